"""Rows that name a partition which was added to the topic, or is gone with the topic that was recreated."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

import pytest
from kafka.admin import KafkaAdminClient

from kafka_sink.clock import monotonic_ms
from kafka_sink.cluster import producer_metadata
from kafka_sink.coordinator.address import PlannedCoordinator
from kafka_sink.coordinator.breaker_service import BreakerService
from kafka_sink.coordinator.metadata_service import MetadataService
from kafka_sink.coordinator.server import Services
from kafka_sink.errors import DeliveryError, InvalidRowError
from kafka_sink.options import parse
from kafka_sink.rows.column_plan import ColumnPlan
from kafka_sink.spark.write import PlannedWrite
from kafka_sink.task.producer import Producer
from kafka_sink.task.producer_cache import task_producer
from local_kafka import LocalBroker
from tests.support.coordinator_harness import serving
from tests.support.fake_broker import METADATA, FakeCluster
from tests.support.planned_writes import Context
from tests.support.scripted_cluster import PLAN, TOPIC, keyless, rows, send, task, task_options, written
from tests.support.sink_time import slow_time, slow_until
from tests.support.waiting import until


def lookups(cluster: FakeCluster, client_id: str | None = None) -> int:
    asked = cluster.received(METADATA)
    return len([one for one in asked if client_id in (None, one.client_id)])


def test_a_partition_added_between_two_jobs_is_written_and_one_that_brokers_tell_of_late_waited_for() -> None:
    with FakeCluster({TOPIC: 2}) as cluster, ThreadPoolExecutor(1) as threads:
        send(cluster, rows(0, 5, partition=1))
        cluster.add_partitions(TOPIC, 4)
        assert send(cluster, rows(5, 5, partition=3)).records == 5
        assert written(cluster, 3) == list(range(5, 10))
        assert lookups(cluster) == 2
        late = threads.submit(send, cluster, rows(0, 5, partition=4), retry_backoff_max_ms=200)
        until(lambda: lookups(cluster) >= 5, "lookups of a partition that is not there")
        cluster.add_partitions(TOPIC, 5)
        assert late.result().records == 5


def test_a_partition_that_never_comes_fails_after_max_block_by_name() -> None:
    with FakeCluster({TOPIC: 2}) as cluster:
        begun = time.monotonic()
        wrong = (
            r"'partition' has 2 in a row for topic 't', whose partitions are 0 to 1.*max\.block\.ms = 900 ms"
        )
        backoff = {"retry_backoff_ms": 100, "retry_backoff_max_ms": 1000}
        with slow_until(lambda: lookups(cluster) >= 2), pytest.raises(InvalidRowError, match=wrong):
            send(cluster, rows(0, 1, partition=2), max_block_ms=900, **backoff)
        assert 0.9 <= time.monotonic() - begun < 50
        # The first, one at once or after 100 ms, and those after 100, 200 and 400 ms; fewer if all is slow.
        assert 2 <= lookups(cluster) <= 6


def test_added_partition_that_one_task_missed_becomes_known_to_all_tasks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A task that is run again, in another worker, must not be given the old number of partitions."""
    monkeypatch.setattr(producer_metadata, "COORDINATOR_WAIT_MS", 10_000.0)
    with FakeCluster({TOPIC: 2}) as cluster:
        raw = {"kafka.bootstrap.servers": cluster.bootstrap_servers, "topic": TOPIC, "kafka.linger.ms": "0"}
        made: list[MetadataService] = []

        def metadata_service(*arguments: Any) -> MetadataService:
            made.append(MetadataService(*arguments))
            return made[-1]

        services: Services = {MetadataService: metadata_service, BreakerService: BreakerService}
        with serving(services=services) as found:

            def writing(linger_ms: int) -> AbstractContextManager[Producer]:
                """Each with options and a producer of its own."""
                options = parse({**raw, "kafka.linger.ms": str(linger_ms)}).options
                return task_producer(options, PLAN, found.address)

            with writing(0) as earlier:
                earlier.send(rows(0, 5, partition=1))
                cluster.add_partitions(TOPIC, 3)
                with writing(1) as producer:
                    producer.send(rows(5, 5, partition=2))
                    producer.finish()
                seen = earlier.cluster
                until(lambda: len(seen.topic(TOPIC).partitions) == 3, "its fetch, or the coordinator's push")  # type: ignore[union-attr]
                (shared,) = made
                until(lambda: len(shared.cache.topic(TOPIC).partitions) == 3, "a second one's")  # type: ignore[union-attr]
                with writing(2) as again:
                    again.send(rows(10, 5, partition=2))
                    again.finish()
                earlier.finish()
                assert again.cluster.requests == 0
                # For all of them, when the coordinator asks for it.
                assert seen.requests + seen.fetches <= 3
        assert sorted(written(cluster, 2)) == list(range(5, 15))


