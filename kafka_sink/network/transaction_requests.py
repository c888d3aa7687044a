"""Requests for transactions, and their responses as this package's own types (KIP-98, KIP-664, KIP-890).

Under version 2 of the transaction protocol the first write to a partition or group adds it to the
transaction, and every EndTxn raises the producer's epoch. Under version 1 the client adds both by requests of
their own, and raises the epoch by InitProducerId. kafka-python encodes and decodes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kafka.protocol import admin as admin_api
from kafka.protocol import consumer as consumer_api
from kafka.protocol import producer as producer_api
from kafka.protocol.admin import (
    DescribeTransactionsRequest,
    ListTransactionsRequest,
)
from kafka.protocol.consumer import OffsetFetchRequest
from kafka.protocol.metadata import FindCoordinatorRequest, FindCoordinatorResponse
from kafka.protocol.producer import (
    AddOffsetsToTxnRequest,
    AddPartitionsToTxnRequest,
    EndTxnRequest,
    TxnOffsetCommitRequest,
)

from kafka_sink.model import Node, TopicPartition
from kafka_sink.network.apis import (
    ADD_OFFSETS_TO_TXN,
    ADD_PARTITIONS_TO_TXN,
    DESCRIBE_TRANSACTIONS,
    END_TXN,
    FIND_COORDINATOR,
    LIST_TRANSACTIONS,
    OFFSET_FETCH,
    TXN_OFFSET_COMMIT,
)
from kafka_sink.network.wire import address_of, read_response, text_of
from kafka_sink.printable import printable

# Version 4 looks up many keys at once (KIP-699).
FIND_COORDINATOR_VERSIONS = (4, 5)
# Version 8 fetches many groups at once (KIP-709); version 10 identifies topics by id.
OFFSET_FETCH_VERSIONS = (8, 9)
# The versions of transaction protocol 2 (KIP-890).
END_TXN_VERSIONS = (5, 5)
TXN_OFFSET_COMMIT_VERSIONS = (5, 5)
# Those of transaction protocol 1. AddPartitionsToTxn from 4 on is for brokers.
PROTOCOL_1_END_TXN_VERSIONS = (3, 4)
PROTOCOL_1_TXN_OFFSET_COMMIT_VERSIONS = (3, 4)
ADD_PARTITIONS_TO_TXN_VERSIONS = (3, 3)
ADD_OFFSETS_TO_TXN_VERSIONS = (3, 4)
DESCRIBE_TRANSACTIONS_VERSIONS = (0, 0)
# Version 2 filters ids by an RE2 pattern (KIP-1152).
LIST_TRANSACTIONS_VERSIONS = (0, 2)
_FIRST_WITH_DURATION, _FIRST_WITH_PATTERN = 1, 2

_GROUP, _TRANSACTION = 0, 1


@dataclass(frozen=True, slots=True)
class FoundCoordinator:
    """The coordinator of one key; ``node`` is None if ``error_code`` is set."""

    node: Node | None
    error_code: int
    error_message: str | None


@dataclass(frozen=True, slots=True)
class CoordinatorsResponse:
    """The coordinators by key."""

    found: Mapping[str, FoundCoordinator]
    throttle_time_ms: int = 0


@dataclass(frozen=True, slots=True)
class AddPartitionsResponse:
    """Error codes by partition."""

    errors: Mapping[TopicPartition, int]
    throttle_time_ms: int = 0


@dataclass(frozen=True, slots=True)
class AddOffsetsResponse:
    """Whether the group's offsets belong to the transaction now."""

    error_code: int
    throttle_time_ms: int = 0


@dataclass(frozen=True, slots=True)
class EndTxnResponse:
    """``producer_id`` and ``producer_epoch`` are those of the next transaction; -1 with an error, and under
    protocol 1."""

    error_code: int
    producer_id: int
    producer_epoch: int
    throttle_time_ms: int = 0


@dataclass(frozen=True, slots=True)
class TxnOffsetCommitResponse:
    """Error codes by partition."""

    errors: Mapping[TopicPartition, int]
    throttle_time_ms: int = 0


