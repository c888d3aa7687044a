"""Rows that wait for what is muted. Catches: rows counted twice or kept too long, a stale deadline."""

from __future__ import annotations

from typing import Any

from kafka_sink.coordinator.live.messages import MAX_PARTITIONS, MuteReport
from kafka_sink.coordinator.live.running_tasks import MutedTargets

A, B = ("a", 1), ("b", 2)


def mute(rows: int, left_ms: float, *named: str, partitions: int = 1) -> tuple[MuteReport, ...]:
    return (MuteReport("1", "frozen", 5.0, rows, left_ms, partitions, named),)


def shown(muted: MutedTargets, now_ms: float, cluster: str = "c") -> dict[str, Any]:
    found = [one for one in muted.shown(now_ms) if (one["cluster"], one["target"]) == (cluster, "1")]
    return found[0] if found else {}


def test_rows_of_several_attempts_are_added_up_and_taken_off_again() -> None:
    waiting = MutedTargets()
    waiting.report("c", A, mute(10, 9_000.0, "t-0", partitions=3), 0.0)
    waiting.report("c", B, mute(5, 7_000.0, "t-1"), 1_000.0)
    waiting.report("c", B, mute(7, 6_000.0, "t-1"), 2_000.0)
    expected = {"rows": 17, "partitions": 3, "named": ["t-0", "t-1"], "left": 5.0}
    assert expected.items() <= shown(waiting, 3_000.0).items()
    assert shown(waiting, 3_000.0, "other") == {}
    waiting.forget(B)
    assert (shown(waiting, 3_000.0)["rows"], shown(waiting, 3_000.0)["left"]) == (10, 6.0)
    waiting.report("c", A, mute(10, 5_000.0), 4_000.0)
    assert shown(waiting, 5_000.0)["left"] == 4.0
    waiting.report("c", A, (), 5_000.0)
    assert shown(waiting, 5_000.0) == {}


def test_a_mute_names_few_partitions() -> None:
    waiting = MutedTargets()
    for task in range(100):
        waiting.report("c", ("w", task), mute(1, 1.0, f"t-{task}", partitions=100), 0.0)
    assert len(shown(waiting, 0.0)["named"]) == MAX_PARTITIONS


def test_a_report_that_names_a_target_twice_counts_it_once() -> None:
    """Catches: rows that nobody could take off again, and an error when the attempt ended."""
    waiting = MutedTargets()
    waiting.report("c", A, mute(10, 9_000.0) + mute(4, 9_000.0), 0.0)
    assert shown(waiting, 0.0)["rows"] == 4
    waiting.forget(A)
    assert shown(waiting, 0.0) == {}
