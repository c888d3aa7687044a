"""An immutable view of what is muted, for any thread."""

from __future__ import annotations

from collections.abc import Callable

from kafka_sink.model import PartitionInfo, TopicPartition


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
