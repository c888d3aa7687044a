"""Requests for transactions, with their responses as this package's own types (KIP-98, KIP-664, KIP-890).

With version 2 of the transaction protocol, the first write to a partition or group adds it to the
transaction, and every EndTxn raises the producer's epoch. With version 1, the client adds partitions and
groups with separate requests, and raises the epoch with InitProducerId.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from kafka_sink.model import Node, TopicPartition
from kafka_sink.network import apis
from kafka_sink.network.requests import ProducerIdResponse
from kafka_sink.network.wire import Reader, Writer, address_of, decoder, error_response, text_of
from kafka_sink.printable import printable

# The first version of EndTxn whose response contains the next producer id and epoch (KIP-890).
_FIRST_WITH_NEXT_PRODUCER = 5
# The first versions of ListTransactions that filter by duration and by pattern.
_FIRST_WITH_DURATION, _FIRST_WITH_PATTERN = 1, 2

_GROUP, _TRANSACTION = 0, 1
# The smallest average size of an element of these lists, for requests that do not name all elements. Offsets
# without metadata are smaller, but do not occur in the groups to which this client commits.
_SHORTEST_OFFSET, _SHORTEST_TOPIC, _SHORTEST_TRANSACTION = 100, 8, 16
_EPOCH_BYTES, _PARTITION_BYTES, _PRODUCER_ID_BYTES = 4, 4, 8


@dataclass(frozen=True, slots=True)
class FoundCoordinator:
    """The coordinator of one key. ``node`` is None if ``error_code`` is set."""

    node: Node | None
    error_code: int
    error_message: str | None


@dataclass(frozen=True, slots=True)
class CoordinatorsResponse:
    found: Mapping[str, FoundCoordinator]
    throttle_time_ms: int = 0


@dataclass(frozen=True, slots=True)
class PartitionErrors:
    """The response to AddPartitionsToTxn (up to version 3), and to TxnOffsetCommit."""

    errors: Mapping[TopicPartition, int]
    throttle_time_ms: int = 0


@dataclass(frozen=True, slots=True)
class CommittedOffset:
    """A group's committed offset for a partition. ``offset`` is -1 if the group has committed none."""

    offset: int
    metadata: str
    error_code: int


@dataclass(frozen=True, slots=True)
class OffsetFetchResponse:
    groups: Mapping[str, tuple[int, Mapping[TopicPartition, CommittedOffset]]]
    throttle_time_ms: int = 0


@dataclass(frozen=True, slots=True)
class TransactionDescription:
    """The state of a transactional id. Times are milliseconds; ``started_ms`` is by the broker's clock."""

    error_code: int
    state: str
    producer_id: int
    producer_epoch: int
    started_ms: int
    timeout_ms: int
    partitions: int


@dataclass(frozen=True, slots=True)
class DescribeTransactionsResponse:
    transactions: Mapping[str, TransactionDescription]
    throttle_time_ms: int = 0


@dataclass(frozen=True, slots=True)
class ListTransactionsResponse:
    """The transactional ids of one broker in the requested states."""

    error_code: int
    ids: Sequence[str]
    throttle_time_ms: int = 0


def encode_find_coordinator(version: int, keys: Sequence[str], *, of_groups: bool) -> bytes:
    """Look up the coordinators of groups (``of_groups``) or of transactional ids."""
    request = Writer(apis.FIND_COORDINATOR, version)
    request.fields("b", _GROUP if of_groups else _TRANSACTION)
    request.texts(keys)
    return request.finished()


@decoder(apis.FIND_COORDINATOR)
def decode_find_coordinator(reader: Reader) -> CoordinatorsResponse:
    throttle = reader.integer()
    coordinators: dict[str, FoundCoordinator] = {}
    for _ in reader.structs("coordinators"):
        key, node_id, host, port = reader.name_text(), reader.integer(), reader.text(), reader.integer()
        error, message = reader.short(), text_of(reader.text())
        coordinators[key] = FoundCoordinator(
            None if error else address_of(node_id, host, port), error, message
        )
    return CoordinatorsResponse(coordinators, throttle)


