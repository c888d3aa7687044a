"""The tasks that share a breaker: which report, what they wait for, and who gets the next lease. No I/O."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice

from kafka_sink.breaker.states import Target
from kafka_sink.coordinator.breaker.messages import BreakerReport
from kafka_sink.timing_bounds import SILENT_TASK_MS

# Reports of a task without news are at most so many intervals of coordinator.report.interval.ms apart.
_SILENT_INTERVALS = 3
# With more candidates for a lease, walking the tasks in their order finds one sooner than comparing all
# candidates.
_MAX_COMPARED = 16


@dataclass(slots=True)
class _BreakerTask:
    """A task.

    ``holds``: muted targets that its batches wait for. ``wants``: muted partitions that its rows could go to.
    ``reported_ms``: its last report. ``leased_ms``: its last lease.
    """

    holds: frozenset[Target] = frozenset()
    wants: frozenset[Target] = frozenset()
    reported_ms: float = -math.inf
    leased_ms: float = -math.inf


class BreakerTasks:
    """The connected tasks by peer number, in the order of their first reports."""

    def __init__(self, report_interval_ms: float) -> None:
        self._quiet_ms = max(_SILENT_INTERVALS * report_interval_ms, SILENT_TASK_MS)
        self._peers: dict[int, _BreakerTask] = {}
        # By muted target, the tasks that hold batches for it, and those that have rows for it.
        self._holders_of: dict[Target, set[int]] = {}
        self._wanters_of: dict[Target, set[int]] = {}

    def __contains__(self, peer: int) -> bool:
        return peer in self._peers

    def __iter__(self) -> Iterator[int]:
        return iter(self._peers)

    def update(self, peer: int, report: BreakerReport, now_ms: float) -> bool:
        """Notes a task's report. True if the task is new, or had been silent before."""
        known = self._peers.setdefault(peer, _BreakerTask())
        was_silent = now_ms - known.reported_ms > self._quiet_ms
        known.reported_ms = -math.inf if report.is_resting else now_ms
        if report.holds is not None:
            before, known.holds = known.holds, frozenset(report.holds)
            _index(self._holders_of, peer, before, known.holds)
        if report.wants is not None:
            before, known.wants = known.wants, frozenset(report.wants)
            _index(self._wanters_of, peer, before, known.wants)
        return was_silent

    def remove(self, peer: int) -> None:
        """A task has disconnected."""
        known = self._peers.pop(peer, None)
        if known is not None:
            _index(self._holders_of, peer, known.holds, frozenset())
            _index(self._wanters_of, peer, known.wants, frozenset())

    def active(self, now_ms: float) -> list[int]:
        """The tasks that are not silent."""
        return [peer for peer in self._peers if self._is_active(peer, now_ms)]

    def has_several(self, now_ms: float) -> bool:
        """Whether more than one task is active. Walks until it has found two."""
        return len(list(islice((peer for peer in self._peers if self._is_active(peer, now_ms)), 2))) == 2

    def _is_active(self, peer: int, now_ms: float) -> bool:
        return now_ms - self._peers[peer].reported_ms <= self._quiet_ms

    def has_holder(self, target: Target, now_ms: float) -> bool:
        """Whether batches of an active task wait for a target."""
        return any(self._is_active(peer, now_ms) for peer in self._holders_of.get(target, ()))

    def holds_any(self, peer: int, targets: Collection[Target]) -> bool:
        """Whether batches of a task wait for one of these targets."""
        return not self._peers[peer].holds.isdisjoint(targets)

    # -- the order of leases --------------------------------------------------------------------------

    def move_to_end(self, peer: int, now_ms: float) -> None:
        """The task has had its turn: all others come before it."""
        self._peers[peer].leased_ms = now_ms

    def in_lease_order(self, now_ms: float) -> list[int]:
        """The active tasks. The one whose last lease is longest ago comes first."""
        return sorted(self.active(now_ms), key=lambda peer: self._peers[peer].leased_ms)

    def next_for_lease(self, now_ms: float, *, other_than: int) -> int | None:
        """The first task in lease order, without one of them; None if there is no other."""
        others = (peer for peer in self.active(now_ms) if peer != other_than)
        return min(others, key=lambda peer: self._peers[peer].leased_ms, default=None)

    def first_holder(self, target: Target, order: Mapping[int, None]) -> int | None:
        """The first task in ``order`` with a batch for ``target``."""
        return self._first(order, self._holders_of.get(target, set()))

    def first_wanter(self, target: Target, order: Mapping[int, None]) -> int | None:
        """The first task in ``order`` whose rows could go to ``target``."""
        return self._first(order, self._wanters_of.get(target, set()))

    def _first(self, order: Mapping[int, None], able: set[int]) -> int | None:
        if len(able) > _MAX_COMPARED:
            return next((peer for peer in order if peer in able), None)
        active = [peer for peer in able if peer in order]
        return min(active, key=lambda peer: (self._peers[peer].leased_ms, peer), default=None)


def _index(
    index: dict[Target, set[int]], peer: int, before: frozenset[Target], now: frozenset[Target]
) -> None:
    """Moves a task in an index from the targets ``before`` to those ``now``."""
    for target in before - now:
        index[target].discard(peer)
        if not index[target]:
            del index[target]
    for target in now - before:
        index.setdefault(target, set()).add(peer)
