"""Requests about transactions: what is encoded, and responses as values, cut short or with bytes left over
too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from kafka.protocol.admin import (
    DescribeTransactionsRequest,
    DescribeTransactionsResponse,
    ListTransactionsRequest,
    ListTransactionsResponse,
)
from kafka.protocol.consumer import OffsetFetchRequest, OffsetFetchResponse
from kafka.protocol.metadata import FindCoordinatorRequest, FindCoordinatorResponse
from kafka.protocol.producer import (
    EndTxnRequest,
    EndTxnResponse,
    InitProducerIdRequest,
    TxnOffsetCommitRequest,
    TxnOffsetCommitResponse,
)

from kafka_sink.errors import ProtocolError
from kafka_sink.model import Node, TopicPartition
from kafka_sink.network import requests as own
from kafka_sink.network import transaction_requests as sut

T0, T1 = TopicPartition("t", 0), TopicPartition("t", 1)


def encoded(response: Any, version: int) -> bytes:
    """As a broker sends it, with the header that the version asks for."""
    header = b"\0\0\0\7" + (b"\0" if response.flexible_version_q(version) else b"")
    return header + bytes(response.encode(version=version))


def found() -> bytes:
    row = FindCoordinatorResponse.Coordinator
    rows = [
        row(version=4, key="a", node_id=3, host="h", port=9, error_code=0, error_message=None),
        row(version=4, key="b", node_id=-1, host="", port=-1, error_code=15, error_message="not yet"),
    ]
    return encoded(FindCoordinatorResponse(version=4, throttle_time_ms=5, coordinators=rows), 4)


def ended() -> bytes:
    return encoded(
        EndTxnResponse(version=5, throttle_time_ms=0, error_code=0, producer_id=8, producer_epoch=3), 5
    )


def recorded() -> bytes:
    topic = TxnOffsetCommitResponse.TxnOffsetCommitResponseTopic
    row = topic.TxnOffsetCommitResponsePartition
    rows = [row(version=5, partition_index=index, error_code=code) for index, code in ((0, 0), (1, 47))]
    topics = [topic(version=5, name="t", partitions=rows)]
    return encoded(TxnOffsetCommitResponse(version=5, throttle_time_ms=0, topics=topics), 5)


def fetched() -> bytes:
    group = OffsetFetchResponse.OffsetFetchResponseGroup
    topic = group.OffsetFetchResponseTopics
    row = topic.OffsetFetchResponsePartitions
    rows = [
        row(
            version=8,
            partition_index=0,
            committed_offset=4,
            committed_leader_epoch=-1,
            metadata="m",
            error_code=0,
        ),
        row(
            version=8,
            partition_index=1,
            committed_offset=-1,
            committed_leader_epoch=-1,
            metadata=None,
            error_code=88,
        ),
    ]
    topics = [topic(version=8, name="t", partitions=rows)]
    groups = [group(version=8, group_id="g", topics=topics, error_code=0)]
    return encoded(OffsetFetchResponse(version=8, throttle_time_ms=0, groups=groups), 8)


def described() -> bytes:
    row = DescribeTransactionsResponse.TransactionState
    topic = row.TopicData
    rows = [
        row(
            version=0,
            error_code=0,
            transactional_id="x",
            transaction_state="Ongoing",
            transaction_timeout_ms=60,
            transaction_start_time_ms=1000,
            producer_id=8,
            producer_epoch=3,
            topics=[topic(version=0, topic="t", partitions=[0, 1])],
        )
    ]
    return encoded(DescribeTransactionsResponse(version=0, throttle_time_ms=0, transaction_states=rows), 0)


def listed() -> bytes:
    row = ListTransactionsResponse.TransactionState
    rows = [row(version=1, transactional_id="x", producer_id=8, transaction_state="Ongoing")]
    response = ListTransactionsResponse(
        version=1, throttle_time_ms=0, error_code=0, unknown_state_filters=[], transaction_states=rows
    )
    return encoded(response, 1)


ANSWERS: dict[str, tuple[Callable[[int, bytes], Any], int, bytes, Any]] = {
    "FindCoordinator": (
        sut.decode_find_coordinator,
        4,
        found(),
        sut.CoordinatorsResponse(
            {
                "a": sut.FoundCoordinator(Node(3, "h", 9), 0, None),
                "b": sut.FoundCoordinator(None, 15, "not yet"),
            },
            5,
        ),
    ),
    "EndTxn": (sut.decode_end_txn, 5, ended(), sut.EndTxnResponse(0, 8, 3)),
    "TxnOffsetCommit": (
        sut.decode_txn_offset_commit,
        5,
        recorded(),
        sut.PartitionErrors({T0: 0, T1: 47}),
    ),
    "OffsetFetch": (
        sut.decode_offset_fetch,
        8,
        fetched(),
        sut.OffsetFetchResponse(
            {"g": (0, {T0: sut.CommittedOffset(4, "m", 0), T1: sut.CommittedOffset(-1, "", 88)})}
        ),
    ),
    "DescribeTransactions": (
        sut.decode_describe_transactions,
        0,
        described(),
        sut.DescribeTransactionsResponse({"x": sut.TransactionDescription(0, "Ongoing", 8, 3, 1000, 60, 2)}),
    ),
    "ListTransactions": (
        sut.decode_list_transactions,
        1,
        listed(),
        sut.ListTransactionsResponse(0, ["x"]),
    ),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_a_response_is_read_and_nothing_but_a_whole_one(name: str) -> None:
    decode, version, payload, expected = ANSWERS[name]
    assert decode(version, payload) == expected
    for end in range(len(payload)):
        with pytest.raises(ProtocolError):
            decode(version, payload[:end])
    with pytest.raises(ProtocolError):
        decode(version, payload + b"\0")


def test_requests_say_what_they_are_to() -> None:
    ended = EndTxnRequest.decode(sut.encode_end_txn(5, "x", 8, 3, commit=True), version=5)
    assert (ended.transactional_id, ended.producer_id, ended.producer_epoch, ended.committed) == (
        "x",
        8,
        3,
        True,
    )
    asked = FindCoordinatorRequest.decode(
        sut.encode_find_coordinator(4, ["a", "b"], of_groups=False), version=4
    )
    assert (asked.key_type, asked.coordinator_keys) == (1, ["a", "b"])
    described = DescribeTransactionsRequest.decode(sut.encode_describe_transactions(0, ["x"]), version=0)
    assert described.transactional_ids == ["x"]
    taken = InitProducerIdRequest.decode(own.encode_init_producer_id(5, -1, -1, "x", 900_000), version=5)
    assert (taken.transactional_id, taken.transaction_timeout_ms) == ("x", 900_000)


@pytest.mark.parametrize("version", [0, 1, 2])
def test_a_list_is_asked_for_by_state_and_where_brokers_can_by_pattern(version: int) -> None:
    request = ListTransactionsRequest.decode(
        sut.encode_list_transactions(version, ["Ongoing"], "^p-"), version=version
    )
    assert request.state_filters == ["Ongoing"]
    assert request.transactional_id_pattern == ("^p-" if version == 2 else None)


def test_offsets_are_recorded_without_a_member_and_fetched_by_name_where_they_are_to_be_stable() -> None:
    body = sut.encode_txn_offset_commit(5, "x", 8, 3, "g", {T0: (0, "a"), T1: (0, "b")})
    request = TxnOffsetCommitRequest.decode(body, version=5)
    assert (request.group_id, request.generation_id, request.member_id) == ("g", -1, "")
    rows = [
        (topic.name, row.partition_index, row.committed_metadata)
        for topic in request.topics
        for row in topic.partitions
    ]
    assert rows == [("t", 0, "a"), ("t", 1, "b")]
    everything = OffsetFetchRequest.decode(sut.encode_offset_fetch(8, "g", None, stable=False), version=8)
    assert everything.groups[0].topics is None
    named = OffsetFetchRequest.decode(sut.encode_offset_fetch(8, "g", [T0, T1], stable=True), version=8)
    assert named.require_stable
    assert [(topic.name, topic.partition_indexes) for topic in named.groups[0].topics] == [("t", [0, 1])]
