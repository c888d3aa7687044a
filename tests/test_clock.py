"""The one backoff: its bounds, and that it grows. The order of times that depend on one another."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kafka_sink import clock
from kafka_sink.clock import ExponentialBackoff
from kafka_sink.options.parse import breaker_value

_MS = st.integers(0, 3_600_000)


@given(_MS, _MS, st.integers(0, 10_000), st.floats(0, 1, exclude_max=True))
def test_delays_double_up_to_the_maximum_with_a_fifth_of_jitter(
    base_ms: int, max_ms: int, attempts: int, drawn: float
) -> None:
    delay_ms = ExponentialBackoff(base_ms, max_ms, lambda: drawn).delay_ms(attempts)
    # The formula as broker connections had it, in floats and counting failures before this one.
    grown = min(base_ms * 2.0 ** min(max(attempts - 1, 0), 30), max(max_ms, base_ms))
    assert delay_ms == grown * (1 - 0.2 + 2 * 0.2 * drawn)


def test_a_wait_is_logged_after_3_s_and_at_most_once_a_minute() -> None:
    now_ms = 0.0
    activity = clock.TaskActivity(lambda: now_ms)
    logged = []
    # Waits of 10 s, one after another.
    for second in range(120):
        now_ms = second * 1000.0
        if second % 10 == 0:
            waiting = activity.waiting(clock.MEMORY, lambda: "memory")
            waiting.__enter__()
        if text := activity.long_wait():
            logged.append((second, text))
        if second % 10 == 9:
            waiting.__exit__(None, None, None)
    said = "memory; the task has waited for 3 s"
    assert logged == [(3, said), (63, said)]
    with activity.waiting(clock.ROWS):
        now_ms += 100_000
        assert activity.long_wait() is None


def test_times_that_depend_on_one_another_are_in_order() -> None:
    # A task waits for the second task that is asked to fetch, but not for the third.
    assert clock.FETCH_SILENCE_MS < clock.COORDINATOR_WAIT_MS < 2 * clock.FETCH_SILENCE_MS
    # It gives up waiting before it takes the coordinator for gone.
    assert clock.COORDINATOR_WAIT_MS < clock.COORDINATOR_SILENCE_MS
    # Gathering is shorter than the interval of reports.
    assert clock.REPORT_OUTCOMES_MS > clock.GATHER_MUTES_MS
    # A silence is confirmed long before a request counts as slow.
    assert breaker_value("slow.request.min.ms", {}) >= 10 * clock.CONFIRM_SILENCE_MS
    # Batches count as waiting until the sender checks again.
    assert clock.WAITED_FOR_MS > clock.MAX_POLL_MS
