"""A worker's client of the coordinator, and the relay that the workers of an executor share."""
