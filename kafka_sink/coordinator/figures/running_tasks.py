"""The tasks that run, as they last reported, with sums over them that follow each report. No I/O.

A snapshot therefore looks at no task but those that are silent, and those that it shows.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from kafka_sink.activity import STATES
from kafka_sink.coordinator.figures.messages import MAX_PARTITIONS, MuteFigures, TaskFigures
from kafka_sink.counts import BrokerFigures, Number, TopicFigures

# A write and the number of its task.
AttemptKey = tuple[str, int]


@dataclass(slots=True)
class RunningTask:
    """An attempt. ``counters``, ``topics`` and ``brokers``: of what it reported, what is in the totals."""

    cluster: str
    figures: TaskFigures
    reported_ms: float
    state_since_ms: float = 0.0
    works: bool = False
    counters: dict[str, Number] = field(default_factory=dict)
    topics: dict[str, TopicFigures] = field(default_factory=dict)
    brokers: dict[int, BrokerFigures] = field(default_factory=dict)
    letters: Mapping[tuple[str, str], int] = field(default_factory=dict)

    @property
    def job(self) -> str:
        return self.figures.identity.query or self.figures.identity.write


@dataclass(slots=True)
class _Sums:
    """Sums over one cluster's tasks, and by task since when: for the oldest, which no sum gives."""

    gauges: Counter[str] = field(default_factory=Counter)
    states: Counter[str] = field(default_factory=Counter)
    in_flight: Counter[int] = field(default_factory=Counter)
    request_since_ms: defaultdict[int, dict[AttemptKey, float]] = field(
        default_factory=lambda: defaultdict(dict)
    )
    muted_since_ms: defaultdict[str, dict[AttemptKey, tuple[float, str]]] = field(
        default_factory=lambda: defaultdict(dict)
    )
    transaction_since_ms: dict[AttemptKey, float] = field(default_factory=dict)


class RunningTasks:
    """At most ``max_tasks`` are kept. A task that has not reported for long is gone: it is not shown, but its
    next report finds what it had reported before. ``waiting``: their rows that wait for what is muted."""

    def __init__(self, max_tasks: int) -> None:
        self._max_tasks = max_tasks
        self.waiting = WaitingRows()
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

    def report(self, cluster: str, figures: TaskFigures, now_ms: float) -> RunningTask:
        key = figures.identity.write, figures.identity.task
        task = self._tasks.get(key)
        if task is None:
            task = self._tasks[key] = RunningTask(cluster, figures, now_ms)
            while len(self._tasks) > self._max_tasks:
                self.remove(*next(iter(self._tasks)))
        else:
            self._hide(key)
            self._sums[task.cluster].transaction_since_ms.pop(key, None)
        task.figures, task.reported_ms = figures, now_ms
        task.state_since_ms, task.works = now_ms - figures.state_ms, figures.state == STATES[0]
        self._shown[key] = task
        self._count(key, task, 1)
        if figures.transaction_ms >= 0 and not figures.failed:
            self._sums[cluster].transaction_since_ms[key] = now_ms - figures.transaction_ms
        self.waiting.report(cluster, key, figures.mutes, now_ms)
        return task

    def remove(self, write: str, number: int) -> None:
        key = write, number
        self._hide(key)
        task = self._tasks.pop(key, None)
        if task is not None:
            self._sums[task.cluster].transaction_since_ms.pop(key, None)
        self.waiting.forget(key)

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
            self._count(key, task, -1)

    def _count(self, key: AttemptKey, task: RunningTask, sign: int) -> None:
        """Add a task's last report to the sums, or take it off."""
        figures, sums = task.figures, self._sums[task.cluster]
        sums.states[figures.state] += sign
        self.of_job[task.job] += sign
        if not self.of_job[task.job]:
            del self.of_job[task.job]
        for name, value in figures.gauges.items():
            sums.gauges[name] += sign * value  # type: ignore[assignment]  # all are whole numbers
        for node, broker in figures.brokers.items():
            if not broker.in_flight:
                continue
            sums.in_flight[node] += sign * broker.in_flight
            if sign > 0:
                sums.request_since_ms[node][key] = task.reported_ms - broker.oldest_ms
            else:
                del sums.request_since_ms[node][key]
        for mute in figures.mutes:
            if sign > 0:
                sums.muted_since_ms[mute.target][key] = task.reported_ms - mute.age_ms, mute.reason
                continue
            since_ms = sums.muted_since_ms[mute.target]
            since_ms.pop(key, None)
            if not since_ms:
                del sums.muted_since_ms[mute.target]

    # -- sums -----------------------------------------------------------------------------------------

    def _silent(self, silent_before_ms: float) -> Iterator[RunningTask]:
        for task in self._shown.values():
            if task.reported_ms >= silent_before_ms:
                return
            yield task

    def gauges(self, cluster: str) -> dict[str, int]:
        """Their sums over a cluster's tasks."""
        return {name: value for name, value in self._sums[cluster].gauges.items() if value}

    def states(self, cluster: str, silent_before_ms: float) -> dict[str, int]:
        """How many tasks of a cluster are in each state; "silent" instead, where the last report is older."""
        states = Counter(self._sums[cluster].states)
        for task in self._silent(silent_before_ms):
            if task.cluster == cluster:
                states[task.figures.state] -= 1
                states["silent"] += 1
        return {name: count for name, count in states.items() if count}

    def requests(self, cluster: str, node: int) -> tuple[int, float]:
        """Of one broker: the requests in flight, and since when the oldest is; infinite without one."""
        sums = self._sums[cluster]
        since_ms = sums.request_since_ms.get(node)
        return sums.in_flight[node], min(since_ms.values()) if since_ms else math.inf

    def muted(self) -> Iterator[tuple[str, str, dict[AttemptKey, tuple[float, str]]]]:
        """Cluster, target, and by task since when it mutes the target for itself, and why."""
        for cluster, sums in self._sums.items():
            for target, since_ms in sums.muted_since_ms.items():
                yield cluster, target, since_ms

    def transactions(self, cluster: str) -> tuple[int, float]:
        """How many are open, and since when the oldest is; infinite without one."""
        since_ms = self._sums[cluster].transaction_since_ms
        return len(since_ms), min(since_ms.values(), default=math.inf)

    def to_look_at(self, count: int, silent_before_ms: float) -> list[tuple[RunningTask, str]]:
        """So many tasks with their states: those that work last, and else those longest in their state."""

        ranks = (
            (task.works and task.reported_ms >= silent_before_ms, task.state_since_ms, key)
            for key, task in self._shown.items()
        )
        found = (self._shown[key] for _, _, key in heapq.nsmallest(count, ranks))
        return [(one, "silent" if one.reported_ms < silent_before_ms else one.figures.state) for one in found]


