"""What the server logs of connections that it refused or dropped: one line a minute, however many."""

from __future__ import annotations

from collections import Counter
from enum import Enum

_INTERVAL_MS = 60_000.0
_MAX_SOURCES = 3


class Dropped(Enum):
    """Why; the text follows a number of connections."""

    WRONG_PROOF = "did not prove that they know the secret"
    NO_PROOF = "proved nothing in time"
    MADE_ROOM = "had proved nothing yet and made room for others"
    FULL = "were refused, as all connections are in use by tasks"
    NONSENSE = "sent what is no message of a served cluster"
    TOO_MANY = "were more than one address may make in a second"
    HELD_BACK = "sent more messages than allowed, and were read from later"
    STALLED = "did not finish a frame in time"
    UNREAD = "did not read what they were sent"


class ConnectionLog:
    """Pure: times are monotonic milliseconds."""

    def __init__(self) -> None:
        self._counts: Counter[Dropped] = Counter()
        self._sources: Counter[str] = Counter()
        self._logged_ms: float | None = None

    def note(self, why: Dropped, source: str) -> None:
        """A connection from ``source``, an address without port, ended."""
        self._counts[why] += 1
        # Of a flood from many addresses the first ones are kept: memory is bounded.
        if source in self._sources or len(self._sources) < 1000:
            self._sources[source] += 1

    def line(self, now_ms: float) -> str | None:
        """What to log now: the first at once, later ones together; None where there is nothing yet."""
        if not self._counts or (self._logged_ms is not None and now_ms - self._logged_ms < _INTERVAL_MS):
            return None
        self._logged_ms = now_ms
        reasons = "; ".join(f"{count} {why.value}" for why, count in self._counts.most_common())
        sources = ", ".join(source for source, _ in self._sources.most_common(_MAX_SOURCES))
        self._counts.clear()
        self._sources.clear()
        return f"connections refused or dropped in the last minute: {reasons} (most from {sources})"