@dataclass(frozen=True, slots=True)
class CommittedOffset:
    """A group's committed offset for a partition; ``offset`` is -1 if it has committed none."""

    offset: int
    metadata: str
    error_code: int


@dataclass(frozen=True, slots=True)
class OffsetFetchResponse:
    """Error code and offsets of each group."""

    groups: Mapping[str, tuple[int, Mapping[TopicPartition, CommittedOffset]]]
    throttle_time_ms: int = 0


@dataclass(frozen=True, slots=True)
class TransactionDescription:
    """The state of a transactional id. Times are ms; ``started_ms`` is by the broker's clock."""

    error_code: int
    state: str
    producer_id: int
    producer_epoch: int
    started_ms: int
    timeout_ms: int
    partitions: int


@dataclass(frozen=True, slots=True)
class DescribeTransactionsResponse:
    """Descriptions by transactional id."""

    transactions: Mapping[str, TransactionDescription]
    throttle_time_ms: int = 0


@dataclass(frozen=True, slots=True)
class ListTransactionsResponse:
    """The states of one broker's transactional ids, by id."""

    error_code: int
    states: Mapping[str, str]
    throttle_time_ms: int = 0


# -- FindCoordinator ------------------------------------------------------------------------------


def encode_find_coordinator(version: int, keys: Sequence[str], *, of_groups: bool) -> bytes:
    """Looks up the coordinators of groups (``of_groups``) or of transactional ids."""
    request = FindCoordinatorRequest(
        version=version, key_type=_GROUP if of_groups else _TRANSACTION, coordinator_keys=list(keys)
    )
    return bytes(request.encode(version=version))


def decode_find_coordinator(version: int, payload: bytes) -> CoordinatorsResponse:
    """``payload`` includes its header. Raises ProtocolError, as all decoders here do."""
    return read_response(FindCoordinatorResponse, version, payload, _coordinators)


def _coordinators(response: Any) -> CoordinatorsResponse:
    return CoordinatorsResponse(
        {
            str(one.key): FoundCoordinator(
                None if one.error_code else address_of(one.node_id, one.host, one.port),
                int(one.error_code),
                text_of(one.error_message),
            )
            for one in response.coordinators
        },
        int(response.throttle_time_ms),
    )


# -- what belongs to a transaction (protocol 1) ------------------------------------------------------


def encode_add_partitions(
    version: int,
    transactional_id: str,
    producer_id: int,
    producer_epoch: int,
    partitions: Iterable[TopicPartition],
) -> bytes:
    """Adds partitions to the transaction, which begins with the first of them."""
    topics: dict[str, list[int]] = {}
    for one in partitions:
        topics.setdefault(one.topic, []).append(one.partition)
    topic_class = AddPartitionsToTxnRequest.AddPartitionsToTxnTopic
    request = AddPartitionsToTxnRequest(
        version=version,
        v3_and_below_transactional_id=transactional_id,
        v3_and_below_producer_id=producer_id,
        v3_and_below_producer_epoch=producer_epoch,
        v3_and_below_topics=[
            topic_class(version=version, name=name, partitions=numbers) for name, numbers in topics.items()
        ],
    )
    return bytes(request.encode(version=version))


def decode_add_partitions(version: int, payload: bytes) -> AddPartitionsResponse:
    return read_response(producer_api.AddPartitionsToTxnResponse, version, payload, _add_partitions)


def _add_partitions(response: Any) -> AddPartitionsResponse:
    return AddPartitionsResponse(
        {
            TopicPartition(str(topic.name), int(row.partition_index)): int(row.partition_error_code)
            for topic in response.results_by_topic_v3_and_below
            for row in topic.results_by_partition
        },
        int(response.throttle_time_ms),
    )


def encode_add_offsets(
    version: int, transactional_id: str, producer_id: int, producer_epoch: int, group: str
) -> bytes:
    """Adds a group's offsets to the transaction, before TxnOffsetCommit."""
    request = AddOffsetsToTxnRequest(
        version=version,
        transactional_id=transactional_id,
        producer_id=producer_id,
        producer_epoch=producer_epoch,
        group_id=group,
    )
    return bytes(request.encode(version=version))


def decode_add_offsets(version: int, payload: bytes) -> AddOffsetsResponse:
    return read_response(producer_api.AddOffsetsToTxnResponse, version, payload, _add_offsets)


