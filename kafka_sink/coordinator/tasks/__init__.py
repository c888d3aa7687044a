"""The tasks' side of the coordinator: one client thread and a channel per kind of message."""
