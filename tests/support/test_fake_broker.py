"""The fake broker, asked by this package's client, and by librdkafka as an independent one."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from confluent_kafka import Producer

from kafka_sink.network import apis, requests
from kafka_sink.network.broker_protocol import Request
from kafka_sink.network.produce import ProducePartitionResponse
from tests.support.fake_broker import API_VERSIONS, METADATA, PRODUCE, FakeCluster
from tests.support.fake_replies import Refuse, Reply, error
from tests.support.network_harness import (
    Disconnected,
    Driver,
    Failed,
    Responded,
    batch,
    metadata_request,
    produce_request,
    request,
)
from tests.support.response_checks import every_version


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    """Two brokers; partitions 0 and 2 of t lead on broker 0, partition 1 on broker 1."""
    with FakeCluster({"t": 3}, brokers=2, max_message_bytes=10_000) as running:
        yield running


@pytest.fixture
def driver(cluster: FakeCluster) -> Iterator[Driver]:
    with Driver(cluster.bootstrap_servers) as one:
        one.connect(-1)
        one.connect(-2)
        yield one


def ask(driver: Driver, asked: Request, node_id: int = -1) -> Any:
    """The response of broker 0, or of broker 1 (-2)."""
    driver.events.clear()
    driver.send(asked, node_id, name=asked)
    return driver.event(Responded, asked).response


def produced(driver: Driver, data: bytes, **more: Any) -> ProducePartitionResponse:
    (partition,) = ask(driver, produce_request(data, **more)).partitions
    assert isinstance(partition, ProducePartitionResponse)
    return partition


def topic_in(driver: Driver) -> Any:
    (topic,) = ask(driver, metadata_request("t")).update.topics
    return topic


def test_versions_also_of_an_older_broker(driver: Driver) -> None:
    ranges = {0: (3, 13), 3: (0, 13), 18: (0, 4), 19: (2, 7), 22: (0, 6), 32: (0, 4)}
    assert driver.connection().protocol.api_versions == ranges
    with FakeCluster(versions={API_VERSIONS: (0, 2)}) as old, Driver(old.bootstrap_servers) as other:
        other.connect()
        assert other.connection().protocol.api_versions == {**ranges, API_VERSIONS: (0, 2)}
        assert [one.api_version for one in old.received(API_VERSIONS)] == [0], "4 was refused"


def test_metadata_of_every_version(cluster: FakeCluster, driver: Driver) -> None:
    for version in every_version(METADATA):
        update = ask(driver, metadata_request("t", "none", version=version)).update
        nodes = [(one.id, one.port) for one in update.nodes]
        assert nodes == [(0, cluster.port(0)), (1, cluster.port(1))], version
        (topic,) = update.topics
        assert [one.leader for one in topic.partitions] == [0, 1, 0]
        assert update.errors == {"none": 3}
        assert (topic.topic_id is not None) == (version >= 10)


def test_produce_of_every_version_appends(cluster: FakeCluster, driver: Driver) -> None:
    topic_id, offset = topic_in(driver).topic_id, 0
    for version in every_version(PRODUCE):
        for count in (3, 2):
            found = produced(driver, batch(count), version=version, topic_id=topic_id)
            assert (found.error_code, found.base_offset) == (0, offset), version
            offset += count
        *_, received, _ = cluster.received(PRODUCE)
        assert (received.node_id, received.api_version, received.client_id) == (0, version, "test")
        assert [b.record_count for b in received.batches] == [3]
    assert [b.record_count for b in cluster.batches("t", 0)] == [3, 2] * 11


def test_the_wrong_broker_names_the_leader_and_what_is_not_there_is_refused(
    cluster: FakeCluster, driver: Driver
) -> None:
    response = ask(driver, produce_request(batch(1), partition=1))
    assert (response.partitions[0].error_code, response.partitions[0].current_leader) == (6, (1, 0))
    assert [(n.id, n.port) for n in response.node_endpoints] == [(1, cluster.port(1))]
    cluster.move_leader("t", 1, 0)
    assert produced(driver, batch(1), partition=1).error_code == 0
    assert topic_in(driver).partitions[1].leader_epoch == 1
    assert produced(driver, batch(1), partition=9).error_code == 3
    assert produced(driver, batch(1), topic="gone").error_code == 3
    assert produced(driver, batch(1), version=13, topic_id=bytes([4] * 16)).error_code == 100
    before = topic_in(driver).topic_id
    cluster.create_topic("t", 1)
    assert produced(driver, batch(1), version=13, topic_id=before).error_code == 100
    cluster.delete_topic("t")
    assert ask(driver, metadata_request("t")).update.errors == {"t": 3}


def test_batches_are_checked_and_producer_ids_are_new_each_time(driver: Driver) -> None:
    broken = bytearray(batch(1))
    broken[-1] ^= 1
    assert produced(driver, bytes(broken)).error_code == 2
    assert produced(driver, batch(1, value=bytes(20_000))).error_code == 10
    assert produced(driver, batch(1, producer_id=1, sequence=0)).error_code == 0
    assert produced(driver, batch(1, producer_id=1, sequence=5)).error_code == 45
    ids = set()
    versions = list(every_version(apis.INIT_PRODUCER_ID))
    for version in versions:
        body = [requests.encode_init_producer_id(version, -1, -1)]
        response = ask(driver, request(apis.INIT_PRODUCER_ID, version, body))
        assert (response.error_code, response.producer_epoch) == (0, 0)
        ids.add(response.producer_id)
    assert len(ids) == len(versions)


def test_scripts_are_taken_one_each_and_then_all_is_well(cluster: FakeCluster, driver: Driver) -> None:
    cluster.script(PRODUCE, error(19, message="few"), error(20, append=True), Reply(throttle_ms=7))
    cluster.script(PRODUCE, Reply(partition_errors={("t", 0): 7}))
    responses = [ask(driver, produce_request(batch(1))) for _ in range(5)]
    assert [one.partitions[0].error_code for one in responses] == [19, 20, 0, 7, 0]
    assert responses[0].partitions[0].error_message == "few"
    assert [one.throttle_time_ms for one in responses] == [0, 0, 7, 0, 0]
    assert len(cluster.batches("t", 0)) == 3, "of 20 (after append), of throttling and the last"
    cluster.script(METADATA, error(5), node_id=1)
    assert ask(driver, metadata_request("t")).update.errors == {}
    assert ask(driver, metadata_request("t"), -2).update.errors == {"t": 5}


def test_silence_delay_and_connections_that_end(cluster: FakeCluster, driver: Driver) -> None:
    cluster.script(PRODUCE, Reply(delay_ms=60), Reply(silent=True))
    began = time.monotonic()
    assert produced(driver, batch(1)).error_code == 0
    assert time.monotonic() - began >= 0.06
    driver.send(produce_request(batch(1)), name="silent")
    driver.poll(50)
    assert not driver.of(Responded, "silent")
    cluster.disconnect(0)
    driver.event(Failed, "silent")
    cluster.script(PRODUCE, Refuse())
    appended = len(cluster.batches("t", 0))
    driver.clock.now += 50
    driver.connect()
    driver.send(produce_request(batch(4)), name="refused")
    driver.event(Failed, "refused")
    assert len(cluster.batches("t", 0)) == appended
    with FakeCluster({"t": 1}, versions={PRODUCE: (3, 8)}) as old, Driver(old.bootstrap_servers) as other:
        other.connect()
        other.send(produce_request(batch(1), version=9))
        other.event(Disconnected)


def test_librdkafka_is_content_with_it() -> None:
    """An independent client negotiates, finds leaders and produces idempotently."""
    # It writes V2 batches only if Fetch could read them, so Fetch is announced here (and never requested).
    with FakeCluster({"t": 3}, brokers=2, versions={1: (4, 11)}) as cluster:
        producer = Producer({"bootstrap.servers": cluster.bootstrap_servers, "enable.idempotence": True})
        results: list[Any] = []
        for index in range(300):
            producer.produce(
                "t", b"v", partition=index % 3, on_delivery=lambda problem, _: results.append(problem)
            )
        assert producer.flush(60) == 0
        assert results == [None] * 300
        batches = [b for partition in range(3) for b in cluster.batches("t", partition)]
        assert sum(b.record_count for b in batches) == 300
        assert all(b.producer_id >= 1000 for b in batches)
