"""The tasks that run, as they last reported, with sums over them that follow each report. No I/O.

A snapshot therefore inspects no task but those that are silent, and those that it shows. What is kept is
bounded over all tasks: one whose reports name ever more would otherwise take all memory.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, zip_longest
from typing import Any

from kafka_sink.clock import STATES
from kafka_sink.coordinator.live.messages import MAX_PARTITIONS, MuteReport, TaskReport
from kafka_sink.counts import GAUGES, Number

# A write and the number of its task.
AttemptKey = tuple[str, int]
# What totals belong to: a topic, a broker, a topic with a reason, or None for the task's own counters.
TotalsKey = str | int | tuple[str, str] | None
# Topics, brokers, reasons and mutes of all tasks together: some 300 bytes each.
MAX_ENTRIES = 300_000
_MAX_TARGETS = 2_000


@dataclass(slots=True)
class RunningTask:
    """An attempt as it last reported. ``awaited``: brokers that owe it a response; ``totals``: what of it is
    in the sums of the application."""

    key: AttemptKey
    cluster: str
    job: str
    partition: int
    attempt: int
    host: str
    reported_ms: float = -math.inf
    elapsed_ms: float = 0.0
    state: str = STATES[0]
    state_since_ms: float = 0.0
    gauges: Mapping[str, Number] = field(default_factory=dict)
    awaited: tuple[int, ...] = ()
    mutes: Sequence[MuteReport] = ()
    totals: dict[TotalsKey, tuple[Number, ...]] = field(default_factory=dict)


@dataclass(slots=True)
class _Sums:
    """Sums over one cluster's tasks, and by task since when: for the oldest, which no sum gives."""

    gauges: Counter[str] = field(default_factory=Counter)
    states: Counter[str] = field(default_factory=Counter)
    # By broker: requests in flight, since when it owes a response, and when rows that wait for it fail.
    awaited: dict[int, dict[AttemptKey, tuple[int, float, float]]] = field(default_factory=dict)
    transaction_since_ms: dict[AttemptKey, float] = field(default_factory=dict)


