"""Exactly once: transactions of tasks, one durable decision a batch, recovery after any crash.

docs/exactly-once-proof.md draws it. The decisions are sans-I/O: generators yield operations and are sent
their results, so tests run them against a model of Kafka with a crash between any two messages.
"""