def encode_add_partitions(
    version: int,
    transactional_id: str,
    producer_id: int,
    producer_epoch: int,
    partitions: Iterable[TopicPartition],
) -> bytes:
    """Add partitions to the transaction. The first of them begins it."""
    request = Writer(apis.ADD_PARTITIONS_TO_TXN, version)
    request.text(transactional_id)
    request.fields("qh", producer_id, producer_epoch)
    _write_partitions(request, partitions)
    return request.finished()


def _write_partitions(request: Writer, partitions: Iterable[TopicPartition]) -> None:
    """Write a list of topics, each with the numbers of its partitions."""
    topics: dict[str, list[int]] = {}
    for partition in partitions:
        topics.setdefault(partition.topic, []).append(partition.partition)
    request.length(topics)
    for name, numbers in topics.items():
        request.text(name)
        request.length(numbers)
        request.fields(f"{len(numbers)}i", *numbers)
        request.end()


def _partition_errors(reader: Reader) -> PartitionErrors:
    throttle = reader.integer()
    errors: dict[TopicPartition, int] = {}
    for _ in reader.structs("topics"):
        topic = reader.name_text()
        for _ in reader.structs("partitions"):
            partition = TopicPartition(topic, reader.integer())
            errors[partition] = reader.short()
    return PartitionErrors(errors, throttle)


decoder(apis.ADD_PARTITIONS_TO_TXN)(_partition_errors)
decode_txn_offset_commit = decoder(apis.TXN_OFFSET_COMMIT)(_partition_errors)


def encode_add_offsets(
    version: int, transactional_id: str, producer_id: int, producer_epoch: int, group: str
) -> bytes:
    """Add a group's offsets to the transaction, before TxnOffsetCommit."""
    request = Writer(apis.ADD_OFFSETS_TO_TXN, version)
    request.text(transactional_id)
    request.fields("qh", producer_id, producer_epoch)
    request.text(group)
    return request.finished()


decoder(apis.ADD_OFFSETS_TO_TXN)(error_response)


def encode_end_txn(
    version: int, transactional_id: str, producer_id: int, producer_epoch: int, *, commit: bool
) -> bytes:
    """Commit or abort. A retry must have the same id and epoch."""
    request = Writer(apis.END_TXN, version)
    request.text(transactional_id)
    request.fields("qh?", producer_id, producer_epoch, commit)
    return request.finished()


@decoder(apis.END_TXN)
def decode_end_txn(reader: Reader) -> ProducerIdResponse:
    """The id and epoch are those of the next transaction; -1 after an error, and with protocol 1."""
    throttle, error = reader.integer(), reader.short()
    is_next = reader.version >= _FIRST_WITH_NEXT_PRODUCER
    producer_id, epoch = (reader.long(), reader.short()) if is_next else (-1, -1)
    return ProducerIdResponse(error, producer_id, epoch, throttle)


def encode_txn_offset_commit(
    version: int,
    transactional_id: str,
    producer_id: int,
    producer_epoch: int,
    group: str,
    offsets: Mapping[TopicPartition, tuple[int, str]],
) -> bytes:
    """Commit offsets with their metadata in a transaction. The group has no members."""
    topics: dict[str, list[tuple[int, int, str]]] = {}
    for partition, (offset, metadata) in offsets.items():
        topics.setdefault(partition.topic, []).append((partition.partition, offset, metadata))
    request = Writer(apis.TXN_OFFSET_COMMIT, version)
    request.text(transactional_id)
    request.text(group)
    request.fields("qhi", producer_id, producer_epoch, -1)
    request.text("")
    request.text(None)
    request.length(topics)
    for name, rows in topics.items():
        request.text(name)
        request.length(rows)
        for number, offset, metadata in rows:
            request.fields("iqi", number, offset, -1)
            request.text(metadata)
            request.end()
        request.end()
    return request.finished()


