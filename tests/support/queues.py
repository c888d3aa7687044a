"""A look at an accumulator's queues from a test, and what its topic's batches shrink to."""

from __future__ import annotations

from kafka_sink.accumulator.batch_limits import SizeEstimates
from kafka_sink.accumulator.batch_queues import BatchQueues
from kafka_sink.accumulator.record_accumulator import RecordAccumulator


def queues_of(accumulator: RecordAccumulator) -> BatchQueues:
    """As a task gets them; without the lock, so only where no other thread is at work."""
    with accumulator.planning() as queues:
        return queues


def teach_ratio(estimates: SizeEstimates, ratio: float) -> None:
    """As many batches of topic t that shrank to ``ratio`` would."""
    while estimates.ratio("t") > ratio:
        estimates.ratios.observe("t", estimates.compression, ratio)
