"""When known brokers are given up, with plain numbers for the time."""

from __future__ import annotations

from kafka_sink.metadata.metadata_requests import RebootstrapTimer


def test_it_triggers_after_the_time_without_a_response_and_again_after_another() -> None:
    recovery = RebootstrapTimer(rebootstrap=True, trigger_ms=1000)
    triggered = [now for now in range(0, 3500, 100) if recovery.wanted(now)]
    assert triggered == [1000, 2000, 3000]


def test_a_response_starts_the_timer_anew() -> None:
    recovery = RebootstrapTimer(rebootstrap=True, trigger_ms=1000)
    assert not recovery.wanted(0)
    recovery.satisfied()
    assert not recovery.wanted(5000)
    assert recovery.wanted(6000)


def test_a_new_start_is_given_time_however_short_the_trigger() -> None:
    recovery = RebootstrapTimer(rebootstrap=True, trigger_ms=0)
    assert [now for now in range(0, 2500, 100) if recovery.wanted(now)] == [0, 1000, 2000]
    recovery.satisfied()
    assert not recovery.wanted(2600), "a response came, but the last start is no second ago"
    assert recovery.wanted(3000)


def test_it_never_triggers_without_rebootstrap() -> None:
    recovery = RebootstrapTimer(rebootstrap=False, trigger_ms=0)
    assert not any(recovery.wanted(now) for now in range(0, 100_000, 1000))
