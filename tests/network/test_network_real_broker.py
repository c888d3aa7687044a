"""The network layer against a real broker: every version that both speak, byte for byte as sent."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from kafka_sink.model import TopicMetadata
from kafka_sink.network import apis, produce, requests
from local_kafka import LocalBroker
from tests.support.network_harness import Driver, Failed, Responded, batch, request
from tests.support.proxy import METADATA, PRODUCE, ProxyCluster
from tests.support.response_checks import every_version
from tests.support.waiting import until

TOPIC = "network-layer"


@pytest.fixture
def driver(broker: LocalBroker) -> Iterator[Driver]:
    """Connected to the broker by its id, with the topic there."""
    with Driver(broker.bootstrap_servers) as one:
        one.connect()
        yield one


def topic_on(driver: Driver, node_id: int = -1) -> TopicMetadata:
    """Asks until the topic is there; it is created by asking."""

    def asked() -> TopicMetadata | None:
        body = [requests.encode_metadata(12, (TOPIC,), True)]
        driver.events.clear()
        driver.send(request(apis.METADATA, 12, body), node_id, name="topic")
        update = driver.event(Responded, "topic").response.update
        driver.client.set_addresses(update.nodes)
        led = [topic for topic in update.topics if all(p.leader >= 0 for p in topic.partitions)]
        return led[0] if led else None

    return until(asked, "the topic", 30, 0.1)


def appended(driver: Driver, version: int, body: list[bytes | memoryview], node_id: int = -1) -> Any:
    """The partition's response; asks again while a new topic's leader does not know it yet."""

    def asked() -> Any:
        driver.events.clear()
        driver.send(request(apis.PRODUCE, version, body), node_id, name="p")
        (partition,) = driver.event(Responded, "p").response.partitions
        return None if partition.error_code in (3, 6, 100) else partition

    return until(asked, "a leader that takes the batch", 30, 0.1)


@pytest.mark.parametrize("version", every_version(apis.PRODUCE))
def test_produce_in_every_version(driver: Driver, version: int) -> None:
    topic = topic_on(driver)
    data = batch(7)
    chunks = [memoryview(data)[at : at + 5] for at in range(0, len(data), 5)]
    body = produce.produce_body(
        version, -1, 30_000, None, [(TOPIC, topic.topic_id, [(0, chunks, len(data))])]
    )
    partition = appended(driver, version, body)
    assert (partition.error_code, partition.partition) == (0, 0)
    assert partition.base_offset >= 0
    assert partition.topic_id == (topic.topic_id if version == 13 else None)
    assert partition.topic == (None if version == 13 else TOPIC)


@pytest.mark.parametrize("version", every_version(apis.METADATA))
def test_metadata_in_every_version(driver: Driver, broker: LocalBroker, version: int) -> None:
    known = topic_on(driver)
    body = [requests.encode_metadata(version, (TOPIC, "not-there"), False)]
    driver.send(request(apis.METADATA, version, body), name="m")
    update = driver.event(Responded, "m").response.update
    assert [f"{node.host}:{node.port}" for node in update.nodes] == [broker.bootstrap_servers]
    assert update.errors == {"not-there": 3}
    assert [len(topic.partitions) for topic in update.topics] == [len(known.partitions)]
    assert update.topics[0].topic_id == (known.topic_id if version >= 10 else None)
    assert all(partition.leader == 0 for partition in update.topics[0].partitions)


def test_producer_ids_in_every_version_that_the_broker_takes(driver: Driver) -> None:
    newest = driver.connection().api_version(apis.INIT_PRODUCER_ID)
    for version in range(newest + 1):
        deadline = time.monotonic() + 30
        code = -1
        while code and time.monotonic() < deadline:
            driver.events.clear()
            body = [requests.encode_init_producer_id(version, -1, -1)]
            driver.send(request(apis.INIT_PRODUCER_ID, version, body), name="i")
            response = driver.event(Responded, "i").response
            code = response.error_code  # 14 and 15 while the coordinator loads
        assert (code, response.producer_epoch) == (0, 0)
        assert response.producer_id >= 0


def test_a_request_of_many_thousand_chunks(driver: Driver) -> None:
    topic = topic_on(driver)
    data = batch(500)
    chunks = [memoryview(data)[at : at + 2] for at in range(0, len(data), 2)]
    assert len(chunks) > 4_000
    body = produce.produce_body(13, -1, 30_000, None, [(TOPIC, topic.topic_id, [(0, chunks, len(data))])])
    assert appended(driver, 13, body).error_code == 0


def test_through_the_proxies_of_a_cluster(broker: LocalBroker) -> None:
    """Metadata names the proxy; a swallowed response leaves the batch in the log and fails the request."""
    with ProxyCluster(broker.bootstrap_servers) as proxies, Driver(proxies.bootstrap_servers) as driver:
        driver.connect()
        topic = topic_on(driver)
        driver.connect(0)
        data = batch(1)
        body = produce.produce_body(
            12, -1, 30_000, None, [(TOPIC, None, [(1, [memoryview(data)], len(data))])]
        )
        offset = appended(driver, 12, body, 0).base_offset
        before = proxies.requests[PRODUCE]
        proxies[0].swallow(PRODUCE)
        driver.send(request(apis.PRODUCE, 12, body), 0, name="lost")
        assert driver.event(Failed, "lost").possibly_sent
        driver.clock.now += 1_000
        driver.connect(0)
        driver.send(request(apis.PRODUCE, 12, body), 0, name="next")
        assert driver.event(Responded, "next").response.partitions[0].base_offset == offset + 2
        assert len(topic.partitions) > 1
        assert proxies.requests[PRODUCE] == before + 2
        assert proxies.requests[METADATA] >= 1
        assert driver.client.connections[0].node.port == proxies[0].port
