"""The fake broker against an independent client (kafka-python's codecs on a plain socket)."""

from __future__ import annotations

import socket
import time
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from confluent_kafka import Producer
from kafka.protocol.metadata import ApiVersionsRequest, ApiVersionsResponse, MetadataRequest, MetadataResponse
from kafka.protocol.producer import (
    InitProducerIdRequest,
    InitProducerIdResponse,
    ProduceRequest,
    ProduceResponse,
)

from tests.support.fake_broker import API_VERSIONS, METADATA, PRODUCE, FakeCluster
from tests.support.fake_replies import Refuse, Reply, error
from tests.support.network_harness import batch

RESPONSES = {
    ProduceRequest: ProduceResponse,
    MetadataRequest: MetadataResponse,
    ApiVersionsRequest: ApiVersionsResponse,
    InitProducerIdRequest: InitProducerIdResponse,
}


class PlainClient:
    def __init__(self, cluster: FakeCluster, node_id: int = 0) -> None:
        self.socket = socket.create_connection(("127.0.0.1", cluster.port(node_id)), timeout=10)
        self.correlation = 0

    def send(self, request: Any) -> None:
        self.correlation += 1
        request.with_header(correlation_id=self.correlation, client_id="plain")
        self.socket.sendall(request.encode(header=True, framed=True))

    def read(self, count: int) -> bytes:
        """So many bytes, or what comes before the end."""
        data = b""
        while len(data) < count:
            piece = self.socket.recv(count - len(data))
            if not piece:
                break
            data += piece
        return data

    def ask(self, request: Any) -> Any:
        self.send(request)
        size = int.from_bytes(self.read(4), "big")
        response = RESPONSES[type(request)].decode(self.read(size), version=request.version, header=True)
        assert response.header.correlation_id == self.correlation
        return response


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    """Two brokers; partitions 0 and 2 of t lead on broker 0, partition 1 on broker 1."""
    with FakeCluster({"t": 3}, brokers=2, max_message_bytes=10_000) as running:
        yield running


@pytest.fixture
def client(cluster: FakeCluster) -> Iterator[PlainClient]:
    one = PlainClient(cluster)
    yield one
    one.socket.close()


def produce(
    data: bytes, partition: int = 0, *, topic: str = "t", version: int = 11, acks: int = -1, id: Any = None
) -> Any:
    row = ProduceRequest.TopicProduceData.PartitionProduceData(index=partition, records=data)
    topic_data = ProduceRequest.TopicProduceData(name=topic, topic_id=id, partition_data=[row])
    return ProduceRequest(version=version, acks=acks, timeout_ms=1000, topic_data=[topic_data])


def only(response: Any) -> Any:
    return response.responses[0].partition_responses[0]


def metadata(*names: str, version: int = 12) -> Any:
    rows = [MetadataRequest.MetadataRequestTopic(name=name, topic_id=None) for name in names]
    return MetadataRequest(version=version, topics=rows)


def test_api_versions_of_every_version(client: PlainClient) -> None:
    for version in range(5):
        response = client.ask(
            ApiVersionsRequest(version=version, client_software_name="x", client_software_version="1")
        )
        ranges = {row.api_key: (row.min_version, row.max_version) for row in response.api_keys}
        assert ranges == {0: (3, 13), 3: (0, 13), 18: (0, 4), 19: (2, 7), 22: (0, 6), 32: (0, 4)}, version


def test_too_new_api_versions_are_refused_in_version_0() -> None:
    with FakeCluster(versions={API_VERSIONS: (0, 2)}) as old:
        client = PlainClient(old)
        client.send(ApiVersionsRequest(version=4, client_software_name="x", client_software_version="1"))
        size = int.from_bytes(client.read(4), "big")
        response = ApiVersionsResponse.decode(client.read(size)[4:], version=0)
        assert response.error_code == 35
        assert any(row.api_key == API_VERSIONS and row.max_version == 2 for row in response.api_keys)
        client.socket.close()


def test_metadata_of_every_version(cluster: FakeCluster, client: PlainClient) -> None:
    for version in range(14):
        response = client.ask(metadata("t", "none", version=version))
        nodes = [(one.node_id, one.port) for one in response.brokers]
        assert nodes == [(0, cluster.port(0)), (1, cluster.port(1))], version
        topic, missing = response.topics
        assert [(p.partition_index, p.leader_id) for p in topic.partitions] == [(0, 0), (1, 1), (2, 0)]
        assert (topic.error_code, missing.error_code) == (0, 3)
        assert (topic.topic_id is not None) == (version >= 10)


def test_produce_of_every_version_appends(cluster: FakeCluster, client: PlainClient) -> None:
    topic_id = client.ask(metadata("t")).topics[0].topic_id
    offset = 0
    for version in range(3, 14):
        first = only(client.ask(produce(batch(3), version=version, id=topic_id)))
        second = only(client.ask(produce(batch(2), version=version, id=topic_id)))
        offsets = [(p.error_code, p.base_offset) for p in (first, second)]
        assert offsets == [(0, offset), (0, offset + 3)], version
        offset += 5
        *_, received, _ = cluster.received(PRODUCE)
        assert (received.node_id, received.api_version, received.client_id) == (0, version, "plain")
        assert [b.record_count for b in received.batches] == [3]
    assert [b.record_count for b in cluster.batches("t", 0)] == [3, 2] * 11


