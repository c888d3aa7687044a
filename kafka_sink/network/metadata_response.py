"""Metadata responses, read without objects for what this client does not use.

kafka-python's stream decoder takes 16 us and some 1.5 KB a partition, and an object for each topic that a
hostile broker invents: 8 MiB of them took 12 s and 796 MiB. This reader skips lists of replicas by their
lengths, and stops at more topics than were asked for. Source: MetadataResponse.json of Kafka 4.3, versions 4
to 13.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from kafka_sink.errors import ProtocolError
from kafka_sink.model import Node
from kafka_sink.network.wire import address_of, text_of

_FIRST_WITH_OFFLINE, _FIRST_WITH_EPOCH, _FIRST_WITH_OPERATIONS = 5, 7, 8
_FIRST_FLEXIBLE, _FIRST_WITH_ID, _LAST_WITH_CLUSTER_OPERATIONS, _FIRST_WITH_ERROR = 9, 10, 10, 13
_MAX_BROKERS = 20_000
_MAX_TEXT = 32_767
_UVARINT_BYTES = 5
_SHORT, _INT = struct.Struct(">h"), struct.Struct(">i")
_PARTITION, _PARTITION_WITH_EPOCH = struct.Struct(">hii"), struct.Struct(">hiii")
# Where a broker does not say which operations are allowed.
_NO_OPERATIONS = -(2**31)


class RawPartition(NamedTuple):
    """As the broker says it. The number comes first, as partitions are ordered by it."""

    number: int
    error_code: int
    leader: int
    leader_epoch: int | None


@dataclass(frozen=True, slots=True)
class RawTopic:
    """``operations`` is a set of bits, None where the broker does not say."""

    name: str | None
    error_code: int
    topic_id: bytes | None
    partitions: list[RawPartition]
    operations: int | None


@dataclass(frozen=True, slots=True)
class RawMetadata:
    """The fields of a response that this client uses."""

    throttle_time_ms: int
    nodes: tuple[Node, ...]
    cluster_id: str | None
    controller_id: int
    topics: list[RawTopic]
    error_code: int


def read_metadata(version: int, payload: bytes, most_topics: int) -> RawMetadata:
    """``payload`` with its header. Raises ProtocolError, also for more topics than ``most_topics``."""
    reader = _Reader(version, payload)
    try:
        found = _metadata(reader, version, most_topics)
    except (struct.error, IndexError, UnicodeDecodeError) as error:
        problem = type(error).__name__
    else:
        if reader.at == len(payload):
            return found
        raise ProtocolError(
            f"a response to Metadata v{version} has {len(payload) - reader.at} bytes too many"
        )
    raise ProtocolError(f"a response to Metadata v{version} cannot be read: {problem}")


def _metadata(reader: _Reader, version: int, most_topics: int) -> RawMetadata:
    reader.at = _INT.size
    reader.skip_tags()
    throttle = reader.integer()
    nodes = tuple(_nodes(reader))
    cluster_id, controller = text_of(reader.text()), reader.integer()
    topics = [_topic(reader, version) for _ in range(reader.count(most_topics, "topics"))]
    if _FIRST_WITH_OPERATIONS <= version <= _LAST_WITH_CLUSTER_OPERATIONS:
        reader.integer()
    error = reader.short() if version >= _FIRST_WITH_ERROR else 0
    reader.skip_tags()
    return RawMetadata(throttle, nodes, cluster_id, controller, topics, error)


def _nodes(reader: _Reader) -> Iterator[Node]:
    for _ in range(reader.count(_MAX_BROKERS, "brokers")):
        node_id, host, port, rack = reader.integer(), reader.text(), reader.integer(), reader.text()
        reader.skip_tags()
        yield address_of(node_id, host, port, rack)


def _topic(reader: _Reader, version: int) -> RawTopic:
    error, name = reader.short(), reader.text()
    topic_id = reader.take(16) if version >= _FIRST_WITH_ID else None
    reader.take(1)  # is_internal
    partitions = _partitions(reader, version)
    operations = reader.integer() if version >= _FIRST_WITH_OPERATIONS else _NO_OPERATIONS
    reader.skip_tags()
    allowed = None if operations == _NO_OPERATIONS else operations
    return RawTopic(name, error, topic_id, partitions, allowed)


def _partitions(reader: _Reader, version: int) -> list[RawPartition]:
    with_epoch = version >= _FIRST_WITH_EPOCH
    fixed = _PARTITION_WITH_EPOCH if with_epoch else _PARTITION
    lists = 3 if version >= _FIRST_WITH_OFFLINE else 2
    found = []
    for _ in range(reader.count(len(reader.payload) // fixed.size, "partitions")):
        error, index, leader, *epoch = fixed.unpack_from(reader.payload, reader.at)
        reader.at += fixed.size
        for _ in range(lists):
            reader.skip_integers()
        reader.skip_tags()
        found.append(RawPartition(index, error, leader, epoch[0] if with_epoch else None))
    return found


class _Reader:
    """A place in a payload. Raises struct.error or IndexError behind its end."""

    def __init__(self, version: int, payload: bytes) -> None:
        self.payload = payload
        self.at = 0
        self._flexible = version >= _FIRST_FLEXIBLE

    def take(self, size: int) -> bytes:
        end = self.at + size
        if end > len(self.payload):
            raise IndexError
        found = self.payload[self.at : end]
        self.at = end
        return found

    def short(self) -> int:
        return int(_SHORT.unpack(self.take(_SHORT.size))[0])

    def integer(self) -> int:
        return int(_INT.unpack(self.take(_INT.size))[0])

    def text(self) -> str | None:
        length = self._uvarint() - 1 if self._flexible else self.short()
        if length > _MAX_TEXT:
            raise IndexError
        return None if length < 0 else self.take(length).decode()

    def count(self, most: int, what: str) -> int:
        """The length of a list. Raises ProtocolError where it is longer than ``most``, before any is read."""
        length = self._uvarint() - 1 if self._flexible else self.integer()
        if not 0 <= length <= most:
            raise ProtocolError(f"a response to Metadata has {length} {what}; at most {most} are expected")
        return length

    def skip_integers(self) -> None:
        length = self._uvarint() - 1 if self._flexible else self.integer()
        if length < 0 or self.at + length * _INT.size > len(self.payload):
            raise IndexError
        self.at += length * _INT.size

    def skip_tags(self) -> None:
        if not self._flexible:
            return
        payload = self.payload
        if payload[self.at] == 0:
            self.at += 1
            return
        for _ in range(self._uvarint()):
            self._uvarint()
            self.take(self._uvarint())

    def _uvarint(self) -> int:
        payload, at = self.payload, self.at
        byte = payload[at]
        if byte < 0x80:
            self.at = at + 1
            return byte
        value = 0
        for index in range(_UVARINT_BYTES):
            byte = payload[at + index]
            value |= (byte & 0x7F) << (7 * index)
            if byte < 0x80:
                self.at = at + index + 1
                return value
        raise IndexError
