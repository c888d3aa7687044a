"""How a task's batches ended: counts, offset ranges and the first failure."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from kafka_sink.errors import DeliveryError
from kafka_sink.model import NO_TIMESTAMP, PartitionResult, TopicPartition
from kafka_sink.records import batch_header

Range = tuple[int, int]


@dataclass(slots=True)
class DeliveryCounts:
    """Counts of one task. Sizes are bytes.

    Records are rows. ``written_letters`` are dead letters; their rows are counted as skipped, and not here.
    ``written_records`` and all about batches and bytes count what is acknowledged, and with acks=0 what was
    sent. ``unconfirmed_records`` are those sent with acks=0. ``compression_rates`` is the sum over batches of
    compressed bytes per raw byte. ``moved_records`` went to another partition than the one they were appended
    to, before they were sent. ``queue_ms`` is the sum over sent batches of the time from a batch's first row
    to its first request.
    """

    written_records: int = 0
    written_letters: int = 0
    unconfirmed_records: int = 0
    failed_records: int = 0
    batches: int = 0
    raw_bytes: int = 0
    wire_bytes: int = 0
    max_batch_bytes: int = 0
    compression_rates: float = 0.0
    requests: int = 0
    retries: int = 0
    splits: int = 0
    moved_records: int = 0
    sent_batches: int = 0
    queue_ms: float = 0.0
    max_queue_ms: float = 0.0

    @property
    def acknowledged_records(self) -> int:
        """Rows that a broker has acknowledged."""
        return self.written_records - self.unconfirmed_records


@dataclass(slots=True)
class TopicCounts:
    """A topic's acknowledged rows (with acks=0: sent rows), their bytes and batches."""

    records: int = 0
    wire_bytes: int = 0
    raw_bytes: int = 0
    batches: int = 0


class Written(NamedTuple):
    """A batch that is written. ``base_offset`` is -1 where the broker did not say; with acks=0 it did not
    confirm the batch either."""

    partition: TopicPartition
    records: int
    raw_bytes: int
    wire_bytes: int
    base_offset: int
    log_append_time_ms: int
    confirmed: bool = True
    letters: bool = False


class _PartitionCounts:
    """One partition's acknowledged batches."""

    __slots__ = ("batches", "log_append_time_ms", "ranges", "raw_bytes", "records", "wire_bytes")

    def __init__(self) -> None:
        self.records = 0
        self.batches = 0
        self.wire_bytes = 0
        self.raw_bytes = 0
        self.log_append_time_ms = NO_TIMESTAMP
        self.ranges: list[Range] = []


