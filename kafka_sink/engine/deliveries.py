"""The results of a task's batches: counts, offset ranges and the first failure."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter

from kafka_sink.cluster.partition import Partition, PartitionCounts, ProducerBatch
from kafka_sink.counts import TaskCounts, TopicMetrics
from kafka_sink.errors import DeliveryError
from kafka_sink.memory.pool import PoolMetrics
from kafka_sink.model import PartitionResult, TopicPartition
from kafka_sink.records import batch_header

# The number of offset ranges that are kept for all partitions together, which take 13 MB. If other producers
# write to the same partitions, each batch has a range of its own, and a producer may run for months.
MAX_RANGES = 100_000
# A batch that a broker has, its base offset and its log append time; -1 if the response had none.
WrittenBatch = tuple[ProducerBatch, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Deliveries(TaskCounts):
    """The counts that follow from one task's batches; the other counts of TaskCounts are 0.

    ``dead_letters`` counts the acknowledged dead letters, which are not rows of the task.
    ``compression_rates`` is the sum over batches of compressed bytes per raw byte. ``moved`` rows went to
    another partition than the one they were appended to, before they were sent. ``queue_ms`` is the sum over
    sent batches of the time from a batch's first row to its first request.
    """

    dead_letters: int = 0
    moved: int = 0
    max_batch_bytes: int = 0
    compression_rates: float = 0.0
    sent_batches: int = 0
    queue_ms: float = 0.0
    max_queue_ms: float = 0.0

    @property
    def written(self) -> int:
        """The rows that are acknowledged, or with acks=0 sent."""
        return self.records + self.unconfirmed


# The counts of partitions that are summed.
_SUMMED = (
    *("records", "unconfirmed", "dead_letters", "batches"),
    *("raw_bytes", "sent_bytes", "compression_rates"),
)


class TaskDeliveries:
    """Counts the deliveries of the current task. Thread-safe: the sender's thread writes the counts, the
    task's thread reads them, and ``begin`` resets them between two tasks."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards everything below
        # The partitions with acknowledged batches, and their counts of this task.
        self._counted: list[tuple[Partition, PartitionCounts]] = []
        self.begin()

    def begin(self) -> None:
        """Set all counts to zero. The last task has no batch left."""
        with self._lock:
            for partition, _ in self._counted:
                partition.counts = None
            self._counted.clear()
            self._first_failure: tuple[TopicPartition | None, Exception] | None = None
            # Whether a batch or the producer has failed. The thread that fails it sets this under the lock.
            # Both threads read it without: a reader that misses the change sees it in its next pass.
            self.has_failed = False
            self._ranges = 0
            # The counts of Deliveries that belong to no partition.
            self._counts: Counter[str] = Counter()
            self._queue_ms = self._max_queue_ms = 0.0

    def on_acknowledged(self, batches: Iterable[WrittenBatch], *, confirmed: bool = True) -> None:
        """Count batches that brokers have; ``confirmed`` unless acks is 0."""
        with self._lock:
            for batch, base_offset, log_append_time_ms in batches:
                counts = batch.queue.counts
                if counts is None:
                    counts = batch.queue.counts = PartitionCounts()
                    self._counted.append((batch.queue, counts))
                records, raw_bytes, sent_bytes = batch.record_count, batch.raw_bytes, batch.buffer.size
                counts.records += records
                if batch.dead_letters:
                    counts.dead_letters += records
                elif not confirmed:
                    counts.unconfirmed += records
                counts.batches += 1
                counts.sent_bytes += sent_bytes
                counts.raw_bytes += raw_bytes
                if sent_bytes > counts.max_batch_bytes:
                    counts.max_batch_bytes = sent_bytes
                counts.compression_rates += (sent_bytes - batch_header.SIZE) / raw_bytes if raw_bytes else 1.0
                if log_append_time_ms > counts.log_append_time_ms:
                    counts.log_append_time_ms = log_append_time_ms
                if base_offset >= 0:
                    may_grow, last = self._ranges < MAX_RANGES, base_offset + records - 1
                    self._ranges += counts.extend(base_offset, last, may_grow=may_grow)

    def on_failed(self, partition: TopicPartition | None, records: int, cause: Exception) -> None:
        """Count a failed batch or, without a partition, record that the producer failed."""
        with self._lock:
            self._counts["failed"] += records
            if self._first_failure is None:
                self._first_failure = (partition, cause)
                self.has_failed = True

    def count(self, *, retries: int = 0, splits: int = 0, moved: int = 0) -> None:
        """Add to the counts that belong to no partition."""
        with self._lock:
            self._counts.update(retries=retries, splits=splits, moved=moved)

    def on_sent(self, queue_ms: Sequence[float]) -> None:
        """Count a request. ``queue_ms`` are the times that its batches waited for their first request."""
        with self._lock:
            self._counts["requests"] += 1
            if queue_ms:
                self._counts["sent_batches"] += len(queue_ms)
                self._queue_ms += sum(queue_ms)
                self._max_queue_ms = max(self._max_queue_ms, *queue_ms)

    def counts(self) -> Deliveries:
        """Return all counts as of one moment."""
        with self._lock:
            counts = [counted for _, counted in self._counted]
            sums = {name: sum(map(attrgetter(name), counts)) for name in _SUMMED}
            # The records of a partition include dead letters and the ones that were sent with acks=0.
            sums["records"] -= sums["dead_letters"] + sums["unconfirmed"]
            return Deliveries(
                **sums,
                **self._counts,
                max_batch_bytes=max((partition.max_batch_bytes for partition in counts), default=0),
                queue_ms=self._queue_ms,
                max_queue_ms=self._max_queue_ms,
            )

    def topics(self) -> dict[str, TopicMetrics]:
        """The counts of each topic, in the order of their first acknowledged batches."""
        topics: dict[str, TopicMetrics] = {}
        with self._lock:
            for partition, counted in self._counted:
                counts = TopicMetrics(counted.records, counted.sent_bytes, counted.raw_bytes, counted.batches)
                topics[partition.id.topic] = topics.get(partition.id.topic, TopicMetrics()).plus(counts)
        return topics

    def raise_failure(self, rows: int, unacknowledged: int, skipped: int = 0) -> None:
        """Raise DeliveryError with the first cause if a batch or the producer failed.

        The task has appended ``rows``. ``unacknowledged`` of them were sent and have no response yet, and
        ``skipped`` ones can never be written.
        """
        failure = self._first_failure
        if failure is None:
            return
        partition, cause = failure
        counts = self.counts()
        where = "" if partition is None else f" to {partition}"
        never = max(rows - counts.written - counts.failed - unacknowledged - skipped, 0)
        unconfirmed = f"{counts.unconfirmed} unconfirmed, " if counts.unconfirmed else ""
        left_out = f"{skipped} skipped ({counts.dead_letters} dead letters acknowledged), " if skipped else ""
        raise DeliveryError(
            f"delivery{where} failed: {cause} "
            f"[{counts.records} rows acknowledged, {unconfirmed}{left_out}"
            f"{counts.failed} failed, "
            f"{unacknowledged} sent without a response, {never} never sent]"
        ) from cause

    def partitions(self) -> tuple[PartitionResult, ...]:
        """The results of each partition, ordered by topic and partition."""
        with self._lock:
            return tuple(
                PartitionResult(
                    topic=partition.id.topic,
                    partition=partition.id.partition,
                    records=counts.records,
                    batches=counts.batches,
                    bytes=counts.sent_bytes,
                    raw_bytes=counts.raw_bytes,
                    offset_ranges=tuple(counts.ranges),
                    log_append_time_ms=counts.log_append_time_ms,
                )
                for partition, counts in sorted(self._counted, key=lambda pair: pair[0].id)
            )


