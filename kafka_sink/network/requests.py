"""The requests that every task sends, except Produce, with their responses as this package's own values."""

from __future__ import annotations

import struct
from array import array
from dataclasses import dataclass, field

from kafka_sink.errors import ProtocolError
from kafka_sink.kafka_errors import LEADER_NOT_AVAILABLE
from kafka_sink.model import MAX_BROKERS, NO_LEADER, UNKNOWN_EPOCH, MetadataUpdate, Partitions, TopicMetadata
from kafka_sink.network.apis import API_VERSIONS, APIS, INIT_PRODUCER_ID, METADATA
from kafka_sink.network.wire import Reader, Writer, broker_in, decoder, text_of

# The tag of the feature levels that the cluster has finalized (KIP-584).
_FINALIZED_FEATURES = 2
# The first version of InitProducerId whose request contains the producer's id and epoch.
_FIRST_WITH_PRODUCER = 3
# The first version of ApiVersions whose request contains the client's name and version.
_FIRST_WITH_SOFTWARE = 3


@dataclass(frozen=True, slots=True)
class ApiVersionsResponse:
    """The broker's version range for each API key; empty if ``error_code`` is set. ``features`` are the
    levels that the cluster has finalized (KIP-584)."""

    error_code: int
    ranges: dict[int, tuple[int, int]]
    throttle_time_ms: int = 0
    features: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ProducerIdResponse:
    """The response to InitProducerId and EndTxn. The id and the epoch are -1 if ``error_code`` is set."""

    error_code: int
    producer_id: int
    producer_epoch: int
    throttle_time_ms: int = 0


def encode_header(api_key: int, api_version: int, correlation_id: int, client_id: str) -> bytes:
    """A request header, in the header version that belongs to the API version."""
    name, flexible = client_id.encode(), api_version >= APIS[api_key].first_flexible
    # In every version, the client's name has a length of two bytes.
    return struct.pack(">hhih", api_key, api_version, correlation_id, len(name)) + name + b"\0" * flexible


def encode_api_versions(version: int, software_version: str) -> bytes:
    """The first request on every connection (KIP-35; client name and version: KIP-511)."""
    request = Writer(API_VERSIONS, version)
    if version >= _FIRST_WITH_SOFTWARE:
        request.text("kafka-chunked")
        request.text(software_version)
    return request.finished()


@decoder(API_VERSIONS, reads_tags=True)
def decode_api_versions(reader: Reader) -> ApiVersionsResponse:
    error = reader.short()
    if error:
        # Nothing more is read: brokers that do not support the version write the rest in the form of version
        # 0, or in another form.
        reader.at = len(reader.payload)
        return ApiVersionsResponse(error, {})
    ranges: dict[int, tuple[int, int]] = {}
    for _ in reader.structs("API versions"):
        key, low, high = reader.short(), reader.short(), reader.short()
        ranges[key] = low, high
    throttle = reader.integer() if reader.version > 0 else 0
    features: dict[str, int] = {}
    for tag in reader.tags():
        if tag == _FINALIZED_FEATURES:
            for _ in reader.structs("features"):
                name, highest = reader.name_text(), reader.short()
                reader.short()  # the lowest level
                features[name] = highest
    return ApiVersionsResponse(error, ranges, throttle, features)


def encode_metadata(
    version: int, topics: tuple[str, ...], allow_auto_create: bool, operations: bool = False
) -> bytes:
    """Request the metadata of these topics only; without topics, of the brokers alone. ``operations`` also
    requests what this client may do with the topics (KIP-430, from version 8 on)."""
    request = Writer(METADATA, version)
    request.length(topics)
    for name in topics:
        if version >= _FIRST_WITH_ID:
            request.body += _NO_TOPIC_ID
        request.text(name)
        request.end()
    request.fields("?", allow_auto_create)
    if _FIRST_WITH_OPERATIONS <= version <= _LAST_WITH_CLUSTER_OPERATIONS:
        request.fields("?", False)
    if version >= _FIRST_WITH_OPERATIONS:
        request.fields("?", operations)
    return request.finished()


def encode_init_producer_id(
    version: int,
    producer_id: int,
    producer_epoch: int,
    transactional_id: str | None = None,
    # Brokers read it for transactional producers only. Kafka's own client also sends the largest value.
    transaction_timeout_ms: int = 2**31 - 1,
) -> bytes:
    """Request a producer id. Without a transactional id, a broker ignores the id and epoch given here, and
    assigns a new id with epoch 0. With one, it fences the producer that used the id before, and ends that
    producer's open transaction."""
    request = Writer(INIT_PRODUCER_ID, version)
    request.text(transactional_id)
    request.fields("i", transaction_timeout_ms)
    if version >= _FIRST_WITH_PRODUCER:
        request.fields("qh", producer_id, producer_epoch)
    return request.finished()


@decoder(INIT_PRODUCER_ID)
def decode_init_producer_id(reader: Reader) -> ProducerIdResponse:
    throttle, error = reader.integer(), reader.short()
    response = ProducerIdResponse(error, reader.long(), reader.short(), throttle)
    if not error and (response.producer_id < 0 or response.producer_epoch < 0):
        # Otherwise rows would be written as if there were no id, and retries would write them twice.
        raise ProtocolError(
            f"a response to {reader.name} contains an invalid producer id or epoch: "
            f"{response.producer_id}, {response.producer_epoch}"
        )
    return response


