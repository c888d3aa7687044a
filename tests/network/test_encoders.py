"""Every request but Produce, in each version that this client writes, is byte for byte as kafka-python
encodes it by Kafka's schemas."""

from __future__ import annotations

from typing import Any

import pytest
from kafka.protocol.admin import (
    CreateTopicsRequest,
    DescribeConfigsRequest,
    DescribeTransactionsRequest,
    ListTransactionsRequest,
)
from kafka.protocol.api_header import RequestHeader
from kafka.protocol.consumer import OffsetFetchRequest
from kafka.protocol.metadata import ApiVersionsRequest, FindCoordinatorRequest, MetadataRequest
from kafka.protocol.producer import (
    AddOffsetsToTxnRequest,
    AddPartitionsToTxnRequest,
    EndTxnRequest,
    InitProducerIdRequest,
    TxnOffsetCommitRequest,
)
from kafka.protocol.sasl import SaslAuthenticateRequest, SaslHandshakeRequest

from kafka_sink.model import TopicPartition
from kafka_sink.network import apis
from kafka_sink.network.admin_requests import encode_create_topic, encode_describe_broker
from kafka_sink.network.apis import APIS
from kafka_sink.network.authentication import Login
from kafka_sink.network.requests import (
    encode_api_versions,
    encode_header,
    encode_init_producer_id,
    encode_metadata,
)
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
from kafka_sink.security.sasl import SaslExchange, Steps

# Longer than what one byte of a compact length can say, and no ASCII.
LONG = "töpic" * 40
PARTITIONS = [TopicPartition(LONG, 3), TopicPartition("t", 0), TopicPartition(LONG, 2**31 - 1)]


def versions(api_key: int) -> range:
    low, high = APIS[api_key].versions
    return range(low, high + 1)


def encoded(request: Any, version: int, **fields: Any) -> bytes:
    return bytes(request(version=version, **fields).encode(version=version))


def each(api_key: int) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("version", versions(api_key))


@pytest.mark.parametrize("api_key", APIS)
@pytest.mark.parametrize("client_id", ["", "kafka-chunked", LONG])
def test_headers(api_key: int, client_id: str) -> None:
    for version in versions(api_key):
        header = RequestHeader(
            request_api_key=api_key, request_api_version=version, correlation_id=77, client_id=client_id
        )
        expected = bytes(header.encode(flexible=version >= APIS[api_key].first_flexible))
        assert encode_header(api_key, version, 77, client_id) == expected


@each(apis.API_VERSIONS)
def test_api_versions(version: int) -> None:
    fields = {"client_software_name": "kafka-chunked", "client_software_version": "1.2"}
    assert encode_api_versions(version, "1.2") == encoded(ApiVersionsRequest, version, **fields)


@each(apis.METADATA)
@pytest.mark.parametrize("names", [(), ("t", LONG)])
@pytest.mark.parametrize("create", [False, True])
def test_metadata(version: int, names: tuple[str, ...], create: bool) -> None:
    topics = [MetadataRequest.MetadataRequestTopic(topic_id=None, name=name) for name in names]
    for operations in (False, True):
        assert encode_metadata(version, names, create, operations) == encoded(
            MetadataRequest,
            version,
            topics=topics,
            allow_auto_topic_creation=create,
            include_cluster_authorized_operations=False,
            include_topic_authorized_operations=operations,
        )


@each(apis.INIT_PRODUCER_ID)
@pytest.mark.parametrize("name", [None, "", LONG])
def test_init_producer_id(version: int, name: str | None) -> None:
    assert encode_init_producer_id(version, 2**40, 5, name, 9) == encoded(
        InitProducerIdRequest,
        version,
        transactional_id=name,
        transaction_timeout_ms=9,
        producer_id=2**40,
        producer_epoch=5,
    )


@each(apis.CREATE_TOPICS)
@pytest.mark.parametrize("config", [(), (("retention.ms", "-1"), (LONG, ""))])
def test_create_topic(version: int, config: tuple[tuple[str, str], ...]) -> None:
    of = CreateTopicsRequest.CreatableTopic
    topic = of(
        name=LONG,
        num_partitions=-1,
        replication_factor=3,
        assignments=[],
        configs=[of.CreatableTopicConfig(name=name, value=value) for name, value in config],
    )
    fields = {"topics": [topic], "timeout_ms": 7, "validate_only": False}
    assert encode_create_topic(version, LONG, -1, 3, 7, config) == encoded(
        CreateTopicsRequest, version, **fields
    )


@each(apis.DESCRIBE_CONFIGS)
def test_describe_broker(version: int) -> None:
    resource = DescribeConfigsRequest.DescribeConfigsResource(
        resource_type=4, resource_name="12", configuration_keys=["a", LONG]
    )
    fields = {"resources": [resource], "include_synonyms": False, "include_documentation": False}
    assert encode_describe_broker(version, 12, ["a", LONG]) == encoded(
        DescribeConfigsRequest, version, **fields
    )


@each(apis.FIND_COORDINATOR)
@pytest.mark.parametrize("of_groups", [False, True])
def test_find_coordinator(version: int, of_groups: bool) -> None:
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
@pytest.mark.parametrize("commit", [False, True])
def test_end_txn(version: int, commit: bool) -> None:
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
@pytest.mark.parametrize("partitions", [None, [], PARTITIONS])
@pytest.mark.parametrize("stable", [False, True])
def test_offset_fetch(version: int, partitions: list[TopicPartition] | None, stable: bool) -> None:
    of = OffsetFetchRequest.OffsetFetchRequestGroup
    topics = [
        of.OffsetFetchRequestTopics(name=LONG, partition_indexes=[3, 2**31 - 1]),
        of.OffsetFetchRequestTopics(name="t", partition_indexes=[0]),
    ]
    wanted = None if partitions is None else topics[: len(partitions)]
    group = of(group_id="g", member_id=None, member_epoch=-1, topics=wanted)
    assert encode_offset_fetch(version, "g", partitions, stable=stable) == encoded(
        OffsetFetchRequest, version, groups=[group], require_stable=stable
    )


@each(apis.DESCRIBE_TRANSACTIONS)
@pytest.mark.parametrize("ids", [[], ["a", LONG]])
def test_describe_transactions(version: int, ids: list[str]) -> None:
    assert encode_describe_transactions(version, ids) == encoded(
        DescribeTransactionsRequest, version, transactional_ids=ids
    )


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


@each(apis.SASL_AUTHENTICATE)
def test_a_login(version: int) -> None:
    steps: Steps = (b"\0" * 300 for _ in range(1))  # type: ignore[assignment]
    login = Login(
        SaslExchange("SCRAM-SHA-256", steps),
        "h:1",
        {apis.SASL_HANDSHAKE: (0, 1), apis.SASL_AUTHENTICATE: (0, version)},
    )
    assert login.begin().body == encoded(SaslHandshakeRequest, 1, mechanism="SCRAM-SHA-256")
    assert bytes(login._authenticate(b"\0" * 300).body) == encoded(
        SaslAuthenticateRequest, version, auth_bytes=b"\0" * 300
    )
