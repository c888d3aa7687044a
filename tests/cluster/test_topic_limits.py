"""What brokers taught about a topic's batches, and what batches shrink to.

How many rows they take is in tests/records/test_ordered_rows.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kafka_sink.cluster.records_builder import projected_size
from kafka_sink.cluster.topic_limits import TopicLimits
from kafka_sink.model import CompressionType
from kafka_sink.records.compression import BlockCodec, codec_for

LZ4 = codec_for(CompressionType.LZ4, None)
NOW = 1_700_000_000_000


def test_full_blocks_are_reserved_for_as_they_are_expected_to_shrink() -> None:
    assert isinstance(LZ4, BlockCodec)
    block = 65_536
    # Four bytes of length for each block, the last one raw, and four at the end of the frame.
    for ratio, share in [(0.25, 0.25 * 1.05), (1.0, 1.0), (1.3, 1.0)]:
        expected = 68 + int(3 * block * share) + 100 + 4 * 4 + 4
        assert projected_size(LZ4, ratio, 68, 3 * block + 100) == expected
        assert projected_size(LZ4, ratio, 68, block - 1) == 68 + block - 1 + 4 + 4
    assert projected_size(None, 0.25, 61, 300_000) == 300_061, "what stays raw, in full"


class Store:
    """Keeps limits in memory."""

    def __init__(self) -> None:
        self.limits: dict[str, int] = {}

    def read(self) -> dict[str, int]:
        return dict(self.limits)

    def write(self, limits: Mapping[str, int]) -> None:
        self.limits = dict(limits)


def learnt(batch_size: int, store: Store | None = None, topic: str = "t") -> TopicLimits:
    """The limits with which a new producer begins."""
    return TopicLimits(topic, batch_size, None, store, None if store is None else store.read().get(topic))


def test_a_refused_size_is_halved_and_the_task_goes_on_with_its_limit_until_it_learns() -> None:
    """The sender's thread is told at once, as it splits by it."""
    limits = TopicLimits("t", 1_000)
    assert limits.largest_batch == 1_000
    # The second time, what was larger before changes nothing.
    for size, largest in [(900, 450), (900, 450), (450, 225)]:
        limits.on_too_large(size)
        assert (limits.largest_batch, limits.learnt, limits.write_limit) == (largest, largest, 1_000)
    limits.relearn(0.5, 1.0)
    assert (limits.write_limit, limits.ratio) == (225, 1.0)


def test_a_refusal_that_costs_a_task_lowers_the_limit_further() -> None:
    """Spark allows four attempts: with halves, batches of 512 KiB would still be of 64 KiB in the last."""
    limits = TopicLimits("t", 512 << 10)
    for _ in range(3):
        limits.on_too_large(limits.largest_batch, costs_task=True)
    assert limits.largest_batch == 1 << 10
    limits = TopicLimits("t", 1)
    limits.on_too_large(1, costs_task=True)
    assert limits.largest_batch == 1


def test_the_next_producer_begins_with_what_was_learnt_of_its_cluster() -> None:
    a, b = Store(), Store()
    learnt(1_000, a).on_too_large(900)
    assert learnt(1_000, a).largest_batch == 450
    limits = learnt(400, a)
    assert (limits.largest_batch, limits.learnt) == (400, 450), "not split by a batch.size below that"
    assert learnt(1_000, b).largest_batch == learnt(1_000, a, "u").largest_batch == 1_000
    assert learnt(1_000).largest_batch == 1_000


def test_limits_that_two_workers_learn_are_kept_together() -> None:
    a = Store()
    one, two = learnt(1_000, a), learnt(1_000, a)
    other = learnt(1_000, a, "u")
    one.on_too_large(900)
    other.on_too_large(800)
    two.on_too_large(1_000)
    assert (learnt(1_000, a).largest_batch, learnt(1_000, a, "u").largest_batch) == (450, 400)


