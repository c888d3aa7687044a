"""The network layer against a real broker: every version that both speak, byte for byte as sent."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from kafka_sink.model import TopicMetadata
from kafka_sink.network import apis, produce, requests
from local_kafka import LocalBroker
from tests.support.network_harness import Driver, Responded, batch, request
from tests.support.proxy import METADATA, PRODUCE
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
        driver.connect(node_id)
        driver.send(request(apis.METADATA, 12, body), node_id, name="topic")
        update = driver.event(Responded, "topic").response.update
        driver.client.set_addresses(update.nodes)
        led = [topic for topic in update.topics if all(p.leader >= 0 for p in topic.partitions)]
        return led[0] if led else None

    topic = until(asked, "the topic", 30, 0.1)
    # The connection to a bootstrap address may have become the broker's.
    driver.connect(node_id)
    return topic


def appended(driver: Driver, version: int, body: list[bytes | memoryview], node_id: int = -1) -> Any:
    """The partition's response; asks again while a new topic's leader does not know it yet."""

    def asked() -> Any:
        driver.events.clear()
        driver.send(request(apis.PRODUCE, version, body), node_id, name="p")
        (partition,) = driver.event(Responded, "p").response.partitions
        return None if partition.error_code in (3, 6, 100) else partition

    return until(asked, "a leader that takes the batch", 30, 0.1)


def test_produce_in_every_version(driver: Driver) -> None:
    topic = topic_on(driver)
    # In many thousand buffers, too: more than one call of the system takes.
    for version, data, size in [(13, batch(500), 2), *((one, batch(7), 5) for one in every_version(PRODUCE))]:
        chunks = [memoryview(data)[at : at + size] for at in range(0, len(data), size)]
        rows = [(TOPIC, topic.topic_id, [(0, chunks, len(data))])]
        partition = appended(driver, version, produce.produce_body(version, -1, 30_000, None, rows))
        assert (partition.error_code, partition.partition) == (0, 0), version
        assert partition.base_offset >= 0
        assert partition.topic_id == (topic.topic_id if version == 13 else None)
        assert partition.topic == (None if version == 13 else TOPIC)


def test_metadata_in_every_version(driver: Driver, broker: LocalBroker) -> None:
    known = topic_on(driver)
    for version in every_version(METADATA):
        body = [requests.encode_metadata(version, (TOPIC, "not-there"), False)]
        driver.send(request(METADATA, version, body), name=version)
        update = driver.event(Responded, version).response.update
        assert [f"{node.host}:{node.port}" for node in update.nodes] == [broker.bootstrap_servers]
        assert update.errors == {"not-there": 3}
        assert [len(topic.partitions) for topic in update.topics] == [len(known.partitions)]
        assert update.topics[0].topic_id == (known.topic_id if version >= 10 else None)
        assert all(partition.leader == 0 for partition in update.topics[0].partitions)


def test_producer_ids_in_every_version_that_the_broker_takes(driver: Driver) -> None:
    for version in range(driver.connection().api_version(apis.INIT_PRODUCER_ID) + 1):

        def asked(version: int = version) -> Any:
            driver.events.clear()
            body = [requests.encode_init_producer_id(version, -1, -1)]
            driver.send(request(apis.INIT_PRODUCER_ID, version, body), name="i")
            response = driver.event(Responded, "i").response
            return None if response.error_code else response  # 14 and 15 while the coordinator loads

        response = until(asked, "a producer id", 30)
        assert response.producer_epoch == 0
        assert response.producer_id >= 0
