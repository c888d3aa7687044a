"""Tasks learn from one another through a coordinator, on a scripted cluster that counts its requests."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from kafka_sink.clock import monotonic_ms
from kafka_sink.cluster.topic_state import MetadataSnapshot, TopicSnapshot
from kafka_sink.coordinator.address import CoordinatorAddress
from kafka_sink.coordinator.breaker_service import BreakerService
from kafka_sink.coordinator.client import ClientTimes, CoordinatorClient
from kafka_sink.coordinator.metadata_service import MetadataService
from kafka_sink.errors import InvalidRowError, MetadataTimeoutError
from kafka_sink.model import Node, PartitionMetadata, TopicPartition
from kafka_sink.options import SinkOptions, parse
from kafka_sink.rows.column_plan import ColumnPlan
from kafka_sink.task.producer import Producer
from kafka_sink.task.producer_cache import PRODUCERS, task_producer
from tests.support.coordinator_harness import Serving, serving, wait_long
from tests.support.fake_broker import METADATA, PRODUCE, FakeCluster
from tests.support.fake_replies import error
from tests.support.lookups import asked, rows, written
from tests.support.surroundings import Environ
from tests.support.topic_metadata import topic_of
from tests.support.waiting import until

PLAN = ColumnPlan.of([("topic", "string"), ("value", "binary")], None)
NOT_LEADER_OR_FOLLOWER, TOPIC_AUTHORIZATION_FAILED = 6, 29


@pytest.fixture(autouse=True)
def _alone(environ: Environ, tmp_path: Path) -> Iterator[None]:
    """Warnings are due once an application: every test is one."""
    environ(SPARK_LOCAL_DIRS=str(tmp_path))
    yield
    PRODUCERS.close()


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tasks wait for the coordinator however busy this machine is."""
    wait_long(monkeypatch)


def options_of(cluster: FakeCluster, **options: object) -> SinkOptions:
    raw = {
        "kafka.bootstrap.servers": cluster.bootstrap_servers,
        "kafka.linger.ms": "0",
        "kafka.retry.backoff.ms": "20",
        "kafka.retry.backoff.max.ms": "50",
    }
    raw |= {f"kafka.{name.replace('_', '.')}": str(value) for name, value in options.items()}
    return parse(raw).options


@contextmanager
def coordinating() -> Iterator[Serving]:
    with serving(services={MetadataService: MetadataService, BreakerService: BreakerService}) as found:
        yield found


@contextmanager
def task(options: SinkOptions, address: CoordinatorAddress) -> Iterator[Producer]:
    with task_producer(options, PLAN, address) as producer:
        yield producer


@pytest.mark.usefixtures("patient")
def test_a_topic_that_one_task_needs_is_requested_once_and_reaches_all_tasks() -> None:
    topics = {f"t{number}": 1 for number in range(300)}
    with FakeCluster(topics) as cluster, coordinating() as found:
        for linger_ms in range(3):
            # Each of its own options, hence with a producer of its own, as in processes of their own.
            with task(options_of(cluster, linger_ms=linger_ms), found.address) as producer:
                producer.send(rows(*topics))
                producer.finish()
        assert asked(cluster) == [set(topics)]
        assert {written(cluster, topic) for topic in topics} == {3}


@pytest.mark.parametrize("is_named", [True, False], ids=["named by the broker", "not named"])
@pytest.mark.usefixtures("patient")
def test_a_moved_leader_is_known_to_all_tasks_after_one_task_met_it(is_named: bool) -> None:
    with FakeCluster({"t": 1}, brokers=2) as cluster, coordinating() as found:
        one, two = options_of(cluster, linger_ms=0), options_of(cluster, linger_ms=1)
        with task(one, found.address) as writing, task(two, found.address) as idle:
            for producer in (writing, idle):
                producer.send(rows("t"))
                producer.finish()
            cluster.move_leader("t", 0, 1)
            if not is_named:
                cluster.script(PRODUCE, error(NOT_LEADER_OR_FOLLOWER), node_id=0)
            writing.send(rows("t"))
            writing.finish()
            partition = TopicPartition("t", 0)
            until(lambda: (leader := idle.cluster.leader(partition)) and leader.leader == 1)
            idle.send(rows("t"))
            idle.finish()
        assert written(cluster, "t") == 4
        asked_by = {api: cluster.received(api) for api in (PRODUCE, METADATA)}
        # The writing task had its first rows acknowledged before the idle task sent any.
        ids = dict.fromkeys(batch.producer_id for one in asked_by[PRODUCE] for batch in one.batches)
        given = {
            name: [one.node_id for one in asked_by[PRODUCE] if one.batches[0].producer_id == producer_id]
            for name, producer_id in zip("ab", ids, strict=True)
        }
        # The first met the old leader, and again, which names the new one, if its retry was sooner than the
        # metadata; the second never did.
        assert given["a"] in ([0, 0, 1], *([] if is_named else [[0, 0, 0, 1]]))
        assert given["b"] == [0, 1]
        # At first, and each time by the first and by whoever was asked.
        assert len(asked_by[METADATA]) <= 1 + 2 * len(given["a"][1:-1])


