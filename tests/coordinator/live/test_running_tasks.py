"""Rows that wait for what is muted. Catches: rows counted twice or kept too long, a stale deadline."""

from __future__ import annotations

from kafka_sink.coordinator.live.messages import MAX_PARTITIONS, MuteReport
from kafka_sink.coordinator.live.running_tasks import MutedTargets

A, B = ("a", 1), ("b", 2)


def mute(rows: int, left_ms: float, *named: str, partitions: int = 1) -> tuple[MuteReport, ...]:
    return (MuteReport("1", "frozen", 5.0, rows, left_ms, partitions, named),)


def test_rows_of_several_attempts_are_added_up_and_taken_off_again() -> None:
    waiting = MutedTargets()
    waiting.report("c", A, mute(10, 9_000.0, "t-0", partitions=3), 0.0)
    waiting.report("c", B, mute(5, 7_000.0, "t-1"), 1_000.0)
    waiting.report("c", B, mute(7, 6_000.0, "t-1"), 2_000.0)
    shown = {"rows": 17, "partitions": 3, "named": ["t-0", "t-1"], "left": 5.0}
    assert waiting.waiting("c", "1", 3_000.0) == shown
    assert waiting.waiting("other", "1", 3_000.0)["rows"] == 0
    waiting.forget(B)
    assert waiting.waiting("c", "1", 3_000.0)["rows"] == 10
    # Nobody has said since who is next.
    assert waiting.waiting("c", "1", 3_000.0)["left"] is None
    waiting.report("c", A, mute(10, 5_000.0), 4_000.0)
    assert waiting.waiting("c", "1", 5_000.0)["left"] == 4.0
    waiting.report("c", A, (), 5_000.0)
    assert waiting.waiting("c", "1", 5_000.0) == {"rows": 0, "partitions": 0, "named": [], "left": None}
    assert not waiting._by_target
    assert not waiting._targets


def test_a_mute_names_few_partitions() -> None:
    waiting = MutedTargets()
    for task in range(100):
        waiting.report("c", ("w", task), mute(1, 1.0, f"t-{task}", partitions=100), 0.0)
    assert len(waiting.waiting("c", "1", 0.0)["named"]) == MAX_PARTITIONS


def test_a_report_that_names_a_target_twice_counts_it_once() -> None:
    """Catches: rows that nobody could take off again, and an error when the attempt ended."""
    waiting = MutedTargets()
    waiting.report("c", A, mute(10, 9_000.0) + mute(4, 9_000.0), 0.0)
    assert waiting.waiting("c", "1", 0.0)["rows"] == 4
    waiting.forget(A)
    assert waiting.waiting("c", "1", 0.0)["rows"] == 0