class RunningTasks:
    """At most ``max_tasks`` are kept. A task that has not reported for long is gone: it is not shown, but its
    next report finds what it had reported before."""

    def __init__(self, max_tasks: int, max_entries: int = MAX_ENTRIES) -> None:
        self._max_tasks = max_tasks
        self._max_entries = max_entries
        self.entries = 0
        self._tasks: OrderedDict[AttemptKey, RunningTask] = OrderedDict()
        # Those that are not gone, in the order of their last reports.
        self._shown: OrderedDict[AttemptKey, RunningTask] = OrderedDict()
        self._sums: defaultdict[str, _Sums] = defaultdict(_Sums)
        self.of_job: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._tasks)

    @property
    def shown(self) -> int:
        """How many are not gone."""
        return len(self._shown)

    def report(self, cluster: str, report: TaskReport, now_ms: float) -> RunningTask:
        one = report.identity
        key = one.write, one.task
        task = self._tasks.get(key)
        if task is None:
            job = one.query or one.write
            task = RunningTask(key, cluster, job, one.partition, one.attempt, one.host)
            self._tasks[key] = task
            while len(self._tasks) > self._max_tasks:
                self.remove(next(iter(self._tasks)))
        else:
            self._hide(key)
        task.reported_ms, task.elapsed_ms = now_ms, report.elapsed_ms
        task.state, task.state_since_ms = report.state, now_ms - report.state_ms
        task.gauges = {name: value for name, value in report.gauges.items() if name in GAUGES}
        waiting = ((node, one) for node, one in report.brokers.items() if one.in_flight or one.oldest_ms)
        awaited = dict(islice(waiting, self._capacity))
        task.awaited = tuple(awaited)
        self._shown[key] = task
        self._count(task, 1)
        sums = self._sums[task.cluster]
        for node, broker in awaited.items():
            left_ms = math.inf if broker.left_ms is None else broker.left_ms
            owed = broker.in_flight, now_ms - broker.oldest_ms, now_ms + left_ms
            sums.awaited.setdefault(node, {})[key] = owed
        if report.transaction_ms is not None and not report.failed:
            sums.transaction_since_ms[key] = now_ms - report.transaction_ms
        else:
            sums.transaction_since_ms.pop(key, None)
        # Each target once, whatever the report says.
        task.mutes = tuple({one.target: one for one in report.mutes[: self._capacity]}.values())
        self.entries += len(task.mutes)
        return task

    @property
    def _capacity(self) -> int:
        return max(0, self._max_entries - self.entries)

    def grow(self, task: RunningTask, key: TotalsKey, now: Sequence[Number]) -> Sequence[Number]:
        """By how much these totals have grown since the task reported them last; empty if they have not.

        What is lost, repeated or late therefore changes nothing. Beyond the bound other keys than a task's
        counters do not count: the driver's sums have them when the write ends.
        """
        before = task.totals.get(key)
        if before is None:
            if key is not None and not self._capacity:
                return ()
            self.entries += 1
        grown = [max(0, new - old) for new, old in zip_longest(now, before or (), fillvalue=0)]
        if before is None or any(grown):
            task.totals[key] = tuple(map(max, zip_longest(now, before or (), fillvalue=0)))
        return grown if any(grown) else ()

    def remove(self, key: AttemptKey) -> None:
        """It has ended."""
        self._hide(key)
        task = self._tasks.pop(key, None)
        if task is not None:
            self.entries -= len(task.totals)
            self._sums[task.cluster].transaction_since_ms.pop(key, None)

    def expire(self, gone_before_ms: float) -> None:
        """Those that have not reported since then are gone."""
        while self._shown:
            key, task = next(iter(self._shown.items()))
            if task.reported_ms >= gone_before_ms:
                return
            self._hide(key)

    def _hide(self, key: AttemptKey) -> None:
        task = self._shown.pop(key, None)
        if task is not None:
            self._count(task, -1)
            awaited = self._sums[task.cluster].awaited
            for node in task.awaited:
                del awaited[node][key]
                if not awaited[node]:
                    del awaited[node]
            self.entries -= len(task.mutes)

    def _count(self, task: RunningTask, sign: int) -> None:
        """Add a task's last report to the sums, or take it off."""
        sums = self._sums[task.cluster]
        self.entries += sign * len(task.awaited)
        sums.states[task.state] += sign
        self.of_job[task.job] += sign
        if not self.of_job[task.job]:
            del self.of_job[task.job]
        for name, value in task.gauges.items():
            sums.gauges[name] += sign * value  # type: ignore[assignment]  # all are whole numbers

    # -- sums -----------------------------------------------------------------------------------------

    def gauges(self, cluster: str) -> dict[str, int]:
        """Their sums over a cluster's tasks."""
        return {name: value for name, value in self._sums[cluster].gauges.items() if value}

    def states(self, cluster: str, silent_before_ms: float) -> dict[str, int]:
        """How many tasks of a cluster are in each state; "silent" instead, where the last report is older."""
        states = Counter(self._sums[cluster].states)
        for task in self._shown.values():
            if task.reported_ms >= silent_before_ms:
                break
            if task.cluster == cluster:
                states[task.state] -= 1
                states["silent"] += 1
        return {name: count for name, count in states.items() if count}

    def requests(self, cluster: str, node: int) -> tuple[int, float, float]:
        """Of one broker: the requests in flight, since when it owes a response, and when rows that wait for
        it fail; infinite without any."""
        awaited = self._sums[cluster].awaited.get(node)
        if not awaited:
            return 0, math.inf, math.inf
        numbers, since_ms, until_ms = zip(*awaited.values(), strict=True)
        return sum(numbers), min(since_ms), min(until_ms)

    def transactions(self, cluster: str) -> tuple[int, float]:
        """How many are open, and since when the oldest is; infinite without one."""
        since_ms = self._sums[cluster].transaction_since_ms
        return len(since_ms), min(since_ms.values(), default=math.inf)

    def to_show(self, count: int, silent_before_ms: float) -> list[tuple[RunningTask, str]]:
        """So many tasks with their states: those that work last, and else those longest in their state."""
        ranks = (
            (task.state == STATES[0] and task.reported_ms >= silent_before_ms, task.state_since_ms, key)
            for key, task in self._shown.items()
        )
        found = (self._shown[key] for _, _, key in heapq.nsmallest(count, ranks))
        return [(one, "silent" if one.reported_ms < silent_before_ms else one.state) for one in found]

    # -- muted brokers and partitions, and rows that wait for them ------------------------------------------

    def muted(self, now_ms: float) -> list[dict[str, Any]]:
        """By target, the longest first: since when and why, whether for all tasks, and what waits for it.

        ``left``: seconds until the first of the rows reach delivery.timeout.ms; None where none wait.
        """
        found: dict[tuple[str, str], _ReportedMutes] = {}
        for task in self._shown.values():
            for one in task.mutes:
                key = task.cluster, one.target
                muted = found.get(key)
                if muted is None:
                    if len(found) >= _MAX_TARGETS:
                        continue
                    muted = found[key] = _ReportedMutes()
                muted.add(one, task.reported_ms)
        return [
            one.shown(*key, now_ms) for key, one in sorted(found.items(), key=lambda item: item[1].since_ms)
        ]


@dataclass(slots=True)
class _ReportedMutes:
    """A target as tasks see it. Tens of thousands may wait for it, each time that somebody asks."""

    since_ms: float = math.inf
    reason: str = ""
    shared: bool = False
    rows: int = 0
    partitions: int = 0
    named: dict[str, None] = field(default_factory=dict)
    deadline_ms: float = math.inf

    def add(self, one: MuteReport, at_ms: float) -> None:
        since_ms = at_ms - one.age_ms
        if since_ms < self.since_ms:
            self.since_ms, self.reason = since_ms, one.reason
        self.rows += one.rows
        if one.left_ms is not None and at_ms + one.left_ms < self.deadline_ms:
            self.deadline_ms = at_ms + one.left_ms
        if one.shared:
            self.shared = True
        if one.partitions > self.partitions:
            self.partitions = one.partitions
        if len(self.named) < MAX_PARTITIONS:
            self.named.update(dict.fromkeys(one.named[: MAX_PARTITIONS - len(self.named)]))

    def shown(self, cluster: str, target: str, now_ms: float) -> dict[str, Any]:
        return {
            "cluster": cluster,
            "target": target,
            "kind": "broker" if target.lstrip("-").isdigit() else "partition",
            "reason": self.reason,
            "seconds": max(0.0, now_ms - self.since_ms) / 1000,
            "shared": self.shared,
            "rows": self.rows,
            "partitions": self.partitions,
            "named": list(self.named),
            "left": max(0.0, self.deadline_ms - now_ms) / 1000 if self.deadline_ms < math.inf else None,
        }
