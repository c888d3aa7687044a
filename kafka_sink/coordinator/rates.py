"""Shares a job's rate limit between its tasks by granting each task the rows that it may send next.

Each job has one token bucket, so the sum never exceeds the limit, even while tasks come and go. Tasks are
served in the order in which they ask, each with a fraction of a second's rows.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Annotated

from msgspec import Meta

from kafka_sink.coordinator.schema import (
    MAX_INT,
    Channel,
    Message,
    Ms,
    Name,
    Outbox,
    Service,
    ServiceScope,
    receives,
)

# These times stand for the rows or bytes that a limit allows in them. In one turn all waiting tasks together
# get the first amount, and each task at least the second, which bounds the messages of thousands of tasks.
_TURN_MS, _MIN_GRANT_MS = 100.0, 1.0
# What a job may send at its start, and what it may catch up on after a pause.
_START_MS, _BURST_MS = 1.0, 200.0
# The most that one grant costs the job, even if a task claims that its rows need more.
_MAX_DEBT_MS = 10_000.0
# How many jobs are kept that no task waits for.
MAX_JOBS = 10_000
# The jobs that one ``on_time`` looks at, or the tasks that it serves, and when it looks at further ones.
_AT_ONCE, _NEXT_MS = 500, 20.0

_Positive = Annotated[int, Meta(ge=1, le=MAX_INT)]


class RowsWanted(Message, frozen=True):
    """From a task of this job: this many rows are ready, and need ``needs_ms`` of each of the job's limits.

    An answer follows when the job may send more.
    """

    job: Name
    rows: _Positive
    needs_ms: Annotated[tuple[Ms, ...], Meta(min_length=1, max_length=2)]


class RowsGranted(Message, frozen=True):
    """To a task of this job: it may send this many of the rows that it asked for."""

    job: Name
    rows: _Positive


@dataclass(slots=True)
class _RatedJob:
    """``levels_ms``: how much of each limit may be used now; a grant may take it below zero.

    ``waiting``: the tasks' requests, in the order of asking.
    """

    name: str
    at_ms: float
    levels_ms: list[float]
    waiting: dict[int, RowsWanted] = field(default_factory=dict)

    def grant(self) -> tuple[int, RowsGranted]:
        """Serve the task that has waited longest. Returns it, and what it may send now."""
        share_ms = max(_TURN_MS / len(self.waiting), _MIN_GRANT_MS)
        task = next(iter(self.waiting))
        asked = self.waiting.pop(task)
        most_ms = max(asked.needs_ms)
        rows = asked.rows if most_ms <= share_ms else max(1, int(asked.rows * share_ms / most_ms))
        for limit, needs_ms in zip(range(len(self.levels_ms)), asked.needs_ms, strict=False):
            self.levels_ms[limit] -= min(needs_ms * rows / asked.rows, _MAX_DEBT_MS)
        return task, RowsGranted(self.name, rows)


class RateService(Service):
    """The rate limits of all jobs."""

    scope = ServiceScope.APPLICATION

    def __init__(self, out: Outbox, max_jobs: int = MAX_JOBS) -> None:
        super().__init__(out)
        self._max_jobs = max_jobs
        # A job is in the first map while a task waits for it, and otherwise in the second, where the job that
        # was used longest ago comes first. The first map cannot have more jobs than there are tasks.
        self._waiting: dict[str, _RatedJob] = {}
        self._idle: OrderedDict[str, _RatedJob] = OrderedDict()
        # The job that each waiting task waits for, and when the first of these jobs may send.
        self._job_of: dict[int, _RatedJob] = {}
        self._due_ms = math.inf

    @receives(RowsWanted)
    def on_rows_wanted(self, peer: int, message: RowsWanted, now_ms: float) -> None:
        self.on_gone(peer, now_ms)
        name = message.job
        job = self._waiting.get(name) or self._idle.pop(name, None)
        if job is None:
            job = _RatedJob(name, now_ms, [_START_MS] * len(message.needs_ms))
        self._waiting[name] = self._job_of[peer] = job
        job.waiting[peer] = message
        self._serve(job, _AT_ONCE, now_ms)

    def on_gone(self, peer: int, now_ms: float) -> None:
        job = self._job_of.pop(peer, None)
        if job is not None:
            del job.waiting[peer]
            self._rest(job)

    def _serve(self, job: _RatedJob, at_most: int, now_ms: float) -> int:
        """Grant rows to at most this many tasks of a job. Returns how many got some."""
        job.levels_ms = [min(_BURST_MS, level_ms + now_ms - job.at_ms) for level_ms in job.levels_ms]
        job.at_ms = now_ms
        served = 0
        while job.waiting and min(job.levels_ms) > 0 and served < at_most:
            task, granted = job.grant()
            del self._job_of[task]
            self.out.send(task, granted)
            served += 1
        if job.waiting:
            self._due_ms = min(self._due_ms, now_ms + max(0.0, -min(job.levels_ms)) + 1.0)
        self._rest(job)
        return served

    def _rest(self, job: _RatedJob) -> None:
        """If no task waits for the job any more, keep it for a while. The jobs used last are kept longest."""
        if not job.waiting:
            self._idle[job.name] = self._waiting.pop(job.name)
            if len(self._idle) > self._max_jobs:
                self._idle.popitem(last=False)

    def on_time(self, now_ms: float) -> None:
        self._due_ms, left = math.inf, _AT_ONCE
        for name in list(islice(self._waiting, _AT_ONCE)):
            # Move the job to the back of the queue.
            job = self._waiting[name] = self._waiting.pop(name)
            left -= max(1, self._serve(job, left, now_ms))
            if left <= 0:
                self._due_ms = now_ms + _NEXT_MS
                break

    def next_change_ms(self, now_ms: float) -> float:
        return max(0.0, self._due_ms - now_ms)


class RateChannel(Channel):
    """Asks for rows on behalf of the task's thread, which calls ``ask`` and ``await_grant``."""

    scope = ServiceScope.APPLICATION

    def __init__(self) -> None:
        super().__init__()
        # Guards all attributes below. The task's thread waits for it and the client's thread notifies it.
        # Otherwise a grant that arrives just before the wait would be missed until the timeout.
        self._changed = threading.Condition()
        # Whether there is a coordinator to ask. It is True even before the first connection, because the task
        # waits for the connection rather than for a share of its own.
        self.is_shared = True
        self._asked: RowsWanted | None = None
        self._unsent: RowsWanted | None = None
        self._granted = 0

    def expect(self) -> None:
        """A new task starts while the client connects: wait for the coordinator again."""
        with self._changed:
            self.is_shared = True

    @property
    def is_waiting(self) -> bool:  # type: ignore[override]
        return self._asked is not None

    def ask(self, job: str, limits: Mapping[str, int], rows: int, size: int) -> bool:
        """Ask for the job's next rows of ``size`` bytes in all. Returns False if there is no coordinator.

        Writes of one query may have different limits. Each set of limits has its own bucket.
        """
        wanted = {"rows": rows, "bytes": max(1, size)}
        needs_ms = tuple(1000 * wanted[name] / limit for name, limit in limits.items())
        with self._changed:
            if not self.is_shared:
                return False
            self._asked = self._unsent = RowsWanted(f"{job} {limits}", rows, needs_ms)
            self._granted = 0
        self.wake()
        return True

    def await_grant(self, timeout_ms: float) -> int | None:
        """How many rows may be sent. 0: the timeout passed first. None: the connection is lost."""
        with self._changed:
            if not self._granted and self.is_shared:
                self._changed.wait(timeout_ms / 1000)
            granted, self._granted = self._granted, 0
            return granted if granted or self.is_shared else None

    def next_message(self, now_ms: float) -> RowsWanted | None:
        with self._changed:
            unsent, self._unsent = self._unsent, None
            return unsent

    @receives(RowsGranted)
    def on_rows_granted(self, message: RowsGranted, now_ms: float) -> None:
        with self._changed:
            if self._asked is not None and self._asked.job == message.job:
                self._asked = None
                self._granted = message.rows
                self._changed.notify_all()

    def on_connected(self, now_ms: float) -> None:
        with self._changed:
            self.is_shared = True
            self._unsent = self._asked

    def on_lost(self, now_ms: float) -> None:
        """The task continues with a share of its own."""
        with self._changed:
            self.is_shared = False
            self._asked = None
            self._changed.notify_all()
