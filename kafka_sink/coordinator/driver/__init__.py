"""The driver's side of the coordinator: planning a write finds it or starts it."""
