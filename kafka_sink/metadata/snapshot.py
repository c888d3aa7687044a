"""What one metadata cache tells another of the same cluster: plain values, picklable."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kafka_sink.model import Node, TopicMetadata


@dataclass(frozen=True, slots=True)
class TopicSnapshot:
    """A topic as a broker told it ``age_ms`` ago. Ids and epochs are in the metadata.

    ``replaced_age_ms``: how long ago a topic without id was found to be recreated; infinite where it was not.
    """

    metadata: TopicMetadata
    age_ms: float
    replaced_age_ms: float = math.inf

    def aged(self, by_ms: float) -> TopicSnapshot:
        """The same, ``by_ms`` later."""
        return TopicSnapshot(self.metadata, self.age_ms + by_ms, self.replaced_age_ms + by_ms)


@dataclass(frozen=True, slots=True)
class MetadataSnapshot:
    """Topics and the brokers that ``nodes_age_ms`` ago were all there are.

    Ages are of the moment it was taken: whoever keeps it adds the time that it was kept (``aged``).
    """

    topics: tuple[TopicSnapshot, ...] = ()
    nodes: tuple[Node, ...] = ()
    nodes_age_ms: float = 0.0
    cluster_id: str | None = None

    def aged(self, by_ms: float) -> MetadataSnapshot:
        """The same, ``by_ms`` later."""
        topics = tuple(one.aged(by_ms) for one in self.topics)
        return MetadataSnapshot(topics, self.nodes, self.nodes_age_ms + by_ms, self.cluster_id)
