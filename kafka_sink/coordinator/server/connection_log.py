"""Log lines for connections that the server refused or dropped: at most one a minute."""

from __future__ import annotations

from collections import Counter
from enum import Enum

_INTERVAL_MS = 60_000.0
_MAX_SOURCES = 3


class Dropped(Enum):
    """The reason. Its text completes a line that begins with a number of connections."""

    WRONG_PROOF = "did not prove that they know the secret"
    NO_PROOF = "did not prove in time that they know the secret"
    MADE_ROOM = "had not proved that they know the secret, and made room for others"
    FULL = "were refused, because all connections are in use by tasks"
    NONSENSE = "sent an invalid message, or named an unknown cluster"
    TOO_MANY = "exceeded the connections that one address may open in a second"
    HELD_BACK = "sent more messages than allowed, and were slowed down"
    STALLED = "did not complete a frame in time"
    UNREAD = "did not read the data sent to them"


class ConnectionLog:
    """Pure: times are monotonic milliseconds."""

    def __init__(self) -> None:
        self._counts: Counter[Dropped] = Counter()
        self._sources: Counter[str] = Counter()
        self._logged_ms: float | None = None

    def note(self, why: Dropped, source: str) -> None:
        """A connection from ``source``, an address without port, ended."""
        self._counts[why] += 1
        # Only the first addresses of a flood are counted, so that memory is bounded.
        if source in self._sources or len(self._sources) < 1000:
            self._sources[source] += 1

    def line(self, now_ms: float) -> str | None:
        """The line to log now, if any. The first drop is logged at once, later ones together."""
        if not self._counts or (self._logged_ms is not None and now_ms - self._logged_ms < _INTERVAL_MS):
            return None
        self._logged_ms = now_ms
        reasons = "; ".join(f"{count} {why.value}" for why, count in self._counts.most_common())
        sources = ", ".join(source for source, _ in self._sources.most_common(_MAX_SOURCES))
        self._counts.clear()
        self._sources.clear()
        return f"connections refused or dropped in the last minute: {reasons} (most from {sources})"
