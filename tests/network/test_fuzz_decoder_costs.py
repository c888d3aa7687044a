"""What hostile responses cost, memory and processor time by byte, and what is refused before it costs any."""

from __future__ import annotations

import struct
import time
import tracemalloc
import uuid
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kafka.protocol import metadata as library
from kafka.protocol.admin import ListTransactionsResponse
from kafka.protocol.metadata import ApiVersionsResponse, FindCoordinatorResponse, MetadataResponse
from kafka.protocol.producer import ProduceResponse

from kafka_sink.errors import ProtocolError
from kafka_sink.network import apis, produce, requests, transaction_requests
from kafka_sink.network.broker_protocol import BrokerProtocol
from kafka_sink.network.events import OutboundRequest
from kafka_sink.network.wire import read_response
from tests.support.effort import tries
from tests.support.fake_state import framed

ELEMENTS = 3_000
# Ratios of processor time on a machine that others use: several times what was measured.
SLOW = 5
Topic, Broker = MetadataResponse.MetadataResponseTopic, MetadataResponse.MetadataResponseBroker


def payload_of(response: Any) -> bytes:
    return framed(response, 7)[4:]


def of_partitions(replicas: list[int]) -> bytes:
    rows = [
        Topic.MetadataResponsePartition(
            error_code=0, partition_index=index, leader_id=index % 7, leader_epoch=index % 500,
            replica_nodes=replicas, isr_nodes=replicas, offline_replicas=[],
        )
        for index in range(ELEMENTS)
    ]  # fmt: skip
    topic = Topic(error_code=0, name="t", topic_id=uuid.UUID(int=7), partitions=rows)
    return payload_of(MetadataResponse(version=12, brokers=[], topics=[topic], cluster_id="c"))


def of_brokers() -> bytes:
    rows = [Broker(node_id=index, host="h", port=1, rack=None) for index in range(ELEMENTS)]
    return payload_of(MetadataResponse(version=12, brokers=rows, topics=[], cluster_id="c"))


def of_nameless_topics() -> bytes:
    rows = [Topic(error_code=3, name=None, topic_id=uuid.UUID(int=7), partitions=[])] * ELEMENTS
    return payload_of(MetadataResponse(version=12, brokers=[], topics=rows, cluster_id="c"))


def of_produce(message: str | None) -> bytes:
    kind = ProduceResponse.TopicProduceResponse
    rows = [
        kind.PartitionProduceResponse(
            index=index, error_code=1, base_offset=index * 1000, log_append_time_ms=-1,
            log_start_offset=0, record_errors=[], error_message=message,
        )
        for index in range(ELEMENTS)
    ]  # fmt: skip
    topic = kind(name="t", partition_responses=rows)
    return payload_of(ProduceResponse(version=9, responses=[topic], throttle_time_ms=0))


def of_coordinators() -> bytes:
    row = FindCoordinatorResponse.Coordinator(
        key="", node_id=1, host="h", port=1, error_code=0, error_message=None
    )
    return payload_of(FindCoordinatorResponse(version=4, throttle_time_ms=0, coordinators=[row] * ELEMENTS))


def of_versions() -> bytes:
    rows = [
        ApiVersionsResponse.ApiVersion(api_key=key, min_version=0, max_version=1) for key in range(ELEMENTS)
    ]
    return payload_of(ApiVersionsResponse(version=3, error_code=0, api_keys=rows))


def of_transactions() -> bytes:
    kind = ListTransactionsResponse.TransactionState
    rows = [
        kind(transactional_id=str(index), producer_id=1, transaction_state="") for index in range(ELEMENTS)
    ]
    return payload_of(
        ListTransactionsResponse(
            version=0, throttle_time_ms=0, error_code=0, unknown_state_filters=[], transaction_states=rows
        )
    )


# The response, its decoder, and the bounds: times its size in memory, milliseconds a MiB. Measured (Python
# 3.11, one of two busy cores): metadata of three replicas 5.2 times and 125 ms, a Produce response 7.1 times
# and 26 ms.
Case = tuple[Callable[[], bytes], Callable[[bytes], Any], float, float]
CASES: dict[str, Case] = {
    "metadata": (partial(of_partitions, [1, 2, 3]), partial(requests.decode_metadata, 12), 8, 125),
    "metadata without replicas": (partial(of_partitions, []), partial(requests.decode_metadata, 12), 16, 240),
    "brokers": (of_brokers, partial(requests.decode_metadata, 12), 12, 360),
    "topics": (of_nameless_topics, partial(requests.decode_metadata, 12), 10, 170),
    "produce": (partial(of_produce, None), partial(produce.decode_produce, 9), 10, 30),
    "produce with messages": (partial(of_produce, "x"), partial(produce.decode_produce, 9), 16, 640),
    "coordinators": (of_coordinators, partial(transaction_requests.decode_find_coordinator, 4), 12, 1_400),
    "versions": (of_versions, partial(requests.decode_api_versions, 3), 40, 1_600),
    "transactions": (of_transactions, partial(transaction_requests.decode_list_transactions, 0), 16, 800),
}


