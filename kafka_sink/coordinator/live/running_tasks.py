"""The running tasks with their last reports, and the parts of a snapshot that are made of them. No I/O.

The memory for all tasks is bounded, because a task's reports might contain ever new names.
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

# A write's name and the number of its task.
AttemptKey = tuple[str, int]
# The owner of totals: a topic, a broker, a topic with a reason, or None for the task itself.
TotalsKey = str | int | tuple[str, str] | None
_MAX_TARGETS = 2_000
_MAX_TASKS = 25_000
# The topics, brokers, reasons and mutes of all tasks, and what their writes keep of ended tasks. An entry
# takes some 300 bytes.
_MAX_ENTRIES = 500_000


@dataclass(slots=True)
class RunningTask:
    """An attempt as it last reported.

    ``identity`` lacks the texts about the application and the job. ``gauges``: in the order of GAUGES.
    ``waits_for``: for each broker that owes it a response, the number of requests in flight, and since when.
    ``totals``: the part of its reports that has been added to the application's sums.
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
    """Keeps the tasks that reported last."""

    def __init__(self) -> None:
        self.entries = 0
        self._tasks: OrderedDict[AttemptKey, RunningTask] = OrderedDict()
        # The numbers of each write's tasks.
        self._of_write: dict[str, set[int]] = {}

    def __iter__(self) -> Iterator[RunningTask]:
        return iter(self._tasks.values())

    def on_report(self, cluster: str, report: TaskReport, now_ms: float) -> RunningTask:
        identity = replace(report.identity, application="", about=None)
        before = self._tasks.pop((identity.write, identity.task), None)
        if before is not None:
            self.entries -= len(before.waits_for) + len(before.mutes)
        waiting = (
            (node, (broker.in_flight, now_ms - broker.oldest_ms))
            for node, broker in report.brokers.items()
            if broker.in_flight or broker.oldest_ms
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
            # Each target counts once, even if the report repeats it.
            mutes=tuple({mute.target: mute for mute in report.mutes[: self.capacity]}.values()),
            totals={} if before is None else before.totals,
        )
        self.entries += len(task.waits_for) + len(task.mutes)
        self._tasks[task.key] = task
        self._of_write.setdefault(identity.write, set()).add(identity.task)
        if len(self._tasks) > _MAX_TASKS:
            self.remove(next(iter(self._tasks)))
        return task

    @property
    def capacity(self) -> int:
        return max(0, _MAX_ENTRIES - self.entries)

    def grow(self, task: RunningTask, key: TotalsKey, now: Sequence[Number]) -> Sequence[Number]:
        """How much these totals have grown since the task's last report; empty if they have not.

        A lost, repeated or late report therefore changes nothing. Beyond the bound only the task's own
        counters are kept. The driver's sums contain the rest when the write ends.
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
        """Remove a task that has ended."""
        task = self._tasks.pop(key, None)
        if task is not None:
            self.entries -= len(task.totals) + len(task.waits_for) + len(task.mutes)
            write, number = key
            self._of_write[write].discard(number)
            if not self._of_write[write]:
                del self._of_write[write]

    def remove_write(self, write: str) -> None:
        """Remove the tasks of a write that has ended. Other tasks cost nothing, as many writes may end."""
        for number in list(self._of_write.get(write, ())):
            self.remove((write, number))


def requests(tasks: Iterable[RunningTask]) -> dict[tuple[str, int], tuple[int, float]]:
    """For each cluster and broker: the number of requests in flight, and since when it owes a response."""
    requests_by_broker: dict[tuple[str, int], tuple[int, float]] = {}
    for task in tasks:
        for node, (in_flight, since_ms) in task.waits_for.items():
            others, first_ms = requests_by_broker.get((task.cluster, node), (0, math.inf))
            requests_by_broker[task.cluster, node] = others + in_flight, min(first_ms, since_ms)
    return requests_by_broker


def longest_waits(tasks: Iterable[RunningTask], count: int, silent_before_ms: float) -> list[RunningTask]:
    """This many tasks: first those that have waited longest in their state, and then those that work."""

    def rank(task: RunningTask) -> tuple[bool, float, AttemptKey]:
        works = task.state == STATES[0] and task.reported_ms >= silent_before_ms
        return works, task.state_since_ms, task.key

    return heapq.nsmallest(count, tasks, rank)


def muted(tasks: Iterable[RunningTask], now_ms: float) -> list[dict[str, Any]]:
    """The muted brokers and partitions with the rows that wait for them, the longest mute first.

    ``left``: seconds until the first of the rows reach delivery.timeout.ms, or None if no rows wait. The
    values are added up report by report, because there may be 300,000 of them each second.
    """
    targets: dict[tuple[str, str], dict[str, Any]] = {}
    for task in tasks:
        silence_ms = now_ms - task.reported_ms
        for mute in task.mutes:
            target = targets.get((task.cluster, mute.target))
            if target is None:
                if len(targets) >= _MAX_TARGETS:
                    continue
                kind = "broker" if mute.target.lstrip("-").isdigit() else "partition"
                target = {"cluster": task.cluster, "target": mute.target, "kind": kind, "seconds": -1.0}
                target |= {"rows": 0, "named": [], "left": None}
                targets[task.cluster, mute.target] = target
            seconds = (mute.age_ms + silence_ms) / 1000
            if seconds > target["seconds"]:
                target["seconds"], target["reason"] = seconds, mute.reason
            if mute.left_ms is not None:
                left = max(0.0, mute.left_ms - silence_ms) / 1000
                if target["left"] is None or left < target["left"]:
                    target["left"] = left
            target["rows"] += mute.rows
            named = target["named"]
            if len(named) < MAX_PARTITIONS:
                named += [name for name in mute.named if name not in named]
                del named[MAX_PARTITIONS:]
    return sorted(targets.values(), key=lambda target: -target["seconds"])
