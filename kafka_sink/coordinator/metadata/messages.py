"""Metadata hints, and what tasks report of metadata, as JSON bodies. Decoding checks every field."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from kafka_sink.coordinator.transport import message_format as fields
from kafka_sink.coordinator.transport.message_format import decoding, int32, whole
from kafka_sink.metadata.topic_state import MetadataSnapshot, TopicSnapshot
from kafka_sink.model import Node, Partitions, TopicMetadata, TopicPartition
from kafka_sink.printable import is_host

KIND = "metadata"
MAX_TOPICS = 5000
MAX_STALE = 1000
# Keeps a message far below the bound of a frame.
_MAX_PARTITIONS = 50_000
_BYTES_OF_ID = 16
# Of a string in Kafka's protocol.
_MAX_STRING = 32_767
# A task reports a topic in use again after this time, or sooner if metadata.max.idle.ms is short.
_REPORT_USE_MS = 60_000.0


def use_interval_ms(idle_ms: float) -> float:
    """How often a task reports a topic in use, if metadata.max.idle.ms is ``idle_ms``."""
    return min(_REPORT_USE_MS, idle_ms / 3)


def coordinator_idle_ms(idle_ms: float) -> float:
    """After how long without reports the coordinator considers a topic idle.

    A use just after a report is reported one interval later, and that report may be delayed by another
    interval to be sent with others.
    """
    return idle_ms + 2 * use_interval_ms(idle_ms)


def encode_snapshot(snapshot: MetadataSnapshot) -> Iterator[dict[str, Any]]:
    """The bodies of one or more messages, each of which contains the brokers."""
    head = {
        "nodes": [[node.id, node.host, node.port, node.rack] for node in snapshot.nodes],
        "nodes_age": snapshot.nodes_age_ms if math.isfinite(snapshot.nodes_age_ms) else None,
        "cluster_id": snapshot.cluster_id,
    }
    topics: list[Any] = []
    partitions = 0
    for hint in snapshot.topics:
        count = len(hint.metadata.partitions)
        if topics and (partitions + count > _MAX_PARTITIONS or len(topics) >= MAX_TOPICS):
            yield {**head, "topics": topics}
            topics, partitions = [], 0
        topics.append(_encode_topic(hint))
        partitions += count
    yield {**head, "topics": topics}


def _encode_topic(hint: TopicSnapshot) -> list[Any]:
    topic = hint.metadata
    topic_id = None if topic.topic_id is None else topic.topic_id.hex()
    leaders = list(zip(topic.partitions.leaders, topic.partitions.epochs, strict=True))
    encoded = [topic.name, topic_id, hint.age_ms, leaders]
    return encoded if math.isinf(hint.replaced_age_ms) else [*encoded, hint.replaced_age_ms]


def decode_snapshot(body: Mapping[str, Any]) -> MetadataSnapshot:
    """The snapshot in a body. Raises ProtocolError."""
    with decoding("metadata"):
        nodes_age = body["nodes_age"]
        snapshot = MetadataSnapshot(
            tuple(_decode_topic(*topic) for topic in body["topics"]),
            tuple(_decode_node(*node) for node in body["nodes"]),
            math.inf if nodes_age is None else fields.ms(nodes_age),
            None if body["cluster_id"] is None else fields.text(body["cluster_id"]),
        )
        waited_ms = fields.ms(body.get("waited", 0))
        return snapshot.aged(waited_ms) if waited_ms else snapshot


@dataclass(frozen=True, slots=True)
class NamedLeader:
    """A partition's leader, from a broker's response to a request with this topic id (KIP-951)."""

    partition: TopicPartition
    leader: int
    epoch: int
    topic_id: bytes | None


def leaders_in(body: Mapping[str, Any]) -> list[NamedLeader]:
    """The leaders that a task was told: [topic, topic id, partition, leader, epoch]. Raises ProtocolError."""
    with decoding("list of leaders"):
        return [
            NamedLeader(
                TopicPartition(fields.topic(topic), int32(number)), int32(leader), int32(epoch), _id(topic_id)
            )
            for topic, topic_id, number, leader, epoch in fields.list_in(body, "leaders", MAX_STALE)
        ]


def stale_in(body: Mapping[str, Any]) -> dict[str, float]:
    """The topics that a task found to be stale, and how long ago in milliseconds. Raises ProtocolError."""
    with decoding("list of stale topics"):
        return {
            fields.topic(topic): fields.ms(ago_ms)
            for topic, ago_ms in fields.list_in(body, "stale", MAX_STALE)
        }


def topics_in(body: Mapping[str, Any], key: str) -> list[str]:
    """The topics under a key. Raises ProtocolError."""
    with decoding("list of topics"):
        # Many tasks name the same topics, so their strings are shared.
        return [sys.intern(fields.topic(one)) for one in fields.list_in(body, key, MAX_TOPICS)]


def _id(value: Any) -> bytes | None:
    found = None if value is None else bytes.fromhex(value)
    if found is not None and len(found) != _BYTES_OF_ID:
        raise ValueError("a topic id has the wrong length")
    return found


def _decode_topic(
    name: Any, topic_id: Any, age_ms: Any, leaders: Any, replaced_age_ms: Any = None
) -> TopicSnapshot:
    name = fields.topic(name)
    partitions = Partitions(
        name, (int32(leader) for leader, _ in leaders), (int32(epoch) for _, epoch in leaders)
    )
    replaced = math.inf if replaced_age_ms is None else fields.ms(replaced_age_ms)
    known = TopicMetadata(name, _id(topic_id), partitions)
    return TopicSnapshot(known, fields.ms(age_ms), replaced)


def _decode_node(node_id: Any, host: Any, port: Any, rack: Any) -> Node:
    host = fields.text(host, _MAX_STRING)
    if not is_host(host):
        raise ValueError("a broker's address that is none")
    return Node(whole(node_id), host, whole(port), None if rack is None else fields.text(rack, _MAX_STRING))


def in_parts(values: Iterable[str]) -> Iterator[list[str]]:
    """Split topic names into lists that ``topics_in`` accepts."""
    topics = list(values)
    for start in range(0, len(topics), MAX_TOPICS):
        yield topics[start : start + MAX_TOPICS]
