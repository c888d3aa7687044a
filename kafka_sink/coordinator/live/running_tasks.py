"""The tasks that run, as they last reported, and what a snapshot shows of them. No I/O.

What is kept is bounded over all tasks: one whose reports name ever more would otherwise take all memory.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, zip_longest
from typing import Any

from msgspec.structs import replace

from kafka_sink.clock import STATES
from kafka_sink.coordinator.live.messages import MAX_PARTITIONS, MuteReport, TaskIdentity, TaskReport
from kafka_sink.counts import GAUGES, Number

# A write and the number of its task.
AttemptKey = tuple[str, int]
# What totals belong to: a topic, a broker, a topic with a reason, or None for the task's own counters.
TotalsKey = str | int | tuple[str, str] | None
_MAX_TARGETS = 2_000


@dataclass(slots=True)
class RunningTask:
    """An attempt as it last reported.

    ``identity`` without texts about the application and the job. ``gauges``: in the order of GAUGES.
    ``waits_for``: by broker that owes it a response, the requests in flight, and since when. ``totals``: what
    of it is in the sums of the application.
    """

    identity: TaskIdentity
    cluster: str
    reported_ms: float
    elapsed_ms: float
    state: str
    state_since_ms: float
    transaction_since_ms: float | None
    gauges: tuple[Number, ...]
    waits_for: dict[int, tuple[int, float]]
    mutes: tuple[MuteReport, ...]
    totals: dict[TotalsKey, tuple[Number, ...]]

    @property
    def key(self) -> AttemptKey:
        return self.identity.write, self.identity.task


class RunningTasks:
    """At most ``max_tasks`` are kept, those that reported last.

    ``max_entries``: topics, brokers, reasons and mutes of all tasks, and what their writes keep of those that
    have ended: some 300 bytes each.
    """

    def __init__(self, max_tasks: int, max_entries: int) -> None:
        self._max_tasks = max_tasks
        self._max_entries = max_entries
        self.entries = 0
        self._tasks: OrderedDict[AttemptKey, RunningTask] = OrderedDict()
        # By write, the numbers of its tasks.
        self._of_write: dict[str, set[int]] = {}

    def __len__(self) -> int:
        return len(self._tasks)

    def __iter__(self) -> Iterator[RunningTask]:
        return iter(self._tasks.values())

    def report(self, cluster: str, report: TaskReport, now_ms: float) -> RunningTask:
        identity = replace(report.identity, application="", about=None)
        before = self._tasks.pop((identity.write, identity.task), None)
        if before is not None:
            self.entries -= len(before.waits_for) + len(before.mutes)
        waiting = (
            (node, (one.in_flight, now_ms - one.oldest_ms))
            for node, one in report.brokers.items()
            if one.in_flight or one.oldest_ms
        )
        has_transaction = report.transaction_ms is not None and not report.failed
        task = RunningTask(
            identity=identity,
            cluster=cluster,
            reported_ms=now_ms,
            elapsed_ms=report.elapsed_ms,
            state=report.state,
            state_since_ms=now_ms - report.state_ms,
            transaction_since_ms=now_ms - (report.transaction_ms or 0.0) if has_transaction else None,
            gauges=tuple(report.gauges.get(name, 0) for name in GAUGES),
            waits_for=dict(islice(waiting, self.capacity)),
            # Each target once, whatever the report says.
            mutes=tuple({one.target: one for one in report.mutes[: self.capacity]}.values()),
            totals={} if before is None else before.totals,
        )
        self.entries += len(task.waits_for) + len(task.mutes)
        self._tasks[task.key] = task
        self._of_write.setdefault(identity.write, set()).add(identity.task)
        if len(self._tasks) > self._max_tasks:
            self.remove(next(iter(self._tasks)))
        return task

    @property
    def capacity(self) -> int:
        return max(0, self._max_entries - self.entries)

    def grow(self, task: RunningTask, key: TotalsKey, now: Sequence[Number]) -> Sequence[Number]:
        """By how much these totals have grown since the task reported them last; empty if they have not.

        What is lost, repeated or late therefore changes nothing. Beyond the bound other keys than a task's
        counters do not count: the driver's sums have them when the write ends.
        """
        before = task.totals.get(key, ())
        if key not in task.totals:
            if key is not None and not self.capacity:
                return ()
            self.entries += 1
        pairs = list(zip_longest(now, before, fillvalue=0))
        task.totals[key] = tuple(map(max, pairs))
        grown = [max(0, new - old) for new, old in pairs]
        return grown if any(grown) else ()

    def remove(self, key: AttemptKey) -> None:
        """It has ended."""
        task = self._tasks.pop(key, None)
        if task is not None:
            self.entries -= len(task.totals) + len(task.waits_for) + len(task.mutes)
            write, number = key
            self._of_write[write].discard(number)
            if not self._of_write[write]:
                del self._of_write[write]

    def remove_write(self, write: str) -> None:
        """It has ended. A write that ends costs as much as it has tasks: a liar may end thousands at once."""
        for number in list(self._of_write.get(write, ())):
            self.remove((write, number))


def requests(tasks: Iterable[RunningTask]) -> dict[tuple[str, int], tuple[int, float]]:
    """By cluster and broker: the requests in flight, and since when it owes a response."""
    found: dict[tuple[str, int], tuple[int, float]] = {}
    for task in tasks:
        for node, (in_flight, since_ms) in task.waits_for.items():
            others, first_ms = found.get((task.cluster, node), (0, math.inf))
            found[task.cluster, node] = others + in_flight, min(first_ms, since_ms)
    return found


def longest_waits(tasks: Iterable[RunningTask], count: int, silent_before_ms: float) -> list[RunningTask]:
    """So many tasks: those that work last, and else those longest in their state."""

    def rank(task: RunningTask) -> tuple[bool, float, AttemptKey]:
        works = task.state == STATES[0] and task.reported_ms >= silent_before_ms
        return works, task.state_since_ms, task.key

    return heapq.nsmallest(count, tasks, rank)


def muted(tasks: Iterable[RunningTask], now_ms: float) -> list[dict[str, Any]]:
    """Brokers and partitions that tasks have muted, and what waits for them: the longest first.

    ``left``: seconds until the first of the rows reach delivery.timeout.ms; None where none wait. Added up
    report by report: each second there may be 300,000 of them.
    """
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for task in tasks:
        silence_ms = now_ms - task.reported_ms
        for one in task.mutes:
            target = found.get((task.cluster, one.target))
            if target is None:
                if len(found) >= _MAX_TARGETS:
                    continue
                kind = "broker" if one.target.lstrip("-").isdigit() else "partition"
                target = {"cluster": task.cluster, "target": one.target, "kind": kind, "seconds": -1.0}
                target |= {"rows": 0, "named": [], "left": None}
                found[task.cluster, one.target] = target
            seconds = (one.age_ms + silence_ms) / 1000
            if seconds > target["seconds"]:
                target["seconds"], target["reason"] = seconds, one.reason
            if one.left_ms is not None:
                left = max(0.0, one.left_ms - silence_ms) / 1000
                if target["left"] is None or left < target["left"]:
                    target["left"] = left
            target["rows"] += one.rows
            named = target["named"]
            if len(named) < MAX_PARTITIONS:
                named += [name for name in one.named if name not in named]
                del named[MAX_PARTITIONS:]
    return sorted(found.values(), key=lambda target: -target["seconds"])
