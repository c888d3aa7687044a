"""Who is muted, and what may probe (KIP-693's CircuitBreakManager).

A broker's probe is a request without rows; only a partition's needs a batch.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Protocol

from kafka_sink.breaker.health import Health, has_response, health_of
from kafka_sink.breaker.states import BreakerState, Mute, MuteTable, Target, target_of
from kafka_sink.breaker.values import (
    NO_EVIDENCE,
    NOTHING_MUTED,
    BreakerMetrics,
    Evidence,
    MuteChange,
    MutedView,
    ProbeLease,
    ongoing_mute,
)
from kafka_sink.model import NO_LEADER, PartitionInfo, TopicMetadata, TopicPartition

# A sender looks at what waits at least once a second.
_HELD_MS = 1_500.0


class Topology(Protocol):
    """What is known of the cluster; MetadataCache and ClusterMetadata are such."""

    @property
    def version(self) -> int: ...

    def names(self) -> tuple[str, ...]: ...

    def topic(self, name: str) -> TopicMetadata | None: ...

    def leader(self, partition: TopicPartition) -> PartitionInfo | None: ...


class CircuitBreakManager:
    """Mutes brokers and partitions, and lets probes through. One thread uses it; any may read ``mutes``, and
    call the KIP's methods: what another thread mutes or unmutes holds from the owner's next ``refresh`` on.

    The KIP's calls take no time, so the owner sets ``now_ms`` before it lets a breaker class act.
    ``coordinated``: probes go only under a lease of the coordinator's. ``awaits``: whether a target owes an
    answer, which would tell as much as a probe's.
    """

    def __init__(self, topology: Topology, retry_interval_ms: float) -> None:
        self.now_ms = 0.0
        self.coordinated = False
        self.awaits: Callable[[Target], bool] = lambda _: False
        # What is muted, or nothing where everything is: then the job goes on as if nothing was.
        self.mutes: MutedView = NOTHING_MUTED
        # Brokers that keyless rows avoid for the moment, see mute_congested.
        self.congested: frozenset[int] = frozenset()
        self._topology = topology
        self._book = MuteTable(retry_interval_ms)
        self._changes: list[MuteChange] = []
        # The partition whose batch is a target's probe, kept until the mute ends, as answers may be late.
        self._probes: dict[Target, TopicPartition] = {}
        # Targets that the coordinator's last word had muted; leases it gave to this task, with their ends.
        self._shared: frozenset[Target] = frozenset()
        self._leases: dict[Target, float] = {}
        self._trial_leases: set[Target] = set()
        # Brokers that owe the answer to a probe; one request at a time, however long it takes.
        self._probed_nodes: set[int] = set()
        # Brokers that the coordinator asks about, muted or not: to be asked, and asked.
        self._questions: set[int] = set()
        self._questioned: set[int] = set()
        # Mutes that were decided here, probes that failed, when a batch was last seen to wait for a target.
        self._own: dict[Target, MuteChange] = {}
        self._failures: list[tuple[Target, str]] = []
        self._held_ms: dict[Target, float] = {}
        # When the task last had rows of a topic that choose their partition freely. Written by its thread.
        self._free_rows_ms: dict[str, float] = {}
        self._trials: frozenset[Target] = frozenset()
        # The muted brokers of partitions that they led when last a leader was known.
        self._muted_leaders: dict[TopicPartition, int] = {}
        self._own_trips = 0
        self._muted_count = 0
        self._seen = (-1, -1)
        self._closed = False
        # Who refreshes, and what other threads want muted or unmuted.
        self._owner: int | None = None
        self._wanted: deque[partial[None]] = deque()

    # -- the KIP's methods --------------------------------------------------------------------------

    def mute(
        self,
        target: int | TopicPartition,
        reason: str = "muted by the breaker class",
        evidence: Evidence = NO_EVIDENCE,
    ) -> None:
        """Mutes a broker's partitions, whoever they are at any time, or one. Raises ValueError for others."""
        target = target_of(target)
        if self._is_elsewhere():
            self._wanted.append(partial(self.mute, target, reason, evidence))
        else:
            self._mute(target, str(reason), evidence, own=True)

    def unmute(self, target: int | TopicPartition, reason: str = "unmuted by the breaker class") -> None:
        """Ends a mute. Raises ValueError for what cannot be muted."""
        target = target_of(target)
        if self._is_elsewhere():
            self._wanted.append(partial(self.unmute, target, reason))
        elif self._book.reset(target):
            self._note_unmute(target, str(reason), own=True)

    def _is_elsewhere(self) -> bool:
        return self._owner not in (None, threading.get_ident())

    def available_partitions_for_topic(self, topic: str) -> list[PartitionInfo]:
        """Partitions with a leader that are not muted."""
        return [info for info in self._led(topic) if not self.is_muted(info)]

    def muted_partitions_for_topic(self, topic: str) -> list[PartitionInfo]:
        """Partitions that are muted, by themselves or with the broker that leads them, or led them last."""
        found = self._topology.topic(topic)
        infos = () if found is None else found.partitions
        return [info for info in infos if self.is_muted(TopicPartition(topic, info.partition))]

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
        return bool(self.covering(what)) if isinstance(what, TopicPartition) else what in self._book.mutes

    def rests_with_leader(self, partition: TopicPartition) -> bool:
        """Whether a partition's leader is muted."""
        return self._leader_id(partition) in self._book.mutes

    def mute_congested(self, node_id: int) -> None:
        """Keyless rows avoid a broker until unmute_congested: no trip, no probe, of this producer alone."""
        self.congested |= {node_id}

    def unmute_congested(self, node_id: int) -> None:
        """Ends mute_congested."""
        if node_id in self.congested:
            self.congested -= {node_id}

    def forget_congested(self) -> None:
        """Nobody is left to end mute_congested."""
        self.congested = frozenset()

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

    def apply_shared(self, muted: Mapping[Target, str], leases: Mapping[Target, ProbeLease]) -> None:
        """The coordinator's mutes with their reasons, and new leases of this task.

        What was muted here and the coordinator has not heard of, or does not hold with, stays muted.
        """
        self.coordinated = True
        for target in self._shared - muted.keys():
            if self._book.reset(target):
                self._note_unmute(target, "another task's batch got through", own=False)
        for target, reason in muted.items():
            self._mute(target, reason, own=False)
        self._shared = frozenset(muted)
        for target, lease in leases.items():
            self._leases[target] = self.now_ms + lease.left_ms
            (self._trial_leases.add if lease.trial else self._trial_leases.discard)(target)

    def on_coordinator_lost(self) -> None:
        """From here on this task's own clock decides when to probe."""
        self.coordinated = False
        self._shared = frozenset()
        self._leases.clear()
        self._questions.clear()
        self._questioned.clear()

    def mutes_to_report(self) -> list[MuteChange]:
        """All that rests, for a coordinator that may have begun anew: brokers by their silence until now."""
        return [
            ongoing_mute(self._own.get(one.target), one, self.now_ms) for one in self._book.mutes.values()
        ]

    def held(self) -> list[Target]:
        """Muted targets that batches of this task wait for."""
        return [target for target in self._book.mutes if self._is_held(target)]

    def wanted(self) -> list[Target]:
        """Muted partitions that no batch of this task waits for, but rows of it might go to."""
        partitions = [target for target in self._book.mutes if isinstance(target, TopicPartition)]
        return [one for one in partitions if self._has_free_rows(one) and not self._is_held(one)]

    def note_free_rows(self, topics: Iterable[str]) -> None:
        """The task has rows of these topics that may go to any partition. The task's thread."""
        for topic in topics:
            self._free_rows_ms[topic] = self.now_ms

    def _has_free_rows(self, target: TopicPartition) -> bool:
        return self.now_ms - self._free_rows_ms.get(target.topic, -math.inf) <= _HELD_MS

    def take_failures(self) -> list[tuple[Target, str]]:
        """Probes that failed since the last call, with their errors."""
        failures, self._failures = self._failures, []
        return failures

    def take_changes(self) -> list[MuteChange]:
        """What changed since the last call."""
        changes, self._changes = self._changes, []
        return changes

    # -- the owner: probes ----------------------------------------------------------------------------

    def brokers_to_probe(self) -> list[int]:
        """Brokers that are to be sent a request without rows now: muted ones, and those in doubt."""
        if not self._book.mutes and not self._questions:
            return []
        due = [target for target in self._book.mutes if isinstance(target, int) and self._is_due(target)]
        return [node for node in {*due, *self._questions} if node not in self._probed_nodes]

    def ask_broker(self, node_id: int) -> None:
        """The coordinator wants to know whether a broker answers this task."""
        self._questions.add(node_id)

    def probe_sent(self, node_id: int) -> None:
        """A request without rows goes to a broker."""
        self._probed_nodes.add(node_id)
        if node_id in self._questions:
            self._questions.discard(node_id)
            self._questioned.add(node_id)
        if self._is_due(node_id):
            self._begin_probe(node_id)

    def probe_done(self, node_id: int, cause: Exception | None) -> bool:
        """The request without rows has its answer, or will have none. A late answer counts too.

        True where the answer is what the coordinator asked for.
        """
        self._probed_nodes.discard(node_id)
        was_asked = node_id in self._questioned
        self._questioned.discard(node_id)
        if has_response(cause):
            self.connected(node_id)
            return was_asked
        mute = self._book.mutes.get(node_id)
        if mute is not None:
            mute.last_error = str(cause)
            self._book.fail(node_id, str(cause), self.now_ms)
            self._failures.append((node_id, str(cause)))
        return False

    def connected(self, node_id: int) -> None:
        """A broker has answered a request without rows, also the first one of a new connection."""
        if self._is_due(node_id):
            self._begin_probe(node_id)
        if self._book.succeed(node_id):
            self._note_unmute(node_id, "it answers again", own=True)

    def leaderless_topics(self) -> list[str]:
        """Topics with a partition that nobody leads."""
        found = ((name, self._topology.topic(name)) for name in self._topology.names())
        return [name for name, topic in found if topic and any(info.leader < 0 for info in topic.partitions)]

    def may_probe(self, partition: TopicPartition) -> bool:
        """Whether a batch of this partition, which is muted by itself, may go now as its probe."""
        covering = self.covering(partition)
        for target in covering:
            self._held_ms[target] = self.now_ms
        return covering == [partition] and self._is_due(partition)

    def note_waiting(self, partitions: Iterable[TopicPartition]) -> None:
        """Batches of these could go but for their brokers, which take none now: a trial's rows are enough."""
        if self._book.mutes:
            for partition in partitions:
                for target in self.covering(partition):
                    self._held_ms[target] = self.now_ms

    def _is_due(self, target: Target) -> bool:
        if self.coordinated and target in self._shared:
            mute = self._book.mutes.get(target)
            free = mute is not None and mute.state is BreakerState.OPEN
            return free and self._leases.get(target, -math.inf) > self.now_ms
        return self._book.is_due(target, self.now_ms)

    def _is_held(self, target: Target) -> bool:
        return self.now_ms - self._held_ms.get(target, -math.inf) <= _HELD_MS

    def _is_on_trial(self, target: Target) -> bool:
        """Whether a partition's probe may go, and no batch waits that could be it, nor an answer: then a new
        row must."""
        if not isinstance(target, TopicPartition) or self.rests_with_leader(target):
            return False
        if not self._is_due(target) or self._is_held(target) or self.awaits(target):
            return False
        if self.coordinated and target in self._shared:
            return target in self._trial_leases
        return self._book.is_due(target, self.now_ms - self._book.retry_interval_ms)

    def sent(self, partition: TopicPartition) -> None:
        """A batch goes out; the probe, where its partition is muted."""
        if self._book.mutes:
            for target in self.covering(partition):
                # A broker's too: where all are muted batches go out as if none was.
                if self._is_due(target):
                    self._begin_probe(target)
                    self._probes[target] = partition

    def _begin_probe(self, target: Target) -> None:
        self._book.probe(target, self.now_ms)
        self._leases.pop(target, None)
        self._trial_leases.discard(target)

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
            verdict = health_of(exception)
            # A broker that answers is there, whatever it says of one partition.
            if verdict is Health.HEALTHY or (isinstance(target, int) and has_response(exception)):
                self._book.succeed(target)
                self._note_unmute(target, "a probe got through", own=True)
                if verdict is Health.HEALTHY and self._book.reset(partition):
                    self._note_unmute(partition, "a probe got through", own=True)
            elif verdict is Health.UNHEALTHY:
                self._book.fail(target, str(exception), self.now_ms)
                self._failures.append((target, str(exception)))
            elif mute.state is BreakerState.HALF_OPEN:
                self._book.expire(target, self.now_ms)

    def covering(self, partition: TopicPartition) -> list[Target]:
        """What mutes a partition: its leader before itself."""
        candidates: tuple[Target, ...] = (self._leader_id(partition), partition)
        return [target for target in candidates if target in self._book.mutes]

    def _leader_id(self, partition: TopicPartition) -> int:
        """A partition's leader. The cluster takes the leadership from a broker that is gone for long, and
        where no other can lead, that makes nothing better: then the muted broker that had it last."""
        info = self._topology.leader(partition)
        if info is None or info.leader == NO_LEADER:
            return self._muted_leaders.get(partition, NO_LEADER)
        return info.leader

    def refresh(self) -> MutedView:
        """Ends lost probes and brings ``mutes`` up to date; returns it."""
        self._owner = threading.get_ident()
        for _ in range(len(self._wanted)):
            self._wanted.popleft()()
        if not self._book.mutes and self._seen == (self._book.version, self._topology.version):
            return self.mutes
        self._book.expire_late(self.now_ms)
        trials = frozenset(target for target in self._book.mutes if self._is_on_trial(target))
        seen = (self._book.version, self._topology.version)
        if seen != self._seen or trials != self._trials:
            self._seen, self._trials = seen, trials
            self._muted_leaders = dict(self._find_muted_leaders()) if self._book.mutes else {}
            self._muted_count, known, available = self._count() if self._book.mutes else (0, 0, 0)
            # Of a cluster of which nothing is known yet, the mutes are known all the same.
            self.mutes = self._view() if self._book.mutes and (available or not known) else NOTHING_MUTED
        return self.mutes

    def _view(self) -> MutedView:
        muted = self._book.mutes.keys() - self._trials
        own = (one for one in muted if isinstance(one, TopicPartition))
        return MutedView(
            frozenset(target for target in muted if isinstance(target, int)),
            frozenset((*own, *self._leaderless())),
            self._topology.leader,
        )

    def _find_muted_leaders(self) -> Iterator[tuple[TopicPartition, int]]:
        for name in self._topology.names():
            found = self._topology.topic(name)
            for info in () if found is None else found.partitions:
                partition = TopicPartition(name, info.partition)
                leader = self._muted_leaders.get(partition, NO_LEADER) if info.leader < 0 else info.leader
                if leader in self._book.mutes:
                    yield partition, leader

    def _leaderless(self) -> Iterator[TopicPartition]:
        """Partitions that a muted broker led until it lost them, and that nobody leads."""
        for partition in self._muted_leaders:
            info = self._topology.leader(partition)
            if info is not None and info.leader == NO_LEADER:
                yield partition

    def _count(self) -> tuple[int, int, int]:
        """Muted, known and available partitions; one without a leader that nothing mutes is neither."""
        muted = known = available = 0
        for name in self._topology.names():
            found = self._topology.topic(name)
            for info in () if found is None else found.partitions:
                known += 1
                if self.is_muted(TopicPartition(name, info.partition)):
                    muted += 1
                elif info.leader >= 0:
                    available += 1
        return muted, known, available

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

    def _mute(self, target: Target, reason: str, evidence: Evidence = NO_EVIDENCE, *, own: bool) -> None:
        if not self._closed and self._book.trip(target, reason, self.now_ms):
            change = MuteChange(target, True, reason, own, evidence)
            self._changes.append(change)
            if own:
                self._own_trips += 1
                self._own[target] = change

    def _note_unmute(self, target: Target, reason: str, *, own: bool) -> None:
        for kept in (self._probes, self._leases, self._held_ms, self._own):
            kept.pop(target, None)
        # What the coordinator says of it until it hears of this is of the mute before.
        self._shared -= {target}
        self._changes.append(MuteChange(target, False, reason, own))

    def _led(self, topic: str) -> list[PartitionInfo]:
        found = self._topology.topic(topic)
        return [] if found is None else [info for info in found.partitions if info.leader >= 0]

    def _of_node(self, node_id: int, *, muted: bool) -> dict[str, list[PartitionInfo]]:
        result: dict[str, list[PartitionInfo]] = {}
        for name in self._topology.names():
            found = self._topology.topic(name)
            wanted = []
            for info in () if found is None else found.partitions:
                partition = TopicPartition(name, info.partition)
                if self._leader_id(partition) == node_id and self.is_muted(partition) is muted:
                    wanted.append(info)
            if wanted:
                result[name] = wanted
        return result
