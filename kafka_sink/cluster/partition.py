"""All that a producer knows of one partition: its batches and its leader.

The accumulator's lock guards its batches, which the task's thread and the sender's share. The sender's thread
writes all else. Times are monotonic milliseconds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from kafka_sink.cluster.broker import Broker
from kafka_sink.model import TopicPartition

if TYPE_CHECKING:
    from kafka_sink.accumulator.producer_batch import ProducerBatch


class Partition:
    """One for each partition that a producer has written to."""

    __slots__ = ("batches", "has_taken", "id", "in_flight", "leader", "metadata_version", "retry_at_ms")

    def __init__(self, partition: TopicPartition) -> None:
        self.id = partition
        # Oldest first; the last may be open. The backoff of the first ends at ``retry_at_ms``.
        self.batches: deque[ProducerBatch] = deque()
        self.in_flight = 0
        self.retry_at_ms = 0.0
        # As of this version of the metadata.
        self.leader: Broker | None = None
        self.metadata_version: int | None = None
        # Whether a broker has taken a batch of this producer.
        self.has_taken = False

    def refresh_leader(
        self, leader: Callable[[TopicPartition], Broker | None], metadata_version: int | None
    ) -> None:
        """Look the leader up, which holds for this version of the metadata."""
        self.leader = leader(self.id)
        self.metadata_version = metadata_version

    def insert(self, batch: ProducerBatch) -> None:
        """Put a batch back in append order: retries of several in-flight batches may return in any order."""
        place = 0
        for queued in self.batches:
            if queued.ordinal > batch.ordinal:
                break
            place += 1
        self.batches.insert(place, batch)
