"""Shares a job's rate limit between its tasks: grants each task the rows that it may send next. Pure.

    task -> {"job": name, "limits": {"rows": per second, "bytes": per second}, "rows": r, "bytes": b}
            reply {}; the push {"rows": granted} follows when the job may send more
    relay -> the same with "tasks": n, of all its tasks that wait; rows of 0: none waits any more
            the push names the "job", with its limits

Each job has one token bucket, so the sum never exceeds the limit, whatever tasks come and go. Groups (the
tasks behind a relay, or one by itself) are served in the order in which they ask, each with a fraction of a
second's rows for each of its tasks. So a task with few rows waits no longer than one turn of the others.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kafka_sink.coordinator.rates.messages import Ask, RateRequest, decode_request
from kafka_sink.coordinator.transport.handlers import Handler, Push, Reply, ServerMessage, TaskId
from kafka_sink.errors import ProtocolError

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


class _JobBuckets:
    """Levels are what may be sent now, per dimension that is limited. They fall below zero by one grant."""

    def __init__(self, now_ms: float) -> None:
        self.limits: dict[str, float] = {}
        self.levels: dict[str, float] = {}
        self.waiting: OrderedDict[int, Ask] = OrderedDict()
        self.tasks_waiting = 0
        self.at_ms = now_ms

    def wait(self, group: TaskId, ask: Ask) -> None:
        """A group has rows ready. One that waits already keeps its place."""
        before = self.waiting.get(group)
        self.waiting[group] = ask
        self.tasks_waiting += ask.tasks - (0 if before is None else before.tasks)

    def leave(self, group: TaskId) -> None:
        """A group waits no more."""
        ask = self.waiting.pop(group, None)
        self.tasks_waiting -= 0 if ask is None else ask.tasks

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
        """Groups and the rows that they may send now."""
        self.refill(now_ms)
        granted = []
        while self.waiting and self.may_send:
            group, ask = next(iter(self.waiting.items()))
            share = max(_TURN / self.tasks_waiting, _MIN_GRANT) * ask.tasks
            self.leave(group)
            wanted = {"rows": ask.rows, "bytes": max(1, ask.bytes)}
            part = min([1.0, *(limit * share / wanted[name] for name, limit in self.limits.items())])
            rows = max(1, int(ask.rows * part))
            for name in self.levels:
                self.levels[name] -= wanted[name] * rows / ask.rows
            granted.append((group, rows))
        return granted


class RateHandler(Handler):
    """The rate limits of the jobs of one cluster."""

    def __init__(self) -> None:
        self._jobs: OrderedDict[str, _JobBuckets] = OrderedDict()
        # Jobs of waiting groups. A task by itself writes for one job at a time.
        self._jobs_of: dict[TaskId, set[str]] = {}

    def on_message(
        self, task: TaskId, request: int, body: Mapping[str, Any], now_ms: float
    ) -> Sequence[ServerMessage]:
        asked = decode_request(body)
        if "tasks" not in body:
            for key in self._jobs_of.get(task, set()) - {asked.key}:
                self._leave(task, key)
        if not asked.ask.tasks:
            self._leave(task, asked.key)
            return [Reply(task, request, {})]
        return [Reply(task, request, {}), *self._wait(task, asked, now_ms)]

    def _wait(self, group: TaskId, asked: RateRequest, now_ms: float) -> list[ServerMessage]:
        if asked.key not in self._jobs and len(self._jobs) >= 2 * _MAX_JOBS:
            # All of them wait; others would have been forgotten.
            raise ProtocolError("tasks wait for too many jobs")
        job = self._jobs.setdefault(asked.key, _JobBuckets(now_ms))
        self._jobs.move_to_end(asked.key)
        job.limit(asked.limits)
        job.wait(group, asked.ask)
        self._jobs_of.setdefault(group, set()).add(asked.key)
        self._forget(now_ms)
        return self._serve(asked.key, job, now_ms)

    def _serve(self, key: str, job: _JobBuckets, now_ms: float) -> list[ServerMessage]:
        pushes: list[ServerMessage] = []
        for group, rows in job.grants(now_ms):
            self._leave(group, key)
            pushes.append(Push(group, {"rows": rows, "job": key}))
        return pushes

    def _leave(self, group: TaskId, key: str) -> None:
        keys = self._jobs_of.get(group, set())
        if key in keys:
            self._jobs[key].leave(group)
            keys.discard(key)
            if not keys:
                del self._jobs_of[group]

    def _forget(self, now_ms: float) -> None:
        """Forget jobs that nobody asks for, from the one that was used longest ago."""
        while self._jobs:
            name, job = next(iter(self._jobs.items()))
            if job.waiting or (now_ms - job.at_ms < _FORGET_MS and len(self._jobs) <= _MAX_JOBS):
                return
            del self._jobs[name]

    def on_disconnect(self, task: TaskId, now_ms: float) -> None:
        for key in list(self._jobs_of.get(task, ())):
            self._leave(task, key)

    def on_time(self, now_ms: float) -> Sequence[ServerMessage]:
        return [message for key, job in self._waiting() for message in self._serve(key, job, now_ms)]

    def next_change_ms(self, now_ms: float) -> float:
        return min((job.at_ms + job.delay_ms() - now_ms for _, job in self._waiting()), default=math.inf)

    def _waiting(self) -> list[tuple[str, _JobBuckets]]:
        """The jobs whose tasks wait. There are few jobs, and may be thousands of tasks."""
        return [(key, job) for key, job in self._jobs.items() if job.waiting]


def rate_handler(_options: SinkOptions, _wake: Callable[[], None]) -> Handler:
    return RateHandler()
