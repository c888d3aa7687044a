"""max.rows.per.second and max.bytes.per.second in a task: cuts tables into slices that the task may send now.

With a coordinator, the limit applies to the job, and each slice waits for a grant. Without one, the task
keeps to its share: the limit divided by the number of tasks that run at the same time.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator

import pyarrow as pa

from kafka_sink.clock import LIMIT, Clock, TaskActivity
from kafka_sink.coordinator.rates import RateChannel
from kafka_sink.options import SinkOptions

_log = logging.getLogger(__name__)
# How often a waiting task checks whether it has been given up.
_CHECK_MS = 100.0
# If a coordinator answers but grants nothing for this long, plus twice the time in which the task's share
# allows one row, the task goes on without a grant.
_NO_GRANT_MS = 60_000.0
# A slice has as many rows as a share allows in this time, so that rows flow evenly.
_SLICE_S = 0.1


def limits_of(options: SinkOptions) -> dict[str, int]:
    """The limits of a job per second, by what they limit ("rows", "bytes"); empty if there are none."""
    given = {"rows": options.max_rows_per_second, "bytes": options.max_bytes_per_second}
    return {name: limit for name, limit in given.items() if limit}


class RateLimit:
    """The rate limit of one task. Only the task's thread uses it. Times are monotonic milliseconds."""

    def __init__(self, limits: dict[str, int], activity: TaskActivity, clock_ms: Clock) -> None:
        self._activity = activity
        self._limits = limits
        self._clock_ms = clock_ms
        self._levels = dict.fromkeys(limits, 1.0)
        self._at_ms = clock_ms()
        self._has_warned = False
        self.begin("")

    def begin(self, job: str, tasks: int = 1, grants: RateChannel | None = None) -> None:
        """Start a new task of a job, of which ``tasks`` tasks may run at the same time."""
        self._job = job
        # A write without a job name shares its limit with no other task.
        self._grants = grants if job else None
        self._tasks = max(1, tasks)
        self._share = {name: limit / self._tasks for name, limit in self._limits.items()}
        self.waited_ms = 0.0

    def slices(self, table: pa.Table | pa.RecordBatch, check: Callable[[], None]) -> Iterator[pa.Table]:
        """Yield the rows in order, each slice when it may be sent. ``check`` raises if the task is lost."""
        start = 0
        while start < table.num_rows:
            rest = table.slice(start)
            started = self._clock_ms()
            with self._activity.waiting(LIMIT):
                rows = self._granted(rest.num_rows, rest.nbytes, check)
            self.waited_ms += self._clock_ms() - started
            yield rest.slice(0, rows)
            start += rows

    def _granted(self, rows: int, size: int, check: Callable[[], None]) -> int:
        row = {"rows": 1.0, "bytes": size / rows}
        row_ms = max(1000 * row[name] / share for name, share in self._share.items())
        until_ms = self._clock_ms() + _NO_GRANT_MS + 2 * row_ms
        while True:
            if self._grants is not None and self._grants.ask(self._job, self._limits, rows, size):
                while (granted := self._grants.await_grant(_CHECK_MS)) is not None:
                    check()
                    if granted:
                        return min(granted, rows)
                    if self._clock_ms() >= until_ms:
                        return self._own_share(rows, size, check, despite_coordinator=True)
            own = self._own_share(rows, size, check)
            if own:
                return own

    def _own_share(
        self, rows: int, size: int, check: Callable[[], None], *, despite_coordinator: bool = False
    ) -> int:
        """How many rows the task's own share allows; 0 as soon as a coordinator can be asked again."""
        # A single task has the whole limit, so there is nothing to warn about.
        if self._tasks > 1 and not self._has_warned:
            self._has_warned = True
            each = " and ".join(f"{share:,.0f} {name}" for name, share in self._share.items())
            why = "grants no rows" if despite_coordinator else "cannot be reached"
            _log.warning(
                "the coordinator that shares the rate limit %s: this task limits itself to %s per second",
                why,
                each,
            )
        while True:
            check()
            is_shared = self._grants is not None and self._grants.is_shared
            if is_shared and not despite_coordinator:
                return 0
            now_ms = self._clock_ms()
            for name, share in self._share.items():
                level = self._levels[name] + share * (now_ms - self._at_ms) / 1000
                self._levels[name] = min(share * _SLICE_S, level)
            self._at_ms = now_ms
            delay_ms = max(-level / self._share[name] * 1000 for name, level in self._levels.items())
            if delay_ms < 0:
                break
            time.sleep(min(delay_ms + 1.0, _CHECK_MS) / 1000)
        wanted = {"rows": rows, "bytes": max(1, size)}
        part = min([1.0, *(share * _SLICE_S / wanted[name] for name, share in self._share.items())])
        taken = max(1, int(rows * part))
        for name in self._levels:
            self._levels[name] -= wanted[name] * taken / rows
        return taken