_FIRST_WITH_OFFLINE, _FIRST_WITH_EPOCH, _FIRST_WITH_OPERATIONS = 5, 7, 8
_FIRST_WITH_ID, _LAST_WITH_CLUSTER_OPERATIONS, _FIRST_WITH_ERROR = 10, 10, 13
# Before this version (Kafka 2.4), brokers may send wrong epochs while partitions are reassigned. Kafka's own
# clients also ignore those epochs (KAFKA-9212).
_FIRST_RELIABLE_EPOCHS = 9
# The size of a partition with one replica, which is in sync or offline.
_SHORTEST_PARTITION = 26
# Error, number, leader and epoch. In versions without epochs, an empty text takes the epoch's place.
_PARTITION_WITHOUT, _PARTITION_WITH_EPOCH = struct.Struct(">hii0s"), struct.Struct(">hiii")
_REPLICA_BYTES = 4
_LONG_VARINT = 0x80
_NO_TOPIC_ID = bytes(16)
# AclOperation.WRITE, and the value that a broker sends if it does not report which operations are allowed.
_WRITE_OPERATION, _NO_OPERATIONS = 4, -(2**31)


@dataclass(frozen=True, slots=True)
class MetadataResponse:
    """A Metadata response. ``error_code`` is about the whole response (version 13: REBOOTSTRAP_REQUIRED).

    ``unwritable`` are the topics to which this client may not write, if the request asked for them (KIP-430).
    """

    update: MetadataUpdate
    error_code: int = 0
    throttle_time_ms: int = 0
    controller_id: int = -1
    unwritable: tuple[str, ...] = ()


@decoder(METADATA)
def decode_metadata(reader: Reader) -> MetadataResponse:
    version = reader.version
    throttle = reader.integer()
    nodes = tuple(broker_in(reader) for _ in reader.elements_up_to(MAX_BROKERS, "brokers"))
    cluster_id, controller = text_of(reader.text()), reader.integer()
    topics: list[TopicMetadata] = []
    errors: dict[str, int] = {}
    unwritable: list[str] = []
    for _ in reader.structs("topics"):
        _read_topic(reader, topics, errors, unwritable)
    if _FIRST_WITH_OPERATIONS <= version <= _LAST_WITH_CLUSTER_OPERATIONS:
        reader.integer()
    error = reader.short() if version >= _FIRST_WITH_ERROR else 0
    update = MetadataUpdate(nodes, tuple(topics), errors, cluster_id)
    return MetadataResponse(update, error, throttle, controller, tuple(unwritable))


def _read_topic(
    reader: Reader, topics: list[TopicMetadata], errors: dict[str, int], unwritable: list[str]
) -> None:
    """Read a topic, and add it to the list to which it belongs."""
    version, error, name = reader.version, reader.short(), reader.text()
    topic_id = reader.take(16) if version >= _FIRST_WITH_ID else _NO_TOPIC_ID
    reader.byte()  # is_internal
    partitions = _partitions(reader, name or "")
    operations = reader.integer() if version >= _FIRST_WITH_OPERATIONS else _NO_OPERATIONS
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
    """The partitions of a topic; None if some are missing, so that no row goes to one that does not exist."""
    version = reader.version
    fixed = _PARTITION_WITH_EPOCH if version >= _FIRST_WITH_EPOCH else _PARTITION_WITHOUT
    unpack, size, payload = fixed.unpack_from, fixed.size, reader.payload
    lists = range(3 if version >= _FIRST_WITH_OFFLINE else 2)
    reliable = version >= _FIRST_RELIABLE_EPOCHS
    numbers, leaders, epochs = array("i"), array("i"), array("i")
    elements = reader.elements_of(_SHORTEST_PARTITION, "partitions")
    at = reader.at
    for _ in elements:
        error, number, leader, epoch = unpack(payload, at)
        numbers.append(number)
        leaders.append(NO_LEADER if error == LEADER_NOT_AVAILABLE else leader)
        epochs.append(epoch if reliable else UNKNOWN_EPOCH)
        at = _behind_lists(reader, at + size, lists)
    reader.at = at
    return _in_order(topic, numbers, leaders, epochs)


def _behind_lists(reader: Reader, begin: int, lists: range) -> int:
    """The position after lists of replicas and tagged fields. Short compact lists are skipped faster."""
    payload, at = reader.payload, begin
    for _ in lists:
        length = payload[at]
        if length >= _LONG_VARINT or not reader.flexible:
            break
        at += 4 * length - 3 if length else 1
    else:
        if payload[at] == 0:
            return at + 1
    reader.at = begin
    for _ in lists:
        reader.skip_list(_REPLICA_BYTES)
    reader.skip_tags()
    return reader.at


def _in_order(topic: str, numbers: array[int], leaders: array[int], epochs: array[int]) -> Partitions | None:
    """The partitions in the order of their numbers; None if one is missing or repeated, or without any."""
    dense = array("i", range(len(numbers)))
    if numbers != dense:
        order = sorted(dense, key=numbers.__getitem__)
        if any(numbers[place] != number for number, place in enumerate(order)):
            return None
        leaders = array("i", map(leaders.__getitem__, order))
        epochs = array("i", map(epochs.__getitem__, order))
    return Partitions(topic, leaders, epochs) if dense else None
