"""An immutable view of what is muted, for any thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from kafka_sink.breaker.states import LocalMutes, Mute, Target
from kafka_sink.model import NO_LEADER, PartitionInfo, TopicMetadata, TopicPartition


class MutedView:
    """Contains a partition if it is muted by itself or if its present leader is muted."""

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


# From muted brokers and partitions to the partitions that get no requests, by their present leaders.


class Topology(Protocol):
    """What is known of the cluster. MetadataCache and ClusterMetadata implement it."""

    @property
    def version(self) -> int: ...

    def names(self) -> tuple[str, ...]: ...

    def topic(self, name: str) -> TopicMetadata | None: ...

    def leader(self, partition: TopicPartition) -> PartitionInfo | None: ...


class MutedPartitions:
    """Answers for partitions what LocalMutes knows of targets. The sender's thread; any may read ``view``.

    ``view`` is what sender and partitioner follow. It is empty where no partition would be left: then the
    sender goes on as if nothing was muted.
    """

    def __init__(self, mutes: LocalMutes, topology: Topology) -> None:
        self.view: MutedView = NOTHING_MUTED
        # As of the last refresh.
        self.muted_count = 0
        self._muted = mutes.table.mutes
        self._table = mutes.table
        self._topology = topology
        # The muted brokers of partitions, from when a leader was last known.
        self._muted_leaders: dict[TopicPartition, int] = {}
        # The versions of mutes and topology that the view shows.
        self._seen = (-1, -1)
        self._trials: frozenset[Target] = frozenset()

    # -- one partition or broker --------------------------------------------------------------------

    def covering(self, partition: TopicPartition) -> list[Target]:
        """The muted targets that cover a partition: its leader before itself."""
        candidates: tuple[Target, ...] = (self._leader_id(partition), partition)
        return [target for target in candidates if target in self._muted]

    def is_muted(self, what: int | TopicPartition | PartitionInfo) -> bool:
        if isinstance(what, PartitionInfo):
            return what.leader in self._muted or TopicPartition(what.topic, what.partition) in self._muted
        return bool(self.covering(what)) if isinstance(what, TopicPartition) else what in self._muted

    def has_muted_leader(self, partition: TopicPartition) -> bool:
        return self._leader_id(partition) in self._muted

    def mute_of(self, partition: TopicPartition) -> Mute | None:
        """The mute that covers a partition; the broker's before the partition's own. Any thread."""
        covering = self.covering(partition) if self._muted else []
        return self._muted.get(covering[0]) if covering else None

    def leader(self, partition: TopicPartition) -> PartitionInfo | None:
        return self._topology.leader(partition)

    def _leader_id(self, partition: TopicPartition) -> int:
        """A partition's leader; without one, the muted broker that led it last.

        The cluster takes the leadership from a broker that is gone for long. Where no other can lead, the
        partition is no better off.
        """
        info = self._topology.leader(partition)
        if info is None or info.leader == NO_LEADER:
            return self._muted_leaders.get(partition, NO_LEADER)
        return info.leader

    # -- many partitions ----------------------------------------------------------------------------

    def available_for_topic(self, topic: str) -> list[PartitionInfo]:
        return [info for info in self._infos(topic) if info.leader >= 0 and not self.is_muted(info)]

    def muted_for_topic(self, topic: str) -> list[PartitionInfo]:
        return [info for info in self._infos(topic) if self.is_muted(TopicPartition(topic, info.partition))]

    def for_node(self, node_id: int, *, muted: bool) -> dict[str, list[PartitionInfo]]:
        """By topic, the partitions that a broker leads, or led last, and that are muted or are not."""
        result: dict[str, list[PartitionInfo]] = {}
        for name in self._topology.names():
            found = [
                info for info in self._infos(name) if self._matches(name, info, node_id=node_id, muted=muted)
            ]
            if found:
                result[name] = found
        return result

    def _matches(self, topic: str, info: PartitionInfo, *, node_id: int, muted: bool) -> bool:
        partition = TopicPartition(topic, info.partition)
        return self._leader_id(partition) == node_id and self.is_muted(partition) is muted

    def available_nodes(self) -> set[int]:
        return {
            info.leader
            for name in self._topology.names()
            for info in self._infos(name)
            if info.leader >= 0 and not self.is_muted(info)
        }

    def leaderless_topics(self) -> list[str]:
        return [name for name in self._topology.names() if any(info.leader < 0 for info in self._infos(name))]

    def _infos(self, topic: str) -> Sequence[PartitionInfo]:
        found = self._topology.topic(topic)
        return () if found is None else found.partitions

    # -- the view -----------------------------------------------------------------------------------

    def refresh(self, trials: frozenset[Target]) -> MutedView:
        """Bring ``view`` up to date. ``trials``: muted partitions that new rows may go to."""
        seen = (self._table.version, self._topology.version)
        if seen != self._seen or trials != self._trials:
            self._seen, self._trials = seen, trials
            self._muted_leaders = dict(self._find_muted_leaders()) if self._muted else {}
            self.muted_count, known, available = self._count() if self._muted else (0, 0, 0)
            # Mutes hold before any metadata has come.
            self.view = self._build() if self._muted and (available or not known) else NOTHING_MUTED
        return self.view

    def close(self) -> None:
        self.view = NOTHING_MUTED

    def _build(self) -> MutedView:
        muted = self._muted.keys() - self._trials
        by_themselves = (target for target in muted if isinstance(target, TopicPartition))
        return MutedView(
            frozenset(target for target in muted if isinstance(target, int)),
            frozenset((*by_themselves, *self._leaderless())),
            self._topology.leader,
        )

    def _find_muted_leaders(self) -> Iterator[tuple[TopicPartition, int]]:
        for name in self._topology.names():
            for info in self._infos(name):
                partition = TopicPartition(name, info.partition)
                leader = self._muted_leaders.get(partition, NO_LEADER) if info.leader < 0 else info.leader
                if leader in self._muted:
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
        for name in self._topology.names():
            for info in self._infos(name):
                known += 1
                if self.is_muted(TopicPartition(name, info.partition)):
                    muted += 1
                elif info.leader >= 0:
                    available += 1
        return muted, known, available
