"""The tasks that share a breaker: which report, what they wait for, and who gets the next lease. No I/O.

The coordinator knows groups: the tasks behind a relay, or one task by itself. A relay knows its tasks by the
same class.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate, islice

from kafka_sink.breaker.states import BreakerState, MuteTable, ProbeLease, Target
from kafka_sink.coordinator.breaker.messages import BreakerReport, BreakerUpdate, encode_update
from kafka_sink.coordinator.transport.handlers import Push, SharedBody, with_facts
from kafka_sink.model import TopicPartition
from kafka_sink.timing_bounds import GATHER_MUTES_MS, SILENT_TASK_MS

# Reports of a task without news are at most so many intervals of coordinator.report.interval.ms apart.
_SILENT_INTERVALS = 3
# With more candidates for a lease, walking the tasks in their order finds one sooner than comparing all
# candidates. Those for hundreds of targets may be the same, and all at the end of that order.
_MAX_COMPARED = 100


@dataclass(slots=True)
class _BreakerTask:
    """A group, of so many ``tasks`` at work.

    ``holds``: muted targets that its batches wait for. ``wants``: muted partitions that its rows could go to.
    ``reported_ms``: its last report. ``turn``: the number of its last lease among those of all.
    """

    holds: frozenset[Target] = frozenset()
    wants: frozenset[Target] = frozenset()
    reported_ms: float = -math.inf
    turn: int = 0
    tasks: int = 1


class BreakerTasks:
    """The connected groups by group number, in the order of their first reports."""

    def __init__(self, report_interval_ms: float) -> None:
        self.expect_reports(report_interval_ms)
        self._groups: dict[int, _BreakerTask] = {}
        self._turns = 0
        # By muted target, the groups that hold batches for it, and those that have rows for it.
        self._holders_of: dict[Target, set[int]] = {}
        self._wanters_of: dict[Target, set[int]] = {}
        # By broker, how many probes of a group have neither failed nor been answered.
        self._unanswered: dict[int, Counter[int]] = {}

    def __contains__(self, group: int) -> bool:
        return group in self._groups

    def __iter__(self) -> Iterator[int]:
        return iter(self._groups)

    def expect_reports(self, interval_ms: float) -> None:
        """``interval_ms``: coordinator.report.interval.ms."""
        self._quiet_ms = max(_SILENT_INTERVALS * interval_ms, SILENT_TASK_MS)

    def update(self, group: int, report: BreakerReport, now_ms: float) -> bool:
        """Note a group's report. True if the group is new, or had been silent before."""
        known = self._groups.setdefault(group, _BreakerTask())
        known.tasks = 1 if report.tasks is None else report.tasks
        was_silent = now_ms - known.reported_ms > self._quiet_ms
        known.reported_ms = -math.inf if report.is_resting else now_ms
        if report.holds is not None:
            before, known.holds = known.holds, frozenset(report.holds)
            _index(self._holders_of, group, before, known.holds)
        if report.wants is not None:
            before, known.wants = known.wants, frozenset(report.wants)
            _index(self._wanters_of, group, before, known.wants)
        return was_silent

    def forgive(self, late_ms: float) -> None:
        """No report could be taken for so long."""
        for known in self._groups.values():
            known.reported_ms += late_ms

    def remove(self, group: int) -> None:
        known = self._groups.pop(group, None)
        if known is not None:
            _index(self._holders_of, group, known.holds, frozenset())
            _index(self._wanters_of, group, known.wants, frozenset())
            for unanswered in self._unanswered.values():
                unanswered.pop(group, None)

    def active(self, now_ms: float) -> list[int]:
        """The groups that are not silent."""
        return [group for group in self._groups if self._is_active(group, now_ms)]

    def has_several(self, now_ms: float) -> bool:
        """Whether more than one task is active. Walks until it has found two groups."""
        active = islice((group for group in self._groups if self._is_active(group, now_ms)), 2)
        return sum(self._groups[group].tasks for group in active) >= 2

    @property
    def has_any(self) -> bool:
        return bool(self._groups)

    def size(self, group: int) -> int:
        """How many tasks a group has at work."""
        return self._groups[group].tasks

    @property
    def held(self) -> Collection[Target]:
        """What batches wait for."""
        return self._holders_of.keys()

    @property
    def wanted(self) -> Collection[Target]:
        """Where rows could go, if it were not muted."""
        return self._wanters_of.keys()

    def _is_active(self, group: int, now_ms: float) -> bool:
        return now_ms - self._groups[group].reported_ms <= self._quiet_ms

    def has_holder(self, target: Target, now_ms: float) -> bool:
        """Whether batches of an active task wait for a target."""
        return any(self._is_active(group, now_ms) for group in self._holders_of.get(target, ()))

    def those_that_wait_first(self, targets: Collection[Target], random: Callable[[], float]) -> list[int]:
        """All, in any order, but first those with batches that wait for one of these targets."""
        holders: set[int] = set()
        for target in targets:
            # Thousands of targets may have the same thousand.
            if len(holders) == len(self._groups):
                break
            holders |= self._holders_of.get(target, set())
        return sorted(self._groups, key=lambda group: (group not in holders, random()))

    # -- the order of leases --------------------------------------------------------------------------

    def move_to_end(self, group: int) -> None:
        """The group has had its turn: all others come before it."""
        self._turns += 1
        self._groups[group].turn = self._turns

    def lease(self, group: int, target: Target) -> None:
        """The group probes a target, or is asked about a broker, and has had its turn."""
        self.move_to_end(group)
        if not isinstance(target, TopicPartition):
            self._unanswered.setdefault(target, Counter())[group] += 1

    def end_probe(self, group: int, target: Target) -> None:
        """A probe has failed, or was answered."""
        unanswered = None if isinstance(target, TopicPartition) else self._unanswered.get(target)
        if unanswered is not None and unanswered[group]:
            unanswered[group] -= 1

    def forget_probes(self, target: Target) -> None:
        """A target is muted no more."""
        if not isinstance(target, TopicPartition):
            self._unanswered.pop(target, None)

    def first_for_broker(self, node: int, order: Mapping[int, None]) -> int | None:
        """The first in ``order`` with a task that waits for no probe of this broker: another one would not be
        sent. If all wait, the first."""
        unanswered = self._unanswered.get(node, Counter())
        able = (group for group in order if unanswered[group] < self._groups[group].tasks)
        return next(able, next(iter(order), None))

    def in_lease_order(self, now_ms: float) -> list[int]:
        """The active groups. The one whose last lease is longest ago comes first."""
        return sorted(self.active(now_ms), key=lambda group: self._groups[group].turn)

    def next_for_lease(self, now_ms: float, *, other_than: int) -> int | None:
        """The first group in lease order, ``other_than`` the one with the task that asks, unless that has
        more tasks; None if there is no other."""
        others = (group for group in self.active(now_ms) if group != other_than)
        fallback = other_than if other_than in self._groups and self._groups[other_than].tasks > 1 else None
        return min(others, key=lambda group: self._groups[group].turn, default=fallback)

    def names(self, target: Target) -> bool:
        """Whether batches of a task wait for a target, or rows could go there."""
        return target in self._holders_of or target in self._wanters_of

    def first_holder(self, target: Target, order: Mapping[int, None]) -> int | None:
        """The first task in ``order`` with a batch for ``target``."""
        return self._first(order, self._holders_of.get(target, set()))

    def first_wanter(self, target: Target, order: Mapping[int, None]) -> int | None:
        """The first task in ``order`` whose rows could go to ``target``."""
        return self._first(order, self._wanters_of.get(target, set()))

    def _first(self, order: Mapping[int, None], able: set[int]) -> int | None:
        if len(able) > _MAX_COMPARED:
            return next((group for group in order if group in able), None)
        active = [group for group in able if group in order]
        return min(active, key=lambda group: (self._groups[group].turn, group), default=None)


