"""A broker is out for three times delivery.timeout.ms while keyless tasks begin and end on the others."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kafka_sink.clock import monotonic_ms
from kafka_sink.coordinator.address import CoordinatorAddress
from kafka_sink.coordinator.breaker_service import BreakerService
from kafka_sink.coordinator.metadata_service import MetadataService
from kafka_sink.coordinator.server import Services
from kafka_sink.errors import DeliveryError
from kafka_sink.task.producer import Producer
from kafka_sink.task.producer_cache import PRODUCERS
from tests.support.coordinator_harness import serving
from tests.support.fake_broker import FakeCluster
from tests.support.scripted_cluster import TOPIC, keyless, mutes, task, written
from tests.support.sink_time import SinkTime, sink_time
from tests.support.waiting import repeat_until, until

PARTITIONS = 3
ROWS = 12
TIMEOUT_MS = 30_000
OPTIONS = {
    "batch_size": 1_024,
    "delivery_timeout_ms": TIMEOUT_MS,
    "request_timeout_ms": TIMEOUT_MS,
    "producer_circuit_breaker_mute_retry_interval": 300,
    "producer_circuit_breaker_slow_request_min_ms": 200,
}


class Tasks:
    """The tasks of one job with a coordinator. Their rows are numbered throughout."""

    def __init__(self, cluster: FakeCluster, address: CoordinatorAddress, sinks: SinkTime) -> None:
        self._cluster, self._address, self._sinks = cluster, address, sinks
        self.numbers = itertools.count()
        self.acknowledged: list[int] = []

    @contextmanager
    def begin(self) -> Iterator[Producer]:
        """A task in a worker of its own."""
        PRODUCERS.close()
        with task(self._cluster, self._address, **OPTIONS) as producer:
            yield producer

    def keyless(self, producer: Producer) -> int:
        number = next(self.numbers)
        producer.send(keyless(number))
        return number

    def run(self) -> None:
        """A small task: as many rows as reach all partitions."""
        with self.begin() as producer:
            sent = [self.keyless(producer) for _ in range(ROWS)]
            producer.finish()
            self.acknowledged += sent

    def find_outage(self) -> None:
        """A task whose rows are on their way to a broker when it freezes: nobody can save those."""
        with self.begin() as producer:
            until_s = time.monotonic() + 1.0
            while time.monotonic() < until_s:
                self.keyless(producer)
            self._cluster.freeze(0)
            repeat_until(
                lambda: mutes(producer), lambda: self.keyless(producer), "it is muted", pause_s=0.002
            )
            queues = producer.accumulator.partitions
            others = [queue for partition, queue in queues.items() if partition.partition]
            until(lambda: not any(one.batches or one.in_flight for one in others), "the others' rows")
            self._sinks.skip(TIMEOUT_MS)
            producer.finish()


def test_tasks_that_begin_in_an_outage_put_no_row_on_the_dead_broker() -> None:
    """Catches: first rows that ignore what the coordinator has muted, and rows as probes of a dead broker."""
    services: Services = {MetadataService: MetadataService, BreakerService: BreakerService}
    with (
        sink_time() as sinks,
        FakeCluster({TOPIC: PARTITIONS}, brokers=3) as cluster,
        serving(services=services, clock=monotonic_ms) as running,
    ):
        tasks = Tasks(cluster, running.address, sinks)
        tasks.run()
        with pytest.raises(DeliveryError, match="delivery"):
            tasks.find_outage()
        rows_there = len(written(cluster))
        for _ in range(12):
            tasks.run()
            sinks.skip(TIMEOUT_MS / 4)
        cluster.move_leader(TOPIC, 0, -1)
        for _ in range(3):
            tasks.run()
        assert len(written(cluster)) == rows_there
        cluster.move_leader(TOPIC, 0, 0)
        cluster.thaw(0)
        with tasks.begin() as producer:
            until(lambda: not mutes(producer), "it is back")
            producer.finish()
        found = [number for partition in range(PARTITIONS) for number in written(cluster, partition)]
    assert all(found.count(number) == 1 for number in tasks.acknowledged)
