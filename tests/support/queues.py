"""What a topic's batches shrink to."""

from __future__ import annotations

from kafka_sink.engine.accumulator import RecordAccumulator


def teach_ratio(accumulator: RecordAccumulator, ratio: float) -> None:
    """As many batches of topic t that shrank to ``ratio`` would."""
    limits = accumulator.limits_of("t")
    while limits.ratio > ratio:
        limits.observe(ratio)
