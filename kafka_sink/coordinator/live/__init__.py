"""Live figures: messages, the coordinator's handler, a task's channel, the live view."""
