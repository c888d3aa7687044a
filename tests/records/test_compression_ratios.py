"""What is expected of a topic's compression: Kafka's CompressionRatioEstimator, but for its first steps."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kafka_sink.model import CompressionType
from kafka_sink.records.compression import CompressionRatios

LZ4, ZSTD = CompressionType.LZ4, CompressionType.ZSTD


def test_nothing_is_expected_to_shrink_before_it_did() -> None:
    assert CompressionRatios().estimate("t", LZ4) == 1.0


def test_an_estimate_first_falls_by_quarters_and_not_below_what_was_seen() -> None:
    ratios = CompressionRatios()
    estimates = []
    for _ in range(6):
        ratios.observe("t", LZ4, 0.27)
        estimates.append(ratios.estimate("t", LZ4))
    assert estimates == pytest.approx([0.75, 0.75**2, 0.75**3, 0.75**4, 0.27, 0.27])


def test_an_estimate_that_was_once_too_low_falls_by_small_steps_and_not_below_what_was_seen() -> None:
    ratios = CompressionRatios()
    ratios.observe("t", LZ4, 0.2)
    ratios.observe("t", LZ4, 1.0)
    for step in range(1, 11):
        ratios.observe("t", LZ4, 0.2)
        assert ratios.estimate("t", LZ4) == pytest.approx(1 - 0.005 * step)
    for _ in range(200):
        ratios.observe("t", LZ4, 0.2)
    assert ratios.estimate("t", LZ4) == 0.2
    ratios.observe("t", LZ4, 0.199)
    assert ratios.estimate("t", LZ4) == 0.199


def test_an_estimate_rises_at_once_and_by_a_step_at_least() -> None:
    ratios = CompressionRatios()
    for _ in range(200):
        ratios.observe("t", LZ4, 0.2)
    ratios.observe("t", LZ4, 0.21)
    assert ratios.estimate("t", LZ4) == pytest.approx(0.25)
    ratios.observe("t", LZ4, 0.9)
    assert ratios.estimate("t", LZ4) == 0.9
    ratios.observe("t", LZ4, 0.9)
    assert ratios.estimate("t", LZ4) == 0.9


def test_topics_and_codecs_are_learnt_apart() -> None:
    ratios = CompressionRatios()
    ratios.observe("t", LZ4, 0.5)
    assert ratios.estimate("t", LZ4) < 1
    assert (ratios.estimate("t", ZSTD), ratios.estimate("u", LZ4)) == (1.0, 1.0)


@pytest.mark.parametrize(("seen", "expected"), [(0.3, 1.0), (1.01, 1.01)])
def test_after_a_split_the_topic_starts_over(seen: float, expected: float) -> None:
    ratios = CompressionRatios()
    for _ in range(200):
        ratios.observe("t", LZ4, 0.2)
    ratios.relearn("t", LZ4, seen)
    assert ratios.estimate("t", LZ4) == expected
    ratios.observe("t", LZ4, 0.2)
    assert ratios.estimate("t", LZ4) == pytest.approx(expected - 0.005)


@given(st.lists(st.floats(0.01, 1.2), min_size=1, max_size=50))
def test_an_estimate_is_never_below_the_last_batch(observed: list[float]) -> None:
    ratios = CompressionRatios()
    for ratio in observed:
        ratios.observe("t", LZ4, ratio)
        assert ratios.estimate("t", LZ4) >= ratio
