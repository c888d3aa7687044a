"""KIP-693's CircuitBreakManager: a breaker class uses it to mute, and to ask for partitions and brokers."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Set
from functools import partial

from kafka_sink.breaker.mutes import NO_EVIDENCE, Evidence, MutedPartitions, target_of
from kafka_sink.breaker.task_mutes import TaskMutes
from kafka_sink.cluster.broker import Broker
from kafka_sink.cluster.partition import Partition
from kafka_sink.cluster.producer_metadata import ProducerMetadata
from kafka_sink.model import NO_LEADER, PartitionMetadata, Target, TopicPartition
from kafka_sink.printable import one_line


class CircuitBreakManager:
    """The object through which a breaker class mutes and unmutes. The class is called on the sender's thread.

    Any thread may call ``mute`` and ``unmute``. A call on another thread takes effect in the sender's next
    pass. ``partition`` returns the producer's own ``Partition`` object, or None.

    Examples:
        >>> manager.mute(TopicPartition("orders", 3), "my monitoring reports a full disk")
        >>> manager.unmute(TopicPartition("orders", 3), "the disk has room again")
    """

    def __init__(
        self,
        cluster: ProducerMetadata,
        retry_interval_ms: float,
        partition: Callable[[TopicPartition], Partition | None],
    ) -> None:
        self.task_mutes: TaskMutes = TaskMutes(cluster, retry_interval_ms, partition)
        self.partition = partition
        # The producer's own objects for brokers, and its look-up of a partition's leader.
        self.brokers: Mapping[int, Broker] = cluster.brokers
        self.leader: Callable[[TopicPartition], PartitionMetadata | None] = cluster.leader
        # The number of rows whose first attempt has ended, over the producer's life.
        self.rows = 0
        # See ``mute_congested``. The sender's thread replaces the set, so any thread may read it.
        self.congested: Set[int] = frozenset()
        self._cluster = cluster
        # The result of ``available_nodes``, and the versions of mutes and metadata that it belongs to.
        self._available: tuple[tuple[int, int], Set[int]] = (-1, -1), frozenset()
        # The id of the sender's thread, once it has run, and the calls of ``mute`` and ``unmute`` on other
        # threads. Those threads only append and the sender's only removes: a deque does either in one step.
        self._owner: int | None = None
        self._queued: deque[Callable[[], None]] = deque()
        # Called after each mute and unmute, on the thread of that call.
        self.on_call: Callable[[], None] = lambda: None

    # -- the KIP's methods --------------------------------------------------------------------------

    def mute(
        self,
        target: int | TopicPartition,
        reason: str = "muted by the breaker class",
        evidence: Evidence = NO_EVIDENCE,
    ) -> None:
        """Mute a partition, or a broker and with it all partitions that it leads at any time.

        Args:
            target: A partition, or the id of a broker.
            reason: The reason, for the log and the live view.
            evidence: Why it is muted. The coordinator weighs it against the evidence of other tasks.

        Raises:
            ValueError: ``target`` is neither a broker's id nor a valid partition.
        """
        target = target_of(target)
        self._on_sender(partial(self.task_mutes.mute, target, one_line(str(reason)), evidence, own=True))

    def unmute(self, target: int | TopicPartition, reason: str = "unmuted by the breaker class") -> None:
        """End a mute. Does nothing if the target is not muted.

        Args:
            target: A partition, or the id of a broker.
            reason: The reason, for the log and the live view.

        Raises:
            ValueError: ``target`` is neither a broker's id nor a valid partition.
        """
        target = target_of(target)
        self._on_sender(partial(self.task_mutes.unmute, target, one_line(str(reason)), own=True))

    def _on_sender(self, change: Callable[[], None]) -> None:
        if self._owner in (None, threading.get_ident()):
            change()
        else:
            self._queued.append(change)
        self.on_call()

    def available_partitions_for_topic(self, topic: str) -> list[PartitionMetadata]:
        """The partitions of a topic that have a leader and are not muted."""
        partitions = self.task_mutes.partitions(topic)
        return [info for name, info in partitions if info.leader >= 0 and not self.is_muted(name)]

    def muted_partitions_for_topic(self, topic: str) -> list[PartitionMetadata]:
        """The partitions of a topic that are muted themselves or with their (last) leader."""
        return [info for name, info in self.task_mutes.partitions(topic) if self.is_muted(name)]

    def available_partitions_for_node(self, node_id: int) -> dict[str, list[PartitionMetadata]]:
        """The partitions that a broker leads and that are not muted, by topic."""
        return self._of_node(node_id, muted=False)

    def muted_partitions_for_node(self, node_id: int) -> dict[str, list[PartitionMetadata]]:
        """The muted partitions that a broker leads, or led last, by topic."""
        return self._of_node(node_id, muted=True)

    def close(self) -> None:
        """Unmute everything. Later mutes have no effect."""
        self.task_mutes.close()
        self.congested = frozenset()

    # -- methods that the KIP does not have ---------------------------------------------------------

    def is_muted(self, target: Target) -> bool:
        """Whether a broker is muted, or a partition itself or its leader is muted."""
        if isinstance(target, TopicPartition):
            return bool(self.task_mutes.covering(target))
        return target in self.task_mutes.mutes

    def available_nodes(self) -> Set[int]:
        """The brokers that lead at least one partition that is not muted."""
        versions = self.task_mutes.version, self._cluster.version
        if versions != self._available[0]:
            leaders = {info.leader for name, info in self.task_mutes.partitions() if not self.is_muted(name)}
            self._available = versions, frozenset(leaders) - {NO_LEADER}
        return self._available[1]

    def ask(self, node_id: int) -> None:
        """Send a broker a request without rows. ``Broker.probed_ms`` is the time of its response."""
        if (broker := self.brokers.get(node_id)) is not None:
            broker.is_to_be_asked = True

    def mute_congested(self, node_id: int) -> None:
        """Let this producer's keyless rows avoid a broker until ``unmute_congested``.

        This does not count as a mute, and no probe follows.
        """
        self.congested |= {node_id}

    def unmute_congested(self, node_id: int) -> None:
        if node_id in self.congested:
            self.congested -= {node_id}

    def _of_node(self, node_id: int, *, muted: bool) -> dict[str, list[PartitionMetadata]]:
        by_topic: dict[str, list[PartitionMetadata]] = {}
        for partition, info in self.task_mutes.partitions():
            if self.task_mutes.leader_id(partition) == node_id and self.is_muted(partition) is muted:
                by_topic.setdefault(partition.topic, []).append(info)
        return by_topic

    def refresh(self) -> MutedPartitions:
        """Run the calls that other threads have queued, and return what is muted now.

        The calling thread counts as the sender's from now on.
        """
        self._owner = threading.get_ident()
        for _ in range(len(self._queued)):
            self._queued.popleft()()
        return self.task_mutes.publish()