def test_rows_for_a_partition_that_a_recreated_topic_lacks_fail_after_max_block_by_name() -> None:
    """Not after delivery.timeout.ms: the task that is run again has them in other partitions."""
    with FakeCluster({TOPIC: 4}) as cluster:
        begun = time.monotonic()
        lacks = r"t-3: the topic has only 2 partition\(s\), for kafka\.max\.block\.ms = 500 ms"
        with (  # noqa: PT012 - finish raises it
            pytest.raises(DeliveryError, match=lacks),
            slow_time() as sinks,
            task(cluster, max_block_ms=500, delivery_timeout_ms=30_000) as producer,
        ):
            producer.send(rows(0, 5, partition=3))
            until(lambda: written(cluster, 3), "the first rows")
            cluster.create_topic(TOPIC, 2)
            sinks.go_on()
            producer.send(rows(5, 5, partition=3))
            producer.finish()
        assert time.monotonic() - begun < 25, "delivery.timeout.ms is 30 s"
        assert send(cluster, rows(5, 5, partition=1)).records == 5


def test_keyless_rows_leave_partitions_that_a_recreated_topic_lacks(caplog: pytest.LogCaptureFixture) -> None:
    """Catches: rows that fail after max.block.ms, because a rejected batch had its sequence already."""
    with FakeCluster({TOPIC: 4}) as cluster:
        with task(cluster, batch_size=1024) as producer:
            producer.send(keyless(0))
            until(lambda: not producer.accumulator.incomplete, "the first row")
            cluster.freeze(0)
            for number in range(1, 13):
                producer.send(keyless(number))
            partitions = producer.accumulator.partitions
            # Keyless rows choose partitions by chance, and at most five requests are in flight.
            gone = [partitions[at] for at in list(partitions) if at.partition]
            until(lambda: any(partition.in_flight for partition in gone), "a request for a partition to go")
            cluster.create_topic(TOPIC, 1)
            cluster.thaw(0)
            assert producer.finish().records == 13
        assert sorted(written(cluster)) == list(range(1, 13))
    moves = "to other partitions: the topic has only 1 partition"
    lines = [line for line in caplog.messages if moves in line]
    assert sum(int(line.split()[1]) for line in lines) > 0


def test_an_attempt_after_the_first_takes_no_hints_of_planning(in_task: Callable[[object], None]) -> None:
    with FakeCluster({TOPIC: 2}) as cluster:
        with task(cluster, client_id="planning") as producer:
            producer.send(rows(0, 1))
            producer.finish()
            hints = PlannedCoordinator(snapshot=producer.cluster.snapshot(monotonic_ms()))
        for number in (0, 1):
            options = parse(task_options(cluster, client_id=f"attempt-{number}")).options
            in_task(Context({}, number))
            PlannedWrite(options, PLAN, hints).write(iter([rows(1, 1)]))
            assert bool(lookups(cluster, f"attempt-{number}")) == (number > 0)


# -- on a real broker ---------------------------------------------------------------------------------


def add_partitions(broker: LocalBroker, topic: str, partitions: int) -> None:
    admin = KafkaAdminClient(bootstrap_servers=broker.bootstrap_servers)
    try:
        admin.create_partitions({topic: partitions})
    finally:
        admin.close()


def test_partitions_added_on_a_real_broker_between_jobs_and_in_mid_job(broker: LocalBroker) -> None:
    topic = "partitions-added"
    broker.create_topic(topic, 1)
    options = parse({"kafka.bootstrap.servers": broker.bootstrap_servers, "topic": topic}).options
    plan = ColumnPlan.of([("value", "binary"), ("partition", "int")], topic)
    with task_producer(options, plan) as producer:
        producer.send(rows(0, 10, partition=0))
        assert producer.finish().records == 10
    add_partitions(broker, topic, 2)
    with task_producer(options, plan) as producer:
        producer.send(rows(10, 10, partition=1))
        add_partitions(broker, topic, 3)
        producer.send(rows(20, 10, partition=2))
        result = producer.finish()
    ranges = {one.partition: one.offset_ranges for one in result.partitions}
    assert ranges == {1: ((0, 9),), 2: ((0, 9),)}
