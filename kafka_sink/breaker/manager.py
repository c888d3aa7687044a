"""All that one producer keeps of mutes and probes, behind KIP-693's CircuitBreakManager."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from functools import partial
from typing import Protocol

from kafka_sink.breaker.probes import ProbePolicy
from kafka_sink.breaker.states import NO_EVIDENCE, Evidence, LocalMutes, Mute, ProbeLease, Target, target_of
from kafka_sink.cluster.broker import Broker
from kafka_sink.model import NO_LEADER, PartitionInfo, TopicMetadata, TopicPartition
from kafka_sink.printable import one_line


class MutedView:
    """Contains a partition if it is muted by itself or if its present leader is muted. Immutable."""

    __slots__ = ("_leader", "nodes", "partitions")

    def __init__(
        self,
        nodes: frozenset[int] = frozenset(),
        partitions: frozenset[TopicPartition] = frozenset(),
        leader: Callable[[TopicPartition], PartitionInfo | None] = lambda _: None,
    ) -> None:
        self.nodes = nodes
        self.partitions = partitions
        self._leader = leader

    def __bool__(self) -> bool:
        return bool(self.nodes or self.partitions)

    def __contains__(self, partition: object) -> bool:
        if partition in self.partitions:
            return True
        if not self.nodes or not isinstance(partition, TopicPartition):
            return False
        info = self._leader(partition)
        return info is not None and info.leader in self.nodes


NOTHING_MUTED = MutedView()
_NO_TRIALS: frozenset[Target] = frozenset()


class Topology(Protocol):
    """What is known of the cluster: ClusterMetadata."""

    @property
    def version(self) -> int: ...

    @property
    def brokers(self) -> Mapping[int, Broker]: ...

    def names(self) -> tuple[str, ...]: ...

    def topic(self, name: str) -> TopicMetadata | None: ...

    def leader(self, partition: TopicPartition) -> PartitionInfo | None: ...


class CircuitBreakManager:
    """Handed to a breaker class, whose calls come on the sender's thread.

    ``mute`` and ``unmute`` may be called on any thread. A call on another thread is queued and takes effect
    in the sender's next pass.

    ``view`` is what sender and partitioner follow; any thread may read it. It is empty where no partition
    would be left: then the sender goes on as if nothing was muted.
    """

    def __init__(self, topology: Topology, retry_interval_ms: float) -> None:
        self.local = LocalMutes(retry_interval_ms)
        self.probes = ProbePolicy(self.local, self.covering, topology.brokers)
        self.local.on_unmuted = self.probes.forget
        self.view: MutedView = NOTHING_MUTED
        # As of the last refresh.
        self.muted_count = 0
        # Brokers that keyless rows avoid for the moment, see mute_congested. Any thread may read it.
        self.congested: Set[int] = frozenset()
        self._topology = topology
        # The muted brokers of partitions, from when a leader was last known.
        self._muted_leaders: dict[TopicPartition, int] = {}
        # The versions of mutes and topology that the view shows.
        self.seen = (-1, -1)
        self._trials = _NO_TRIALS
        # The answer of ``available_nodes``, and the versions that it is for.
        self._available: tuple[tuple[int, int], Set[int]] = (-1, -1), frozenset()
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
            self.local.mute(target, one_line(str(reason)), evidence, own=True)

    def unmute(self, target: int | TopicPartition, reason: str = "unmuted by the breaker class") -> None:
        """End a mute. Raises ValueError for a target that cannot be muted."""
        target = target_of(target)
        if self._is_other_thread():
            self._queued.append(partial(self.unmute, target, reason))
        else:
            self.local.unmute(target, one_line(str(reason)), own=True)

    def available_partitions_for_topic(self, topic: str) -> list[PartitionInfo]:
        """Partitions that have a leader and are not muted."""
        return [info for info in self._infos(topic) if info.leader >= 0 and not self.is_muted(info)]

    def muted_partitions_for_topic(self, topic: str) -> list[PartitionInfo]:
        """Partitions that are muted, by themselves or with the broker that leads them, or led them last."""
        return [info for info in self._infos(topic) if self.is_muted(TopicPartition(topic, info.partition))]

    def available_partitions_for_node(self, node_id: int) -> dict[str, list[PartitionInfo]]:
        """By topic, the partitions that a broker leads and that are not muted."""
        return self._of_node(node_id, muted=False)

    def muted_partitions_for_node(self, node_id: int) -> dict[str, list[PartitionInfo]]:
        """By topic, the muted partitions that a broker leads, or led last."""
        return self._of_node(node_id, muted=True)

    def close(self) -> None:
        """Unmute everything; later mutes have no effect."""
        self.local.close()
        self.view = NOTHING_MUTED
        self.congested = frozenset()

    # -- beyond the KIP -----------------------------------------------------------------------------

    def is_muted(self, what: int | TopicPartition | PartitionInfo) -> bool:
        """Whether a broker is muted, or a partition by itself or with its leader."""
        muted = self.local.mutes
        if isinstance(what, PartitionInfo):
            return what.leader in muted or TopicPartition(what.topic, what.partition) in muted
        return bool(self.covering(what)) if isinstance(what, TopicPartition) else what in muted

    def leader(self, partition: TopicPartition) -> PartitionInfo | None:
        return self._topology.leader(partition)

    @property
    def brokers(self) -> Mapping[int, Broker]:
        """What the producer knows of each."""
        return self._topology.brokers

    def available_nodes(self) -> Set[int]:
        """Brokers that lead a partition that is not muted."""
        versions = self.local.version, self._topology.version
        if versions != self._available[0]:
            infos = (info for _, info in self._all() if info.leader >= 0 and not self.is_muted(info))
            self._available = versions, frozenset(info.leader for info in infos)
        return self._available[1]

    def ask(self, node_id: int) -> None:
        """Send a broker a request without rows; ``ProducerStatusContext.probed_ms`` has its response."""
        self.probes.ask_broker(node_id)

    def mute_congested(self, node_id: int) -> None:
        """Keyless rows of this producer avoid a broker until unmute_congested. This is no trip and no probe
        follows."""
        self.congested |= {node_id}

    def unmute_congested(self, node_id: int) -> None:
        if node_id in self.congested:
            self.congested -= {node_id}

    # -- for the sender: which mutes cover a partition ----------------------------------------------

    def covering(self, partition: TopicPartition) -> list[Target]:
        """The muted targets that cover a partition: its leader before itself."""
        candidates: tuple[Target, ...] = (self._leader_id(partition), partition)
        return [target for target in candidates if target in self.local.mutes]

    def has_muted_leader(self, partition: TopicPartition) -> bool:
        return self._leader_id(partition) in self.local.mutes

    def mute_of(self, partition: TopicPartition) -> Mute | None:
        """The mute that covers a partition; the broker's before the partition's own. Any thread."""
        covering = self.covering(partition) if self.local.mutes else []
        return self.local.mutes.get(covering[0]) if covering else None

    def leaderless_topics(self) -> list[str]:
        return [name for name in self._topology.names() if any(info.leader < 0 for info in self._infos(name))]

    def _leader_id(self, partition: TopicPartition) -> int:
        """A partition's leader; without one, the muted broker that led it last.

        The cluster takes the leadership from a broker that is gone for long. Where no other can lead, the
        partition is no better off.
        """
        info = self._topology.leader(partition)
        if info is None or info.leader == NO_LEADER:
            return self._muted_leaders.get(partition, NO_LEADER)
        return info.leader

    def _of_node(self, node_id: int, *, muted: bool) -> dict[str, list[PartitionInfo]]:
        found: dict[str, list[PartitionInfo]] = {}
        for partition, info in self._all():
            if self._leader_id(partition) == node_id and self.is_muted(partition) is muted:
                found.setdefault(partition.topic, []).append(info)
        return found

    def _infos(self, topic: str) -> Sequence[PartitionInfo]:
        found = self._topology.topic(topic)
        return () if found is None else found.partitions

    def _all(self) -> Iterator[tuple[TopicPartition, PartitionInfo]]:
        for name in self._topology.names():
            for info in self._infos(name):
                yield TopicPartition(name, info.partition), info

    # -- for the sender: once in each pass ----------------------------------------------------------

    def apply_shared(self, muted: Mapping[Target, str], leases: Mapping[Target, ProbeLease]) -> None:
        """Take the coordinator's mutes, with their reasons, and its new leases for this task."""
        self.local.apply_shared(muted)
        self.probes.grant(leases)

    def on_coordinator_lost(self) -> None:
        """From now on this task's own clock decides when to probe."""
        self.local.on_coordinator_lost()
        self.probes.on_coordinator_lost()

    def refresh(self) -> MutedView:
        """Run what other threads called, and bring ``view`` up to date. The calling thread is the sender's
        from now on."""
        self._owner = threading.get_ident()
        for _ in range(len(self._queued)):
            self._queued.popleft()()
        local, trials = self.local, _NO_TRIALS
        if local.mutes:
            local.expire_late(local.now_ms)
            trials = self.probes.trials()
        seen = (local.version, self._topology.version)
        if seen != self.seen or trials != self._trials:
            self.seen, self._trials = seen, trials
            self._muted_leaders = dict(self._find_muted_leaders()) if local.mutes else {}
            self.muted_count, known, available = self._count() if local.mutes else (0, 0, 0)
            # Mutes hold before any metadata has come.
            self.view = self._build() if local.mutes and (available or not known) else NOTHING_MUTED
        return self.view

    def _is_other_thread(self) -> bool:
        return self._owner not in (None, threading.get_ident())

    def _build(self) -> MutedView:
        muted = self.local.mutes.keys() - self._trials
        by_themselves = (target for target in muted if isinstance(target, TopicPartition))
        return MutedView(
            frozenset(target for target in muted if isinstance(target, int)),
            frozenset((*by_themselves, *self._leaderless())),
            self._topology.leader,
        )

    def _find_muted_leaders(self) -> Iterator[tuple[TopicPartition, int]]:
        for partition, info in self._all():
            leader = self._muted_leaders.get(partition, NO_LEADER) if info.leader < 0 else info.leader
            if leader in self.local.mutes:
                yield partition, leader

    def _leaderless(self) -> Iterator[TopicPartition]:
        """Partitions without a leader that a muted broker led last."""
        for partition in self._muted_leaders:
            info = self._topology.leader(partition)
            if info is not None and info.leader == NO_LEADER:
                yield partition

    def _count(self) -> tuple[int, int, int]:
        """Muted, known and available partitions. One without a leader that nothing mutes is only known."""
        muted = known = available = 0
        for partition, info in self._all():
            known += 1
            if self.is_muted(partition):
                muted += 1
            elif info.leader >= 0:
                available += 1
        return muted, known, available
