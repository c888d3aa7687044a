"""Produce framing: batches that were built elsewhere, sent without a copy.

librdkafka and kafka-python build their own batches, so the request body is written here, for versions 3
(topic names, classic lengths) to 13 (topic ids, compact lengths). Answers go through kafka-python.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from kafka.protocol.producer import ProduceResponse

from kafka_sink.errors import ProtocolError
from kafka_sink.model import Node

VERSIONS = (3, 13)
LAST_VERSION_WITH_NAMES = 12
_FIRST_FLEXIBLE = 9

PartitionData = tuple[int, Sequence[memoryview], int]
TopicData = tuple[str, bytes | None, Sequence[PartitionData]]


@dataclass(frozen=True, slots=True)
class ProducePartitionResponse:
    """One partition's answer. Offsets and times are -1 where unknown; ``record_errors`` are pairs of a
    record's index in the batch and a message."""

    topic: str | None
    topic_id: bytes | None
    partition: int
    error_code: int
    base_offset: int
    log_append_time_ms: int
    log_start_offset: int
    error_message: str | None
    record_errors: tuple[tuple[int, str | None], ...]
    current_leader: tuple[int, int] | None


@dataclass(frozen=True, slots=True)
class ProduceAnswer:
    """A whole Produce response."""

    partitions: tuple[ProducePartitionResponse, ...]
    throttle_time_ms: int
    node_endpoints: tuple[Node, ...]


def produce_body(
    version: int,
    acks: int,
    timeout_ms: int,
    transactional_id: str | None,
    topics: Sequence[TopicData],
) -> list[bytes | memoryview]:
    """The request body as buffers for scatter-gather; a partition is (index, batch buffers, bytes)."""
    if version >= _FIRST_FLEXIBLE:
        return _flexible_body(version, acks, timeout_ms, transactional_id, topics)
    return _classic_body(acks, timeout_ms, transactional_id, topics)


def _classic_body(
    acks: int, timeout_ms: int, transactional_id: str | None, topics: Sequence[TopicData]
) -> list[bytes | memoryview]:
    head = struct.pack(">h", -1) if transactional_id is None else _string(transactional_id)
    pending = head + struct.pack(">hii", acks, timeout_ms, len(topics))
    out: list[bytes | memoryview] = []
    for name, _, partitions in topics:
        pending += _string(name) + struct.pack(">i", len(partitions))
        for index, buffers, size in partitions:
            out.append(pending + struct.pack(">ii", index, size))
            out += buffers
            pending = b""
    if pending:
        out.append(pending)
    return out


def _flexible_body(
    version: int, acks: int, timeout_ms: int, transactional_id: str | None, topics: Sequence[TopicData]
) -> list[bytes | memoryview]:
    no_tags = b"\0"
    head = b"\0" if transactional_id is None else _compact_string(transactional_id)
    pending = head + struct.pack(">hi", acks, timeout_ms) + _uvarint(len(topics) + 1)
    out: list[bytes | memoryview] = []
    for name, topic_id, partitions in topics:
        if version > LAST_VERSION_WITH_NAMES:
            if topic_id is None:
                raise ValueError(f"topic {name!r} has no id, which Produce v{version} needs")
            pending += topic_id
        else:
            pending += _compact_string(name)
        pending += _uvarint(len(partitions) + 1)
        for index, buffers, size in partitions:
            out.append(pending + struct.pack(">i", index) + _uvarint(size + 1))
            out += buffers
            pending = no_tags
        pending += no_tags
    out.append(pending + no_tags)
    return out


def _string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack(">h", len(raw)) + raw


def _compact_string(text: str) -> bytes:
    raw = text.encode()
    return _uvarint(len(raw) + 1) + raw


def _uvarint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append((value & 0x7F) | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def decode_produce_response(version: int, body: memoryview) -> ProduceAnswer:
    """Raises ProtocolError for anything that is not a Produce response of this version."""
    try:
        response = ProduceResponse.decode(bytes(body), version=version)
        partitions = tuple(
            _partition(version, topic, partition)
            for topic in response.responses
            for partition in topic.partition_responses
        )
        endpoints = tuple(
            Node(int(node.node_id), str(node.host), int(node.port), node.rack)
            for node in (getattr(response, "node_endpoints", None) or ())
        )
        return ProduceAnswer(partitions, int(response.throttle_time_ms or 0), endpoints)
    except Exception as error:  # whatever a decoder makes of garbage
        raise ProtocolError(f"an answer to Produce v{version} cannot be read: {error!r}") from error


def _partition(version: int, topic: object, partition: object) -> ProducePartitionResponse:
    leader = getattr(partition, "current_leader", None)
    known = leader is not None and leader.leader_id is not None and leader.leader_id >= 0
    topic_id = getattr(topic, "topic_id", None)
    by_id = version > LAST_VERSION_WITH_NAMES
    errors = getattr(partition, "record_errors", None) or ()
    return ProducePartitionResponse(
        topic=None if by_id else str(topic.name),  # type: ignore[attr-defined]  # generated class
        topic_id=getattr(topic_id, "bytes", topic_id) if by_id else None,
        partition=int(partition.index),  # type: ignore[attr-defined]  # generated class
        error_code=int(partition.error_code),  # type: ignore[attr-defined]  # generated class
        base_offset=int(partition.base_offset),  # type: ignore[attr-defined]  # generated class
        log_append_time_ms=int(getattr(partition, "log_append_time_ms", -1)),
        log_start_offset=int(getattr(partition, "log_start_offset", -1)),
        error_message=getattr(partition, "error_message", None),
        record_errors=tuple((int(e.batch_index), e.batch_index_error_message) for e in errors),
        current_leader=(int(leader.leader_id), int(leader.leader_epoch)) if known else None,
    )
