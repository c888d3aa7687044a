"""The driver's side: requests of planning, checks, warnings, the log, Spark's process and settings."""
