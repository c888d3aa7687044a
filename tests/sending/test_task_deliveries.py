"""What is kept of a task's batches: a producer of a service runs for months."""

from __future__ import annotations

from kafka_sink.model import TopicPartition
from kafka_sink.sending.task_deliveries import TaskDeliveries
from tests.support.written_batches import written_batch


def test_neighbouring_batches_take_one_range() -> None:
    """Catches: a producer that runs for months keeps an entry for each batch."""
    deliveries = TaskDeliveries()
    for number in range(1000):
        # Another writer has a batch in between, once.
        offset = 10 * number + (7 if number >= 500 else 0)
        deliveries.acknowledged([written_batch(TopicPartition("t", 0), 10, 100, 128, offset)])
    (kept,) = deliveries._partitions.values()
    assert kept.ranges == [(0, 4_999), (5_007, 10_006)]
    (found,) = deliveries.partitions()
    assert found.offset_ranges == ((0, 4_999), (5_007, 10_006))
    assert (found.records, found.batches) == (10_000, 1000)
