"""Requests other than Produce as kafka-python reads them, and their responses as our own values."""

from __future__ import annotations

import io
import uuid
from typing import Any

import pytest
from kafka.protocol.api_header import RequestHeader
from kafka.protocol.metadata import ApiVersionsRequest, ApiVersionsResponse, MetadataRequest, MetadataResponse
from kafka.protocol.producer import InitProducerIdRequest, InitProducerIdResponse, ProduceRequest

from kafka_sink.errors import ProtocolError
from kafka_sink.kafka_errors import REBOOTSTRAP_REQUIRED
from kafka_sink.model import NO_LEADER, Node, PartitionMetadata, TopicMetadata
from kafka_sink.network import apis, requests
from tests.support.fake_state import framed
from tests.support.response_checks import every_version

_Topic = MetadataResponse.MetadataResponseTopic
_Partition = _Topic.MetadataResponsePartition


REQUESTS: list[Any] = [MetadataRequest, ApiVersionsRequest, InitProducerIdRequest, ProduceRequest]
CASES = [(request, version) for request in REQUESTS for version in range(request.max_version + 1)]


@pytest.mark.parametrize(("request_class", "version"), CASES)
def test_headers_are_of_the_version_that_the_api_version_asks_for(request_class: Any, version: int) -> None:
    api_key = int(request_class.API_KEY)
    for correlation, client in ((77, "client-é"), (2**31 - 1, "client-é"), (1, "another")):
        header = requests.encode_header(api_key, version, correlation, client)
        parsed = RequestHeader.decode(io.BytesIO(header), flexible=request_class.flexible_version_q(version))
        assert (parsed.request_api_key, parsed.request_api_version) == (api_key, version)
        assert (parsed.correlation_id, parsed.client_id) == (correlation, client)


@pytest.mark.parametrize("version", every_version(apis.METADATA))
@pytest.mark.parametrize("allow", [True, False])
def test_metadata_asks_for_these_topics_only(version: int, allow: bool) -> None:
    body = requests.encode_metadata(version, ("a", "b"), allow)
    request = MetadataRequest.decode(body, version=version)
    assert [topic.name for topic in request.topics] == ["a", "b"]
    assert request.allow_auto_topic_creation is allow
    nothing = MetadataRequest.decode(requests.encode_metadata(version, (), allow), version=version)
    assert nothing.topics == []


@pytest.mark.parametrize("version", every_version(apis.INIT_PRODUCER_ID))
def test_init_producer_id(version: int) -> None:
    request = InitProducerIdRequest.decode(requests.encode_init_producer_id(version, 8, 3), version=version)
    assert request.transactional_id is None
    if version >= 3:
        assert (request.producer_id, request.producer_epoch) == (8, 3)
    response = InitProducerIdResponse(
        version=version, throttle_time_ms=2, error_code=0, producer_id=8, producer_epoch=4
    )
    response = requests.decode_init_producer_id(version, framed(response, 1)[4:])
    assert response == requests.ProducerIdResponse(0, 8, 4, 2)


@pytest.mark.parametrize(("producer_id", "epoch"), [(-1, 0), (-(2**63) + 1000, 0), (8, -1)])
def test_a_negative_producer_id_without_an_error_is_none(producer_id: int, epoch: int) -> None:
    """Catches: rows that were written without idempotence, and twice where a response was lost."""
    response = InitProducerIdResponse(
        version=4, throttle_time_ms=0, error_code=0, producer_id=producer_id, producer_epoch=epoch
    )
    with pytest.raises(ProtocolError, match="which is none"):
        requests.decode_init_producer_id(4, framed(response, 1)[4:])


@pytest.mark.parametrize("version", range(5))
def test_api_versions(version: int) -> None:
    rows = [ApiVersionsResponse.ApiVersion(api_key=0, min_version=3, max_version=11)]
    response = ApiVersionsResponse(version=version, error_code=0, api_keys=rows, throttle_time_ms=9)
    response = requests.decode_api_versions(version, framed(response, 1)[4:])
    assert response == requests.ApiVersionsResponse(0, {0: (3, 11)}, 9 if version else 0)


