"""Makes the metadata of topics."""

from __future__ import annotations

from collections.abc import Iterable

from kafka_sink.model import PartitionMetadata, Partitions, TopicMetadata


def topic_of(name: str, topic_id: bytes | None, infos: Iterable[PartitionMetadata]) -> TopicMetadata:
    """A topic with these partitions, which are in order."""
    pairs = [(info.leader, info.leader_epoch) for info in infos]
    partitions = Partitions(name, (leader for leader, _ in pairs), (epoch for _, epoch in pairs))
    return TopicMetadata(name, topic_id, partitions)
