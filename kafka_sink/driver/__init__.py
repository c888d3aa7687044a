"""The driver's side: requests of planning, checks, warnings, the log, and the driver's process and
settings."""
