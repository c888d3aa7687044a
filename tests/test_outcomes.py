"""The recent outcomes from which the failure rate is computed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kafka_sink.outcomes import RecentOutcomes

OUTCOMES = st.lists(st.tuples(st.sampled_from([1, 400, 2_600, 5_000, 11_000]), st.booleans()))


@given(OUTCOMES)
def test_outcomes_against_a_list_of_everything(story: list[tuple[int, bool]]) -> None:
    """The batches are sent one after the other."""
    outcomes = RecentOutcomes()
    now, seen = 0.0, []
    for passed, bad in story:
        sent, now = now, now + passed
        if not bad:
            outcomes.on_success(sent, now)
        else:
            outcomes.on_failure(sent, now)
        seen.append((now, bad))
        start = (now // 5_000 - 1) * 5_000
        recent = [failed for at, failed in seen if at >= start]
        streak = 0
        for _, failed in seen:
            streak = streak + 1 if failed else 0
        failures = max(sum(recent), streak)
        assert outcomes.count(now) == (failures, failures + recent.count(False))


def test_outcomes_of_batches_in_flight_together_count_once_and_failures_long_ago_do_not() -> None:
    outcomes = RecentOutcomes()
    for now in (10.0, 11.0):
        outcomes.on_success(0.0, now)
        outcomes.on_failure(0.0, now)
    assert outcomes.count(11.0) == (1, 2)
    outcomes.on_failure(600_000.0, 600_010.0)
    assert outcomes.count(600_010.0) == (1, 1)
    outcomes.on_failure(1_200_000.0, 1_200_009.0)
    assert outcomes.count(1_200_009.0) == (2, 2)
    outcomes.on_failure(1_900_000.0, 1_900_000.0)
    assert outcomes.count(1_900_000.0) == (1, 1)
