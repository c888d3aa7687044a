"""Metadata responses. Source: MetadataResponse.json of Kafka 4.3, versions 4 to 13.

A partition takes 8 bytes of memory and under a microsecond: its replicas are skipped by their number.
"""

from __future__ import annotations

import struct
from array import array
from dataclasses import dataclass

from kafka_sink.kafka_errors import LEADER_NOT_AVAILABLE
from kafka_sink.model import NO_LEADER, UNKNOWN_EPOCH, MetadataUpdate, Partitions, TopicMetadata
from kafka_sink.network.apis import METADATA
from kafka_sink.network.wire import ANY_NUMBER, Reader, broker_in, read_response, text_of

_FIRST_WITH_OFFLINE, _FIRST_WITH_EPOCH, _FIRST_WITH_OPERATIONS = 5, 7, 8
_FIRST_WITH_ID, _LAST_WITH_CLUSTER_OPERATIONS, _FIRST_WITH_ERROR = 10, 10, 13
# Before this version (Kafka 2.4) brokers may send wrong epochs while partitions are reassigned. Kafka's own
# clients ignore those, too (KAFKA-9212).
_FIRST_RELIABLE_EPOCHS = 9
# Clusters have hundreds.
_MOST_BROKERS = 5_000
# With one replica, which is in sync or offline.
_SHORTEST_PARTITION = 26
# Error, number, leader, epoch; an empty text stands for an epoch that is not there.
_PARTITION_WITHOUT, _PARTITION_WITH_EPOCH = struct.Struct(">hii0s"), struct.Struct(">hiii")
_COUNT = struct.Struct(">i")
_LONG_VARINT = 0x80
_NO_TOPIC_ID = bytes(16)
# AclOperation.WRITE, and what stands where a broker does not say which operations are allowed.
_WRITE_OPERATION, _NO_OPERATIONS = 4, -(2**31)


@dataclass(frozen=True, slots=True)
class MetadataResponse:
    """A Metadata response; ``error_code`` is about the whole of it (version 13: REBOOTSTRAP_REQUIRED).

    ``unwritable``: topics that this client may not write to, where the request asked for that (KIP-430).
    """

    update: MetadataUpdate
    error_code: int = 0
    throttle_time_ms: int = 0
    controller_id: int = -1
    unwritable: tuple[str, ...] = ()


def decode_metadata(version: int, payload: bytes, asked: int = ANY_NUMBER) -> MetadataResponse:
    """``payload`` with its header. Raises ProtocolError, also for more topics than were ``asked`` for."""
    return read_response(METADATA, version, payload, _metadata, asked)


def _metadata(reader: Reader) -> MetadataResponse:
    version = reader.version
    throttle = reader.integer()
    nodes = tuple(broker_in(reader) for _ in reader.elements_up_to(_MOST_BROKERS, "brokers"))
    cluster_id, controller = text_of(reader.text()), reader.integer()
    topics: list[TopicMetadata] = []
    errors: dict[str, int] = {}
    unwritable: list[str] = []
    for _ in reader.elements("topics"):
        _read_topic(reader, topics, errors, unwritable)
    if _FIRST_WITH_OPERATIONS <= version <= _LAST_WITH_CLUSTER_OPERATIONS:
        reader.integer()
    error = reader.short() if version >= _FIRST_WITH_ERROR else 0
    reader.skip_tags()
    update = MetadataUpdate(nodes, tuple(topics), errors, cluster_id)
    return MetadataResponse(update, error, throttle, controller, tuple(unwritable))


def _read_topic(
    reader: Reader, topics: list[TopicMetadata], errors: dict[str, int], unwritable: list[str]
) -> None:
    """Put the topic in the list that it belongs to."""
    version, error, name = reader.version, reader.short(), reader.text()
    topic_id = reader.take(16) if version >= _FIRST_WITH_ID else _NO_TOPIC_ID
    reader.byte()  # is_internal
    partitions = _partitions(reader, name or "")
    operations = reader.integer() if version >= _FIRST_WITH_OPERATIONS else _NO_OPERATIONS
    reader.skip_tags()
    if name is None:
        return  # only an unknown topic id has no name, and requests name topics
    if operations != _NO_OPERATIONS and not operations >> _WRITE_OPERATION & 1:
        unwritable.append(name)
    if error:
        errors[name] = error
    elif partitions is None:
        errors[name] = LEADER_NOT_AVAILABLE
    else:
        topics.append(TopicMetadata(name, None if topic_id == _NO_TOPIC_ID else topic_id, partitions))


def _partitions(reader: Reader, topic: str) -> Partitions | None:
    """None where partitions are missing: rows could go to partitions that the topic does not have."""
    version = reader.version
    fixed = _PARTITION_WITH_EPOCH if version >= _FIRST_WITH_EPOCH else _PARTITION_WITHOUT
    unpack, size, payload = fixed.unpack_from, fixed.size, reader.payload
    lists = range(3 if version >= _FIRST_WITH_OFFLINE else 2)
    behind_lists = _behind_compact_lists if reader.flexible else _behind_lists
    reliable = version >= _FIRST_RELIABLE_EPOCHS
    numbers, leaders, epochs = array("i"), array("i"), array("i")
    elements = reader.elements_of(_SHORTEST_PARTITION, "partitions")
    at = reader.at
    for _ in elements:
        error, number, leader, epoch = unpack(payload, at)
        numbers.append(number)
        leaders.append(NO_LEADER if error == LEADER_NOT_AVAILABLE else leader)
        epochs.append(epoch if reliable else UNKNOWN_EPOCH)
        at = behind_lists(reader, at + size, lists)
    reader.at = at
    return _in_order(topic, numbers, leaders, epochs)


def _behind_lists(reader: Reader, at: int, lists: range) -> int:
    """The place behind lists of replicas."""
    for _ in lists:
        at += _COUNT.size + _COUNT.size * max(0, _COUNT.unpack_from(reader.payload, at)[0])
    return at


def _behind_compact_lists(reader: Reader, begin: int, lists: range) -> int:
    """The place behind lists of replicas and tagged fields."""
    payload, at = reader.payload, begin
    for _ in lists:
        length = payload[at]
        if length >= _LONG_VARINT:
            break
        at += 4 * length - 3 if length else 1
    else:
        if payload[at] == 0:
            return at + 1
    reader.at = begin
    for _ in lists:
        reader.skip_list(_COUNT.size)
    reader.skip_tags()
    return reader.at


def _in_order(topic: str, numbers: array[int], leaders: array[int], epochs: array[int]) -> Partitions | None:
    """By number; None where one is missing, given twice, or where there are none."""
    dense = array("i", range(len(numbers)))
    if numbers != dense:
        order = sorted(dense, key=numbers.__getitem__)
        if any(numbers[place] != number for number, place in enumerate(order)):
            return None
        leaders = array("i", map(leaders.__getitem__, order))
        epochs = array("i", map(epochs.__getitem__, order))
    return Partitions(topic, leaders, epochs) if dense else None
