"""A broker is out for three times delivery.timeout.ms while keyless tasks begin and end on the others."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import pyarrow as pa
import pytest
from confluent_kafka.admin import AdminClient

from kafka_sink.coordinator.address import CoordinatorAddress
from kafka_sink.coordinator.breaker_service import BreakerService
from kafka_sink.coordinator.metadata import MetadataService
from kafka_sink.coordinator.server import Services
from kafka_sink.errors import DeliveryError
from kafka_sink.options import SinkOptions, parse
from kafka_sink.rows.column_plan import ColumnPlan
from kafka_sink.task.producer import Producer
from kafka_sink.task.producer_cache import PRODUCERS, task_producer
from local_kafka import LocalBroker
from tests.support.coordinator_harness import serving
from tests.support.fake_broker import FakeCluster
from tests.support.producer_ids import ask_for_producer_id
from tests.support.scripted_cluster import TOPIC, mutes, written
from tests.support.topics import numbers_in
from tests.support.waiting import repeat_until, until

BREAKER = "kafka.producer.circuit.breaker."
PARTITIONS = 3
ROWS = 12


def keyless(producer: Producer, number: int) -> None:
    """A row larger than batch.size, so that partitions take turns; both readers find its number."""
    value = pa.array([b"%d:<%d>" % (number, number) + b"x" * 2_000], pa.binary())
    producer.send(pa.record_batch({"value": value, "partition": pa.array([None], pa.int32())}))


@contextmanager
def job(bootstrap: str, topic: str, delivery_timeout_ms: int) -> Iterator[Tasks]:
    """Tasks that share a coordinator."""
    raw = {
        "kafka.bootstrap.servers": bootstrap,
        "topic": topic,
        "kafka.linger.ms": "0",
        "kafka.batch.size": "1024",
        "kafka.delivery.timeout.ms": str(delivery_timeout_ms),
        "kafka.request.timeout.ms": str(delivery_timeout_ms),
        f"{BREAKER}mute.retry.interval": "300",
        f"{BREAKER}slow.request.min.ms": "200",
        "coordinator.report.interval.ms": "100",
    }
    options = parse(raw).options
    services: Services = {MetadataService: MetadataService, BreakerService: BreakerService}
    with serving(services=services) as running:
        yield Tasks(options, topic, running.address)


class Tasks:
    """Of one job, whose rows are numbered throughout."""

    def __init__(self, options: SinkOptions, topic: str, address: CoordinatorAddress) -> None:
        self._options = options
        self._plan = ColumnPlan.of([("value", "binary"), ("partition", "int")], topic)
        self._address = address
        self.numbers = itertools.count()
        self.acknowledged: list[int] = []

    @contextmanager
    def begin(self) -> Iterator[Producer]:
        """A task in a worker of its own."""
        PRODUCERS.close()
        with task_producer(self._options, self._plan, self._address, None) as producer:
            yield producer

    def run(self) -> None:
        """A small task: as many rows as reach all partitions."""
        with self.begin() as producer:
            sent = list(itertools.islice(self.numbers, ROWS))
            for number in sent:
                keyless(producer, number)
            producer.finish()
            self.acknowledged += sent

    def find_outage(self, freeze: Callable[[], None]) -> None:
        """A task whose rows are on their way to a broker when it freezes: nobody can save those."""
        with pytest.raises(DeliveryError, match="delivery"):
            self._run_until_muted(freeze)

    def _run_until_muted(self, freeze: Callable[[], None]) -> None:
        with self.begin() as producer:
            until_s = time.monotonic() + 1.0
            while time.monotonic() < until_s:
                keyless(producer, next(self.numbers))
            freeze()
            repeat_until(
                lambda: mutes(producer),
                lambda: keyless(producer, next(self.numbers)),
                "it is muted",
                pause_s=0.002,
            )
            producer.finish()


def run_through_outage(tasks: Tasks, timeout_ms: float) -> None:
    """Eleven tasks or more, for three times delivery.timeout.ms, with pauses between them, as they would keep
    a processor busy for as long."""
    frozen, counts = time.monotonic(), itertools.count()
    repeat_until(
        lambda: next(counts) > 10 and time.monotonic() > frozen + 3 * timeout_ms / 1000,
        tasks.run,
        "the tasks of an outage",
        pause_s=0.1,
    )


def test_tasks_that_begin_in_an_outage_put_no_row_on_the_dead_broker() -> None:
    """Catches: a first unit that ignores what the coordinator has muted, and rows as probes of a dead broker:
    either fails its task after delivery.timeout.ms."""
    timeout_ms = 1_200
    with FakeCluster({TOPIC: PARTITIONS}, brokers=3) as cluster, ExitStack() as stack:
        tasks = stack.enter_context(job(cluster.bootstrap_servers, TOPIC, timeout_ms))
        tasks.run()
        tasks.find_outage(lambda: cluster.freeze(0))
        rows_there = len(written(cluster))
        run_through_outage(tasks, timeout_ms)
        assert len(written(cluster)) == rows_there
        cluster.thaw(0)
        with tasks.begin() as producer:
            until(lambda: not mutes(producer), "it is back")
            producer.finish()
        found = [number for partition in range(PARTITIONS) for number in written(cluster, partition)]
    assert set(tasks.acknowledged) <= set(found)
    assert all(found.count(number) == 1 for number in tasks.acknowledged)


def leaders(client: AdminClient, topic: str) -> list[bool]:
    """Of each partition whether it has one."""
    found = client.list_topics(topic, timeout=10).topics[topic].partitions
    return [one.leader >= 0 for one in found.values()]


@pytest.mark.timeout(180)
def test_keyless_tasks_outlive_a_frozen_broker_of_three(cluster3: LocalBroker) -> None:
    """The same with a stopped process: a broker that the cluster gives up only when its session ends."""
    topic, timeout_ms = "long-outage", 4_000
    cluster3.create_topic(topic, PARTITIONS, replication_factor=1)
    for address in cluster3.bootstrap_servers.split(","):
        ask_for_producer_id(address)
    with job(cluster3.bootstrap_servers, topic, timeout_ms) as tasks:
        tasks.run()
        victim = 1
        try:
            tasks.find_outage(lambda: cluster3.freeze(victim))
            run_through_outage(tasks, timeout_ms)
        finally:
            cluster3.thaw(victim)
        tasks.run()
    client = AdminClient({"bootstrap.servers": cluster3.bootstrap_servers})
    until(lambda: leaders(client, topic) == [True] * PARTITIONS, "the thawed broker is back in the cluster")
    by_partition = numbers_in(cluster3.bootstrap_servers, topic, PARTITIONS)
    assert set(tasks.acknowledged) <= {number for numbers in by_partition.values() for number in numbers}
