"""A producer's metrics under Kafka's names, and the live producers of this process."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from typing import Protocol
from weakref import WeakSet

from kafka_sink.counts import TaskCounts
from kafka_sink.memory.pool import PoolMetrics
from kafka_sink.sending.task_deliveries import Deliveries

Metrics = dict[str, float]


class HasMetrics(Protocol):
    """A producer, as far as its metrics are concerned."""

    def metrics(self) -> Metrics: ...


@dataclass(frozen=True, slots=True)
class RowMetrics:
    """Of a task's rows on their way to batches. Times are milliseconds, sizes bytes.

    ``metadata_age_ms`` is that of the brokers' last list of themselves, 0 before the first.
    ``muted_partitions`` get no rows now.
    """

    largest_record: int = 0
    metadata_wait_ms: float = 0.0
    metadata_age_ms: float = 0.0
    muted_partitions: int = 0


def task_metrics(
    pool: PoolMetrics,
    before: PoolMetrics,
    counts: Deliveries,
    totals: TaskCounts,
    rows: RowMetrics,
) -> Metrics:
    """The metrics of one task. ``before`` is the pool when the task began.

    Averages are 0.0 before the first batch is sent or acknowledged. docs/metrics.md explains each metric.
    """
    values: Metrics = dict(pool.by_kafka_name())
    began = before.by_kafka_name()
    for name in ("bufferpool-wait-time-ns-total", "buffer-exhausted-total", "buffer-heap-bytes-total"):
        values[name] -= began[name]
    batches = counts.batches
    values["batch-size-avg"] = counts.sent_bytes / batches if batches else 0.0
    values["batch-size-max"] = counts.max_batch_bytes
    values["compression-rate-avg"] = counts.compression_rates / batches if batches else 0.0
    values["batch-split-total"] = counts.splits
    values["record-queue-time-avg"] = counts.queue_ms / counts.sent_batches if counts.sent_batches else 0.0
    values["record-queue-time-max"] = counts.max_queue_ms
    values["record-size-avg"] = counts.raw_bytes / counts.written if counts.written else 0.0
    values["record-size-max"] = rows.largest_record
    values["metadata-age"] = rows.metadata_age_ms / 1000
    values["metadata-wait-time-ns-total"] = int(rows.metadata_wait_ms * 1e6)
    values["record-moved-total"] = counts.moved
    values["muted-partitions"] = rows.muted_partitions
    values["breaker-trips-total"] = totals.breaker_trips
    values["breaker-probes-total"] = totals.breaker_probes
    return values


class LiveProducers:
    """The producers of this process that are not closed. Thread-safe. Keeps no producer alive."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards the attribute below
        self._living: WeakSet[HasMetrics] = WeakSet()
        # For the life of the process.
        os.register_at_fork(after_in_child=self._after_fork)

    def _after_fork(self) -> None:
        """A fork copies the parent's producers without their threads; another may have held the lock."""
        self._lock = threading.Lock()
        self._living = WeakSet()

    def add(self, producer: HasMetrics) -> None:
        with self._lock:
            self._living.add(producer)

    def discard(self, producer: HasMetrics) -> None:
        with self._lock:
            self._living.discard(producer)

    def metrics(self) -> list[Metrics]:
        with self._lock:
            living = list(self._living)
        return [producer.metrics() for producer in living]
