"""What a Spark task has: a producer that is kept for the next task, its rate limit, its reports."""
