"""A cluster that tests describe by who leads which partition."""

from __future__ import annotations

from kafka_sink.model import PartitionInfo, TopicMetadata, TopicPartition


class Cluster:
    """``leaders``: by topic, the leader of each partition (-1: none)."""

    def __init__(self, **leaders: list[int]) -> None:
        self.leaders = leaders
        self.version = 0

    def move(self, partition: TopicPartition, node: int) -> None:
        self.leaders[partition.topic][partition.partition] = node
        self.version += 1

    def names(self) -> tuple[str, ...]:
        return tuple(self.leaders)

    def topic(self, name: str) -> TopicMetadata | None:
        found = self.leaders.get(name)
        if found is None:
            return None
        return TopicMetadata(name, None, tuple(PartitionInfo(name, i, n) for i, n in enumerate(found)))

    def leader(self, partition: TopicPartition) -> PartitionInfo | None:
        found = self.leaders.get(partition.topic, [])
        if partition.partition >= len(found):
            return None
        return PartitionInfo(partition.topic, partition.partition, found[partition.partition])
