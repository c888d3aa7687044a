"""KIP-693: partitions of a sick broker rest, the others go on. Pure: facts and the time come in."""

from kafka_sink.breaker.failure_rate import FailureRateCircuitBreaker
from kafka_sink.breaker.interface import PartitionCircuitBreaker, ProducerStatusContext
from kafka_sink.breaker.manager import CircuitBreakManager
from kafka_sink.breaker.values import Evidence

__all__ = [
    "CircuitBreakManager",
    "Evidence",
    "FailureRateCircuitBreaker",
    "PartitionCircuitBreaker",
    "ProducerStatusContext",
]