def _add_offsets(response: Any) -> AddOffsetsResponse:
    return AddOffsetsResponse(int(response.error_code), int(response.throttle_time_ms))


# -- EndTxn ---------------------------------------------------------------------------------------


def encode_end_txn(
    version: int, transactional_id: str, producer_id: int, producer_epoch: int, *, commit: bool
) -> bytes:
    """Commits or aborts. A retry has the same id and epoch."""
    request = EndTxnRequest(
        version=version,
        transactional_id=transactional_id,
        producer_id=producer_id,
        producer_epoch=producer_epoch,
        committed=commit,
    )
    return bytes(request.encode(version=version))


def decode_end_txn(version: int, payload: bytes) -> EndTxnResponse:
    return read_response(producer_api.EndTxnResponse, version, payload, _end_txn)


def _end_txn(response: Any) -> EndTxnResponse:
    return EndTxnResponse(
        int(response.error_code),
        _or_none(response.producer_id),
        _or_none(response.producer_epoch),
        int(response.throttle_time_ms),
    )


def _or_none(number: int | None) -> int:
    """Versions of protocol 1 do not have the field."""
    return -1 if number is None else int(number)


# -- offsets --------------------------------------------------------------------------------------


def encode_txn_offset_commit(
    version: int,
    transactional_id: str,
    producer_id: int,
    producer_epoch: int,
    group: str,
    offsets: Mapping[TopicPartition, tuple[int, str]],
) -> bytes:
    """Commits offsets with their metadata in a transaction; the group has no members."""
    topics: dict[str, list[Any]] = {}
    topic_class = TxnOffsetCommitRequest.TxnOffsetCommitRequestTopic
    partition_class = topic_class.TxnOffsetCommitRequestPartition
    for partition, (offset, metadata) in offsets.items():
        topics.setdefault(partition.topic, []).append(
            partition_class(
                version=version,
                partition_index=partition.partition,
                committed_offset=offset,
                committed_leader_epoch=-1,
                committed_metadata=metadata,
            )
        )
    request = TxnOffsetCommitRequest(
        version=version,
        transactional_id=transactional_id,
        group_id=group,
        producer_id=producer_id,
        producer_epoch=producer_epoch,
        generation_id=-1,
        member_id="",
        group_instance_id=None,
        topics=[topic_class(version=version, name=name, partitions=rows) for name, rows in topics.items()],
    )
    return bytes(request.encode(version=version))


def decode_txn_offset_commit(version: int, payload: bytes) -> TxnOffsetCommitResponse:
    return read_response(producer_api.TxnOffsetCommitResponse, version, payload, _txn_offset_commit)


def _txn_offset_commit(response: Any) -> TxnOffsetCommitResponse:
    return TxnOffsetCommitResponse(
        {
            TopicPartition(str(topic.name), int(row.partition_index)): int(row.error_code)
            for topic in response.topics
            for row in topic.partitions
        },
        int(response.throttle_time_ms),
    )


def encode_offset_fetch(
    version: int, group: str, partitions: Sequence[TopicPartition] | None, *, stable: bool
) -> bytes:
    """Fetches a group's offsets; all of them if ``partitions`` is None.

    With ``stable`` a partition with an open transaction gets UNSTABLE_OFFSET_COMMIT. If all offsets are
    fetched, only partitions with an earlier offset do.
    """
    group_class = OffsetFetchRequest.OffsetFetchRequestGroup
    topics: list[Any] | None = None
    if partitions is not None:
        by_topic: dict[str, list[int]] = {}
        for one in partitions:
            by_topic.setdefault(one.topic, []).append(one.partition)
        topic_class = group_class.OffsetFetchRequestTopics
        topics = [
            topic_class(version=version, name=name, partition_indexes=indexes)
            for name, indexes in by_topic.items()
        ]
    row = group_class(version=version, group_id=group, member_id=None, member_epoch=-1, topics=topics)
    request = OffsetFetchRequest(version=version, groups=[row], require_stable=stable)
    return bytes(request.encode(version=version))


