"""Exactly once: tasks write in transactions, the driver decides once for a batch and commits them all.

docs/exactly-once.md draws it. The decisions are sans-I/O: generators yield operations and are sent their
results, so tests run them against a model of Kafka with a crash between any two messages.
"""
