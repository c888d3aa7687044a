from __future__ import annotations

import pytest

from kafka_sink.counts import NAMES, LatencyWindow, RateWindow, TaskCounts, TopicMetrics, total


def test_only_counts_that_are_not_zero_have_names_in_a_report() -> None:
    assert TaskCounts().by_name() == {}
    assert TaskCounts(records=3, encode_ms=1.5).by_name() == {"records": 3, "encode_ms": 1.5}


def test_counts_of_tasks_and_of_topics_add_up() -> None:
    each = TaskCounts(**{name: place for place, name in enumerate(NAMES)})
    assert total([each, each]) == TaskCounts(**{name: 2 * place for place, name in enumerate(NAMES)})
    assert total([]) == TaskCounts()
    assert TopicMetrics(1, 2, 3, 4).plus(TopicMetrics(10, 20, 30, 40)) == (11, 22, 33, 44)


def test_a_window_of_latencies_has_their_number_sum_and_largest() -> None:
    window = LatencyWindow()
    for value in (3.0, 7.0, 5.0):
        window.add(value)
    assert (window.count, window.total, window.most) == (3, 15.0, 7.0)


def test_a_rate_shows_at_the_first_sample_and_forgets_what_is_older_than_five() -> None:
    window = RateWindow()
    assert (window.increase, window.per_second) == (0.0, 0.0)
    window.add(10_000.0, 500.0)
    assert (window.increase, window.per_second) == (500.0, 500.0)
    for second in range(1, 6):
        window.add(10_000.0 + 1000 * second, 500.0 + 10 * second)
    assert window.increase == 50.0
    assert window.per_second == pytest.approx(10.0)


def test_a_total_that_was_corrected_and_a_clock_that_stands_give_no_rate() -> None:
    for second_ms, later in ((11_000.0, -5.0), (9_000.0, 0.0)):
        window = RateWindow()
        window.add(10_000.0, 0.0)
        window.add(second_ms, later)
        assert window.per_second == 0.0