def decode_offset_fetch(version: int, payload: bytes) -> OffsetFetchResponse:
    return read_response(consumer_api.OffsetFetchResponse, version, payload, _offset_fetch)


def _offset_fetch(response: Any) -> OffsetFetchResponse:
    return OffsetFetchResponse(
        {str(group.group_id): (int(group.error_code), _offsets(group)) for group in response.groups},
        int(response.throttle_time_ms),
    )


def _offsets(group: Any) -> Mapping[TopicPartition, CommittedOffset]:
    return {
        TopicPartition(str(topic.name), int(row.partition_index)): CommittedOffset(
            int(row.committed_offset), row.metadata or "", int(row.error_code)
        )
        for topic in group.topics
        for row in topic.partitions
    }


# -- open transactions ---------------------------------------------------------------------------------


def encode_describe_transactions(version: int, ids: Sequence[str]) -> bytes:
    """Describes ids whose coordinator is the receiving broker."""
    request = DescribeTransactionsRequest(version=version, transactional_ids=list(ids))
    return bytes(request.encode(version=version))


def decode_describe_transactions(version: int, payload: bytes) -> DescribeTransactionsResponse:
    return read_response(admin_api.DescribeTransactionsResponse, version, payload, _describe_transactions)


def _describe_transactions(response: Any) -> DescribeTransactionsResponse:
    return DescribeTransactionsResponse(
        {
            str(one.transactional_id): TransactionDescription(
                error_code=int(one.error_code),
                state=printable(one.transaction_state),
                producer_id=int(one.producer_id),
                producer_epoch=int(one.producer_epoch),
                started_ms=int(one.transaction_start_time_ms),
                timeout_ms=int(one.transaction_timeout_ms),
                partitions=sum(len(topic.partitions) for topic in one.topics),
            )
            for one in response.transaction_states
        },
        int(response.throttle_time_ms),
    )


def encode_list_transactions(version: int, states: Sequence[str], pattern: str, age_ms: int = -1) -> bytes:
    """Lists transactions in these states whose coordinator is the receiving broker, of those that have been
    open for longer than ``age_ms``; versions before 1 ignore that. ``pattern`` filters ids; versions before
    2 ignore it."""
    more: dict[str, Any] = {}
    if version >= _FIRST_WITH_DURATION:
        more["duration_filter"] = age_ms
    if version >= _FIRST_WITH_PATTERN:
        more["transactional_id_pattern"] = pattern
    request = ListTransactionsRequest(
        version=version, state_filters=list(states), producer_id_filters=[], **more
    )
    return bytes(request.encode(version=version))


def decode_list_transactions(version: int, payload: bytes) -> ListTransactionsResponse:
    return read_response(admin_api.ListTransactionsResponse, version, payload, _list_transactions)


def _list_transactions(response: Any) -> ListTransactionsResponse:
    return ListTransactionsResponse(
        int(response.error_code),
        {str(one.transactional_id): printable(one.transaction_state) for one in response.transaction_states},
        int(response.throttle_time_ms),
    )


REQUESTS: Mapping[int, Any] = {
    OFFSET_FETCH: OffsetFetchRequest,
    FIND_COORDINATOR: FindCoordinatorRequest,
    ADD_PARTITIONS_TO_TXN: AddPartitionsToTxnRequest,
    ADD_OFFSETS_TO_TXN: AddOffsetsToTxnRequest,
    END_TXN: EndTxnRequest,
    TXN_OFFSET_COMMIT: TxnOffsetCommitRequest,
    DESCRIBE_TRANSACTIONS: DescribeTransactionsRequest,
    LIST_TRANSACTIONS: ListTransactionsRequest,
}
DECODERS: Mapping[int, Callable[[int, bytes], Any]] = {
    OFFSET_FETCH: decode_offset_fetch,
    FIND_COORDINATOR: decode_find_coordinator,
    ADD_PARTITIONS_TO_TXN: decode_add_partitions,
    ADD_OFFSETS_TO_TXN: decode_add_offsets,
    END_TXN: decode_end_txn,
    TXN_OFFSET_COMMIT: decode_txn_offset_commit,
    DESCRIBE_TRANSACTIONS: decode_describe_transactions,
    LIST_TRANSACTIONS: decode_list_transactions,
}
