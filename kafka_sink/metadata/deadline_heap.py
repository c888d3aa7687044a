"""Names by time, earliest first, with O(log n) amortised for each change: no call walks over all names."""

from __future__ import annotations

import heapq
import math

# A heap of mostly dropped entries is rebuilt, unless it has few entries anyway.
_SLACK = 64


class DeadlineHeap:
    """Each name has at most one time; putting it again moves it. Times are milliseconds of any clock."""

    def __init__(self) -> None:
        self._times: dict[str, float] = {}
        # An entry whose time differs from the name's time above is dead, and is removed when it comes to the
        # top.
        self._heap: list[tuple[float, str]] = []

    def __len__(self) -> int:
        return len(self._times)

    def __contains__(self, name: object) -> bool:
        return name in self._times

    def put(self, name: str, at_ms: float) -> None:
        """Sets a name's time."""
        if self._times.get(name) == at_ms:
            return
        self._times[name] = at_ms
        heapq.heappush(self._heap, (at_ms, name))
        if len(self._heap) > 2 * len(self._times) + _SLACK:
            self._heap = [(at, one) for one, at in self._times.items()]
            heapq.heapify(self._heap)

    def drop(self, name: str) -> None:
        """Forgets a name's time, if it has one."""
        self._times.pop(name, None)

    def earliest_ms(self) -> float:
        """The earliest time; infinite where there is none."""
        heap = self._heap
        while heap and self._times.get(heap[0][1]) != heap[0][0]:
            heapq.heappop(heap)
        return heap[0][0] if heap else math.inf

    def pop_until(self, until_ms: float) -> list[tuple[str, float]]:
        """Removes and returns the names of this time and before, earliest first, with their times."""
        taken = []
        while self.earliest_ms() <= until_ms and self._heap:
            taken.append(self._take_first())
        return taken

    def take(self, limit: int) -> list[tuple[str, float]]:
        """Removes and returns the ``limit`` earliest names with their times."""
        taken: list[tuple[str, float]] = []
        while len(taken) < limit and self._times:
            self.earliest_ms()
            taken.append(self._take_first())
        return taken

    def _take_first(self) -> tuple[str, float]:
        at_ms, name = heapq.heappop(self._heap)
        del self._times[name]
        return name, at_ms
