"""What is kept of a task's batches: a producer of a service runs for months."""

from __future__ import annotations

from kafka_sink.engine.deliveries import Deliveries, TaskDeliveries
from kafka_sink.errors import KafkaSinkError
from kafka_sink.model import TopicPartition
from tests.support.queues import partition_of
from tests.support.written_batches import written_batch


def test_neighbouring_batches_take_one_range() -> None:
    """Catches: a producer that runs for months keeps an entry for each batch."""
    deliveries, partition = TaskDeliveries(), partition_of(TopicPartition("t", 0))
    for number in range(1000):
        # Another writer has a batch in between, once.
        offset = 10 * number + (7 if number >= 500 else 0)
        deliveries.acknowledged([written_batch(partition, 10, 100, 128, offset)])
    assert partition.counts is not None
    assert partition.counts.ranges == [(0, 4_999), (5_007, 10_006)]
    (found,) = deliveries.partitions()
    assert found.offset_ranges == ((0, 4_999), (5_007, 10_006))
    assert (found.records, found.batches) == (10_000, 1000)


def test_ranges_join_in_whatever_order_responses_come() -> None:
    deliveries, partition = TaskDeliveries(), partition_of(TopicPartition("t", 0))
    for offset in (20, 0, 50, 10, 40, 70):
        deliveries.acknowledged([written_batch(partition, 10, 100, 128, offset)])
    (found,) = deliveries.partitions()
    assert found.offset_ranges == ((0, 29), (40, 59), (70, 79))


def test_the_next_task_counts_from_zero() -> None:
    partition = partition_of(TopicPartition("t", 0))
    deliveries = TaskDeliveries()
    deliveries.acknowledged([written_batch(partition, 10, 100, 128, 0)])
    deliveries.failed(None, 2, KafkaSinkError("x"))
    deliveries.count(retries=1, splits=1, moved=1)
    deliveries.sent([5.0])
    deliveries.begin()
    assert deliveries.counts() == Deliveries()
    assert not deliveries.has_failed
    deliveries.acknowledged([written_batch(partition, 3, 100, 128, 10)])
    (found,) = deliveries.partitions()
    assert (found.records, found.offset_ranges) == (3, ((10, 12),))
    assert {topic: counts.records for topic, counts in deliveries.topics().items()} == {"t": 3}
