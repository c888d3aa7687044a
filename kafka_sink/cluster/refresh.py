"""When each topic's metadata is requested (KIP-526)."""

from __future__ import annotations

import heapq
import math

from kafka_sink.cluster.topic_state import TopicState

# If many topics are cached, a request refreshes some of them about every ten seconds, but never fewer than 20
# topics.
_REFRESH_PERIOD_S = 10
_MIN_FETCH_SIZE = 20
NON_URGENT_SHARE = 0.5


class RefreshSchedule:
    """When to request each topic. A topic in use that is not in the current request is in one of four
    deadline heaps. Times are in milliseconds.

    ``gather_ms`` is how long urgent topics that have metadata wait after a response. A request also includes
    urgent topics whose own wait ends within this time. A topic is non-urgent from ``non_urgent_share`` of
    metadata.max.age.ms on (KIP-526: half). While ``shared`` is True, another cache refreshes topics before
    they reach that age and sends snapshots of them, so this cache refreshes no non-urgent topics.
    """

    def __init__(
        self, max_age_ms: float, gather_ms: float, non_urgent_share: float = NON_URGENT_SHARE
    ) -> None:
        self.shared = False
        # With metadata.max.age.ms=0 metadata is too old when it arrives. It must not be fetched in a tight
        # loop even then.
        self._max_age_ms = max(max_age_ms, gather_ms, 1.0)
        self._gather_ms = gather_ms
        self._non_urgent_ms = self._max_age_ms * non_urgent_share
        # The urgent topics without metadata and with metadata, by the end of their waits.
        self._missing, self._stale = DeadlineHeap(), DeadlineHeap()
        # The fresh and the non-urgent topics, by when they were observed.
        self._fresh, self._aging = DeadlineHeap(), DeadlineHeap()
        self._tables = self._missing, self._stale, self._fresh, self._aging
        self._with_metadata: set[str] = set()

    def reschedule(self, name: str, state: TopicState) -> None:
        """Put a topic into the heap for its state, or remove it from all heaps if it needs no request.

        A topic without metadata is requested immediately if rows wait for it, as KIP-526 specifies.
        """
        self.drop(name)
        if not state.in_use or (state.is_unsolved and not state.is_needed):
            return
        if state.metadata is None:
            if state.retry or not state.final:
                self._missing.put(name, state.not_before_ms)
            return
        self._with_metadata.add(name)
        if state.stale:
            self._stale.put(name, state.not_before_ms)
        else:
            self._fresh.put(name, state.observed_ms)

    def drop(self, name: str) -> None:
        for table in self._tables:
            table.drop(name)
        self._with_metadata.discard(name)

    def due_ms(self, response_ms: float) -> float:
        """When ``choose`` may return topics. ``response_ms`` is when the last response arrived."""
        if self._makes_request():
            return self._aging.earliest_ms()
        return min(
            self._urgent_ms(response_ms),
            self._aging.earliest_ms() + self._max_age_ms,
            self._fresh.earliest_ms() + self._non_urgent_ms,
        )

    def choose(self, response_ms: float, now_ms: float) -> tuple[str, ...]:
        """The topics to request now, urgent ones first; empty if no request is due.

        They are in no heap until ``reschedule`` is called for them.
        """
        for name, observed_ms in self._fresh.pop(now_ms - self._non_urgent_ms):
            self._aging.put(name, observed_ms)
        target = self._target_size()
        over_aged_ms = now_ms - self._max_age_ms
        if self._urgent_ms(response_ms) > now_ms and self._aging.earliest_ms() > over_aged_ms:
            return self._oldest(target) if self._makes_request() else ()
        # A request is sent in any case, so it includes urgent topics whose wait ends soon. Otherwise topics
        # whose waits began at different times would each need a request of their own, for ever.
        soon_ms = now_ms + self._gather_ms
        urgent = [*self._missing.pop(soon_ms), *self._stale.pop(soon_ms)]
        urgent += self._aging.pop(over_aged_ms)
        return (*(name for name, _ in urgent), *self._oldest(target - len(urgent)))

    def _makes_request(self) -> bool:
        return not self.shared and len(self._aging) >= self._target_size()

    def _oldest(self, limit: int) -> tuple[str, ...]:
        return () if self.shared else tuple(name for name, _ in self._aging.pop(limit=limit))

    def _urgent_ms(self, response_ms: float) -> float:
        stale_ms = max(self._stale.earliest_ms(), response_ms + self._gather_ms)
        return min(self._missing.earliest_ms(), stale_ms)

    def _target_size(self) -> int:
        per_second = len(self._with_metadata) / (self._max_age_ms / 1000)
        return max(int(per_second * _REFRESH_PERIOD_S), _MIN_FETCH_SIZE)


# A heap is rebuilt if more than half of its entries, and more than this many, are dead.
_SLACK = 64


class DeadlineHeap:
    """Names ordered by time, earliest first. Putting a name again moves it. Times are milliseconds of any
    clock.

    A change costs O(log n), amortised.
    """

    def __init__(self) -> None:
        self._times: dict[str, float] = {}
        # An entry is dead if its time differs from the name's time in ``_times``. It is removed when it
        # reaches the top.
        self._heap: list[tuple[float, str]] = []

    def __len__(self) -> int:
        return len(self._times)

    def put(self, name: str, at_ms: float) -> None:
        if self._times.get(name) == at_ms:
            return
        self._times[name] = at_ms
        heapq.heappush(self._heap, (at_ms, name))
        if len(self._heap) > 2 * len(self._times) + _SLACK:
            self._heap = [(at, name) for name, at in self._times.items()]
            heapq.heapify(self._heap)

    def drop(self, name: str) -> None:
        self._times.pop(name, None)

    def earliest_ms(self) -> float:
        heap = self._heap
        while heap and self._times.get(heap[0][1]) != heap[0][0]:
            heapq.heappop(heap)
        return heap[0][0] if heap else math.inf

    def pop(self, until_ms: float = math.inf, limit: float = math.inf) -> list[tuple[str, float]]:
        """Remove and return at most ``limit`` names up to this time, earliest first, with their times."""
        taken: list[tuple[str, float]] = []
        while len(taken) < limit and self._times and self.earliest_ms() <= until_ms:
            at_ms, name = heapq.heappop(self._heap)
            del self._times[name]
            taken.append((name, at_ms))
        return taken
