"""The circuit breaker (KIP-693): partitions of an unhealthy broker wait, the others go on. No I/O happens
here."""

from kafka_sink.breaker.breaker import CircuitBreakManager
from kafka_sink.breaker.failure_rate import FailureRateCircuitBreaker
from kafka_sink.breaker.interface import PartitionCircuitBreaker, ProducerStatusContext
from kafka_sink.breaker.mutes import Evidence

__all__ = [
    "CircuitBreakManager",
    "Evidence",
    "FailureRateCircuitBreaker",
    "PartitionCircuitBreaker",
    "ProducerStatusContext",
]
