"""The driver's side of the coordinator: find it or start it when a write is planned."""
