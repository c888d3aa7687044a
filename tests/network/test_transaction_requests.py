"""Requests about transactions are byte for byte as kafka-python encodes them by Kafka's schemas.

What comes of their responses is in test_apis.py.
"""

from __future__ import annotations

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
from kafka_sink.network import transaction_requests as ours
from tests.support.schema_requests import LONG, PARTITIONS, same

PRODUCER = {"transactional_id": "id", "producer_id": 5, "producer_epoch": 6}
TOPICS = [(LONG, [3, 2**31 - 1]), ("t", [0])]


def test_find_coordinator() -> None:
    for is_group, key_type in ((True, 0), (False, 1)):
        same(
            apis.FIND_COORDINATOR,
            lambda version, of=is_group: ours.encode_find_coordinator(version, ["a", LONG], of_groups=of),
            FindCoordinatorRequest,
            key_type=key_type,
            coordinator_keys=["a", LONG],
        )


def test_transaction_requests_match_kafka_python() -> None:
    same(
        apis.ADD_PARTITIONS_TO_TXN,
        lambda version: ours.encode_add_partitions(version, "id", 5, 6, PARTITIONS),
        AddPartitionsToTxnRequest,
        **{f"v3_and_below_{name}": value for name, value in {**PRODUCER, "topics": TOPICS}.items()},
    )
    same(
        apis.ADD_OFFSETS_TO_TXN,
        lambda version: ours.encode_add_offsets(version, "id", 5, 6, LONG),
        AddOffsetsToTxnRequest,
        **PRODUCER,
        group_id=LONG,
    )
    offsets = dict(zip(PARTITIONS, [(1, "m"), (2, ""), (3, LONG)], strict=True))
    same(
        apis.TXN_OFFSET_COMMIT,
        lambda version: ours.encode_txn_offset_commit(version, "id", 5, 6, "group", offsets),
        TxnOffsetCommitRequest,
        **PRODUCER,
        group_id="group",
        generation_id=-1,
        member_id="",
        group_instance_id=None,
        topics=[(LONG, [(3, 1, -1, "m"), (2**31 - 1, 3, -1, LONG)]), ("t", [(0, 2, -1, "")])],
    )
    for commit in (False, True):
        same(
            apis.END_TXN,
            lambda version, commit=commit: ours.encode_end_txn(version, "id", 5, 6, commit=commit),
            EndTxnRequest,
            **PRODUCER,
            committed=commit,
        )


def test_offset_fetch() -> None:
    group = OffsetFetchRequest.OffsetFetchRequestGroup
    for asked, topics in ((None, None), ([], []), (PARTITIONS, TOPICS)):
        for stable in (False, True):
            same(
                apis.OFFSET_FETCH,
                lambda version, asked=asked, stable=stable: ours.encode_offset_fetch(
                    version, "g", asked, stable=stable
                ),
                OffsetFetchRequest,
                groups=[group(group_id="g", member_id=None, member_epoch=-1, topics=topics)],
                require_stable=stable,
            )


def test_open_transactions() -> None:
    for ids in ([], ["a", LONG]):
        same(
            apis.DESCRIBE_TRANSACTIONS,
            lambda version, ids=ids: ours.encode_describe_transactions(version, ids),
            DescribeTransactionsRequest,
            transactional_ids=ids,
        )
    same(
        apis.LIST_TRANSACTIONS,
        lambda version: ours.encode_list_transactions(version, ["Ongoing", LONG], LONG),
        ListTransactionsRequest,
        state_filters=["Ongoing", LONG],
        producer_id_filters=[],
        duration_filter=-1,
        transactional_id_pattern=LONG,
    )
