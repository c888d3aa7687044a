"""What a circuit breaker class implements and what it is told (KIP-693, names in snake_case)."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kafka_sink.model import TopicPartition

if TYPE_CHECKING:
    from kafka_sink.breaker.manager import CircuitBreakManager


@dataclass(slots=True)
class ProducerStatusContext:
    """How busy the producer is. Valid during the call that it comes with; the mappings are live: read only.

    The KIP's fields are ``now`` (monotonic milliseconds), ``in_flight_requests`` by broker and
    ``in_flight_batches`` by partition. The others are this sink's, as the KIP's calls do not tell for whom
    they are: ``node_id``, ``topic_partition`` and ``record_count`` of the batch that the call is about,
    ``request_sent_ms`` when its request went out; ``oldest_request_ms`` when the oldest unanswered request of
    each broker went out; ``unreachable_since_ms`` since when batches wait for a broker without a connection;
    ``failing_connections`` those of them whose last connection came to a bad end, where others are still
    being connected to; ``setup_ms`` how long each broker's last connection took from its begin to its first
    answer (bootstrap addresses have ids below zero).
    A request that a throttling broker holds back counts from the throttle's end, which may be to come.
    """

    now: float = 0.0
    in_flight_requests: Mapping[int, int] = field(default_factory=dict)
    in_flight_batches: Mapping[TopicPartition, int] = field(default_factory=dict)
    node_id: int = -1
    topic_partition: TopicPartition | None = None
    record_count: int = 0
    request_sent_ms: float = 0.0
    oldest_request_ms: Mapping[int, float] = field(default_factory=dict)
    unreachable_since_ms: Mapping[int, float] = field(default_factory=dict)
    failing_connections: Set[int] = field(default_factory=set)
    setup_ms: Mapping[int, float] = field(default_factory=dict)


class PartitionCircuitBreaker(ABC):
    """Decides when a broker or a partition is muted. One object per producer, used by its sender's thread.

    Made without arguments, then ``configure``, then ``set_circuit_break_manager``. No method may block. An
    exception switches the breaker off for this producer. The returned booleans say whether the call muted or
    unmuted something; nothing depends on them.
    """

    @abstractmethod
    def configure(self, configs: Mapping[str, str]) -> None:
        """``configs``: the options under ``kafka.producer.circuit.breaker.`` without that prefix, beside
        ``max.in.flight.requests.per.connection`` and ``request.timeout.ms``. Raises ValueError or
        ConfigurationError for what it cannot use: the job then fails at planning."""

    @abstractmethod
    def set_circuit_break_manager(self, circuit_break_manager: CircuitBreakManager) -> None:
        """The manager to mute and unmute with. Calls from threads of the class's own hold from the sender's
        next pass on, which comes within a second."""

    @abstractmethod
    def on_send(self, context: ProducerStatusContext) -> bool:
        """A record batch goes out; ``context.record_count`` rows."""

    @abstractmethod
    def on_complete(
        self,
        context: ProducerStatusContext,
        topic_partition: TopicPartition,
        exception: Exception | None,
    ) -> bool:
        """An attempt of a record batch has ended; ``exception`` is None where the broker has it."""

    def on_tick(self, context: ProducerStatusContext) -> bool:
        """Called between sends and answers too (not in the KIP): else silence could not be noticed."""
        return False

    def next_tick_ms(self, context: ProducerStatusContext) -> float:
        """Milliseconds after which ``on_tick`` may have something to decide without anything happening."""
        return math.inf

    def close(self) -> None:  # noqa: B027 - a class without anything to close need not say so
        """The producer is closed."""
