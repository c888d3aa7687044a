"""What one metadata cache sends to another of the same cluster: plain values that can be pickled."""

from __future__ import annotations

import math
import struct
import zlib
from dataclasses import dataclass

from kafka_sink.model import Node, Partitions, TopicMetadata


@dataclass(frozen=True, slots=True)
class TopicSnapshot:
    """A topic as a broker described it ``age_ms`` ago, with its topic id and leader epochs.

    ``replaced_age_ms``: how long ago a topic without id was found to be recreated; infinite where it was not.
    """

    metadata: TopicMetadata
    age_ms: float
    replaced_age_ms: float = math.inf

    def aged(self, by_ms: float) -> TopicSnapshot:
        """The same, ``by_ms`` later."""
        return TopicSnapshot(self.metadata, self.age_ms + by_ms, self.replaced_age_ms + by_ms)

    def __reduce__(self) -> tuple[object, ...]:
        """Compressed, because Spark sends it to every task: 10,000 partitions take 2 to 20 kB."""
        topic = self.metadata
        numbers = topic.partitions.leaders + topic.partitions.epochs
        leaders = zlib.compress(struct.pack(f"<{len(numbers)}i", *numbers))
        return _topic_snapshot, (topic.name, topic.topic_id, leaders, self.age_ms, self.replaced_age_ms)


def _topic_snapshot(
    name: str, topic_id: bytes | None, leaders: bytes, age_ms: float, replaced_age_ms: float
) -> TopicSnapshot:
    data = zlib.decompress(leaders)
    numbers = struct.unpack(f"<{len(data) // 4}i", data)
    count = len(numbers) // 2
    partitions = Partitions(name, numbers[:count], numbers[count:])
    return TopicSnapshot(TopicMetadata(name, topic_id, partitions), age_ms, replaced_age_ms)


@dataclass(frozen=True, slots=True)
class MetadataSnapshot:
    """Topics, and all brokers of the cluster as of ``nodes_age_ms`` ago.

    Ages count from the moment the snapshot was taken. Code that keeps it adds the time since (``aged``).
    """

    topics: tuple[TopicSnapshot, ...] = ()
    nodes: tuple[Node, ...] = ()
    nodes_age_ms: float = 0.0
    cluster_id: str | None = None

    def aged(self, by_ms: float) -> MetadataSnapshot:
        """The same, ``by_ms`` later."""
        topics = tuple(one.aged(by_ms) for one in self.topics)
        return MetadataSnapshot(topics, self.nodes, self.nodes_age_ms + by_ms, self.cluster_id)
