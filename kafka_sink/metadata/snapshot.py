"""What one metadata cache sends to another of the same cluster: plain values that can be pickled."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kafka_sink.model import Node, TopicMetadata


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
