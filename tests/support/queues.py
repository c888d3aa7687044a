"""What a topic's batches shrink to."""

from __future__ import annotations

from kafka_sink.accumulator.batch_limits import SizeEstimates


def teach_ratio(estimates: SizeEstimates, ratio: float) -> None:
    """As many batches of topic t that shrank to ``ratio`` would."""
    while estimates.ratio("t") > ratio:
        estimates.ratios.observe("t", estimates.compression, ratio)
