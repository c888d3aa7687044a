"""Prefixes of option names."""

from __future__ import annotations

# Kafka's own options, as Spark's Kafka sink has them.
KAFKA_PREFIX = "kafka."
# Behind KAFKA_PREFIX: options of the circuit breaker (KIP-693).
BREAKER_PREFIX = "producer.circuit.breaker."
