"""Rows that wait for what is muted. Catches: rows counted twice or kept too long, a stale deadline."""

from __future__ import annotations

import pickle
import tracemalloc
from typing import Any

from kafka_sink.coordinator.live.messages import MAX_PARTITIONS, BrokerReport, MuteReport
from kafka_sink.coordinator.live.running_tasks import RunningTasks, muted, requests
from tests.support.task_reports import TASK, of, report


class Waiting:
    def __init__(self) -> None:
        self.tasks = RunningTasks()

    def report(self, task: int, mutes: tuple[MuteReport, ...], now_ms: float) -> None:
        self.tasks.on_report("c", report(1, of(task), mutes=mutes), now_ms)

    def shown(self, now_ms: float) -> dict[str, Any]:
        return next((one for one in muted(self.tasks, now_ms) if one["target"] == "1"), {})


def mute(rows: int, left_ms: float, *named: str) -> tuple[MuteReport, ...]:
    return (MuteReport("1", "frozen", 5.0, rows, left_ms, named),)


def test_rows_of_several_attempts_are_added_up_and_taken_off_again() -> None:
    waiting = Waiting()
    waiting.report(1, mute(10, 9_000.0, "t-0"), 0.0)
    waiting.report(2, mute(5, 7_000.0, "t-1"), 1_000.0)
    waiting.report(2, mute(7, 6_000.0, "t-1"), 2_000.0)
    waiting.tasks.on_report("other", report(1, of(3), mutes=mute(1, 1.0)), 0.0)
    ours, theirs = muted(waiting.tasks, 3_000.0)
    expected = {"cluster": "c", "rows": 17, "named": ["t-0", "t-1"], "left": 5.0}
    assert expected.items() <= ours.items()
    assert (theirs["cluster"], theirs["rows"]) == ("other", 1)
    waiting.tasks.remove((TASK.write, 3))
    waiting.tasks.remove((TASK.write, 2))
    assert (waiting.shown(3_000.0)["rows"], waiting.shown(3_000.0)["left"]) == (10, 6.0)
    waiting.report(1, mute(10, 5_000.0), 4_000.0)
    assert waiting.shown(5_000.0)["left"] == 4.0
    before = waiting.tasks.entries
    waiting.report(1, (), 5_000.0)
    assert waiting.shown(5_000.0) == {}
    assert waiting.tasks.entries == before - 1


def test_a_mute_names_few_partitions() -> None:
    waiting = Waiting()
    for task in range(100):
        waiting.report(task, mute(1, 1.0, f"t-{task}"), 0.0)
    assert len(waiting.shown(0.0)["named"]) == MAX_PARTITIONS


def test_mutes_are_added_up_report_by_report() -> None:
    """Catches: 200,000 reports of them were collected first, which held the loop for 2 s in each
    second."""
    waiting = Waiting()
    targets = tuple(MuteReport(f"t-{one}", "it fails", 5.0, 1, 9.0, (f"t-{one}",)) for one in range(20))
    for task in range(1_000):
        waiting.report(task, targets, 0.0)
    tracemalloc.start()
    try:
        assert [one["rows"] for one in muted(waiting.tasks, 0.0)] == [1_000] * 20
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 100_000


def test_a_report_that_names_a_target_twice_counts_it_once() -> None:
    """Catches: rows that nobody could take off again, and an error when the attempt ended."""
    waiting = Waiting()
    waiting.report(1, mute(10, 9_000.0) + mute(4, 9_000.0), 0.0)
    assert waiting.shown(0.0)["rows"] == 4
    waiting.tasks.remove((TASK.write, 1))
    assert waiting.shown(0.0) == {}


def test_tasks_whose_reports_name_ever_new_gauges_and_brokers_leave_nothing() -> None:
    """Catches: names that stayed for as long as the application ran."""
    tasks = RunningTasks()

    def report_of(numbers: range) -> int:
        for number in numbers:
            gauges, brokers = {f"g{number}": 1, "waiting_threads": 2}, {number: BrokerReport(in_flight=1)}
            tasks.on_report("c", report(1, gauges=gauges, brokers=brokers), 0.0)
        return len(pickle.dumps(tasks))

    kept = report_of(range(100))
    assert requests(tasks) == {("c", 99): (1, 0.0)}
    assert report_of(range(100, 200)) < kept + 100
