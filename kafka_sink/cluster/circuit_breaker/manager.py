"""Who is muted, and which batch may probe (KIP-693's CircuitBreakManager)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from kafka_sink.cluster.circuit_breaker.states import BreakerState, Mute, MuteBook, Target
from kafka_sink.cluster.circuit_breaker.verdict import Verdict, answered, judge
from kafka_sink.model import PartitionInfo, TopicMetadata, TopicPartition


class Topology(Protocol):
    """What is known of the cluster; MetadataCache and ClusterView are such."""

    @property
    def version(self) -> int: ...

    def names(self) -> tuple[str, ...]: ...

    def topic(self, name: str) -> TopicMetadata | None: ...

    def leader(self, partition: TopicPartition) -> PartitionInfo | None: ...


@dataclass(frozen=True, slots=True)
class Change:
    """Something was muted, or unmuted. ``own``: decided here, so that the coordinator is to hear of it."""

    target: Target
    muted: bool
    reason: str
    own: bool


@dataclass(frozen=True, slots=True)
class BreakerMetrics:
    """``muted-partitions``, ``breaker-trips-total`` and ``probes`` of one producer."""

    muted_partitions: int
    breaker_trips_total: int
    probes: int


class Mutes:
    """An immutable view of what rests, for any thread: a broker's partitions follow their leader."""

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


NOTHING_MUTED = Mutes()


