"""What tasks and the coordinator send each other: frames, authentication, message bodies."""
