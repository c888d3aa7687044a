"""The circuit breaker (KIP-693): partitions of an unhealthy broker wait while others go on. Does no I/O."""

from kafka_sink.breaker.failure_rate import FailureRateCircuitBreaker
from kafka_sink.breaker.interface import PartitionCircuitBreaker, ProducerStatusContext
from kafka_sink.breaker.manager import CircuitBreakManager
from kafka_sink.breaker.mutes import Evidence

__all__ = [
    "CircuitBreakManager",
    "Evidence",
    "FailureRateCircuitBreaker",
    "PartitionCircuitBreaker",
    "ProducerStatusContext",
]
