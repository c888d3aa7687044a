"""Exactly-once delivery: a transaction for each task attempt, and one durable decision for each batch.

docs/exactly-once-proof.md draws the protocol and says why it holds. The protocol code does no I/O: it
consists of generators that yield operations and are sent their results, so tests run it against a model of
Kafka with a crash between any two messages.
"""
