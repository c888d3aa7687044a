"""How late the coordinator is: the time that each turn of its loop takes, and that its process stood still.

A turn handles all that had come when it began. A message that comes meanwhile waits for its end. So nobody is
late, or silent, for the time in which the coordinator did not look: see ``stood_ms``.
"""

from __future__ import annotations

import asyncio
import math
import selectors
from collections.abc import Mapping
from typing import Any

from kafka_sink.clock import Clock

# A task that waits for a reply for 2 s gives its connection up.
LATE_MS = 1000.0
_LONG_MS = 500.0
_INTERVAL_MS = 60_000.0
# A look that returns sooner than this found something ready; a timer that fires later than this was held up.
_AT_ONCE_MS, _SLACK_MS = 1.0, 5.0
# Turns that are shorter keep nobody waiting.
_SHORT_MS = 100.0


class LoopWatch:
    """Of one loop. Times are milliseconds of ``clock_ms``; all methods belong to the loop's thread."""

    def __init__(self, clock_ms: Clock) -> None:
        self.clock_ms = clock_ms
        self._turn_ms = self._minute_ms = clock_ms()
        # Since when a message that is handled in this turn may have waited.
        self._waits_since_ms = self._turn_ms
        # The longest in this minute, and in the one before.
        self._longest_ms = self._longest_before_ms = 0.0
        self._late_before = 0
        self.busy_ms = 0.0
        self._stood_ms = 0.0
        # Infinite where no turn is known to go on: not every loop is watched.
        self._since_ms = math.inf
        self.late = self.messages = 0

    def new_loop(self) -> asyncio.AbstractEventLoop:
        """A loop that is watched."""
        return asyncio.SelectorEventLoop(_WatchedSelector(self))

    def turn_ends(self, now_ms: float) -> None:
        """The loop looks for what is ready."""
        self.busy_ms += now_ms - self._turn_ms
        self._note(now_ms - self._turn_ms)
        self._since_ms = math.inf

    def turn_begins(self, looked_ms: float, now_ms: float, timeout_ms: float | None) -> None:
        """Something is ready, or ``timeout_ms`` are over since it looked."""
        waited_ms = now_ms - looked_ms
        over_ms = 0.0 if timeout_ms is None else waited_ms - timeout_ms
        if over_ms > _SLACK_MS:
            # The process was stopped, or had no processor.
            self._note(over_ms)
            self._waits_since_ms = now_ms - over_ms
        else:
            self._waits_since_ms = now_ms if waited_ms > _AT_ONCE_MS else self._turn_ms
        self._turn_ms = self._since_ms = now_ms

    def _note(self, took_ms: float) -> None:
        self._longest_ms = max(self._longest_ms, took_ms)
        self._stood_ms += max(0.0, took_ms - _SHORT_MS)

    def stood_ms(self, now_ms: float) -> float:
        """How long the loop has stood still since it began: long turns, and when the process did not run."""
        return self._stood_ms + max(0.0, now_ms - self._since_ms - _SHORT_MS)

    def handled(self, messages: int, now_ms: float) -> None:
        """So many messages of this turn have been handled."""
        self.messages += messages
        if now_ms - self._waits_since_ms > LATE_MS:
            self.late += messages

    def line(self, now_ms: float) -> str | None:
        """The line to log now, if any: once a minute where a bound was passed."""
        if now_ms - self._minute_ms < _INTERVAL_MS:
            return None
        longest_ms, late = self._longest_ms, self.late - self._late_before
        self._minute_ms, self._late_before = now_ms, self.late
        self._longest_before_ms, self._longest_ms = longest_ms, 0.0
        if longest_ms < _LONG_MS and not late:
            return None
        return (
            f"in the last minute the coordinator was busy, or stood still, for {longest_ms / 1000:.1f} s "
            f"at most, and replied to {late} messages after more than {LATE_MS / 1000:.0f} s"
        )

    def state(self) -> Mapping[str, Any]:
        """For metrics: seconds and counts."""
        return {
            "longest_turn": max(self._longest_ms, self._longest_before_ms) / 1000,
            "busy": self.busy_ms / 1000,
            "late": self.late,
            "messages": self.messages,
        }


class _WatchedSelector(selectors.DefaultSelector):
    def __init__(self, watch: LoopWatch) -> None:
        super().__init__()
        self._watch = watch

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        watch = self._watch
        looked_ms = watch.clock_ms()
        watch.turn_ends(looked_ms)
        ready = super().select(timeout)
        watch.turn_begins(looked_ms, watch.clock_ms(), None if timeout is None else 1000 * timeout)
        return ready