def _index(
    index: dict[Target, set[int]], group: int, before: frozenset[Target], now: frozenset[Target]
) -> None:
    """Move a task in an index from the targets ``before`` to those ``now``."""
    for target in before - now:
        index[target].discard(group)
        if not index[target]:
            del index[target]
    for target in now - before:
        index.setdefault(target, set()).add(group)


# -- which task may probe a muted target, one at a time. No I/O ---------------------------------------------


# One after another, hundreds would hold up the coordinator's loop.
_GRANTED_AT_ONCE = 250


class ProbeLeases:
    """The leases of one cluster's mutes. ``table`` and ``tasks`` are the handler's."""

    def __init__(self, table: MuteTable, tasks: BreakerTasks) -> None:
        self._table = table
        self._tasks = tasks
        # The task that has the lease for a target.
        self._owners: dict[Target, int] = {}
        # Whether more are due than were granted at once.
        self._has_more = False

    @property
    def owners(self) -> Mapping[Target, int]:
        """By target, the task that has its lease."""
        return self._owners

    def grant(self, now_ms: float, unsent: Collection[Target] = ()) -> dict[int, dict[Target, ProbeLease]]:
        """By task, new leases for targets that are due and that an active task can probe.

        ``unsent``: mutes that tasks do not know yet. They would lose the lease when they learn of them.
        """
        due = [
            target
            for target, mute in self._table.mutes.items()
            if mute.state is BreakerState.OPEN
            and mute.retry_at_ms <= now_ms
            and target not in unsent
            and (type(target) is int or self._tasks.names(target))
        ]
        self._has_more = False
        if not due:
            return {}
        # A task that gets a lease goes to the end.
        order = dict.fromkeys(self._tasks.in_lease_order(now_ms))
        leases: dict[int, dict[Target, ProbeLease]] = {}
        left = _GRANTED_AT_ONCE
        for target in due:
            found = self._candidate(target, order, now_ms)
            if found is None:
                continue
            if not left:
                self._has_more = True
                break
            left -= 1
            group, trial = found
            self._table.probe(target, now_ms)
            self._owners[target] = group
            self._tasks.lease(group, target)
            del order[group]
            order[group] = None
            leases.setdefault(group, {})[target] = ProbeLease(self._table.retry_interval_ms, trial)
        return leases

    def _candidate(self, target: Target, order: Mapping[int, None], now_ms: float) -> tuple[int, bool] | None:
        """The first task in ``order`` that can probe a target, and whether new rows may go there for it.

        Any task can probe a broker, as that needs no row. A partition's probe needs a batch. A task that
        holds one goes first. If none does for another interval, a task whose rows could go there gets a
        trial.
        """
        if not isinstance(target, TopicPartition):
            first = self._tasks.first_for_broker(target, order)
            return None if first is None else (first, False)
        first = self._tasks.first_holder(target, order)
        if first is not None:
            return first, False
        if now_ms < self._table.mutes[target].retry_at_ms + self._table.retry_interval_ms:
            return None
        first = self._tasks.first_wanter(target, order)
        return None if first is None else (first, True)

    def next_trial_ms(self, now_ms: float) -> float:
        """Milliseconds until a task without batches may probe a target, or until the next leases if more are
        due; infinite if time brings none."""
        if self._has_more:
            return GATHER_MUTES_MS
        trials = (
            mute.retry_at_ms + self._table.retry_interval_ms
            for mute in self._table.mutes.values()
            if mute.state is BreakerState.OPEN
        )
        return min((at for at in trials if at > now_ms), default=math.inf) - now_ms

    def on_failure(self, group: int, target: Target, error: str, now_ms: float) -> None:
        """A task's probe failed. Without the lease, it sent its batch before the mute, or without the
        coordinator; that changes nothing."""
        self._tasks.end_probe(group, target)
        if self._owners.get(target) == group and target in self._table.mutes:
            self._table.fail(target, error, now_ms)
            del self._owners[target]

    def end(self, target: Target) -> None:
        """A target is muted no more."""
        self._owners.pop(target, None)
        self._tasks.forget_probes(target)

    def remove_task(self, group: int, now_ms: float) -> None:
        for target in [target for target, owner in self._owners.items() if owner == group]:
            # Its probe may be in flight, so the next one waits as after a failure.
            self.on_failure(group, target, "", now_ms)


