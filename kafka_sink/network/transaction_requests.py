"""Requests about transactions, and their answers as the project's own values (KIP-98, KIP-664, KIP-890).

Only what protocol version 2 of transactions needs: a partition or group joins a transaction with the first
write to it, and every EndTxn raises the producer's epoch. kafka-python encodes and decodes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    EndTxnRequest,
    TxnOffsetCommitRequest,
)

from kafka_sink.model import Node, TopicPartition
from kafka_sink.network.wire import read_response

OFFSET_FETCH = 9
FIND_COORDINATOR = 10
END_TXN = 26
TXN_OFFSET_COMMIT = 28
DESCRIBE_TRANSACTIONS = 65
LIST_TRANSACTIONS = 66

# 4 looks up many keys at once (KIP-699).
FIND_COORDINATOR_VERSIONS = (4, 5)
# 8 asks for many groups at once (KIP-709); 10 names topics by id.
OFFSET_FETCH_VERSIONS = (8, 9)
# Those of transaction protocol 2 (KIP-890).
END_TXN_VERSIONS = (5, 5)
TXN_OFFSET_COMMIT_VERSIONS = (5, 5)
DESCRIBE_TRANSACTIONS_VERSIONS = (0, 0)
# 2 filters by id, by a pattern of RE2 (KIP-1152).
LIST_TRANSACTIONS_VERSIONS = (0, 2)
_FIRST_WITH_DURATION, _FIRST_WITH_PATTERN = 1, 2

REQUESTS: Mapping[int, Any] = {
    OFFSET_FETCH: OffsetFetchRequest,
    FIND_COORDINATOR: FindCoordinatorRequest,
    END_TXN: EndTxnRequest,
    TXN_OFFSET_COMMIT: TxnOffsetCommitRequest,
    DESCRIBE_TRANSACTIONS: DescribeTransactionsRequest,
    LIST_TRANSACTIONS: ListTransactionsRequest,
}
NAMES: Mapping[int, str] = {
    OFFSET_FETCH: "OffsetFetch",
    FIND_COORDINATOR: "FindCoordinator",
    END_TXN: "EndTxn",
    TXN_OFFSET_COMMIT: "TxnOffsetCommit",
    DESCRIBE_TRANSACTIONS: "DescribeTransactions",
    LIST_TRANSACTIONS: "ListTransactions",
}
_GROUP, _TRANSACTION = 0, 1


@dataclass(frozen=True, slots=True)
class FoundCoordinator:
    """The broker that coordinates one key; ``node`` is None where ``error_code`` is set."""

    node: Node | None
    error_code: int
    error_message: str | None


@dataclass(frozen=True, slots=True)
class CoordinatorsResponse:
    """FindCoordinator's answer by key."""

    found: Mapping[str, FoundCoordinator]
    throttle_time_ms: int = 0


@dataclass(frozen=True, slots=True)
class EndTxnResponse:
    """``producer_id`` and ``producer_epoch`` are what the next transaction would have; -1 with an error."""

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
    """What a group has committed for a partition; ``offset`` is -1 where there is nothing."""

    offset: int
    metadata: str
    error_code: int


@dataclass(frozen=True, slots=True)
class OffsetFetchResponse:
    """By group its error code and its offsets."""

    groups: Mapping[str, tuple[int, Mapping[TopicPartition, CommittedOffset]]]
    throttle_time_ms: int = 0


@dataclass(frozen=True, slots=True)
class TransactionDescription:
    """A transactional id as its coordinator knows it; times are ms, ``started_ms`` by the broker's clock."""

    error_code: int
    state: str
    producer_id: int
    producer_epoch: int
    started_ms: int
    timeout_ms: int
    partitions: int


@dataclass(frozen=True, slots=True)
class DescribeTransactionsResponse:
    """By transactional id."""

    transactions: Mapping[str, TransactionDescription]
    throttle_time_ms: int = 0


@dataclass(frozen=True, slots=True)
class ListTransactionsResponse:
    """The states of one broker's transactional ids, by id."""

    error_code: int
    states: Mapping[str, str]
    throttle_time_ms: int = 0


TransactionResponse = (
    CoordinatorsResponse
    | EndTxnResponse
    | TxnOffsetCommitResponse
    | OffsetFetchResponse
    | DescribeTransactionsResponse
    | ListTransactionsResponse
)


# -- FindCoordinator ------------------------------------------------------------------------------


def encode_find_coordinator(version: int, keys: Sequence[str], *, of_groups: bool) -> bytes:
    """Asks where the coordinators of groups, else of transactional ids, are."""
    request = FindCoordinatorRequest(
        version=version, key_type=_GROUP if of_groups else _TRANSACTION, coordinator_keys=list(keys)
    )
    return bytes(request.encode(version=version))


def decode_find_coordinator(version: int, payload: bytes) -> CoordinatorsResponse:
    """``payload`` with its header. Raises ProtocolError, as all decoders here."""
    return read_response(FindCoordinatorResponse, version, payload, _coordinators)


def _coordinators(response: Any) -> CoordinatorsResponse:
    return CoordinatorsResponse(
        {
            str(one.key): FoundCoordinator(
                None if one.error_code else Node(int(one.node_id), str(one.host), int(one.port)),
                int(one.error_code),
                one.error_message,
            )
            for one in response.coordinators
        },
        int(response.throttle_time_ms),
    )


# -- EndTxn ---------------------------------------------------------------------------------------


def encode_end_txn(
    version: int, transactional_id: str, producer_id: int, producer_epoch: int, *, commit: bool
) -> bytes:
    """Commits or aborts; a repetition has the same id and epoch."""
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
        int(response.producer_id),
        int(response.producer_epoch),
        int(response.throttle_time_ms),
    )


# -- offsets --------------------------------------------------------------------------------------


def encode_txn_offset_commit(
    version: int,
    transactional_id: str,
    producer_id: int,
    producer_epoch: int,
    group: str,
    offsets: Mapping[TopicPartition, tuple[int, str]],
) -> bytes:
    """Puts offsets with their metadata into a transaction; the group has no members."""
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
    """A group's offsets, all of them without ``partitions``.

    ``stable``: UNSTABLE_OFFSET_COMMIT where a transaction is undecided; of all offsets, only where there was
    one before.
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


# -- what is open ---------------------------------------------------------------------------------


def encode_describe_transactions(version: int, ids: Sequence[str]) -> bytes:
    """Of ids that the broker asked coordinates."""
    request = DescribeTransactionsRequest(version=version, transactional_ids=list(ids))
    return bytes(request.encode(version=version))


def decode_describe_transactions(version: int, payload: bytes) -> DescribeTransactionsResponse:
    return read_response(admin_api.DescribeTransactionsResponse, version, payload, _describe_transactions)


def _describe_transactions(response: Any) -> DescribeTransactionsResponse:
    return DescribeTransactionsResponse(
        {
            str(one.transactional_id): TransactionDescription(
                error_code=int(one.error_code),
                state=str(one.transaction_state),
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


def encode_list_transactions(version: int, states: Sequence[str], pattern: str) -> bytes:
    """Those in these states that the broker asked coordinates. Before version 2 of all ids."""
    more: dict[str, Any] = {}
    if version >= _FIRST_WITH_DURATION:
        more["duration_filter"] = -1
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
        {str(one.transactional_id): str(one.transaction_state) for one in response.transaction_states},
        int(response.throttle_time_ms),
    )