# -- rows that wait for muted brokers and partitions ---------------------------------------------------------


# A cluster and a target.
_Key = tuple[str, str]


@dataclass(slots=True)
class _Waiting:
    """``first``: the attempt whose rows reach delivery.timeout.ms first, at ``deadline_ms``."""

    rows: dict[AttemptKey, int] = field(default_factory=dict)
    total: int = 0
    partitions: int = 0
    named: dict[str, None] = field(default_factory=dict)
    first: AttemptKey | None = None
    deadline_ms: float = math.inf


class WaitingRows:
    """The cost of a report is that of its own entries, and a look costs nothing: tens of thousands of tasks
    may wait. After a task has left, which one is first is known again once each has reported anew.
    """

    def __init__(self) -> None:
        self._by_target: dict[_Key, _Waiting] = {}
        self._targets: dict[AttemptKey, tuple[_Key, ...]] = {}

    def report(self, cluster: str, attempt: AttemptKey, mutes: Iterable[MuteFigures], now_ms: float) -> None:
        """What an attempt says, in place of what it said before."""
        self.forget(attempt)
        # Each target once, whatever the report says: ``forget`` takes back what is added here.
        held = {one.target: one for one in mutes if one.rows}
        if held:
            self._targets[attempt] = tuple((cluster, target) for target in held)
        for one in held.values():
            waiting = self._by_target.setdefault((cluster, one.target), _Waiting())
            waiting.rows[attempt] = one.rows
            waiting.total += one.rows
            waiting.partitions = max(waiting.partitions, one.partitions)
            for name in one.named:
                if len(waiting.named) < MAX_PARTITIONS:
                    waiting.named[name] = None
            if waiting.first is None or now_ms + one.left_ms < waiting.deadline_ms:
                waiting.first, waiting.deadline_ms = attempt, now_ms + one.left_ms

    def forget(self, attempt: AttemptKey) -> None:
        """It has ended."""
        for key in self._targets.pop(attempt, ()):
            waiting = self._by_target[key]
            waiting.total -= waiting.rows.pop(attempt)
            if not waiting.rows:
                del self._by_target[key]
            elif waiting.first == attempt:
                waiting.first, waiting.deadline_ms = None, math.inf

    def shown(self, cluster: str, target: str, now_ms: float) -> dict[str, Any]:
        """``left``: seconds until the first rows reach delivery.timeout.ms; None where that is not known."""
        waiting = self._by_target.get((cluster, target), _Waiting())
        is_known = waiting.deadline_ms < math.inf
        return {
            "rows": waiting.total,
            "partitions": waiting.partitions,
            "named": list(waiting.named),
            "left": max(0.0, waiting.deadline_ms - now_ms) / 1000 if is_known else None,
        }
