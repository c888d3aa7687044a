"""Two producers and a coordinator over loopback: what one of them finds, both know."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager

import pyarrow as pa
import pytest

from kafka_sink.breaker import ProducerStatusContext
from kafka_sink.coordinator.breaker_service import BreakerService
from kafka_sink.coordinator.metadata import MetadataService
from kafka_sink.coordinator.server import Services
from kafka_sink.model import TopicPartition
from kafka_sink.options import parse
from kafka_sink.rows.column_plan import ColumnPlan
from kafka_sink.task.producer import Producer
from kafka_sink.task.producer_cache import task_producer
from tests.support.breaker_cluster import IdleBreaker
from tests.support.coordinator_harness import serving
from tests.support.fake_broker import FakeCluster
from tests.support.scripted_cluster import PATIENCE_S, TOPIC, mutes, rows, written
from tests.support.waiting import repeat_until, throughout, until

BREAKER = "kafka.producer.circuit.breaker."
INTERVAL_MS = 400
P0 = TopicPartition(TOPIC, 0)


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    """Broker n leads partition n."""
    with FakeCluster({TOPIC: 3}, brokers=3) as running:
        yield running


def options_of(cluster: FakeCluster, **breaker: object) -> dict[str, str]:
    raw = {
        "kafka.bootstrap.servers": cluster.bootstrap_servers,
        "topic": TOPIC,
        "kafka.linger.ms": "0",
        "kafka.batch.size": "1024",
        f"{BREAKER}mute.retry.interval": str(INTERVAL_MS),
        f"{BREAKER}slow.request.min.ms": "200",
        "coordinator.report.interval.ms": "100",
    }
    return raw | {f"{BREAKER}{name.replace('_', '.')}": str(value) for name, value in breaker.items()}


@contextmanager
def job(raw: Mapping[str, str], tasks: int) -> Iterator[list[Producer]]:
    """Tasks of one job that know their coordinator."""
    options = parse(raw).options
    plan = ColumnPlan.of([("value", "binary"), ("partition", "int")], TOPIC)
    services: Services = {MetadataService: MetadataService, BreakerService: BreakerService}
    with serving(services=services) as running, ExitStack() as stack:
        producers = [
            stack.enter_context(task_producer(options, plan, running.address, None)) for _ in range(tasks)
        ]
        until(lambda: running.connections, "their coordinator is found")
        yield producers


def keyless(producer: Producer, number: int) -> None:
    value = [b"<%d>" % number + b"x" * 2_000]
    producer.send(
        pa.record_batch({"value": pa.array(value, pa.binary()), "partition": pa.array([None], pa.int32())})
    )


def test_a_broker_that_one_task_finds_frozen_rests_for_both(cluster: FakeCluster) -> None:
    numbers = itertools.count()
    with job(options_of(cluster), 2) as (first, second):

        def send_until(condition: Callable[[], object], what: str) -> None:
            repeat_until(condition, lambda: keyless(first, next(numbers)), what, PATIENCE_S, 0.002)

        send_until(lambda: all(written(cluster, p) for p in range(3)), "all partitions have rows")
        second.send(rows(100_000, 1))
        until(lambda: 100_000 in written(cluster, 0), "the second is connected, else it could not probe")
        cluster.freeze(0)
        send_until(lambda: mutes(first), "the first mutes it")
        until(lambda: P0 in mutes(second), "the second hears of it")
        assert second.metrics()["breaker-trips-total"] == 0
        second.send(rows(100_001, 1))
        first.send(rows(100_002, 1))
        began = time.monotonic()

        def probes() -> float:
            return sum(one.metrics()["breaker-probes-total"] for one in (first, second))

        def are_spaced() -> bool:
            return probes() <= (time.monotonic() - began) * 1000 / INTERVAL_MS + 2

        throughout(are_spaced, 4.5 * INTERVAL_MS / 1000, "one probe an interval")
        until(probes, "a probe")
        assert are_spaced()
        cluster.thaw(0)
        until(lambda: not mutes(first) and not mutes(second), "it is back for both")
        for one in (first, second):
            one.finish()
    found = sorted(itertools.chain(*(written(cluster, p) for p in range(3))))
    assert found == [*range(next(numbers)), 100_000, 100_001, 100_002]


class MutesAfterFirst(IdleBreaker):
    """A user's class: partition 0 is muted once it has a batch of exactly seven rows."""

    def on_complete(
        self, context: ProducerStatusContext, topic_partition: TopicPartition, exception: Exception | None
    ) -> bool:
        if context.record_count == 7:
            self.manager.mute(topic_partition, "seven is enough")
        return context.record_count == 7


def test_what_an_own_class_mutes_rests_for_both(cluster: FakeCluster) -> None:
    raw = options_of(cluster) | {
        f"{BREAKER}class": f"{__name__}.MutesAfterFirst",
        f"{BREAKER}mute.retry.interval": "1500",
    }
    with job(raw, 2) as (first, second):
        first.send(rows(0, 1))
        second.send(rows(1, 1, partition=1))
        until(lambda: written(cluster, 0), "a batch of its own")
        first.send(rows(2, 7))
        until(lambda: P0 in mutes(second), "the second hears of it")
        second.send(rows(9, 2))
        second.finish()
        until(lambda: not mutes(first), "the second's probe got through")
        first.finish()
    assert written(cluster, 0) == [0, *range(2, 11)]
