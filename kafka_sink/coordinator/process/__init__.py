"""How the driver finds, starts and watches the coordinator's process."""
