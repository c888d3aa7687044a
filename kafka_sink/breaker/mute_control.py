"""All that one producer keeps of mutes and probes, and KIP-693's CircuitBreakManager for breaker classes."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from kafka_sink.breaker.muted_partitions import MutedPartitions, MutedView, Topology
from kafka_sink.breaker.probes import ProbePolicy
from kafka_sink.breaker.states import NO_EVIDENCE, Evidence, LocalMutes, ProbeLease, Target, target_of
from kafka_sink.model import PartitionInfo, TopicPartition


class CircuitBreakManager:
    """Handed to a breaker class, whose calls come on the sender's thread.

    ``mute`` and ``unmute`` may be called on any thread. A call on another thread is queued and takes effect
    in the sender's next pass.
    """

    def __init__(
        self, mutes: LocalMutes, partitions: MutedPartitions, ask: Callable[[int], None] = lambda _: None
    ) -> None:
        # Brokers that keyless rows avoid for the moment, see mute_congested. Any thread may read it.
        self.congested: frozenset[int] = frozenset()
        self._mutes = mutes
        self._partitions = partitions
        self._ask = ask
        # The sender's thread, once it has run; mutes and unmutes by other threads.
        self._owner: int | None = None
        self._queued: deque[partial[None]] = deque()

    # -- the KIP's methods --------------------------------------------------------------------------

    def mute(
        self,
        target: int | TopicPartition,
        reason: str = "muted by the breaker class",
        evidence: Evidence = NO_EVIDENCE,
    ) -> None:
        """Mute a partition, or a broker with the partitions that it leads at any time.

        Raises ValueError for anything else.
        """
        target = target_of(target)
        if self._is_other_thread():
            self._queued.append(partial(self.mute, target, reason, evidence))
        else:
            self._mutes.mute(target, str(reason), evidence, own=True)

    def unmute(self, target: int | TopicPartition, reason: str = "unmuted by the breaker class") -> None:
        """End a mute. Raises ValueError for a target that cannot be muted."""
        target = target_of(target)
        if self._is_other_thread():
            self._queued.append(partial(self.unmute, target, reason))
        else:
            self._mutes.unmute(target, str(reason), own=True)

    def available_partitions_for_topic(self, topic: str) -> list[PartitionInfo]:
        """Partitions that have a leader and are not muted."""
        return self._partitions.available_for_topic(topic)

    def muted_partitions_for_topic(self, topic: str) -> list[PartitionInfo]:
        """Partitions that are muted, by themselves or with the broker that leads them, or led them last."""
        return self._partitions.muted_for_topic(topic)

    def available_partitions_for_node(self, node_id: int) -> dict[str, list[PartitionInfo]]:
        """By topic, the partitions that a broker leads and that are not muted."""
        return self._partitions.for_node(node_id, muted=False)

    def muted_partitions_for_node(self, node_id: int) -> dict[str, list[PartitionInfo]]:
        """By topic, the muted partitions that a broker leads."""
        return self._partitions.for_node(node_id, muted=True)

    def close(self) -> None:
        """Unmute everything; later mutes have no effect."""
        self._mutes.close()
        self._partitions.close()
        self.forget_congested()

    # -- beyond the KIP -----------------------------------------------------------------------------

    def is_muted(self, what: int | TopicPartition | PartitionInfo) -> bool:
        """Whether a broker is muted, or a partition by itself or with its leader."""
        return self._partitions.is_muted(what)

    def leader(self, partition: TopicPartition) -> PartitionInfo | None:
        return self._partitions.leader(partition)

    def available_nodes(self) -> set[int]:
        return self._partitions.available_nodes()

    def ask(self, node_id: int) -> None:
        """Send a broker a request without rows; ``ProducerStatusContext.probed_ms`` has its response."""
        self._ask(node_id)

    def mute_congested(self, node_id: int) -> None:
        """Keyless rows of this producer avoid a broker until unmute_congested. This is no trip and no probe
        follows."""
        self.congested |= {node_id}

    def unmute_congested(self, node_id: int) -> None:
        if node_id in self.congested:
            self.congested -= {node_id}

    def forget_congested(self) -> None:
        self.congested = frozenset()

    # -- the owner ----------------------------------------------------------------------------------

    def run_queued_calls(self) -> None:
        """Run what other threads called. The calling thread is the sender's from now on."""
        self._owner = threading.get_ident()
        for _ in range(len(self._queued)):
            self._queued.popleft()()

    def _is_other_thread(self) -> bool:
        return self._owner not in (None, threading.get_ident())


_NO_TRIALS: frozenset[Target] = frozenset()


class MuteControl:
    """The parts of one producer's breaker, wired together. The sender's thread calls it; any may read
    ``view``.

    The KIP's calls carry no time, so the sender sets ``now_ms`` (monotonic) before it calls the breaker
    class.
    """

    def __init__(self, topology: Topology, retry_interval_ms: float) -> None:
        self.local = LocalMutes(retry_interval_ms)
        self.partitions = MutedPartitions(self.local, topology)
        self.probes = ProbePolicy(self.local, self.partitions)
        self.manager = CircuitBreakManager(self.local, self.partitions, self.probes.ask_broker)
        self.local.on_unmuted = self.probes.forget

    @property
    def now_ms(self) -> float:
        return self.local.now_ms

    @now_ms.setter
    def now_ms(self, now_ms: float) -> None:
        self.local.now_ms = now_ms

    @property
    def view(self) -> MutedView:
        return self.partitions.view

    def refresh(self) -> MutedView:
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
        return self.local.table.next_change_ms(self.local.now_ms)

    def metrics(self) -> BreakerMetrics:
        """As of the last refresh. Trips are those of this task's own breaker class. Any thread."""
        return BreakerMetrics(self.partitions.muted_count, self.local.own_trips, self.local.table.probes)


# -- the breaker's metrics of one producer ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BreakerMetrics:
    muted_partitions: int = 0
    breaker_trips_total: int = 0
    probes: int = 0

    def since(self, before: BreakerMetrics) -> BreakerMetrics:
        """The same, with totals counted from ``before`` on."""
        trips = self.breaker_trips_total - before.breaker_trips_total
        return BreakerMetrics(self.muted_partitions, trips, self.probes - before.probes)

    def by_name(self) -> dict[str, float]:
        return {
            "muted-partitions": self.muted_partitions,
            "breaker-trips-total": self.breaker_trips_total,
            "breaker-probes-total": self.probes,
        }
