"""The parts of a Spark task: a producer that is kept for the next task, the rate limit, and reports."""
