"""Metadata, versions and producer ids: requests are byte for byte as kafka-python encodes them.

Then what is made of responses; that each version's response is read is in test_apis.py.
"""

from __future__ import annotations

import itertools
import uuid
from functools import partial
from typing import Any

import pytest
from kafka.protocol.api_header import RequestHeader
from kafka.protocol.metadata import ApiVersionsRequest, ApiVersionsResponse, MetadataRequest, MetadataResponse
from kafka.protocol.producer import InitProducerIdRequest, InitProducerIdResponse

from kafka_sink.errors import ProtocolError
from kafka_sink.model import NO_LEADER
from kafka_sink.network import apis, requests
from kafka_sink.network.apis import APIS
from kafka_sink.network.requests import (
    encode_api_versions,
    encode_header,
    encode_init_producer_id,
    encode_metadata,
)
from tests.support.fake_state import framed
from tests.support.response_checks import every_version
from tests.support.schema_requests import LONG, same

_Topic = MetadataResponse.MetadataResponseTopic


def test_headers() -> None:
    for api_key, client_id in itertools.product(APIS, ("", "kafka-chunked", LONG)):
        for version in every_version(api_key):
            header = RequestHeader(
                request_api_key=api_key, request_api_version=version, correlation_id=77, client_id=client_id
            )
            expected = bytes(header.encode(flexible=version >= APIS[api_key].first_flexible))
            assert encode_header(api_key, version, 77, client_id) == expected, (api_key, version)


def test_bodies() -> None:
    fields = {"client_software_name": "kafka-chunked", "client_software_version": "1.2"}
    same(apis.API_VERSIONS, lambda version: encode_api_versions(version, "1.2"), ApiVersionsRequest, **fields)
    flags = (False, True)
    for names, create, operations in itertools.product([(), ("t", LONG)], flags, flags):
        same(
            apis.METADATA,
            partial(encode_metadata, topics=names, allow_auto_create=create, operations=operations),
            MetadataRequest,
            topics=[MetadataRequest.MetadataRequestTopic(topic_id=None, name=name) for name in names],
            allow_auto_topic_creation=create,
            include_cluster_authorized_operations=False,
            include_topic_authorized_operations=operations,
        )
    of = {"transaction_timeout_ms": 9, "producer_id": 2**40, "producer_epoch": 5}
    for name in (None, "", LONG):
        ours = partial(encode_init_producer_id, transactional_id=name, **of)
        same(apis.INIT_PRODUCER_ID, ours, InitProducerIdRequest, transactional_id=name, **of)


@pytest.mark.parametrize(("producer_id", "epoch"), [(-1, 0), (-(2**63) + 1000, 0), (8, -1)])
def test_a_negative_producer_id_without_an_error_is_none(producer_id: int, epoch: int) -> None:
    """Catches: rows that were written without idempotence, and twice where a response was lost."""
    response = InitProducerIdResponse(
        version=4, throttle_time_ms=0, error_code=0, producer_id=producer_id, producer_epoch=epoch
    )
    with pytest.raises(ProtocolError, match="an invalid producer id or epoch"):
        requests.decode_init_producer_id(4, framed(response, 1)[4:])


def test_refused_versions_come_in_version_0() -> None:
    response = ApiVersionsResponse(version=0, error_code=35, api_keys=[])
    assert requests.decode_api_versions(4, framed(response, 1)[4:]) == requests.ApiVersionsResponse(35, {})


def partition(index: int, error: int = 0, leader: int = 1) -> tuple[Any, ...]:
    """Error, number, leader, epoch, replicas, those in sync, those offline."""
    return error, index, leader, 5, [1], [1], []


def response_of(version: int, *topics: Any) -> requests.MetadataResponse:
    """Through the wire."""
    head = {"brokers": [(1, "b1", 9093, "r")], "cluster_id": "c", "controller_id": 4}
    response = MetadataResponse(version=version, topics=list(topics), **head)
    return requests.decode_metadata(version, framed(response, 1)[4:])


def test_topics_with_an_error_or_without_all_partitions_have_no_metadata() -> None:
    incomplete = {f"new-{n}": indexes for n, indexes in enumerate(([], [1], [0, 2], [0, 0]))}
    response = response_of(
        12,
        _Topic(error_code=3, name="gone", partitions=[]),
        # Of an id that the broker does not know.
        _Topic(error_code=100, name=None, topic_id=uuid.UUID(int=1), partitions=[]),
        *(
            _Topic(error_code=0, name=name, partitions=[partition(i) for i in indexes])
            for name, indexes in incomplete.items()
        ),
    )
    assert response.update.topics == ()
    assert response.update.errors == {"gone": 3, **dict.fromkeys(incomplete, 5)}


def test_partitions_without_a_leader() -> None:
    rows = [partition(0, 5, 4), partition(1, leader=-1), partition(2, 9)]
    response = response_of(12, _Topic(error_code=0, name="t", partitions=rows))
    assert [p.leader for p in response.update.topics[0].partitions] == [NO_LEADER, NO_LEADER, 1]


def test_topics_that_may_not_be_written_to_are_named() -> None:
    rights = {"unknown": None, "writable": {3, 4}, "unwritable": {3, 8}}
    topics = [
        _Topic(error_code=0, name=name, topic_id=uuid.UUID(int=7), partitions=[], authorized_operations=some)
        for name, some in rights.items()
    ]
    response = response_of(13, *topics)
    assert response.unwritable == ("unwritable",)
    assert response.controller_id == 4
