"""The records that are kept of a task's batches: a producer of a service runs for months."""

from __future__ import annotations

import pytest

from kafka_sink.cluster.partition import PartitionCounts
from kafka_sink.engine.deliveries import Deliveries, TaskDeliveries, task_metrics
from kafka_sink.errors import BufferExhaustedError, KafkaSinkError
from kafka_sink.memory.pool import BufferPool
from kafka_sink.model import TopicPartition
from tests.support.allocators import incremental_allocator
from tests.support.queues import partition_of
from tests.support.written_batches import written_batch


def test_neighbouring_batches_take_one_range() -> None:
    """Catches: a producer that runs for months keeps an entry for each batch."""
    deliveries, partition = TaskDeliveries(), partition_of(TopicPartition("t", 0))
    for number in range(1000):
        # Another writer has a batch in between, once.
        offset = 10 * number + (7 if number >= 500 else 0)
        deliveries.on_acknowledged([written_batch(partition, 10, 100, 128, offset)])
    assert partition.counts is not None
    assert partition.counts.ranges == [(0, 4_999), (5_007, 10_006)]
    (found,) = deliveries.partitions()
    assert found.offset_ranges == ((0, 4_999), (5_007, 10_006))
    assert (found.records, found.batches) == (10_000, 1000)
    # In whatever order responses come.
    deliveries, partition = TaskDeliveries(), partition_of(TopicPartition("t", 0))
    for offset in (20, 0, 50, 10, 40, 70):
        deliveries.on_acknowledged([written_batch(partition, 10, 100, 128, offset)])
    (found,) = deliveries.partitions()
    assert found.offset_ranges == ((0, 29), (40, 59), (70, 79))


def test_ranges_are_bounded_where_others_write_to_the_same_partition(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: 128 MB after a million batches."""
    monkeypatch.setattr("kafka_sink.engine.deliveries.MAX_RANGES", 10)
    deliveries = TaskDeliveries()
    for name in ("t", "u"):
        partition = partition_of(TopicPartition(name, 0))
        for number in range(1000):
            deliveries.on_acknowledged([written_batch(partition, 10, 100, 128, 20 * number)])
    first, second = deliveries.partitions()
    assert len(first.offset_ranges) == 10
    assert (first.offset_ranges[0], first.offset_ranges[-1]) == ((0, 9), (19_980, 19_989))
    assert second.offset_ranges == ((0, 9), (19_980, 19_989))
    assert first.records == second.records == 10_000


def test_a_range_that_joins_its_successor_drops_no_other_range() -> None:
    counts = PartitionCounts(ranges=[(0, 9), (20, 29), (40, 49)])
    assert counts.extend(35, 39, may_grow=False) == 0
    assert counts.ranges == [(0, 9), (20, 29), (35, 49)]


def test_the_next_task_counts_from_zero() -> None:
    partition = partition_of(TopicPartition("t", 0))
    deliveries = TaskDeliveries()
    deliveries.on_acknowledged([written_batch(partition, 10, 100, 128, 0)])
    deliveries.on_failed(None, 2, KafkaSinkError("x"))
    deliveries.count(retries=1, splits=1, moved=1)
    deliveries.on_sent([5.0])
    deliveries.begin()
    assert deliveries.counts() == Deliveries()
    assert not deliveries.has_failed
    deliveries.on_acknowledged([written_batch(partition, 3, 100, 128, 10)])
    (found,) = deliveries.partitions()
    assert (found.records, found.offset_ranges) == (3, ((10, 12),))
    assert {topic: counts.records for topic, counts in deliveries.topics().items()} == {"t": 3}


def test_totals_and_averages_are_of_one_task() -> None:
    now = [0.0]
    pool = BufferPool(1 << 20, clock_ms=lambda: now[0])
    allocator = incremental_allocator(pool, 1 << 19)

    def exhaust() -> None:
        with pytest.raises(BufferExhaustedError):
            allocator.open(1 << 20, 0)

    held = allocator.open(900_000, 0)
    exhaust()
    held.release()
    allocator.begin()
    before = pool.metrics()
    assert before.max_used_bytes == 0
    held = allocator.open(20_000, 0)
    exhaust()
    deliveries = TaskDeliveries()
    for raw, sent in ((1000, 561), (100, 161)):
        deliveries.on_acknowledged([written_batch(partition_of(TopicPartition("t", 0)), 1, raw, sent, 0)])
    deliveries.count(splits=2, moved=5)
    deliveries.on_sent([10.0, 40.0])
    deliveries.on_sent([])
    found = task_metrics(pool.metrics(), before, deliveries.counts())
    assert found["buffer-exhausted-total"] == 1
    assert found["buffer-used-bytes-max"] == 32_768
    assert found["buffer-saved-bytes-max"] == (1 << 19) - 32_768
    assert found["buffer-available-bytes"] == (1 << 20) - 32_768
    assert (found["batch-size-avg"], found["batch-size-max"]) == (361, 561)
    # The header is not what compression works on.
    assert found["compression-rate-avg"] == pytest.approx((0.5 + 1.0) / 2)
    assert (found["batch-split-total"], found["record-moved-total"]) == (2, 5)
    assert (found["record-queue-time-avg"], found["record-queue-time-max"]) == (25.0, 40.0)
    assert found["record-size-avg"] == deliveries.counts().raw_bytes / 2
    assert deliveries.counts().requests == 2
    nothing_yet = task_metrics(before, before, Deliveries())
    assert (nothing_yet["batch-size-avg"], nothing_yet["compression-rate-avg"]) == (0.0, 0.0)
