"""Produce requests and responses. Batches are built elsewhere, and are sent without a copy.

Versions up to 12 name topics, and later ones have their ids. The usual response, in which no partition has an
error message or a leader hint, is read in a faster way than other responses.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kafka_sink import varint
from kafka_sink.model import NO_RECORD_ERRORS, Node, RecordErrors
from kafka_sink.network.apis import DECODERS, PRODUCE, OnTrailing
from kafka_sink.network.wire import (
    ANY_NUMBER,
    UNASKED,
    VARINT_BYTES,
    Reader,
    Writer,
    broker_in,
    read_response,
    refuse,
    text_of,
)

LAST_VERSION_WITH_NAMES = 12
# From the next version on, Produce adds partitions to the transaction (protocol 2, KIP-890).
LAST_VERSION_OF_PROTOCOL_1 = 11
# KIP-110.
FIRST_VERSION_WITH_ZSTD = 7
_FIRST_FLEXIBLE = 9
_TOPIC_ID_BYTES = 16
_NO_TOPIC_ID = bytes(_TOPIC_ID_BYTES)

_FIRST_WITH_LOG_START, _FIRST_WITH_RECORD_ERRORS, _FIRST_WITH_LEADERS = 5, 8, 10
_CURRENT_LEADER = _NODE_ENDPOINTS = 0

# A partition's response from version 9 on: index, error, base offset, append time and log start, and then the
# three bytes of "no record errors, no message, no tagged fields".
_PLAIN_PARTITION = struct.Struct(">ihqqq3s")
_NOTHING_MORE = b"\x01\x00\x00"
_INT32 = struct.Struct(">i")

PartitionData = tuple[int, Sequence[memoryview], int]
TopicData = tuple[str, bytes | None, Sequence[PartitionData]]


class ProducePartitionResponse(NamedTuple):
    """The part of the response about one partition. It is a tuple, because a response has thousands of them.
    Offsets and times are -1 if unknown. ``current_leader`` is a pair of node id and leader epoch."""

    topic: str | None
    topic_id: bytes | None
    partition: int
    error_code: int
    base_offset: int
    log_append_time_ms: int
    log_start_offset: int
    error_message: str | None
    record_errors: RecordErrors
    current_leader: tuple[int, int] | None


@dataclass(frozen=True, slots=True)
class ProduceResponse:
    partitions: tuple[ProducePartitionResponse, ...]
    throttle_time_ms: int
    node_endpoints: tuple[Node, ...]


def produce_body(
    version: int, acks: int, timeout_ms: int, transactional_id: str | None, topics: Sequence[TopicData]
) -> list[bytes | memoryview]:
    """The request body as buffers for scatter-gather: small headers between the batches' own buffers.

    A topic is (name, id or None, partitions). A partition is (index, buffers of its batch, total bytes).
    Raises ValueError for a topic without an id if the version needs one.
    """
    request = Writer(PRODUCE, version)
    request.text(transactional_id)
    request.fields("hi", acks, timeout_ms)
    request.length(topics)
    out: list[bytes | memoryview] = []
    for name, topic_id, partitions in topics:
        if version <= LAST_VERSION_WITH_NAMES:
            request.text(name)
        elif topic_id is None:
            raise ValueError(f"topic {name!r} has no id, which Produce v{version} needs")
        else:
            request.body += topic_id
        request.length(partitions)
        for index, buffers, size in partitions:
            request.body += _INT32.pack(index)
            request.size(size)
            out.append(bytes(request.body))
            out += buffers
            request.body.clear()
            request.end()
        request.end()
    request.end()
    if request.body:
        out.append(bytes(request.body))
    return out


def decode_produce(
    version: int, payload: bytes, asked: int = ANY_NUMBER, on_trailing: OnTrailing = refuse
) -> ProduceResponse:
    """Decode ``payload``, which includes its header. Raises ProtocolError if it is not a Produce response."""
    plain = read_plain(version, payload, UNASKED + asked) if version >= _FIRST_FLEXIBLE else None
    return plain or read_response(PRODUCE, version, payload, read_any, asked, on_trailing)


DECODERS[PRODUCE] = decode_produce


def read_plain(version: int, payload: bytes, most: int) -> ProduceResponse | None:
    """Read a response without messages, leader hints and tagged fields, and with at most ``most`` elements.
    Returns None for any other response, valid or not."""
    try:
        if payload[4]:
            return None
        topics, at = varint.read_unsigned(payload, 5, VARINT_BYTES)
        partitions: list[ProducePartitionResponse] = []
        for _ in range(topics - 1):
            name = topic_id = None
            if version > LAST_VERSION_WITH_NAMES:
                topic_id = payload[at : at + _TOPIC_ID_BYTES]
                at += _TOPIC_ID_BYTES
                if topic_id == _NO_TOPIC_ID:
                    return None
            else:
                length, at = varint.read_unsigned(payload, at, VARINT_BYTES)
                name = payload[at : at + length - 1].decode()
                at += length - 1
            count, at = varint.read_unsigned(payload, at, VARINT_BYTES)
            most -= count
            end = at + (count - 1) * _PLAIN_PARTITION.size
            if count == 0 or most < 0 or end >= len(payload) or payload[end]:
                return None
            for index, error, offset, appended, start, more in _PLAIN_PARTITION.iter_unpack(payload[at:end]):
                if more != _NOTHING_MORE:
                    return None
                partitions.append(
                    ProducePartitionResponse(
                        name, topic_id, index, error, offset, appended, start, None, NO_RECORD_ERRORS, None
                    )
                )
            at = end + 1
        if topics == 0 or len(payload) != at + 5 or payload[-1]:
            return None
        return ProduceResponse(
            tuple(partitions), int.from_bytes(payload[at : at + 4], "big", signed=True), ()
        )
    except (IndexError, ValueError):
        # The response is cut short, or a name is not UTF-8: the general way raises the error.
        return None


def read_any(reader: Reader) -> ProduceResponse:
    partitions: list[ProducePartitionResponse] = []
    by_id = reader.version > LAST_VERSION_WITH_NAMES
    for _ in reader.structs("topics"):
        topic_id = reader.take(_TOPIC_ID_BYTES) if by_id else _NO_TOPIC_ID
        name = None if by_id else reader.name_text()
        id_or_none = None if topic_id == _NO_TOPIC_ID else topic_id
        partitions += [_partition(reader, name, id_or_none) for _ in reader.elements("partitions")]
    throttle = reader.integer()
    endpoints: list[Node] = []
    for tag in reader.tags():
        if tag == _NODE_ENDPOINTS and reader.version >= _FIRST_WITH_LEADERS:
            endpoints = [broker_in(reader) for _ in reader.elements("brokers")]
    return ProduceResponse(tuple(partitions), throttle, tuple(endpoints))


def _partition(reader: Reader, topic: str | None, topic_id: bytes | None) -> ProducePartitionResponse:
    index, error, offset, appended = reader.integer(), reader.short(), reader.long(), reader.long()
    start = reader.long() if reader.version >= _FIRST_WITH_LOG_START else -1
    record_errors, message = NO_RECORD_ERRORS, None
    if reader.version >= _FIRST_WITH_RECORD_ERRORS:
        record_errors, message = _record_errors(reader), text_of(reader.text())
    leader = None
    for tag in reader.tags():
        if tag == _CURRENT_LEADER and reader.version >= _FIRST_WITH_LEADERS:
            node_id, epoch = reader.integer(), reader.integer()
            reader.skip_tags()
            leader = (node_id, epoch) if node_id >= 0 else None
    return ProducePartitionResponse(
        topic, topic_id, index, error, offset, appended, start, message, record_errors, leader
    )


def _record_errors(reader: Reader) -> RecordErrors:
    """The positions of the rejected records, of which there may be many, and the first one's message."""
    places, reason = array("i"), None
    for place in reader.structs("record errors"):
        places.append(reader.integer())
        if place == 0:
            reason = text_of(reader.text())
        else:
            reader.skip_text()
    return RecordErrors(places, reason) if places else NO_RECORD_ERRORS
