"""What became of a task's batches: counts, offset ranges and the first failure."""

from __future__ import annotations

import threading

from kafka_sink.errors import DeliveryError
from kafka_sink.model import NO_TIMESTAMP, PartitionResult, TopicPartition
from kafka_sink.records import batch_header

Range = tuple[int, int]


class _Tally:
    """One partition's acknowledged batches."""

    __slots__ = ("batches", "log_append_time_ms", "ranges", "records", "wire_bytes")

    def __init__(self) -> None:
        self.records = 0
        self.batches = 0
        self.wire_bytes = 0
        self.log_append_time_ms = NO_TIMESTAMP
        self.ranges: list[Range] = []


class Deliveries:
    """Thread-safe: the sender writes, the task reads at the end of its rows."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards everything below
        self._tallies: dict[TopicPartition, _Tally] = {}
        self._first_failure: tuple[TopicPartition | None, Exception] | None = None
        self.failed_records = 0
        self.unconfirmed = 0
        self.raw_bytes = 0
        self.wire_bytes = 0
        self.batches = 0
        self.largest_batch = 0
        # The sum over batches of compressed bytes per raw byte, for the average.
        self.compression_rates = 0.0
        self.requests = 0
        self.retries = 0
        self.splits = 0

    def acknowledged(
        self,
        partition: TopicPartition,
        *,
        records: int,
        raw_bytes: int,
        wire_bytes: int,
        base_offset: int,
        log_append_time_ms: int,
        confirmed: bool = True,
    ) -> None:
        """A batch is written; ``base_offset`` is -1 where the broker did not tell it."""
        with self._lock:
            tally = self._tallies.setdefault(partition, _Tally())
            tally.records += records
            tally.batches += 1
            tally.wire_bytes += wire_bytes
            tally.log_append_time_ms = max(tally.log_append_time_ms, log_append_time_ms)
            if base_offset >= 0:
                tally.ranges.append((base_offset, base_offset + records - 1))
            self.batches += 1
            self.largest_batch = max(self.largest_batch, wire_bytes)
            self.compression_rates += (wire_bytes - batch_header.SIZE) / raw_bytes if raw_bytes else 1.0
            self.raw_bytes += raw_bytes
            self.wire_bytes += wire_bytes
            if not confirmed:
                self.unconfirmed += records

    def failed(self, partition: TopicPartition | None, records: int, cause: Exception) -> None:
        """A batch (or, with no partition, the producer) is lost; the first cause is kept."""
        with self._lock:
            self.failed_records += records
            if self._first_failure is None:
                self._first_failure = (partition, cause)

    def count(self, *, requests: int = 0, retries: int = 0, splits: int = 0) -> None:
        """Adds to the counters that belong to no partition."""
        with self._lock:
            self.requests += requests
            self.retries += retries
            self.splits += splits

    @property
    def records(self) -> int:
        """Rows acknowledged so far; those that acks=0 sent unconfirmed are not."""
        with self._lock:
            return sum(tally.records for tally in self._tallies.values()) - self.unconfirmed

    @property
    def lost(self) -> bool:
        """Whether anything has failed."""
        return self._first_failure is not None

    def raise_failure(self, rows: int, unanswered: int) -> None:
        """Raises DeliveryError with the first cause if anything failed.

        ``rows`` were handed over; ``unanswered`` of them were sent and have no answer yet.
        """
        failure = self._first_failure
        if failure is None:
            return
        partition, cause = failure
        acknowledged, unconfirmed = self.records, self.unconfirmed
        where = "" if partition is None else f" to {partition}"
        never = max(rows - acknowledged - unconfirmed - self.failed_records - unanswered, 0)
        told = f"{acknowledged} rows acknowledged, " + (f"{unconfirmed} unconfirmed, " if unconfirmed else "")
        raise DeliveryError(
            f"delivery{where} failed: {cause} "
            f"[{told}{self.failed_records} failed, "
            f"{unanswered} sent without an answer, {never} never sent]"
        ) from cause

    def partitions(self) -> tuple[PartitionResult, ...]:
        """Per partition, ordered by topic and partition, with neighbouring offset ranges merged."""
        with self._lock:
            return tuple(
                PartitionResult(
                    topic=partition.topic,
                    partition=partition.partition,
                    records=tally.records,
                    batches=tally.batches,
                    bytes=tally.wire_bytes,
                    offset_ranges=merge_ranges(tally.ranges),
                    log_append_time_ms=tally.log_append_time_ms,
                )
                for partition, tally in sorted(self._tallies.items())
            )


def merge_ranges(ranges: list[Range]) -> tuple[Range, ...]:
    """Inclusive ranges in ascending order, neighbours joined."""
    merged: list[Range] = []
    for first, last in sorted(ranges):
        if merged and first == merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], last)
        else:
            merged.append((first, last))
    return tuple(merged)