class CircuitBreakManager:
    """Mutes brokers and partitions, and lets probes through. One thread uses it; any may read ``mutes``.

    The KIP's calls take no time, so the owner sets ``now_ms`` before it lets a breaker class act.
    ``coordinated``: probes go only under a lease of the coordinator's.
    """

    def __init__(self, topology: Topology, retry_interval_ms: float) -> None:
        self.now_ms = 0.0
        self.coordinated = False
        # What is muted, or nothing where everything is: then the job goes on as if nothing was.
        self.mutes: Mutes = NOTHING_MUTED
        # Brokers that keyless rows avoid for the moment, see mute_congested.
        self.congested: frozenset[int] = frozenset()
        self._topology = topology
        self._book = MuteBook(retry_interval_ms)
        self._changes: list[Change] = []
        # The partition whose batch is a target's probe, kept until the mute ends, as answers may be late.
        self._probes: dict[Target, TopicPartition] = {}
        # Targets that the coordinator's last word had muted; leases it gave to this task, with their ends.
        self._shared: frozenset[Target] = frozenset()
        self._leases: dict[Target, float] = {}
        self._own_trips = 0
        self._muted_count = 0
        self._seen = (-1, -1)
        self._closed = False

    # -- the KIP's methods --------------------------------------------------------------------------

    def mute(self, target: int | TopicPartition, reason: str = "muted by the breaker class") -> None:
        """Mutes a broker's partitions, whoever they are at any time, or one partition."""
        self._mute(target, reason, own=True)

    def unmute(self, target: int | TopicPartition, reason: str = "unmuted by the breaker class") -> None:
        """Ends a mute."""
        if self._book.reset(target):
            self._note_unmute(target, reason, own=True)

    def available_partitions_for_topic(self, topic: str) -> list[PartitionInfo]:
        """Partitions with a leader that are not muted."""
        return [info for info in self._led(topic) if not self.is_muted(info)]

    def muted_partitions_for_topic(self, topic: str) -> list[PartitionInfo]:
        """Partitions that are muted."""
        return [info for info in self._led(topic) if self.is_muted(info)]

    def available_partitions_for_node(self, node_id: int) -> dict[str, list[PartitionInfo]]:
        """By topic, the partitions that a broker leads and that are not muted."""
        return self._of_node(node_id, muted=False)

    def muted_partitions_for_node(self, node_id: int) -> dict[str, list[PartitionInfo]]:
        """By topic, the muted partitions that a broker leads."""
        return self._of_node(node_id, muted=True)

    def close(self) -> None:
        """Nothing is muted from here on."""
        self._closed = True
        self._book.mutes.clear()
        self.mutes, self.congested = NOTHING_MUTED, frozenset()

    # -- more for breaker classes -------------------------------------------------------------------

    def is_muted(self, what: int | TopicPartition | PartitionInfo) -> bool:
        """Whether a broker, or a partition by itself or with its leader, is muted."""
        if isinstance(what, PartitionInfo):
            return what.leader in self._book.mutes or TopicPartition(what.topic, what.partition) in (
                self._book.mutes
            )
        if isinstance(what, TopicPartition) and what not in self._book.mutes:
            info = self._topology.leader(what)
            return info is not None and info.leader in self._book.mutes
        return what in self._book.mutes

    def mute_congested(self, node_id: int) -> None:
        """Keyless rows avoid a broker until unmute_congested: no trip, no probe, of this producer alone."""
        self.congested |= {node_id}

    def unmute_congested(self, node_id: int) -> None:
        """Ends mute_congested."""
        if node_id in self.congested:
            self.congested -= {node_id}

    def leader(self, partition: TopicPartition) -> PartitionInfo | None:
        """A partition's leader as far as known."""
        return self._topology.leader(partition)

    def others_available(self, node_id: int) -> bool:
        """Whether any partition would be left if this broker was muted."""
        return any(
            info.leader != node_id and not self.is_muted(info)
            for name in self._topology.names()
            for info in self._led(name)
        )

    # -- the owner: the coordinator's word ------------------------------------------------------------

    def take_shared(self, muted: Mapping[Target, str], leases: Mapping[Target, float]) -> None:
        """The coordinator's mutes with their reasons, and leases of this task with milliseconds left.

        What was muted here and the coordinator has not heard of yet stays muted.
        """
        self.coordinated = True
        for target in self._shared - muted.keys():
            if self._book.reset(target):
                self._note_unmute(target, "another task's probe got through", own=False)
        for target, reason in muted.items():
            self._mute(target, reason, own=False)
        self._shared = frozenset(muted)
        self._leases = {target: self.now_ms + left for target, left in leases.items()}

    def lose_coordinator(self) -> None:
        """From here on this task's own clock decides when to probe."""
        self.coordinated = False
        self._shared = frozenset()
        self._leases.clear()

    def take_changes(self) -> list[Change]:
        """What changed since the last call."""
        changes, self._changes = self._changes, []
        return changes

    # -- the owner: probes ----------------------------------------------------------------------------

    def may_probe(self, partition: TopicPartition) -> bool:
        """Whether a batch of this muted partition may go now, as the probe of what mutes it.

        A broker's probe may be of any of its partitions, also one that is muted by itself.
        """
        info = self._topology.leader(partition)
        leader = -1 if info is None else info.leader
        return self._is_due(leader if leader in self._book.mutes else partition)

    def _is_due(self, target: Target) -> bool:
        if self.coordinated and target in self._shared:
            mute = self._book.mutes.get(target)
            free = mute is not None and mute.state is BreakerState.OPEN
            return free and self._leases.get(target, -math.inf) > self.now_ms
        return self._book.is_due(target, self.now_ms)

    def sent(self, partition: TopicPartition) -> None:
        """A batch goes out; the probe, where its partition is muted."""
        if self._book.mutes:
            for target in self.covering(partition):
                if self._is_due(target):
                    self._book.probe(target, self.now_ms)
                    self._probes[target] = partition
                    self._leases.pop(target, None)

    def completed(self, partition: TopicPartition, exception: Exception | None) -> None:
        """An attempt has ended; decides on what it was the probe of."""
        if not self._book.mutes:
            return
        for target in self.covering(partition):
            mute = self._book.mutes.get(target)
            if mute is None:
                # Unmuted together with its broker.
                continue
            if exception is not None:
                mute.last_error = str(exception)
            if self._probes.get(target) != partition:
                continue
            verdict = judge(exception)
            # A broker that answers is there, whatever it says of one partition.
            if verdict is Verdict.HEALTHY or (isinstance(target, int) and answered(exception)):
                self._book.succeed(target)
                self._note_unmute(target, "a probe got through", own=True)
                if verdict is Verdict.HEALTHY and self._book.reset(partition):
                    self._note_unmute(partition, "a probe got through", own=True)
            elif verdict is Verdict.SICK:
                self._book.fail(target, str(exception), self.now_ms)
            elif mute.state is BreakerState.HALF_OPEN:
                self._book.expire(target, self.now_ms)

    def covering(self, partition: TopicPartition) -> list[Target]:
        """What mutes a partition: its leader before itself."""
        info = self._topology.leader(partition)
        candidates: Iterable[Target] = (partition,) if info is None else (info.leader, partition)
        return [target for target in candidates if target in self._book.mutes]

    def refresh(self) -> Mutes:
        """Ends lost probes and brings ``mutes`` up to date; returns it."""
        self._book.expire_late(self.now_ms)
        seen = (self._book.version, self._topology.version)
        if seen != self._seen:
            self._seen = seen
            available = list(self._available()) if self._book.mutes else []
            self._muted_count = available.count(False)
            self.mutes = self._view() if any(available) else NOTHING_MUTED
        return self.mutes

    def _view(self) -> Mutes:
        return Mutes(
            frozenset(target for target in self._book.mutes if isinstance(target, int)),
            frozenset(target for target in self._book.mutes if isinstance(target, TopicPartition)),
            self._topology.leader,
        )

    def _available(self) -> Iterator[bool]:
        for name in self._topology.names():
            for info in self._led(name):
                yield not self.is_muted(info)

    def next_change_ms(self) -> float:
        """Milliseconds until a probe may go, or one counts as lost; infinite where nothing is muted."""
        return self._book.next_change_ms(self.now_ms)

    def mute_of(self, partition: TopicPartition) -> Mute | None:
        """What mutes a partition; the broker's mute before the partition's own. Any thread."""
        covering = self.covering(partition) if self._book.mutes else []
        return self._book.mutes.get(covering[0]) if covering else None

    def mute_targets(self) -> tuple[Target, ...]:
        """Everything that is muted."""
        return tuple(self._book.mutes)

    def metrics(self) -> BreakerMetrics:
        """As of the last refresh; trips are those that this task's breaker found itself. Any thread."""
        return BreakerMetrics(self._muted_count, self._own_trips, self._book.probes)

    # -- inside -------------------------------------------------------------------------------------

    def _mute(self, target: Target, reason: str, *, own: bool) -> None:
        if not self._closed and self._book.trip(target, reason, self.now_ms):
            self._own_trips += own
            self._changes.append(Change(target, True, reason, own))

    def _note_unmute(self, target: Target, reason: str, *, own: bool) -> None:
        self._probes.pop(target, None)
        self._leases.pop(target, None)
        self._changes.append(Change(target, False, reason, own))

    def _led(self, topic: str) -> list[PartitionInfo]:
        found = self._topology.topic(topic)
        return [] if found is None else [info for info in found.partitions if info.leader >= 0]

    def _of_node(self, node_id: int, *, muted: bool) -> dict[str, list[PartitionInfo]]:
        result: dict[str, list[PartitionInfo]] = {}
        for name in self._topology.names():
            wanted = [i for i in self._led(name) if i.leader == node_id and self.is_muted(i) is muted]
            if wanted:
                result[name] = wanted
        return result