def test_a_learnt_limit_doubles_after_a_wait_that_grows_while_brokers_refuse_it() -> None:
    """Catches: a limit that was restored at once and held batches down for an hour."""
    a = Store()
    limits = learnt(4_000, a)
    assert not limits.may_rise(2_000, 0.0)
    limits.on_too_large(2_000)
    now_ms, waits = 100.0, []
    for _ in range(11):
        begun_ms = now_ms
        while not limits.may_rise(501, now_ms):
            now_ms += 1_000.0
        waits.append((now_ms - begun_ms) / 1_000)
        limits.rise()
        assert (limits.learnt, limits.write_limit) == (2_000, 2_000)
        limits.on_too_large(2_000)
    assert waits == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 600]
    # The broker's limit is restored.
    for largest in (2_000, 4_000):
        assert not limits.may_rise(largest // 2, now_ms)
        now_ms += 600_000.0
        assert limits.may_rise(largest // 2, now_ms)
        limits.rise()
        assert limits.write_limit == largest
    assert not limits.may_rise(4_000, now_ms + 3_600_000.0)


def test_a_limit_doubles_only_after_a_batch_of_more_than_half_of_it() -> None:
    """Catches: small batches raised the limit step by step, without a broker having taken one as large."""
    limits = learnt(16_000)
    limits.on_too_large(2_000)
    for now_ms in (0.0, 1_000.0, 2_000.0):
        assert not limits.may_rise(500, now_ms)
    assert not limits.may_rise(501, 3_000.0)
    assert limits.may_rise(501, 4_000.0)


def test_a_raised_limit_does_not_replace_what_another_task_has_learnt() -> None:
    a = Store()
    one, two = learnt(4_000, a), learnt(4_000, a)
    one.on_too_large(2_000)
    two.on_too_large(800)
    one.rise()
    assert a.limits == {"t": 400}
    # The refusal of a raised limit does not make the kept limits look new.
    a.write = Mock()  # type: ignore[method-assign]
    one.on_too_large(2_000)
    a.write.assert_not_called()


def seen(*ratios: float) -> tuple[TopicLimits, list[float]]:
    """A topic's limits, and its estimate after each batch that shrank to so much."""
    limits = TopicLimits("t", 1000, LZ4)
    assert limits.ratio == 1.0
    estimates = []
    for ratio in ratios:
        limits.observe(ratio)
        estimates.append(limits.ratio)
    return limits, estimates


def test_an_estimate_first_falls_by_quarters_and_not_below_what_was_seen() -> None:
    assert seen(*[0.27] * 6)[1] == pytest.approx([0.75, 0.75**2, 0.75**3, 0.75**4, 0.27, 0.27])


def test_an_estimate_that_was_once_too_low_falls_by_small_steps_and_not_below_what_was_seen() -> None:
    _, estimates = seen(0.2, 1.0, *[0.2] * 210, 0.199)
    assert estimates[2:12] == pytest.approx([1 - 0.005 * step for step in range(1, 11)])
    assert estimates[-2:] == [0.2, 0.199]


def test_an_estimate_rises_at_once_and_by_a_step_beyond_the_safety_margin() -> None:
    """Catches: batches that differed by a thousandth kept each other a tenth smaller than batch.size."""
    assert seen(*[0.2] * 200, 0.209, 0.22, 0.9, 0.9)[1][-4:] == pytest.approx([0.209, 0.259, 0.9, 0.9])


@pytest.mark.parametrize(("ratio", "expected"), [(0.3, 1.0), (1.01, 1.01)])
def test_after_a_split_the_topic_starts_over(ratio: float, expected: float) -> None:
    limits, _ = seen(*[0.2] * 200)
    limits.relearn(ratio, 0.2)
    assert limits.ratio == expected
    limits.observe(0.2)
    assert limits.ratio == pytest.approx(expected - 0.005)


def test_a_refusal_of_a_batch_that_was_as_small_as_estimated_leaves_the_estimate() -> None:
    """Catches: each refusal of a raised limit made the next batches small for long."""
    limits, _ = seen(*[0.2] * 200)
    limits.on_too_large(900)
    limits.relearn(0.2, 0.2)
    assert (limits.write_limit, limits.ratio) == (450, 0.2)


@given(st.lists(st.floats(0.01, 1.2), min_size=1, max_size=50))
def test_an_estimate_is_never_below_the_last_batch(observed: list[float]) -> None:
    limits = TopicLimits("t", 1000, LZ4)
    for ratio in observed:
        limits.observe(ratio)
        assert limits.ratio >= ratio
