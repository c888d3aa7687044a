"""Where a circuit breaker is told what becomes of batches, and says which partitions rest (KIP-693)."""

from __future__ import annotations

import math
from collections.abc import Collection, Container, Iterable
from typing import Protocol

from kafka_sink.model import TopicPartition


class SendPolicy(Protocol):
    """Called on the sender's thread, per request, batch or pass; must not block or raise.

    Times are monotonic milliseconds. What is called here never changes what becomes of a batch.
    """

    def on_request(self, node_id: int, now_ms: float) -> None:
        """A Produce request goes to a broker; its batches follow."""

    def on_send(self, node_id: int, partition: TopicPartition, records: int, now_ms: float) -> None:
        """A batch of so many records goes to a broker."""

    def on_request_done(self, node_id: int, now_ms: float) -> None:
        """The oldest request of a broker has its answer, or will have none; its batches follow."""

    def on_complete(
        self, node_id: int, partition: TopicPartition, records: int, cause: Exception | None, now_ms: float
    ) -> None:
        """An attempt has ended; ``cause`` is None where the broker has the batch."""

    def on_unreachable(self, nodes: Collection[int], failing: Collection[int], now_ms: float) -> None:
        """All brokers that batches wait for and that are not connected; ``failing`` are those among them
        whose last connection, or try to make one, came to a bad end."""

    def on_connected(self, node_id: int, setup_ms: float, now_ms: float) -> None:
        """A connection is ready, so long after it was begun: the broker has answered its first request."""

    def on_throttled(self, node_id: int, now_ms: float, throttled_ms: float) -> None:
        """A broker's answer: it holds back for so long what else was sent to it (throttle_time_ms)."""

    def on_waiting(self, partitions: Iterable[TopicPartition]) -> None:
        """Partitions that are not muted and have batches to send to a broker that takes none now."""

    def muted(self, now_ms: float) -> Container[TopicPartition]:
        """Partitions that get no request now; false where there are none. Their batches wait, and expire as
        others do."""

    @property
    def muted_brokers(self) -> Collection[int]:
        """Brokers that rest, as of the last call of ``muted``."""

    def brokers_to_probe(self) -> Collection[int]:
        """Muted brokers that are to be sent a request without rows now."""

    def on_probe(self, node_id: int, now_ms: float) -> None:
        """Such a request goes to a broker."""

    def on_probe_done(self, node_id: int, cause: Exception | None, now_ms: float) -> None:
        """It was answered, or with a ``cause`` will not be."""

    def may_probe(self, partition: TopicPartition) -> bool:
        """Whether one batch of a muted partition may go all the same."""

    def next_change_ms(self, now_ms: float) -> float:
        """Milliseconds until ``muted`` or ``may_probe`` may change by time alone; else infinite."""

    def explain(self, partition: TopicPartition) -> str | None:
        """Why a partition is muted, for messages; None where it is not. Any thread."""

    def close(self) -> None:
        """No more calls follow."""


class NoSendPolicy:
    """Watches nothing, mutes nothing."""

    def on_request(self, node_id: int, now_ms: float) -> None:
        """See SendPolicy."""

    def on_send(self, node_id: int, partition: TopicPartition, records: int, now_ms: float) -> None:
        """See SendPolicy."""

    def on_request_done(self, node_id: int, now_ms: float) -> None:
        """See SendPolicy."""

    def on_complete(
        self, node_id: int, partition: TopicPartition, records: int, cause: Exception | None, now_ms: float
    ) -> None:
        """See SendPolicy."""

    def on_unreachable(self, nodes: Collection[int], failing: Collection[int], now_ms: float) -> None:
        """See SendPolicy."""

    def on_connected(self, node_id: int, setup_ms: float, now_ms: float) -> None:
        """See SendPolicy."""

    def on_throttled(self, node_id: int, now_ms: float, throttled_ms: float) -> None:
        """See SendPolicy."""

    def on_waiting(self, partitions: Iterable[TopicPartition]) -> None:
        """See SendPolicy."""

    def muted(self, now_ms: float) -> Container[TopicPartition]:
        """See SendPolicy."""
        return ()

    @property
    def muted_brokers(self) -> Collection[int]:
        """See SendPolicy."""
        return ()

    def brokers_to_probe(self) -> Collection[int]:
        """See SendPolicy."""
        return ()

    def on_probe(self, node_id: int, now_ms: float) -> None:
        """See SendPolicy."""

    def on_probe_done(self, node_id: int, cause: Exception | None, now_ms: float) -> None:
        """See SendPolicy."""

    def may_probe(self, partition: TopicPartition) -> bool:
        """See SendPolicy."""
        return False

    def next_change_ms(self, now_ms: float) -> float:
        """See SendPolicy."""
        return math.inf

    def explain(self, partition: TopicPartition) -> str | None:
        """See SendPolicy."""
        return None

    def close(self) -> None:
        """See SendPolicy."""
