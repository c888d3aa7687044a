"""A job's rate limit: the coordinator's handler, a task's channel."""
