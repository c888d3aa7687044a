"""A process on the driver's host that shares metadata, mutes and rate limits between all tasks."""
