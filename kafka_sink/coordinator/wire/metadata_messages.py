"""Encodes metadata hints as JSON, and decodes them with full validation.

A peer that knows the secret may still run another version.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from kafka_sink.errors import ProtocolError
from kafka_sink.metadata.snapshot import MetadataSnapshot, TopicSnapshot
from kafka_sink.model import Node, PartitionInfo, TopicMetadata, TopicPartition

MAX_TOPICS = 5000
MAX_STALE = 1000
# Keeps a message far below the bound of a frame.
_MAX_PARTITIONS = 50_000
_BYTES_OF_ID = 16
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
    leaders = [[one.leader, one.leader_epoch] for one in topic.partitions]
    encoded = [topic.name, topic_id, hint.age_ms, leaders]
    return encoded if math.isinf(hint.replaced_age_ms) else [*encoded, hint.replaced_age_ms]


def decode_snapshot(body: Mapping[str, Any]) -> MetadataSnapshot:
    """The snapshot in a body. Raises ProtocolError."""
    try:
        nodes_age = body["nodes_age"]
        snapshot = MetadataSnapshot(
            tuple(_decode_topic(*topic) for topic in body["topics"]),
            tuple(_decode_node(*node) for node in body["nodes"]),
            math.inf if nodes_age is None else age(nodes_age),
            None if body["cluster_id"] is None else text(body["cluster_id"]),
        )
        waited_ms = age(body.get("waited", 0))
        return snapshot.aged(waited_ms) if waited_ms else snapshot
    except (KeyError, TypeError, ValueError) as error:
        raise ProtocolError(f"a message contains invalid metadata ({type(error).__name__})") from None


@dataclass(frozen=True, slots=True)
class NamedLeader:
    """A partition's leader, from a broker's response to a request with this topic id (KIP-951)."""

    partition: TopicPartition
    leader: int
    epoch: int
    topic_id: bytes | None


def named_leaders(value: Any) -> list[NamedLeader]:
    """Decode a list of [topic, topic id, partition, leader, epoch]. Raises ProtocolError."""
    if not isinstance(value, list) or len(value) > MAX_STALE:
        raise ProtocolError("leaders are not a list, or the list is too long")
    try:
        return [
            NamedLeader(
                TopicPartition(text(topic), _int32(number)), _int32(leader), _int32(epoch), _id(topic_id)
            )
            for topic, topic_id, number, leader, epoch in value
        ]
    except (TypeError, ValueError):
        raise ProtocolError("a list of leaders has an invalid entry") from None


def _id(value: Any) -> bytes | None:
    found = None if value is None else bytes.fromhex(value)
    if found is not None and len(found) != _BYTES_OF_ID:
        raise ValueError("a topic id has the wrong length")
    return found


def _decode_topic(
    name: Any, topic_id: Any, age_ms: Any, leaders: Any, replaced_age_ms: Any = None
) -> TopicSnapshot:
    partitions = tuple(
        PartitionInfo(name, index, _int32(leader), _int32(epoch))
        for index, (leader, epoch) in enumerate(leaders)
    )
    replaced = math.inf if replaced_age_ms is None else age(replaced_age_ms)
    return TopicSnapshot(TopicMetadata(text(name), _id(topic_id), partitions), age(age_ms), replaced)


def _decode_node(node_id: Any, host: Any, port: Any, rack: Any) -> Node:
    return Node(whole(node_id), text(host), whole(port), None if rack is None else text(rack))


def names(value: Any) -> list[str]:
    """Validate a list of topic names. Raises ProtocolError."""
    if not isinstance(value, list) or len(value) > MAX_TOPICS:
        raise ProtocolError("topics are not a list, or the list is too long")
    # Many tasks name the same topics, so their strings are shared.
    return [sys.intern(text(one)) for one in value]


def text(value: Any) -> str:
    """Validate a string. Raises ProtocolError."""
    if not isinstance(value, str):
        raise ProtocolError("a value is not a string")
    return value


def whole(value: Any) -> int:
    """Validate an integer. Raises ProtocolError."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise ProtocolError("a value is not an integer")
    return value


def _int32(value: Any) -> int:
    """Validate a 32-bit integer, as Kafka's protocol uses for leaders and epochs. Raises ProtocolError."""
    if not -(2**31) <= whole(value) < 2**31:
        raise ProtocolError("a number exceeds 32 bits")
    return int(value)


def age(value: Any) -> float:
    """Validate an age in milliseconds. Raises ProtocolError."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0:
        raise ProtocolError("an age is not a number >= 0")
    return float(value)


def in_parts(values: Iterable[str]) -> Iterator[list[str]]:
    """Split topic names into lists that ``names`` accepts."""
    topics = list(values)
    for start in range(0, len(topics), MAX_TOPICS):
        yield topics[start : start + MAX_TOPICS]
