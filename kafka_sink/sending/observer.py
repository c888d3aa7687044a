"""Where a circuit breaker is told what becomes of batches, and says which partitions rest (KIP-693)."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Protocol

from kafka_sink.model import TopicPartition


class SendObserver(Protocol):
    """Called on the sender's thread, once per record batch and attempt; must not block or raise.

    Times are monotonic milliseconds. What is called here never changes what becomes of a batch.
    """

    def on_send(self, node_id: int, partition: TopicPartition, records: int, now_ms: float) -> None:
        """A batch of so many records goes to a broker."""

    def on_complete(
        self, node_id: int, partition: TopicPartition, records: int, cause: Exception | None, now_ms: float
    ) -> None:
        """An attempt has ended; ``cause`` is None where the broker has the batch."""

    def muted(self, now_ms: float) -> Collection[TopicPartition]:
        """Partitions that get no request now. Their batches wait, and expire as others do."""

    def next_change_ms(self, now_ms: float) -> float:
        """Milliseconds until ``muted`` may change by time alone; infinite where it does not."""


class NoObserver:
    """Watches nothing, mutes nothing."""

    def on_send(self, node_id: int, partition: TopicPartition, records: int, now_ms: float) -> None:
        """See SendObserver."""

    def on_complete(
        self, node_id: int, partition: TopicPartition, records: int, cause: Exception | None, now_ms: float
    ) -> None:
        """See SendObserver."""

    def muted(self, now_ms: float) -> Collection[TopicPartition]:
        """See SendObserver."""
        return ()

    def next_change_ms(self, now_ms: float) -> float:
        """See SendObserver."""
        return math.inf