class TaskDeliveries:
    """Thread-safe: the sender writes, the task reads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards everything below
        self._counts = DeliveryCounts()
        self._partitions: dict[TopicPartition, _PartitionCounts] = {}
        self._topics: dict[str, TopicCounts] = {}
        self._first_failure: tuple[TopicPartition | None, Exception] | None = None

    def acknowledged(self, batches: Iterable[Written]) -> None:
        """Batches are written."""
        with self._lock:
            counts, partitions, topics = self._counts, self._partitions, self._topics
            for (
                partition,
                records,
                raw_bytes,
                wire_bytes,
                base_offset,
                log_append_time_ms,
                confirmed,
                letters,
            ) in batches:
                of_partition = partitions.get(partition)
                if of_partition is None:
                    of_partition = partitions[partition] = _PartitionCounts()
                of_partition.records += records
                of_partition.batches += 1
                of_partition.wire_bytes += wire_bytes
                of_partition.raw_bytes += raw_bytes
                if log_append_time_ms > of_partition.log_append_time_ms:
                    of_partition.log_append_time_ms = log_append_time_ms
                if base_offset >= 0:
                    _extend(of_partition.ranges, base_offset, base_offset + records - 1)
                of_topic = topics.get(partition.topic)
                if of_topic is None:
                    of_topic = topics[partition.topic] = TopicCounts()
                of_topic.records += records
                of_topic.batches += 1
                of_topic.wire_bytes += wire_bytes
                of_topic.raw_bytes += raw_bytes
                if letters:
                    counts.written_letters += records
                else:
                    counts.written_records += records
                    counts.unconfirmed_records += 0 if confirmed else records
                counts.batches += 1
                counts.raw_bytes += raw_bytes
                counts.wire_bytes += wire_bytes
                if wire_bytes > counts.max_batch_bytes:
                    counts.max_batch_bytes = wire_bytes
                counts.compression_rates += (wire_bytes - batch_header.SIZE) / raw_bytes if raw_bytes else 1.0

    def failed(self, partition: TopicPartition | None, records: int, cause: Exception) -> None:
        """A batch (or, without a partition, the producer) failed. The first cause is kept."""
        with self._lock:
            self._counts.failed_records += records
            if self._first_failure is None:
                self._first_failure = (partition, cause)

    def count(self, *, retries: int = 0, splits: int = 0, moved: int = 0) -> None:
        """Add to the counts that belong to no partition."""
        with self._lock:
            self._counts.retries += retries
            self._counts.splits += splits
            self._counts.moved_records += moved

    def sent(self, queue_ms: Sequence[float]) -> None:
        """A request goes out. ``queue_ms``: how long its batches waited that were never sent before."""
        with self._lock:
            counts = self._counts
            counts.requests += 1
            if queue_ms:
                counts.sent_batches += len(queue_ms)
                counts.queue_ms += sum(queue_ms)
                counts.max_queue_ms = max(counts.max_queue_ms, *queue_ms)

    def counts(self) -> DeliveryCounts:
        """A copy of the counts, all as of one moment."""
        with self._lock:
            return replace(self._counts)

    def topics(self) -> dict[str, TopicCounts]:
        """A copy of the counts by topic, in the order of their first batches."""
        with self._lock:
            return {
                name: TopicCounts(one.records, one.wire_bytes, one.raw_bytes, one.batches)
                for name, one in self._topics.items()
            }

    @property
    def has_failed(self) -> bool:
        """Whether a batch or the producer has failed."""
        return self._first_failure is not None

    def raise_failure(self, rows: int, unacknowledged: int, skipped: int = 0) -> None:
        """Raise DeliveryError with the first cause if anything failed.

        The task has appended ``rows``. ``unacknowledged`` of them were sent and have no response yet,
        ``skipped`` can never be written.
        """
        failure = self._first_failure
        if failure is None:
            return
        partition, cause = failure
        counts = self.counts()
        where = "" if partition is None else f" to {partition}"
        never = max(rows - counts.written_records - counts.failed_records - unacknowledged - skipped, 0)
        unconfirmed = f"{counts.unconfirmed_records} unconfirmed, " if counts.unconfirmed_records else ""
        left_out = (
            f"{skipped} skipped ({counts.written_letters} dead letters acknowledged), " if skipped else ""
        )
        raise DeliveryError(
            f"delivery{where} failed: {cause} "
            f"[{counts.acknowledged_records} rows acknowledged, {unconfirmed}{left_out}"
            f"{counts.failed_records} failed, "
            f"{unacknowledged} sent without a response, {never} never sent]"
        ) from cause

    def partitions(self) -> tuple[PartitionResult, ...]:
        """Per partition, ordered by topic and partition, with neighbouring offset ranges merged."""
        with self._lock:
            return tuple(
                PartitionResult(
                    topic=partition.topic,
                    partition=partition.partition,
                    records=counts.records,
                    batches=counts.batches,
                    bytes=counts.wire_bytes,
                    raw_bytes=counts.raw_bytes,
                    offset_ranges=merge_ranges(counts.ranges),
                    log_append_time_ms=counts.log_append_time_ms,
                )
                for partition, counts in sorted(self._partitions.items())
            )


def _extend(ranges: list[Range], first: int, last: int) -> None:
    """Batches of one writer are neighbours mostly: a producer that runs for months has few ranges."""
    if ranges and ranges[-1][1] + 1 == first:
        ranges[-1] = (ranges[-1][0], last)
    else:
        ranges.append((first, last))


def merge_ranges(ranges: list[Range]) -> tuple[Range, ...]:
    """Inclusive ranges in ascending order, neighbours joined."""
    if len(ranges) <= 1:
        return tuple(ranges)
    merged: list[Range] = []
    for first, last in sorted(ranges):
        if merged and first == merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], last)
        else:
            merged.append((first, last))
    return tuple(merged)
