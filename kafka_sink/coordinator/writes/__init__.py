"""Ends attempts that outlive their write: the coordinator's handler, a task's channel."""
