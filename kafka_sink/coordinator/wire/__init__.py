"""What planning, tasks and the coordinator's process share: connection, frames, messages, file names."""
