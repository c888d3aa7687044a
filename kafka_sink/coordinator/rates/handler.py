"""Shares a job's rate limit between its tasks: grants each task the rows that it may send next. Pure.

    task -> {"job": name, "limits": {"rows": per second, "bytes": per second}, "rows": r, "bytes": b}
            reply {}; the push {"rows": granted} follows when the job may send more

Each job has one token bucket, so the sum never exceeds the limit, whatever tasks come and go. Tasks are
served in the order in which they ask, each with a fraction of a second's rows. So a task with few rows
waits no longer than one turn of the others.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from kafka_sink.coordinator.transport import message_format as fields
from kafka_sink.coordinator.transport.handlers import Handler, Push, Reply, ServerMessage, TaskId
from kafka_sink.coordinator.transport.message_format import count, decoding

if TYPE_CHECKING:
    from kafka_sink.options import SinkOptions

# All waiting tasks together get this fraction of a second's limit in one turn, and each task at least the
# second one, which bounds the number of messages of thousands of tasks.
_TURN = 0.1
_MIN_GRANT = 0.001
# What a job may catch up on after a pause, in seconds of its limit.
_BURST_S = 0.2
_FORGET_MS = 300_000.0
_MAX_JOBS = 10_000
_DIMENSIONS = ("rows", "bytes")


class Ask(NamedTuple):
    """What a task has ready to send."""

    rows: int
    bytes: int


class _JobBuckets:
    """Levels are what may be sent now, per dimension that is limited. They fall below zero by one grant."""

    def __init__(self, now_ms: float) -> None:
        self.limits: dict[str, float] = {}
        self.levels: dict[str, float] = {}
        self.waiting: OrderedDict[int, Ask] = OrderedDict()
        self.at_ms = now_ms

    def limit(self, limits: Mapping[str, float]) -> None:
        """A restarted query may bring other limits."""
        if limits != self.limits:
            # Rows that were sent ahead of time cost as many seconds under the new limit.
            known = {name: self.levels[name] / limit for name, limit in self.limits.items()}
            self.limits = dict(limits)
            self.levels = {name: min(1.0, known.get(name, 1.0) * limit) for name, limit in limits.items()}

    def refill(self, now_ms: float) -> None:
        passed_s = max(0.0, now_ms - self.at_ms) / 1000
        self.at_ms = now_ms
        for name, limit in self.limits.items():
            self.levels[name] = min(limit * _BURST_S, self.levels[name] + limit * passed_s)

    @property
    def may_send(self) -> bool:
        return all(level > 0 for level in self.levels.values())

    def delay_ms(self) -> float:
        """Until ``may_send``, as of the last refill."""
        needs = [
            max(0.0, -level) / self.limits[name] * 1000 for name, level in self.levels.items() if level <= 0
        ]
        return max(needs, default=0.0) + 1.0

    def grants(self, now_ms: float) -> list[tuple[int, int]]:
        """Tasks and the rows that they may send now."""
        self.refill(now_ms)
        granted = []
        while self.waiting and self.may_send:
            task, ask = self.waiting.popitem(last=False)
            share = max(_TURN / (len(self.waiting) + 1), _MIN_GRANT)
            wanted = {"rows": ask.rows, "bytes": max(1, ask.bytes)}
            part = min([1.0, *(limit * share / wanted[name] for name, limit in self.limits.items())])
            rows = max(1, int(ask.rows * part))
            for name in self.levels:
                self.levels[name] -= wanted[name] * rows / ask.rows
            granted.append((task, rows))
        return granted


class RateHandler(Handler):
    """The rate limits of the jobs of one cluster."""

    def __init__(self) -> None:
        self._jobs: OrderedDict[str, _JobBuckets] = OrderedDict()
        # Jobs of waiting tasks, by task. A task writes for one job at a time.
        self._job_of: dict[TaskId, str] = {}

    def on_message(
        self, task: TaskId, request: int, body: Mapping[str, Any], now_ms: float
    ) -> Sequence[ServerMessage]:
        with decoding("request of rows"):
            name, limits, ask = fields.name(body["job"]), _limits(body["limits"]), _ask(body)
        # Writes of one query may have different limits, and each its own bucket.
        name = f"{name} {sorted(limits.items())}"
        self._leave(task)
        job = self._jobs.setdefault(name, _JobBuckets(now_ms))
        self._jobs.move_to_end(name)
        job.limit(limits)
        job.waiting[task] = ask
        self._job_of[task] = name
        self._forget(now_ms)
        return [Reply(task, request, {}), *self._serve(job, now_ms)]

    def _serve(self, job: _JobBuckets, now_ms: float) -> list[ServerMessage]:
        pushes: list[ServerMessage] = []
        for task, rows in job.grants(now_ms):
            self._job_of.pop(task, None)
            pushes.append(Push(task, {"rows": rows}))
        return pushes

    def _leave(self, task: TaskId) -> None:
        name = self._job_of.pop(task, None)
        if name is not None:
            self._jobs[name].waiting.pop(task, None)

    def _forget(self, now_ms: float) -> None:
        """Forget jobs that nobody asks for, from the one that was used longest ago."""
        while self._jobs:
            name, job = next(iter(self._jobs.items()))
            if job.waiting or (now_ms - job.at_ms < _FORGET_MS and len(self._jobs) <= _MAX_JOBS):
                return
            del self._jobs[name]

    def on_disconnect(self, task: TaskId, now_ms: float) -> None:
        self._leave(task)

    def on_time(self, now_ms: float) -> Sequence[ServerMessage]:
        return [message for job in self._waiting() for message in self._serve(job, now_ms)]

    def next_change_ms(self, now_ms: float) -> float:
        return min((job.at_ms + job.delay_ms() - now_ms for job in self._waiting()), default=math.inf)

    def _waiting(self) -> list[_JobBuckets]:
        """The jobs whose tasks wait. There are few jobs, and may be thousands of tasks."""
        return [job for job in self._jobs.values() if job.waiting]


def _limits(value: Any) -> dict[str, float]:
    if not isinstance(value, dict) or not value or not value.keys() <= set(_DIMENSIONS):
        raise ValueError("a job's limits are missing or unknown")
    return {name: float(_positive(limit)) for name, limit in value.items()}


def _ask(body: Mapping[str, Any]) -> Ask:
    return Ask(_positive(body["rows"]), count(body["bytes"]))


def _positive(value: Any) -> int:
    if count(value) < 1:
        raise ValueError("not a positive number")
    return int(value)


def rate_handler(_options: SinkOptions, _wake: Callable[[], None]) -> Handler:
    """The handler of one cluster."""
    return RateHandler()
