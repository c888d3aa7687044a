"""All that one producer keeps of mutes and probes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kafka_sink.breaker.local_mutes import LocalMutes
from kafka_sink.breaker.manager import CircuitBreakManager
from kafka_sink.breaker.muted_partitions import MutedPartitions, MutedView, Topology
from kafka_sink.breaker.probes import ProbePolicy, WaitingRows
from kafka_sink.breaker.states import ProbeLease, Target

_NO_TRIALS: frozenset[Target] = frozenset()


class MuteControl:
    """Wires the parts of one producer's breaker. The sender's thread calls it; any may read ``view``.

    The KIP's calls carry no time, so the sender sets ``now_ms`` (monotonic) before it calls the breaker
    class.
    """

    def __init__(self, topology: Topology, retry_interval_ms: float) -> None:
        self.local = LocalMutes(retry_interval_ms)
        self.partitions = MutedPartitions(self.local, topology)
        self.waiting = WaitingRows(self.local, self.partitions)
        self.probes = ProbePolicy(self.local, self.partitions, self.waiting)
        self.manager = CircuitBreakManager(self.local, self.partitions, self.probes.ask_broker)
        self.local.on_unmuted = self._on_unmuted

    def _on_unmuted(self, target: Target) -> None:
        self.probes.forget(target)
        self.waiting.forget(target)

    @property
    def now_ms(self) -> float:
        """The time of the present call."""
        return self.local.now_ms

    @now_ms.setter
    def now_ms(self, now_ms: float) -> None:
        self.local.now_ms = now_ms

    @property
    def view(self) -> MutedView:
        """What was muted at the last refresh."""
        return self.partitions.view

    def refresh(self) -> MutedView:
        """End lost probes and brings ``view`` up to date; return it."""
        self.manager.run_queued_calls()
        table = self.local.table
        trials = _NO_TRIALS
        if table.mutes:
            table.expire_late(self.local.now_ms)
            trials = self.probes.trials()
        return self.partitions.refresh(trials)

    def apply_shared(self, muted: Mapping[Target, str], leases: Mapping[Target, ProbeLease]) -> None:
        """Take the coordinator's mutes, with their reasons, and its new leases for this task."""
        self.local.apply_shared(muted)
        self.probes.grant(leases)

    def on_coordinator_lost(self) -> None:
        """From now on this task's own clock decides when to probe."""
        self.local.on_coordinator_lost()
        self.probes.on_coordinator_lost()

    def next_change_ms(self) -> float:
        """Milliseconds until a probe may go or counts as lost; infinite where nothing is muted."""
        return self.local.table.next_change_ms(self.local.now_ms)

    def targets(self) -> tuple[Target, ...]:
        """Everything that is muted."""
        return tuple(self.local.table.mutes)

    def metrics(self) -> BreakerMetrics:
        """As of the last refresh. Trips are those of this task's own breaker class. Any thread."""
        return BreakerMetrics(self.partitions.muted_count, self.local.own_trips, self.local.table.probes)


# -- the breaker's metrics of one producer ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BreakerMetrics:
    """``muted-partitions``, ``breaker-trips-total`` and ``breaker-probes-total`` of one producer."""

    muted_partitions: int = 0
    breaker_trips_total: int = 0
    probes: int = 0

    def since(self, before: BreakerMetrics) -> BreakerMetrics:
        """The same, with totals counted from ``before`` on."""
        trips = self.breaker_trips_total - before.breaker_trips_total
        return BreakerMetrics(self.muted_partitions, trips, self.probes - before.probes)

    def by_name(self) -> dict[str, float]:
        """By the names of docs/metrics.md."""
        return {
            "muted-partitions": self.muted_partitions,
            "breaker-trips-total": self.breaker_trips_total,
            "breaker-probes-total": self.probes,
        }
