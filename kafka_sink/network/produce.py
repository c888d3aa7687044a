"""Produce framing: batches that were built elsewhere, sent without a copy.

librdkafka and kafka-python build their own batches, so the request body is written here, for versions 3
(topic names, classic lengths) to 13 (topic ids, compact lengths). Answers go through kafka-python.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kafka.protocol.producer import ProduceResponse

from kafka_sink.model import Node
from kafka_sink.network.wire import read_body, read_response

VERSIONS = (3, 13)
LAST_VERSION_WITH_NAMES = 12
_FIRST_FLEXIBLE = 9
_TOPIC_ID_BYTES = 16

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
    """The request body as buffers for scatter-gather: small heads between the batches' own buffers.

    A topic is (name, id or None, partitions), a partition is (index, buffers of its batch, their bytes in
    all). Buffers are bytes or memoryviews of bytes and are not copied. Raises ValueError for a version
    outside of VERSIONS, or for a topic without an id where the version needs one.
    """
    if not VERSIONS[0] <= version <= VERSIONS[1]:
        raise ValueError(f"Produce v{version} is not one of {VERSIONS[0]} to {VERSIONS[1]}")
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
            if topic_id is None or len(topic_id) != _TOPIC_ID_BYTES:
                raise ValueError(f"topic {name!r} has no id of 16 bytes, which Produce v{version} needs")
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


def decode_produce_response(version: int, body: bytes | memoryview) -> ProduceAnswer:
    """A response body without its header. Raises ProtocolError for anything that is not one."""
    return read_body(ProduceResponse, version, bytes(body), lambda response: _answer(version, response))


def decode_produce(version: int, payload: bytes) -> ProduceAnswer:
    """As decode_produce_response, for a payload that starts with its header."""
    return read_response(ProduceResponse, version, payload, lambda response: _answer(version, response))


def _answer(version: int, response: Any) -> ProduceAnswer:
    partitions = tuple(
        _partition(version, topic, partition)
        for topic in response.responses
        for partition in topic.partition_responses
    )
    endpoints = tuple(
        Node(int(node.node_id), str(node.host), int(node.port), node.rack)
        for node in response.node_endpoints or ()
    )
    return ProduceAnswer(partitions, int(response.throttle_time_ms), endpoints)


def _partition(version: int, topic: Any, partition: Any) -> ProducePartitionResponse:
    by_id = version > LAST_VERSION_WITH_NAMES
    leader = partition.current_leader
    return ProducePartitionResponse(
        topic=None if by_id else str(topic.name),
        topic_id=bytes(topic.topic_id.bytes) if by_id and topic.topic_id is not None else None,
        partition=int(partition.index),
        error_code=int(partition.error_code),
        base_offset=int(partition.base_offset),
        log_append_time_ms=int(partition.log_append_time_ms),
        log_start_offset=int(partition.log_start_offset),
        error_message=partition.error_message,
        record_errors=tuple(
            (int(error.batch_index), error.batch_index_error_message)
            for error in partition.record_errors or ()
        ),
        current_leader=(
            (int(leader.leader_id), int(leader.leader_epoch)) if leader and leader.leader_id >= 0 else None
        ),
    )
