"""What a circuit breaker class implements (KIP-693, in snake_case)."""

from __future__ import annotations

import importlib
import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from kafka_sink.errors import ConfigurationError
from kafka_sink.model import TopicPartition
from kafka_sink.options import SinkOptions
from kafka_sink.options.table import breaker_option_name
from kafka_sink.secret import HiddenValues

if TYPE_CHECKING:
    from kafka_sink.breaker.breaker import CircuitBreakManager
    from kafka_sink.cluster.broker import Broker


@dataclass
class ProducerStatusContext:
    """What the producer has in flight. Valid during the call only.

    The KIP's fields:

    - ``now``: monotonic milliseconds
    - ``in_flight_requests``: by broker
    - ``in_flight_batches``: by partition

    This sink's own fields, as the KIP's calls do not say which batch or broker they are about:

    - ``node_id``, ``topic_partition``, ``record_count``: of the batch that the call is about
    - ``request_sent_ms``: when the batch's request was sent. A request that a throttling broker delays counts
      from the end of the throttling, which may lie ahead.
    - ``brokers``: the producer's own ``Broker`` by id, to be read only, with ``oldest_request_ms``,
      ``unreachable_since_ms``, ``is_failing``, ``setup_ms`` and ``probed_ms``. Bootstrap addresses have ids
      below zero. The mappings above are made of it, each at its first access.
    """

    now: float = 0.0
    node_id: int = -1
    topic_partition: TopicPartition | None = None
    record_count: int = 0
    request_sent_ms: float = 0.0
    brokers: Mapping[int, Broker] = field(default_factory=dict)

    @cached_property
    def in_flight_requests(self) -> Mapping[int, int]:
        return {one.id: len(one.sent) for one in self.brokers.values() if one.sent}

    @cached_property
    def in_flight_batches(self) -> Mapping[TopicPartition, int]:
        return Counter(batch.partition for one in self.brokers.values() for batch in one.batches_in_flight())


class PartitionCircuitBreaker(ABC):
    """Decides when a broker or a partition is muted. Each producer has one object; its sender's thread calls
    it.

    The constructor takes no arguments. ``configure`` comes next, then ``set_circuit_break_manager``. No
    method may block. An exception switches the breaker off for this producer. The booleans returned say
    whether the call muted or unmuted something; nothing depends on them.
    """

    @abstractmethod
    def configure(self, configs: Mapping[str, str]) -> None:
        """``configs``: the options under ``kafka.producer.circuit.breaker.`` without that prefix, and
        ``max.in.flight.requests.per.connection`` and ``request.timeout.ms``.

        Raises ValueError or ConfigurationError for invalid options: the job then fails at planning.
        """

    @abstractmethod
    def set_circuit_break_manager(self, circuit_break_manager: CircuitBreakManager) -> None:
        """The manager to mute and unmute with. Calls on other threads take effect in the sender's next pass,
        within a second."""

    @abstractmethod
    def on_send(self, context: ProducerStatusContext) -> bool:
        """A record batch of ``context.record_count`` rows is sent."""

    @abstractmethod
    def on_complete(
        self,
        context: ProducerStatusContext,
        topic_partition: TopicPartition,
        exception: Exception | None,
    ) -> bool:
        """An attempt of a record batch has ended. ``exception`` is None if the broker has it."""

    def on_tick(self, context: ProducerStatusContext) -> bool:
        """Called between sends and responses too, so that silence can be noticed. Not in the KIP."""
        return False

    def next_tick_ms(self, context: ProducerStatusContext) -> float:
        """Milliseconds until ``on_tick`` may have something to decide though nothing happens."""
        return math.inf

    def close(self) -> None:  # noqa: B027 - not abstract: most classes have nothing to close
        """The producer is closed."""


# -- makes the configured breaker object. Called at planning too, so that a faulty class fails there --------


def load_breaker(options: SinkOptions) -> PartitionCircuitBreaker | None:
    """The breaker of producer.circuit.breaker.class; None if that is ``none``.

    Raises ConfigurationError with the reason if the class cannot be imported, made or configured.
    """
    path = options.breaker.class_path
    if path is None:
        return None
    option = breaker_option_name("class")
    module, _, name = path.rpartition(".")
    if not module:
        raise ConfigurationError(
            f"Option '{option}' must be a dotted path such as package.module.Class, got '{path}'"
        )
    problem = f"Option '{option}': '{path}' cannot be loaded: module '{module}'"
    try:
        found = getattr(importlib.import_module(module), name, None)
    except (Exception, SystemExit) as error:
        raise ConfigurationError(f"{problem} cannot be imported: {error!r}") from error
    if found is None:
        raise ConfigurationError(f"{problem} has no class '{name}'")
    if not (isinstance(found, type) and issubclass(found, PartitionCircuitBreaker)):
        raise ConfigurationError(
            f"Option '{option}': '{path}' is not a subclass of kafka_sink.breaker.PartitionCircuitBreaker"
        )
    # A class of the user's may take credentials, and error trackers collect the variables of every frame.
    given = HiddenValues((name, text) for name, text in options.breaker.given if name != "class")
    given["max.in.flight.requests.per.connection"] = str(options.max_in_flight_requests_per_connection)
    given["request.timeout.ms"] = str(options.request_timeout_ms)
    try:
        breaker = found()
        breaker.configure(given)
    except ConfigurationError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigurationError(f"Option '{option}': '{path}' cannot be configured: {error!r}") from error
    return breaker
