"""Shares a job's rate limit between its tasks: grants each task the rows that it may send next.

Each job has one token bucket, so the sum never exceeds the limit, whatever tasks come and go. Tasks are
served in the order in which they ask, each with a fraction of a second's rows. So a task with few rows waits
no longer than one turn of the others.
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
    Count,
    Message,
    Name,
    Outbox,
    Service,
    ServiceScope,
    receives,
)
from kafka_sink.errors import ProtocolError

_DIMENSIONS = frozenset(("rows", "bytes"))
# All waiting tasks together get this fraction of a second's limit in one turn, and each task at least the
# second one, which bounds the number of messages of thousands of tasks.
_TURN = 0.1
_MIN_GRANT = 0.001
# What a job may catch up on after a pause, in seconds of its limit.
_BURST_S = 0.2
# One grant costs the job no more than so many seconds of its limit, whatever size a task claims for a row.
_MAX_DEBT_S = 10.0
# Jobs that are kept for which nobody waits.
MAX_JOBS = 10_000
# Jobs that one ``on_time`` looks at, or tasks that it serves; when it looks at others.
_AT_ONCE, _NEXT_MS = 500, 20.0

_Positive = Annotated[int, Meta(ge=1, le=MAX_INT)]


class RowsWanted(Message, frozen=True):
    """From a task of this job: so many rows are ready, ``bytes`` in all. ``limits``: rows and bytes in a
    second. An answer follows when the job may send more."""

    job: Name
    limits: Annotated[dict[Name, _Positive], Meta(max_length=len(_DIMENSIONS))]
    rows: _Positive
    bytes: Count


class RowsGranted(Message, frozen=True):
    """To a task of this job: it may send so many of the rows that it asked for."""

    job: Name
    rows: _Positive


# -- the coordinator's side -------------------------------------------------------------------------------


@dataclass(slots=True)
class _JobBuckets:
    """Levels are what may be sent now, per dimension that is limited. They fall below zero by one grant.
    ``waiting``: what tasks have asked for, in the order of asking."""

    limits: Mapping[str, int]
    at_ms: float
    levels: dict[str, float] = field(default_factory=dict)
    waiting: dict[int, RowsWanted] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.levels = {name: float(min(1, limit)) for name, limit in self.limits.items()}

    def refill(self, now_ms: float) -> None:
        passed_s = max(0.0, now_ms - self.at_ms) / 1000
        self.at_ms = now_ms
        for name, limit in self.limits.items():
            self.levels[name] = min(limit * _BURST_S, self.levels[name] + limit * passed_s)

    @property
    def may_send(self) -> bool:
        return all(level > 0 for level in self.levels.values())

    def due_ms(self) -> float:
        """When it may send."""
        needs = [-level / self.limits[name] * 1000 for name, level in self.levels.items() if level <= 0]
        return self.at_ms + max(needs, default=0.0) + 1.0

    def grant(self) -> tuple[int, RowsGranted]:
        """The task that has waited longest, and what it may send now."""
        share_s = max(_TURN / len(self.waiting), _MIN_GRANT)
        task = next(iter(self.waiting))
        asked = self.waiting.pop(task)
        takes_s = max(_part_of(asked, asked.rows, name) / limit for name, limit in self.limits.items())
        rows = max(1, int(asked.rows * min(1.0, share_s / takes_s)))
        for name, limit in self.limits.items():
            self.levels[name] -= min(_part_of(asked, rows, name), limit * _MAX_DEBT_S)
        return task, RowsGranted(asked.job, rows)


def _part_of(asked: RowsWanted, rows: int, name: str) -> float:
    """So many of these rows, in rows or bytes."""
    return rows if name == "rows" else max(1, asked.bytes) * rows / asked.rows


class RateService(Service):
    """The rate limits of all jobs."""

    scope = ServiceScope.APPLICATION

    def __init__(self, out: Outbox, max_jobs: int = MAX_JOBS) -> None:
        super().__init__(out)
        self._max_jobs = max_jobs
        # A job is among those that a task waits for, no more than there are tasks, or among the others, the
        # one that was used longest ago first.
        self._waiting: dict[str, _JobBuckets] = {}
        self._idle: OrderedDict[str, _JobBuckets] = OrderedDict()
        # The job that each waiting task waits for, and when one of these jobs may send.
        self._job_of: dict[int, str] = {}
        self._due_ms = math.inf

    @receives(RowsWanted)
    def on_rows_wanted(self, peer: int, message: RowsWanted, now_ms: float) -> None:
        if not message.limits or not message.limits.keys() <= _DIMENSIONS:
            raise ProtocolError("a job's limits are missing or unknown")
        # Writes of one query may have different limits, and each its own bucket.
        key = f"{message.job} {sorted(message.limits.items())}"
        if self._job_of.get(peer) != key:
            self.on_gone(peer, now_ms)
        job = self._waiting.get(key) or self._idle.pop(key, None)
        job = self._waiting[key] = job or _JobBuckets(dict(message.limits), now_ms)
        job.waiting[peer] = message
        self._job_of[peer] = key
        self._serve(key, job, _AT_ONCE, now_ms)

    def on_gone(self, peer: int, now_ms: float) -> None:
        key = self._job_of.pop(peer, None)
        if key is not None:
            job = self._waiting[key]
            del job.waiting[peer]
            if not job.waiting:
                self._rest(key)

    def _serve(self, key: str, job: _JobBuckets, at_most: int, now_ms: float) -> int:
        """Grant rows to so many tasks of a job at most, and return to how many."""
        job.refill(now_ms)
        served = 0
        while job.waiting and job.may_send and served < at_most:
            task, granted = job.grant()
            del self._job_of[task]
            self.out.send(task, granted)
            served += 1
        if job.waiting:
            self._due_ms = min(self._due_ms, job.due_ms())
        else:
            self._rest(key)
        return served

    def _rest(self, key: str) -> None:
        """Nobody waits for this job any more. Forget the one that was used longest ago, if there are many."""
        self._idle[key] = self._waiting.pop(key)
        if len(self._idle) > self._max_jobs:
            self._idle.popitem(last=False)

    def on_time(self, now_ms: float) -> None:
        self._due_ms, left = math.inf, _AT_ONCE
        for key in list(islice(self._waiting, _AT_ONCE)):
            # Last in turn.
            job = self._waiting[key] = self._waiting.pop(key)
            left -= max(1, self._serve(key, job, left, now_ms))
            if left <= 0:
                self._due_ms = now_ms + _NEXT_MS
                break

    def next_change_ms(self, now_ms: float) -> float:
        return max(0.0, self._due_ms - now_ms)


# -- a task's side ----------------------------------------------------------------------------------------


class RateChannel(Channel):
    """``ask`` and ``await_grant`` are called by the task's thread."""

    scope = ServiceScope.APPLICATION

    def __init__(self) -> None:
        super().__init__()
        self._changed = threading.Condition()  # guards everything below
        # Whether there is a coordinator to ask. Before the first connection too: the task waits for it rather
        # than for a share of its own.
        self.is_shared = True
        self._asked: RowsWanted | None = None
        self._must_send = False
        self._granted = 0

    def expect(self) -> None:
        """A new task starts while the client connects: wait for the coordinator again."""
        with self._changed:
            self.is_shared = True

    @property
    def is_waiting(self) -> bool:  # type: ignore[override]
        return self._asked is not None

    def ask(self, job: str, limits: Mapping[str, int], rows: int, size: int) -> bool:
        """Ask for the job's next rows, ``size`` bytes in all. False where there is no coordinator."""
        with self._changed:
            if not self.is_shared:
                return False
            self._asked = RowsWanted(job, dict(limits), rows, size)
            self._must_send, self._granted = True, 0
        self.wake()
        return True

    def await_grant(self, timeout_ms: float) -> int | None:
        """How many rows may go; 0 where the time is over before that. None: the coordinator is lost."""
        with self._changed:
            if not self._granted and self.is_shared:
                self._changed.wait(timeout_ms / 1000)
            granted, self._granted = self._granted, 0
            return granted if granted or self.is_shared else None

    def next_message(self, now_ms: float) -> RowsWanted | None:
        with self._changed:
            must_send, self._must_send = self._must_send, False
            return self._asked if must_send else None

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
            self._must_send = self._asked is not None

    def on_lost(self, now_ms: float) -> None:
        """The task goes on with a share of its own."""
        with self._changed:
            self.is_shared = False
            self._asked = None
            self._changed.notify_all()