def test_the_wrong_broker_names_the_leader(cluster: FakeCluster, client: PlainClient) -> None:
    response = client.ask(produce(batch(1), 1))
    assert only(response).error_code == 6
    assert (only(response).current_leader.leader_id, only(response).current_leader.leader_epoch) == (1, 0)
    assert [(n.node_id, n.port) for n in response.node_endpoints] == [(1, cluster.port(1))]
    cluster.move_leader("t", 1, 0)
    assert only(client.ask(produce(batch(1), 1))).error_code == 0
    assert client.ask(metadata("t")).topics[0].partitions[1].leader_epoch == 1


def test_what_is_not_there(cluster: FakeCluster, client: PlainClient) -> None:
    assert only(client.ask(produce(batch(1), 9))).error_code == 3
    assert only(client.ask(produce(batch(1), topic="gone"))).error_code == 3
    assert only(client.ask(produce(batch(1), version=13, id=uuid.UUID(int=4)))).error_code == 100
    before = client.ask(metadata("t")).topics[0].topic_id
    cluster.create_topic("t", 1)
    assert only(client.ask(produce(batch(1), version=13, id=before))).error_code == 100
    cluster.delete_topic("t")
    assert client.ask(metadata("t")).topics[0].error_code == 3


def test_batches_are_checked(client: PlainClient) -> None:
    broken = bytearray(batch(1))
    broken[-1] ^= 1
    assert only(client.ask(produce(bytes(broken)))).error_code == 2
    assert only(client.ask(produce(batch(1, value=bytes(20_000))))).error_code == 10
    assert only(client.ask(produce(batch(1, producer_id=1, sequence=0)))).error_code == 0
    assert only(client.ask(produce(batch(1, producer_id=1, sequence=5)))).error_code == 45


def test_producer_ids_are_new_each_time(client: PlainClient) -> None:
    ids = set()
    for version in range(7):
        request = InitProducerIdRequest(version=version, transactional_id=None, transaction_timeout_ms=1)
        response = client.ask(request)
        assert (response.error_code, response.producer_epoch) == (0, 0)
        ids.add(response.producer_id)
    assert len(ids) == 7


def test_scripts_are_taken_one_each_and_then_all_is_well(cluster: FakeCluster, client: PlainClient) -> None:
    cluster.script(PRODUCE, error(19, message="few"), error(20, append=True), Reply(throttle_ms=7))
    cluster.script(PRODUCE, Reply(partition_errors={("t", 0): 7}))
    responses = [client.ask(produce(batch(1))) for _ in range(5)]
    assert [only(a).error_code for a in responses] == [19, 20, 0, 7, 0]
    assert only(responses[0]).error_message == "few"
    assert [a.throttle_time_ms for a in responses] == [0, 0, 7, 0, 0]
    assert len(cluster.batches("t", 0)) == 3, "of 20 (after append), of throttling and the last"


def test_scripts_of_one_broker(cluster: FakeCluster, client: PlainClient) -> None:
    cluster.script(METADATA, error(5), node_id=1)
    assert client.ask(metadata("t")).topics[0].error_code == 0
    other = PlainClient(cluster, 1)
    assert other.ask(metadata("t")).topics[0].error_code == 5
    other.socket.close()


def test_a_refused_request(cluster: FakeCluster, client: PlainClient) -> None:
    cluster.script(PRODUCE, Refuse())
    client.send(produce(batch(4)))
    assert client.read(1) == b""
    assert cluster.batches("t", 0) == []


def test_silence_and_delay(cluster: FakeCluster, client: PlainClient) -> None:
    cluster.script(PRODUCE, Reply(silent=True), Reply(delay_ms=60))
    client.send(produce(batch(1)))
    client.socket.settimeout(0.05)
    with pytest.raises(TimeoutError):
        client.socket.recv(1)
    client.socket.settimeout(10)
    sent = time.monotonic()
    client.send(produce(batch(1)))
    assert len(client.read(4)) == 4
    assert time.monotonic() - sent >= 0.06


def test_disconnecting_leaves_the_broker_up(cluster: FakeCluster, client: PlainClient) -> None:
    client.ask(metadata("t"))
    cluster.disconnect(0)
    try:
        assert client.read(1) == b""
    except ConnectionResetError:
        pass  # as likely
    PlainClient(cluster).socket.close()


def test_a_version_that_is_not_spoken_ends_the_connection() -> None:
    with FakeCluster({"t": 1}, versions={PRODUCE: (3, 8)}) as old:
        client = PlainClient(old)
        client.send(produce(batch(1), version=9))
        assert client.read(1) == b""
        client.socket.close()


def test_librdkafka_is_content_with_it() -> None:
    """An independent client negotiates, finds leaders and produces idempotently."""
    # It writes V2 batches only where Fetch could read them, so Fetch is announced here (and never asked for).
    with FakeCluster({"t": 3}, brokers=2, versions={1: (4, 11)}) as cluster:
        producer = Producer({"bootstrap.servers": cluster.bootstrap_servers, "enable.idempotence": True})
        results: list[Any] = []
        for index in range(300):
            producer.produce(
                "t", b"v", partition=index % 3, on_delivery=lambda problem, _: results.append(problem)
            )
        assert producer.flush(20) == 0
        assert results == [None] * 300
        batches = [b for partition in range(3) for b in cluster.batches("t", partition)]
        assert sum(b.record_count for b in batches) == 300
        assert all(b.producer_id >= 1000 for b in batches)
