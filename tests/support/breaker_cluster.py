"""A cluster that tests describe by the leaders of its partitions."""

from __future__ import annotations

from collections.abc import Iterable

from kafka_sink.model import PartitionInfo, TopicMetadata, TopicPartition
from tests.support.brokers import Brokers

A0, A1, A2 = (TopicPartition("a", number) for number in range(3))
B0 = TopicPartition("b", 0)


def numbers(infos: Iterable[PartitionInfo]) -> list[int]:
    """The partitions' numbers."""
    return [info.partition for info in infos]


class Cluster:
    """``leaders``: by topic, the leader of each partition (-1: none). ``looks``: at all of a topic's."""

    def __init__(self, **leaders: list[int]) -> None:
        self.leaders = leaders
        self.brokers = Brokers(*sorted({node for led in leaders.values() for node in led if node >= 0}))
        self.version = self.looks = 0

    def move(self, partition: TopicPartition, node: int) -> None:
        self.leaders[partition.topic][partition.partition] = node
        self.version += 1

    def names(self) -> tuple[str, ...]:
        return tuple(self.leaders)

    def topic(self, name: str) -> TopicMetadata | None:
        self.looks += 1
        found = self.leaders.get(name)
        if found is None:
            return None
        return TopicMetadata.of(name, None, tuple(PartitionInfo(name, i, n) for i, n in enumerate(found)))

    def leader(self, partition: TopicPartition) -> PartitionInfo | None:
        found = self.leaders.get(partition.topic, [])
        if partition.partition >= len(found):
            return None
        return PartitionInfo(partition.topic, partition.partition, found[partition.partition])
