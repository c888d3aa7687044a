"""Which task may probe a muted target, one at a time. No I/O."""

from __future__ import annotations

import math
from collections.abc import Mapping

from kafka_sink.breaker.states import BreakerState, MuteTable, ProbeLease, Target
from kafka_sink.coordinator.breaker.tasks import BreakerTasks
from kafka_sink.model import TopicPartition


class ProbeLeases:
    """The leases of one cluster's mutes. ``table`` and ``tasks`` are the handler's."""

    def __init__(self, table: MuteTable, tasks: BreakerTasks) -> None:
        self._table = table
        self._tasks = tasks
        # The task that has the lease for a target.
        self._owners: dict[Target, int] = {}

    @property
    def owners(self) -> Mapping[Target, int]:
        """By target, the task that has its lease."""
        return self._owners

    def grant(self, now_ms: float) -> dict[int, dict[Target, ProbeLease]]:
        """By task, new leases for all targets that are due and that an active task can probe."""
        due = [target for target in self._table.mutes if self._table.is_due(target, now_ms)]
        if not due:
            return {}
        # A task that gets a lease goes to the end.
        order = dict.fromkeys(self._tasks.in_lease_order(now_ms))
        leases: dict[int, dict[Target, ProbeLease]] = {}
        for target in due:
            found = self._candidate(target, order, now_ms)
            if found is None:
                continue
            peer, trial = found
            self._table.probe(target, now_ms)
            self._owners[target] = peer
            self._tasks.move_to_end(peer, now_ms)
            del order[peer]
            order[peer] = None
            leases.setdefault(peer, {})[target] = ProbeLease(self._table.retry_interval_ms, trial)
        return leases

    def _candidate(self, target: Target, order: Mapping[int, None], now_ms: float) -> tuple[int, bool] | None:
        """The first task in ``order`` that can probe a target, and whether new rows may go there for it.

        Any task can probe a broker, as that needs no row. A partition's probe needs a batch. A task that
        holds one goes first. If none does for another interval, a task whose rows could go there gets a
        trial.
        """
        if not isinstance(target, TopicPartition):
            first = next(iter(order), None)
            return None if first is None else (first, False)
        first = self._tasks.first_holder(target, order)
        if first is not None:
            return first, False
        if now_ms < self._table.mutes[target].retry_at_ms + self._table.retry_interval_ms:
            return None
        first = self._tasks.first_wanter(target, order)
        return None if first is None else (first, True)

    def next_trial_ms(self, now_ms: float) -> float:
        """Milliseconds until a task without batches may probe a target; infinite if time brings none."""
        trials = (
            mute.retry_at_ms + self._table.retry_interval_ms
            for mute in self._table.mutes.values()
            if mute.state is BreakerState.OPEN
        )
        return min((at for at in trials if at > now_ms), default=math.inf) - now_ms

    def on_failure(self, peer: int, target: Target, error: str, now_ms: float) -> None:
        """A task's probe failed. Without the lease, it sent its batch before the mute, or without the
        coordinator; that changes nothing."""
        if self._owners.get(target) == peer and target in self._table.mutes:
            self._table.fail(target, error, now_ms)
            del self._owners[target]

    def end(self, target: Target) -> None:
        """A target is muted no more."""
        self._owners.pop(target, None)

    def remove_task(self, peer: int, now_ms: float) -> None:
        """A task has disconnected."""
        for target in [target for target, owner in self._owners.items() if owner == peer]:
            # Its probe may be in flight, so the next one waits as after a failure.
            self.on_failure(peer, target, "", now_ms)