@pytest.mark.usefixtures("patient")
def test_each_task_keeps_to_the_leaders_that_brokers_name_to_its_client_id(environ: Environ) -> None:
    """Catches: rows that go to the brokers of another zone, as a task there or the driver has the leaders."""
    with FakeCluster({"t": 1}, brokers=3) as cluster, coordinating() as found:
        # Each with a producer of its own.
        options = {
            zone: options_of(cluster, client_id="app,az=${env:ZONE}", linger_ms=zone) for zone in (1, 2)
        }
        with ExitStack() as stack:
            producers = {}
            for zone, of_zone in options.items():
                cluster.zone(f"app,az={zone}", zone)
                environ(ZONE=str(zone))
                producers[zone] = stack.enter_context(task(of_zone, found.address))
            # The driver's zone is another one.
            planned = MetadataSnapshot(
                (TopicSnapshot(topic_of("t", None, [PartitionMetadata("t", 0, 0, 9)]), 0.0),),
                (Node(0, "127.0.0.1", cluster.port(0)),),
            )
            for producer in producers.values():
                producer.begin(found.address, planned)
                producer.send(rows("t", "t"))
                assert producer.finish().records == 2
                producer.cluster.mark_stale("t", monotonic_ms())
                requests = len(cluster.received(METADATA))
                producer.network.wakeup()
                until(lambda before=requests: len(cluster.received(METADATA)) > before, "another look")
            for producer in producers.values():
                producer.begin(found.address)
                producer.send(rows("t", "t"))
                assert producer.finish().records == 2
        sent = {(one.client_id, one.node_id) for one in cluster.received(PRODUCE)}
        assert sent == {("app,az=1", 1), ("app,az=2", 2)}
        assert written(cluster, "t") == 8


@pytest.mark.parametrize(
    ("refused", "bound_ms", "failure", "said"),
    [
        (9, 30_000, InvalidRowError, "TOPIC_AUTHORIZATION_FAILED"),
        (0, 700, MetadataTimeoutError, "secret"),
    ],
    ids=["refused", "missing"],
)
def test_a_topic_fails_within_max_block_as_it_does_without_a_coordinator(
    refused: int, bound_ms: int, failure: type[Exception], said: str
) -> None:
    with FakeCluster() as cluster, coordinating() as found:
        cluster.script(METADATA, *(error(TOPIC_AUTHORIZATION_FAILED) for _ in range(refused)))
        options = options_of(cluster, max_block_ms=bound_ms)
        with pytest.raises(failure, match=said), task(options, found.address) as producer:
            producer.send(rows("secret"))


@pytest.mark.usefixtures("patient")
def test_tasks_go_on_when_the_coordinator_ends(caplog: pytest.LogCaptureFixture) -> None:
    topics = {"t": 1, "u": 1, "v": 1}
    with FakeCluster(topics) as cluster:
        with coordinating() as found:
            address = found.address
            producer = PRODUCERS.take(options_of(cluster))
            producer.begin(address)
            producer.send(rows("t"), plan=PLAN)
        ended = time.monotonic()
        producer.send(rows("t", "u"), plan=PLAN)
        producer.send(rows("v"), plan=PLAN)
        producer.finish()
        # Nobody waits for the dead, as one would for a coordinator that is only busy.
        assert time.monotonic() - ended < 30
        assert [written(cluster, topic) for topic in topics] == [2, 1, 1]
        until(lambda: [line for line in caplog.messages if "coordinator" in line])
        producer.close()
    assert len([line for line in caplog.messages if "coordinator" in line]) == 1


@pytest.mark.usefixtures("patient")
def test_a_producer_that_lives_on_works_with_the_coordinator_that_took_the_place_of_a_dead_one() -> None:
    """As in a stream of hours: the next micro-batch is planned with another port and secret."""
    kept = []
    with FakeCluster({"t": 1, "u": 1}) as cluster:
        for topic in ("t", "u"):
            with coordinating() as found:
                with task(options_of(cluster, client_id="mine"), found.address) as producer:
                    producer.send(rows(topic))
                    producer.finish()
                    kept.append(producer)
                until(lambda found=found: found.connections() == 1)
        assert len({id(one) for one in kept}) == 1
        assert asked(cluster) == [{"t"}, {"u"}]


@pytest.mark.parametrize("is_frozen", [True, False], ids=["frozen", "of another token"])
def test_a_coordinator_that_does_not_answer_costs_one_warning_and_not_all_of_max_block(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, is_frozen: bool
) -> None:
    # The warning follows the first attempt to connect.
    monkeypatch.setattr(CoordinatorClient.__init__, "__defaults__", (ClientTimes(connect_ms=500.0),))
    topics = {f"t{number}": 1 for number in range(3)}
    with FakeCluster(topics) as cluster, socket.create_server(("127.0.0.1", 0)) as frozen:
        with coordinating() as found:
            address = Serving(frozen).address if is_frozen else found.address
            wrong = replace(address, token=b"x" * 32)
            with task(options_of(cluster, max_block_ms=20_000), wrong) as producer:
                for topic in topics:
                    producer.send(rows(topic))
                producer.finish()
                until(lambda: [line for line in caplog.messages if "coordinator" in line])
        assert [written(cluster, topic) for topic in topics] == [1, 1, 1]
    assert len([line for line in caplog.messages if "coordinator" in line]) == 1
