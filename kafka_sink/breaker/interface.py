"""The base class of circuit breaker classes (KIP-693, in snake_case)."""

from __future__ import annotations

import importlib
import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from kafka_sink.breaker.manager import CircuitBreakManager
from kafka_sink.cluster.broker import Broker
from kafka_sink.errors import ConfigurationError
from kafka_sink.model import TopicPartition
from kafka_sink.options import SinkOptions
from kafka_sink.options.table import breaker_option_name
from kafka_sink.secret import HiddenValues


@dataclass
class ProducerStatusContext:
    """The producer's requests in flight. An object is valid only during the call to which it is passed.

    The fields of the KIP are ``now``, ``in_flight_requests`` and ``in_flight_batches``. This sink adds the
    other fields, because the KIP's calls do not identify the batch or the broker that they are about.

    Attributes:
        now: Monotonic milliseconds.
        in_flight_requests: The number of requests, by broker id. Computed at the first access.
        in_flight_batches: The number of batches, by partition. Computed at the first access.
        node_id: The broker of the batch that the call is about.
        topic_partition: The partition of that batch.
        record_count: The number of its records.
        request_sent_ms: When its request was sent. If a throttling broker delays the request, this is the end
            of the throttling, which may be in the future.
        brokers: The producer's own ``Broker`` objects by id, for reading only, with ``oldest_request_ms``,
            ``unreachable_since_ms``, ``is_failing``, ``setup_ms`` and ``probed_ms``. Bootstrap addresses have
            negative ids.

    Examples:
        >>> busiest = max(context.in_flight_requests.values(), default=0)
    """

    now: float = 0.0
    node_id: int = -1
    topic_partition: TopicPartition | None = None
    record_count: int = 0
    request_sent_ms: float = 0.0
    brokers: Mapping[int, Broker] = field(default_factory=dict)

    @cached_property
    def in_flight_requests(self) -> Mapping[int, int]:
        return {broker.id: len(broker.sent) for broker in self.brokers.values() if broker.sent}

    @cached_property
    def in_flight_batches(self) -> Mapping[TopicPartition, int]:
        return Counter(
            batch.topic_partition for broker in self.brokers.values() for batch in broker.batches_in_flight()
        )


class PartitionCircuitBreaker(ABC):
    """Decides when a broker or a partition is muted.

    Each producer has one object of the class. The sender's thread makes all calls. The constructor must
    accept no arguments. ``configure`` is called first, then ``set_circuit_break_manager``. No method may
    block. If a method raises, the breaker is switched off for this producer. The returned booleans mean that
    the call has muted or unmuted something; nothing depends on them.

    docs/circuit-breaker.md has an example.
    """

    @abstractmethod
    def configure(self, configs: Mapping[str, str]) -> None:
        """Accept the options of the class.

        Args:
            configs: The options under ``kafka.producer.circuit.breaker.`` without that prefix, and also
                ``max.in.flight.requests.per.connection`` and ``request.timeout.ms``.

        Raises:
            ValueError: An option is invalid, so the job fails at planning (or ConfigurationError).
        """

    @abstractmethod
    def set_circuit_break_manager(self, circuit_break_manager: CircuitBreakManager) -> None:
        """Accept the manager, which mutes and unmutes.

        A call on another thread takes effect in the sender's next pass, within a second.
        """

    @abstractmethod
    def on_send(self, context: ProducerStatusContext) -> bool:
        """Called when a batch of ``context.record_count`` rows is sent. Returns whether it has muted."""

    @abstractmethod
    def on_complete(
        self,
        context: ProducerStatusContext,
        topic_partition: TopicPartition,
        exception: Exception | None,
    ) -> bool:
        """Called when an attempt of a record batch has ended.

        Args:
            context: The state of the producer, with the batch's broker.
            topic_partition: The partition of the batch.
            exception: None if the broker has the batch.

        Returns:
            Whether the call has muted or unmuted something.
        """

    def on_tick(self, context: ProducerStatusContext) -> bool:
        """Called also between sends and responses, so that a silence can be noticed. Not part of the KIP."""
        return False

    def next_tick_ms(self, context: ProducerStatusContext) -> float:
        """Milliseconds until ``on_tick`` has work even if no event happens. Not part of the KIP."""
        return math.inf

    def close(self) -> None:  # noqa: B027 - not abstract: most classes have nothing to close
        """Called when the producer is closed."""


def load_breaker(options: SinkOptions) -> PartitionCircuitBreaker | None:
    """The breaker of producer.circuit.breaker.class; None if the option is ``none``.

    Planning also calls it, so that a faulty class fails there. Raises ConfigurationError with the reason if
    the class cannot be imported, created or configured.
    """
    path = options.breaker.class_path
    if path is None:
        return None
    option = breaker_option_name("class")
    module, _, name = path.rpartition(".")
    if not module:
        raise ConfigurationError(
            f"Option '{option}' must be a dotted path such as package.module.Class, or none, got '{path}'"
        )
    problem = f"Option '{option}': '{path}' cannot be loaded: module '{module}'"
    try:
        breaker_class = getattr(importlib.import_module(module), name, None)
    except (Exception, SystemExit) as error:
        raise ConfigurationError(f"{problem} cannot be imported: {error!r}") from error
    if breaker_class is None:
        raise ConfigurationError(f"{problem} has no class '{name}'")
    if not (isinstance(breaker_class, type) and issubclass(breaker_class, PartitionCircuitBreaker)):
        raise ConfigurationError(
            f"Option '{option}': '{path}' is not a subclass of kafka_sink.breaker.PartitionCircuitBreaker"
        )
    # A user's class may have credentials as options, and error trackers collect the variables of every frame.
    given = HiddenValues((name, text) for name, text in options.breaker.given if name != "class")
    given["max.in.flight.requests.per.connection"] = str(options.max_in_flight_requests_per_connection)
    given["request.timeout.ms"] = str(options.request_timeout_ms)
    try:
        breaker = breaker_class()
        breaker.configure(given)
    except ConfigurationError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigurationError(f"Option '{option}': '{path}' cannot be configured: {error!r}") from error
    return breaker
