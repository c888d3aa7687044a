"""What happened, for whoever looks later. Catches: events told twice or never, and a log that grows."""

from __future__ import annotations

from typing import Any

from kafka_sink.coordinator.figures.events import MAX_EVENTS, EventLog


def mute(target: str, seconds: float, kind: str = "broker") -> dict[str, Any]:
    return {"kind": kind, "target": target, "seconds": seconds, "reason": "3 requests without a response"}


def texts(log: EventLog) -> list[str]:
    return [str(one["text"]) for one in log.shown()]


def test_a_mute_is_told_when_it_began_and_when_it_ended() -> None:
    log = EventLog()
    for second in range(100, 110):
        log.observe(second, [mute("1", second - 97.5)], {}, 0)
    log.observe(110, [], {}, 0)
    assert texts(log) == ["broker 1 unmuted after 12 s", "broker 1 muted: 3 requests without a response"]
    assert [one["time"] for one in log.shown()] == [110, 97.5]
    assert [one["level"] for one in log.shown()] == ["good", "bad"]


def test_a_job_is_told_by_its_states() -> None:
    log = EventLog()
    for state in ("running", "running", "aborted", "aborted"):
        log.observe(1, [], {"a": ("write a", state, "no disk")}, 0)
    log.observe(2, [], {}, 0)
    assert texts(log) == ["write a aborted: no disk", "write a running"]


def test_dead_letters_that_go_on_are_one_event() -> None:
    log = EventLog()
    for second, letters in ((0, 0), (1, 5), (2, 9), (50, 20), (111, 30)):
        log.observe(second, [], {}, letters)
    assert texts(log) == ["dead letters: 10 (in all 30)", "dead letters: 5 (in all 5)"]


def test_the_log_is_bounded() -> None:
    log = EventLog()
    for second in range(1_000):
        log.observe(second, [mute(str(second), 0)], {}, 0)
    assert len(log.shown()) == MAX_EVENTS
    assert len(log._mutes) == 1