def encode_offset_fetch(
    version: int, group: str, partitions: Sequence[TopicPartition] | None, *, stable: bool
) -> bytes:
    """Fetch a group's offsets, or all if ``partitions`` is None. With ``stable``, partitions with an open
    transaction get UNSTABLE_OFFSET_COMMIT; without ``partitions`` only those that have an offset."""
    request = Writer(apis.OFFSET_FETCH, version)
    request.length((group,))
    request.text(group)
    if partitions is None:
        request.length(None)
    else:
        _write_partitions(request, partitions)
    request.end()
    request.fields("?", stable)
    return request.finished()


@decoder(apis.OFFSET_FETCH)
def decode_offset_fetch(reader: Reader) -> OffsetFetchResponse:
    throttle = reader.integer()
    groups: dict[str, tuple[int, Mapping[TopicPartition, CommittedOffset]]] = {}
    for _ in reader.structs("groups"):
        group, offsets = reader.name_text(), _offsets(reader)
        groups[group] = reader.short(), offsets
    return OffsetFetchResponse(groups, throttle)


def _offsets(reader: Reader) -> dict[TopicPartition, CommittedOffset]:
    offsets: dict[TopicPartition, CommittedOffset] = {}
    for _ in reader.structs("topics"):
        topic = reader.name_text()
        # The request may have asked for everything that the group has committed.
        for _ in reader.structs("offsets", _SHORTEST_OFFSET):
            number, offset = reader.integer(), reader.long()
            reader.skip(_EPOCH_BYTES)
            metadata, error = reader.text() or "", reader.short()
            offsets[TopicPartition(topic, number)] = CommittedOffset(offset, metadata, error)
    return offsets


def encode_describe_transactions(version: int, ids: Sequence[str]) -> bytes:
    """Describe transactional ids whose coordinator is the broker that receives the request."""
    request = Writer(apis.DESCRIBE_TRANSACTIONS, version)
    request.texts(ids)
    return request.finished()


@decoder(apis.DESCRIBE_TRANSACTIONS)
def decode_describe_transactions(reader: Reader) -> DescribeTransactionsResponse:
    throttle = reader.integer()
    descriptions: dict[str, TransactionDescription] = {}
    for _ in reader.structs("transactions"):
        error, transactional_id, state = reader.short(), reader.name_text(), printable(reader.name_text())
        timeout, started, producer_id, epoch = reader.integer(), reader.long(), reader.long(), reader.short()
        partitions = _count_partitions(reader)
        descriptions[transactional_id] = TransactionDescription(
            error, state, producer_id, epoch, started, timeout, partitions
        )
    return DescribeTransactionsResponse(descriptions, throttle)


def _count_partitions(reader: Reader) -> int:
    partitions = 0
    for _ in reader.structs("topics", _SHORTEST_TOPIC):
        reader.skip_text()
        partitions += reader.skip_list(_PARTITION_BYTES)
    return partitions


def encode_list_transactions(version: int, states: Sequence[str], pattern: str) -> bytes:
    """List transactions in these states whose coordinator is the receiving broker. ``pattern`` filters ids;
    versions before 2 ignore it."""
    request = Writer(apis.LIST_TRANSACTIONS, version)
    request.texts(states)
    # The filters are empty: the list contains transactions of any producer and of any age.
    request.length(())
    if version >= _FIRST_WITH_DURATION:
        request.fields("q", -1)
    if version >= _FIRST_WITH_PATTERN:
        request.text(pattern)
    return request.finished()


@decoder(apis.LIST_TRANSACTIONS)
def decode_list_transactions(reader: Reader) -> ListTransactionsResponse:
    throttle, error = reader.integer(), reader.short()
    for _ in reader.elements("unknown filters"):
        reader.skip_text()
    ids: list[str] = []
    for _ in reader.structs("transactions", _SHORTEST_TRANSACTION):
        ids.append(reader.name_text())
        reader.skip(_PRODUCER_ID_BYTES)
        reader.skip_text()
    return ListTransactionsResponse(error, ids, throttle)