# -- mutes and unmutes on their way to the tasks. No I/O ----------------------------------------------------


# After a mute one task sends again, a step later two more, then four, and so on.
_RAMP_STEP_MS = 100.0
# Delays are multiples of this.
_DELAY_MS = 5.0


def delay_of_turn(turn: int, chance: float) -> float:
    """When the task whose turn it is sends again. ``chance`` spreads those of a step."""
    if turn == 0:
        return 0.0
    return ((turn + 1).bit_length() - 2 + chance) * _RAMP_STEP_MS // _DELAY_MS * _DELAY_MS


def turn_at(delay_ms: float) -> int:
    """The first turn of the step that a delay falls into."""
    return 0 if delay_ms == 0 else 2 ** (int(delay_ms // _RAMP_STEP_MS) + 1) - 1


class MutePushes:
    """The changes that have not been sent. Those that follow one another closely share a message.

    ``random`` returns a number in [0, 1). No unmute takes effect later than ``max_delay_ms``.
    """

    def __init__(self, max_delay_ms: float, random: Callable[[], float]) -> None:
        self._max_delay_ms = max_delay_ms
        self._random = random
        self._added: dict[Target, str] = {}
        self._removed: set[Target] = set()
        self._pushed_ms = -math.inf

    def add(self, target: Target, reason: str) -> None:
        self._added[target] = reason
        self._removed.discard(target)

    def remove(self, target: Target) -> None:
        self._removed.add(target)
        self._added.pop(target, None)

    @property
    def unsent(self) -> Collection[Target]:
        """Mutes that no task knows of yet."""
        return self._added.keys()

    @property
    def due_ms(self) -> float:
        """When the next push may go; infinite if nothing has changed."""
        return self._pushed_ms + GATHER_MUTES_MS if self._added or self._removed else math.inf

    def take(self, tasks: BreakerTasks, now_ms: float) -> list[Push]:
        """What to send now.

        New mutes go to all tasks at once. Unmutes take effect in one task after another: otherwise
        hundreds that wait would all send to a broker that has just come back.
        """
        if now_ms < self.due_ms:
            return []
        added, removed = self._added, self._removed
        self._added, self._removed, self._pushed_ms = {}, set(), now_ms
        told = BreakerUpdate(added=added, removed=tuple(sorted(removed, key=str)))
        if not removed:
            update = SharedBody(encode_update(told), 0.0)
            return [Push(group, update) for group in tasks]
        update = SharedBody(encode_update(replace(told, max_delay_ms=self._max_delay_ms)), 0.0)
        # Tasks that hold rows for these targets go first. For the others the moment does not matter yet.
        order = tasks.those_that_wait_first(removed, self._random)
        # A relay's tasks take as many turns.
        turns = accumulate((tasks.size(group) for group in order), initial=0)
        # Hundreds of targets may end together, and thousands of groups wait: all share the list of targets,
        # and those with the same delay, which follow one another, share a message.
        delays = sorted((self._delay_ms(turn), group) for turn, group in zip(turns, order, strict=False))
        bodies = {delay_ms: with_facts({"delay": delay_ms}, update) for delay_ms, _ in delays}
        return [Push(group, bodies[delay_ms]) for delay_ms, group in delays]

    def _delay_ms(self, turn: int) -> float:
        return min(delay_of_turn(turn, self._random()), self._max_delay_ms)
