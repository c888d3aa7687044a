"""The order of times that depend on one another."""

from __future__ import annotations

from kafka_sink import timing_bounds as bounds
from kafka_sink.options import parse
from kafka_sink.options.breaker import value_of

_OPTIONS = parse({"kafka.bootstrap.servers": "broker:9092"}).options


def test_a_task_waits_for_the_second_task_that_is_asked_to_fetch_but_not_for_the_third() -> None:
    assert bounds.FETCH_SILENCE_MS < bounds.HINT_WAIT_MS < 2 * bounds.FETCH_SILENCE_MS


def test_a_task_gives_up_waiting_before_it_takes_the_coordinator_for_gone() -> None:
    assert bounds.HINT_WAIT_MS < bounds.COORDINATOR_SILENCE_MS


def test_gathering_is_shorter_than_the_interval_of_reports() -> None:
    interval_ms = _OPTIONS.coordinator_report_interval_ms
    assert bounds.GATHER_MUTES_MS < bounds.GATHER_STALE_MS < interval_ms


def test_a_silence_is_confirmed_long_before_a_request_counts_as_slow() -> None:
    assert value_of("slow.request.min.ms", {}) >= 10 * bounds.CONFIRM_SILENCE_MS


def test_batches_count_as_waiting_until_the_sender_looks_again() -> None:
    assert bounds.HELD_MS > bounds.MAX_POLL_MS
