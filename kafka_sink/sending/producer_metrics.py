"""A producer's metrics under Kafka's names, and all producers of this process that have some."""

from __future__ import annotations

import os
import threading
from typing import Protocol
from weakref import WeakSet

from kafka_sink.accumulator.pool_metrics import PoolMetrics
from kafka_sink.breaker.metrics import BreakerMetrics
from kafka_sink.sending.task_deliveries import DeliveryCounts

Metrics = dict[str, float]


class HasMetrics(Protocol):
    """What has metrics."""

    def metrics(self) -> Metrics: ...


def task_metrics(
    pool: PoolMetrics, before: PoolMetrics, counts: DeliveryCounts, breaker: BreakerMetrics
) -> Metrics:
    """Those of one task: ``before`` is its pool when it began, from which totals count; ``breaker``'s do.

    Averages are 0.0 before the first acknowledged batch. docs/metrics.md tells what each one means.
    """
    values: Metrics = dict(pool.by_kafka_name())
    began = before.by_kafka_name()
    for name in ("bufferpool-wait-time-ns-total", "buffer-exhausted-total", "buffer-heap-bytes-total"):
        values[name] -= began[name]
    batches = counts.batches
    values["batch-size-avg"] = counts.wire_bytes / batches if batches else 0.0
    values["batch-size-max"] = counts.max_batch_bytes
    values["compression-rate-avg"] = counts.compression_rates / batches if batches else 0.0
    values["batch-split-total"] = counts.splits
    return values | breaker.by_name()


class LiveProducers:
    """Those that live in this process. Thread-safe; holds none of them alive."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards the two below
        self._living: WeakSet[HasMetrics] = WeakSet()
        self._owner = os.getpid()

    def add(self, producer: HasMetrics) -> None:
        """A new one."""
        with self._lock:
            if self._owner != os.getpid():
                # The parent's producers came along with the fork, without their threads.
                self._living = WeakSet()
                self._owner = os.getpid()
            self._living.add(producer)

    def discard(self, producer: HasMetrics) -> None:
        """It is closed."""
        with self._lock:
            self._living.discard(producer)

    def metrics(self) -> list[Metrics]:
        """Of each producer, in no order."""
        with self._lock:
            living = list(self._living) if self._owner == os.getpid() else []
        return [producer.metrics() for producer in living]
