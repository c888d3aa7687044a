"""Requests about transactions are byte for byte as kafka-python encodes them by Kafka's schemas.

What comes of their responses is in test_apis.py.
"""

from __future__ import annotations

from typing import Any

from kafka.protocol.admin import DescribeTransactionsRequest, ListTransactionsRequest
from kafka.protocol.consumer import OffsetFetchRequest
from kafka.protocol.metadata import FindCoordinatorRequest
from kafka.protocol.producer import (
    AddOffsetsToTxnRequest,
    AddPartitionsToTxnRequest,
    EndTxnRequest,
    TxnOffsetCommitRequest,
)

from kafka_sink.network import apis
from kafka_sink.network.transaction_requests import (
    encode_add_offsets,
    encode_add_partitions,
    encode_describe_transactions,
    encode_end_txn,
    encode_find_coordinator,
    encode_list_transactions,
    encode_offset_fetch,
    encode_txn_offset_commit,
)
from tests.support.schema_requests import LONG, PARTITIONS, each, encoded


@each(apis.FIND_COORDINATOR)
def test_find_coordinator(version: int) -> None:
    for of_groups in (False, True):
        fields = {"key_type": 0 if of_groups else 1, "coordinator_keys": ["a", LONG]}
        assert encode_find_coordinator(version, ["a", LONG], of_groups=of_groups) == encoded(
            FindCoordinatorRequest, version, **fields
        )


@each(apis.ADD_PARTITIONS_TO_TXN)
def test_add_partitions(version: int) -> None:
    of = AddPartitionsToTxnRequest.AddPartitionsToTxnTopic
    assert encode_add_partitions(version, "id", 5, 6, PARTITIONS) == encoded(
        AddPartitionsToTxnRequest,
        version,
        v3_and_below_transactional_id="id",
        v3_and_below_producer_id=5,
        v3_and_below_producer_epoch=6,
        v3_and_below_topics=[of(name=LONG, partitions=[3, 2**31 - 1]), of(name="t", partitions=[0])],
    )


@each(apis.ADD_OFFSETS_TO_TXN)
def test_add_offsets(version: int) -> None:
    fields = {"transactional_id": "id", "producer_id": 5, "producer_epoch": 6, "group_id": LONG}
    assert encode_add_offsets(version, "id", 5, 6, LONG) == encoded(AddOffsetsToTxnRequest, version, **fields)


@each(apis.END_TXN)
def test_end_txn(version: int) -> None:
    for commit in (False, True):
        fields = {"transactional_id": "id", "producer_id": 5, "producer_epoch": 6, "committed": commit}
        assert encode_end_txn(version, "id", 5, 6, commit=commit) == encoded(EndTxnRequest, version, **fields)


@each(apis.TXN_OFFSET_COMMIT)
def test_txn_offset_commit(version: int) -> None:
    topic = TxnOffsetCommitRequest.TxnOffsetCommitRequestTopic

    def row(number: int, offset: int, metadata: str) -> Any:
        return topic.TxnOffsetCommitRequestPartition(
            partition_index=number,
            committed_offset=offset,
            committed_leader_epoch=-1,
            committed_metadata=metadata,
        )

    offsets = dict(zip(PARTITIONS, [(1, "m"), (2, ""), (3, LONG)], strict=True))
    assert encode_txn_offset_commit(version, "id", 5, 6, "group", offsets) == encoded(
        TxnOffsetCommitRequest,
        version,
        transactional_id="id",
        group_id="group",
        producer_id=5,
        producer_epoch=6,
        generation_id=-1,
        member_id="",
        group_instance_id=None,
        topics=[
            topic(name=LONG, partitions=[row(3, 1, "m"), row(2**31 - 1, 3, LONG)]),
            topic(name="t", partitions=[row(0, 2, "")]),
        ],
    )


@each(apis.OFFSET_FETCH)
def test_offset_fetch(version: int) -> None:
    of = OffsetFetchRequest.OffsetFetchRequestGroup
    topics = [
        of.OffsetFetchRequestTopics(name=LONG, partition_indexes=[3, 2**31 - 1]),
        of.OffsetFetchRequestTopics(name="t", partition_indexes=[0]),
    ]
    for partitions, wanted in ((None, None), ([], []), (PARTITIONS, topics)):
        group = of(group_id="g", member_id=None, member_epoch=-1, topics=wanted)
        for stable in (False, True):
            assert encode_offset_fetch(version, "g", partitions, stable=stable) == encoded(
                OffsetFetchRequest, version, groups=[group], require_stable=stable
            )


@each(apis.DESCRIBE_TRANSACTIONS)
def test_describe_transactions(version: int) -> None:
    for ids in ([], ["a", LONG]):
        expected = encoded(DescribeTransactionsRequest, version, transactional_ids=ids)
        assert encode_describe_transactions(version, ids) == expected


@each(apis.LIST_TRANSACTIONS)
def test_list_transactions(version: int) -> None:
    fields: dict[str, Any] = {"state_filters": ["Ongoing", LONG], "producer_id_filters": []}
    if version >= 1:
        fields["duration_filter"] = 9
    if version >= 2:
        fields["transactional_id_pattern"] = LONG
    assert encode_list_transactions(version, ["Ongoing", LONG], LONG, 9) == encoded(
        ListTransactionsRequest, version, **fields
    )