@pytest.mark.parametrize("name", CASES)
def test_what_a_response_of_many_small_elements_costs(name: str) -> None:
    make, decode, most_memory, most_ms = CASES[name]
    payload = make()
    began = time.process_time()
    decode(payload)
    spent_ms = (time.process_time() - began) * 1000
    tracemalloc.start()
    try:
        decode(payload)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak <= most_memory * len(payload) + 100_000
    assert spent_ms <= SLOW * most_ms * len(payload) / 2**20 + 50


def test_topics_that_nobody_asked_for_cost_nothing() -> None:
    """Catches: 8 MiB of topics without a name took 12 s and 796 MiB."""
    payload = of_nameless_topics() + bytes(8 * 2**20)
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError, match="has 3000 topics; at most 5 are expected"):
            requests.decode_metadata(12, payload, 5)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 100_000


def test_the_connection_expects_no_more_topics_than_were_asked_for() -> None:
    protocol = BrokerProtocol("c", "broker", 1000.0)
    protocol.start(0.0)
    rows = [ApiVersionsResponse.ApiVersion(api_key=key, min_version=0, max_version=12) for key in range(70)]
    protocol.send_buffer.advance(protocol.send_buffer.queued_bytes)
    versions = ApiVersionsResponse(version=4, error_code=0, api_keys=rows)
    protocol.receive(framed(versions, 0))
    assert protocol.next_response(0.0) is None
    body = [requests.encode_metadata(12, ("t",), False)]
    protocol.submit(OutboundRequest(apis.METADATA, 12, body, True, 1000.0, "tag"), 0.0)
    protocol.send_buffer.advance(protocol.send_buffer.queued_bytes - protocol.send_buffer.written_bytes)
    payload = of_nameless_topics()
    protocol.receive(struct.pack(">i", len(payload)) + struct.pack(">i", 1) + payload[4:])
    with pytest.raises(ProtocolError, match="has 3000 topics"):
        protocol.next_response(0.0)


def test_a_response_in_proportion_to_its_request_is_bounded_by_it() -> None:
    assert apis.APIS[apis.PRODUCE].largest_response(1_000) < 2 * 2**20
    assert apis.APIS[apis.PRODUCE].largest_response(2**30) == apis.APIS[apis.PRODUCE].max_response_bytes
    assert apis.APIS[apis.METADATA].largest_response(10) == apis.APIS[apis.METADATA].max_response_bytes
    assert max(api.max_response_bytes for api in apis.APIS.values()) <= 32 * 2**20


@given(
    st.integers(4, 13),
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 4), st.booleans(), st.integers(0, 3)), max_size=4),
    st.data(),
)
@settings(max_examples=tries(50))
def test_metadata_is_read_as_kafka_python_reads_it(version: int, drawn: Any, data: Any) -> None:
    """Also where it is cut: then neither gives a value."""
    topics = []
    for number, (error, count, with_operations, replicas) in enumerate(drawn):
        rows = [
            Topic.MetadataResponsePartition(
                error_code=error, partition_index=index, leader_id=index, leader_epoch=9,
                replica_nodes=list(range(replicas)), isr_nodes=[0], offline_replicas=[],
            )
            for index in range(count)
        ]  # fmt: skip
        operations = {"authorized_operations": {3, 4}} if with_operations and version >= 8 else {}
        fields = {"error_code": error, "name": f"t{number}", "topic_id": uuid.UUID(int=number)}
        topics.append(Topic(**fields, partitions=rows, **operations))
    broker = Broker(node_id=1, host="h", port=9092, rack="r")
    payload = payload_of(
        MetadataResponse(version=version, brokers=[broker], topics=topics, cluster_id="c", controller_id=1)
    )
    found = requests.decode_metadata(version, payload)
    by_library = read_response(library.MetadataResponse, version, payload, lambda response: response)
    assert [node.host for node in found.update.nodes] == [one.host for one in by_library.brokers]
    named = {one.name: one for one in by_library.topics}
    for topic in found.update.topics:
        theirs = named.pop(topic.name)
        assert [(p.partition, p.leader) for p in topic.partitions] == [
            (p.partition_index, p.leader_id if p.error_code != 5 else -1) for p in theirs.partitions
        ]
    assert named.keys() == found.update.errors.keys()
    end = data.draw(st.integers(0, len(payload) - 1))
    with pytest.raises(ProtocolError):
        requests.decode_metadata(version, payload[:end])
