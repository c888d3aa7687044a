"""The one backoff: its bounds, and that it grows. The order of times that depend on one another."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kafka_sink import clock
from kafka_sink.clock import ExponentialBackoff
from kafka_sink.options import parse
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


_OPTIONS = parse({"kafka.bootstrap.servers": "broker:9092"}).options


def test_a_task_waits_for_the_second_task_that_is_asked_to_fetch_but_not_for_the_third() -> None:
    assert clock.FETCH_SILENCE_MS < clock.HINT_WAIT_MS < 2 * clock.FETCH_SILENCE_MS


def test_a_task_gives_up_waiting_before_it_takes_the_coordinator_for_gone() -> None:
    assert clock.HINT_WAIT_MS < clock.COORDINATOR_SILENCE_MS


def test_gathering_is_shorter_than_the_interval_of_reports() -> None:
    interval_ms = _OPTIONS.coordinator_report_interval_ms
    assert interval_ms > clock.GATHER_MUTES_MS


def test_a_silence_is_confirmed_long_before_a_request_counts_as_slow() -> None:
    assert breaker_value("slow.request.min.ms", {}) >= 10 * clock.CONFIRM_SILENCE_MS


def test_batches_count_as_waiting_until_the_sender_checks_again() -> None:
    assert clock.HELD_MS > clock.MAX_POLL_MS