# The metrics of a producer, under Kafka's names.
Metrics = dict[str, float]


def task_metrics(pool: PoolMetrics, before: PoolMetrics, counts: Deliveries) -> Metrics:
    """The metrics of one task from the pool and the deliveries. ``before`` are the pool's metrics when the
    task began.

    Averages are 0.0 until the first batch is sent or acknowledged. docs/metrics.md explains each metric.
    """
    batches, written = counts.batches, counts.records + counts.unconfirmed
    used, most_used = pool.used_bytes + pool.heap_bytes, pool.max_used_bytes + pool.max_heap_bytes
    return {
        "buffer-total-bytes": pool.buffer_total_bytes,
        "buffer-available-bytes": pool.buffer_available_bytes,
        "bufferpool-wait-time-ns-total": (
            pool.bufferpool_wait_time_ns_total - before.bufferpool_wait_time_ns_total
        ),
        "bufferpool-wait-ratio": pool.bufferpool_wait_ratio,
        "buffer-exhausted-total": pool.buffer_exhausted_total - before.buffer_exhausted_total,
        "buffer-exhausted-rate": pool.buffer_exhausted_rate,
        "waiting-threads": pool.waiting_threads,
        "buffer-allocated-bytes": pool.allocated_bytes,
        "buffer-allocated-bytes-max": pool.max_allocated_bytes,
        "buffer-used-bytes": pool.used_bytes,
        "buffer-used-bytes-max": pool.max_used_bytes,
        "buffer-heap-bytes": pool.heap_bytes,
        "buffer-heap-bytes-max": pool.max_heap_bytes,
        "buffer-heap-bytes-total": pool.heap_total_bytes - before.heap_total_bytes,
        # The memory that `full` would use for the same batches minus the memory in use; then the same for
        # the peaks of both.
        "buffer-saved-bytes": max(0, pool.full_strategy_bytes - used),
        "buffer-saved-bytes-max": max(0, pool.max_full_strategy_bytes - most_used),
        "batch-size-avg": counts.sent_bytes / batches if batches else 0.0,
        "batch-size-max": counts.max_batch_bytes,
        "compression-rate-avg": counts.compression_rates / batches if batches else 0.0,
        "batch-split-total": counts.splits,
        "record-queue-time-avg": counts.queue_ms / counts.sent_batches if counts.sent_batches else 0.0,
        "record-queue-time-max": counts.max_queue_ms,
        "record-size-avg": counts.raw_bytes / written if written else 0.0,
        "record-moved-total": counts.moved,
    }