def test_refused_versions_come_in_version_0() -> None:
    response = ApiVersionsResponse(version=0, error_code=35, api_keys=[])
    assert requests.decode_api_versions(4, framed(response, 1)[4:]) == requests.ApiVersionsResponse(35, {})


def partition(index: int, **changes: Any) -> Any:
    """A healthy partition, but for the changes."""
    fields: dict[str, Any] = {
        "error_code": 0, "partition_index": index, "leader_id": 1, "leader_epoch": 5,
        "replica_nodes": [1], "isr_nodes": [1], "offline_replicas": [],
    }  # fmt: skip
    return _Partition(**{**fields, **changes})


def response_of(version: int, *topics: Any, error_code: int = 0) -> requests.MetadataResponse:
    """Through the wire."""
    response = MetadataResponse(
        version=version,
        brokers=[MetadataResponse.MetadataResponseBroker(node_id=1, host="b1", port=9093, rack="r")],
        topics=list(topics),
        cluster_id="c",
        error_code=error_code,
        throttle_time_ms=6,
    )
    return requests.decode_metadata(version, framed(response, 1)[4:])


@pytest.mark.parametrize("version", every_version(apis.METADATA))
def test_metadata_as_our_own_values(version: int) -> None:
    topic_id = uuid.UUID(int=99)
    topic = _Topic(
        error_code=0, name="t", topic_id=topic_id, partitions=[partition(1, leader_id=2), partition(0)]
    )
    response = response_of(version, topic)
    # Before Kafka 2.4 epochs are there from version 7 on, and wrong while partitions are reassigned.
    epoch = 5 if version >= 9 else -1
    assert response.update.nodes == (Node(1, "b1", 9093, "r"),)
    assert response.update.cluster_id == "c"
    assert response.throttle_time_ms == 6
    assert response.update.errors == {}
    assert response.update.topics == (
        TopicMetadata.of(
            "t",
            topic_id.bytes if version >= 10 else None,
            (PartitionMetadata("t", 0, 1, epoch), PartitionMetadata("t", 1, 2, epoch)),
        ),
    )


def test_topics_with_an_error_have_no_metadata() -> None:
    response = response_of(12, _Topic(error_code=3, name="gone", partitions=[]))
    assert response.update.topics == ()
    assert response.update.errors == {"gone": 3}


@pytest.mark.parametrize("indexes", [[], [1], [0, 2], [0, 0]])
def test_topics_with_missing_partitions_are_not_yet_there(indexes: list[int]) -> None:
    response = response_of(12, _Topic(error_code=0, name="new", partitions=[partition(i) for i in indexes]))
    assert response.update.topics == ()
    assert response.update.errors == {"new": 5}


def test_partitions_without_a_leader() -> None:
    rows = [partition(0, error_code=5, leader_id=4), partition(1, leader_id=-1), partition(2, error_code=9)]
    response = response_of(12, _Topic(error_code=0, name="t", partitions=rows))
    assert [p.leader for p in response.update.topics[0].partitions] == [NO_LEADER, NO_LEADER, 1]


def test_an_unknown_id_without_a_name_is_skipped() -> None:
    response = response_of(12, _Topic(error_code=100, name=None, topic_id=uuid.UUID(int=1), partitions=[]))
    assert (response.update.topics, response.update.errors) == ((), {})


def test_the_error_of_the_whole_response() -> None:
    assert response_of(13, error_code=129).error_code == REBOOTSTRAP_REQUIRED
    assert response_of(12, error_code=129).error_code == 0


@pytest.mark.parametrize(("operations", "unwritable"), [(None, ()), ({3, 4}, ()), ({3, 8}, ("t",))])
def test_topics_that_may_not_be_written_to_are_named(
    operations: set[int] | None, unwritable: tuple[str, ...]
) -> None:
    row = MetadataResponse.MetadataResponseTopic(
        error_code=0, name="t", topic_id=uuid.UUID(int=7), partitions=[], authorized_operations=operations
    )
    response = MetadataResponse(version=13, brokers=[], topics=[row], cluster_id="c", controller_id=4)
    response = requests.decode_metadata(13, framed(response, 1)[4:])
    assert response.unwritable == unwritable
    assert response.controller_id == 4
