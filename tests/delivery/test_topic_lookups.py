"""How a producer finds topics, leaders and brokers, on a scripted cluster that counts what it is asked."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import pytest

from kafka_sink.cluster.topic_state import MetadataSnapshot, TopicSnapshot
from kafka_sink.errors import DeliveryError, InvalidRowError, MetadataTimeoutError
from kafka_sink.model import Node, PartitionMetadata, TaskResult
from kafka_sink.options import parse
from kafka_sink.rows.column_plan import ColumnPlan
from kafka_sink.task.producer import LIVE_PRODUCERS, Producer
from kafka_sink.task.producer_cache import task_producer
from tests.support.fake_broker import INIT_PRODUCER_ID, METADATA, PRODUCE, FakeCluster
from tests.support.fake_replies import error
from tests.support.lookups import asked, rows, written
from tests.support.ports import refusing_port
from tests.support.proxy import Proxy
from tests.support.sink_time import slow_time, slow_until
from tests.support.topic_metadata import topic_of
from tests.support.waiting import throughout, until

NOT_LEADER_OR_FOLLOWER, INVALID_TOPIC, TOPIC_AUTHORIZATION_FAILED = 6, 17, 29

PLAN = ColumnPlan.of([("topic", "string"), ("value", "binary")], None)


@contextmanager
def writing(bootstrap: str, **options: object) -> Iterator[Producer]:
    raw = {"kafka.bootstrap.servers": bootstrap, "kafka.linger.ms": "0"}
    raw |= {f"kafka.{name.replace('_', '.')}": str(value) for name, value in options.items()}
    with task_producer(parse(raw).options, PLAN) as producer:
        yield producer


def write(bootstrap: str, *topics: str, **options: object) -> TaskResult:
    """A task with a row for each of these topics."""
    with writing(bootstrap, **options) as producer:
        producer.send(rows(*topics))
        return producer.finish()


def test_new_topics_of_a_unit_are_requested_together_without_known_topics() -> None:
    names = [f"t{number}" for number in range(60)]
    with FakeCluster(dict.fromkeys(names, 1)) as cluster:
        with writing(cluster.bootstrap_servers) as producer:
            producer.send(rows(*names[:40], *names[:40]))
            producer.send(rows(*names))
            assert producer.finish().records == 140
        write(cluster.bootstrap_servers, *names)
        assert asked(cluster) == [set(names[:40]), set(names[40:])]


def test_a_missing_topic_is_bounded_and_named_with_the_brokers() -> None:
    with FakeCluster({"there": 1}) as cluster:
        begun = time.monotonic()
        with slow_until(lambda: len(asked(cluster)) >= 2), pytest.raises(MetadataTimeoutError) as caught:
            write(cluster.bootstrap_servers, "there", "missing", max_block_ms=1000)
        assert 1.0 <= time.monotonic() - begun < 50
        text, bound = str(caught.value), "kafka.max.block.ms = 1000"
        for part in ("missing", bound, "UNKNOWN_TOPIC_OR_PARTITION", cluster.bootstrap_servers):
            assert part in text
        assert "there," not in text
        requests = asked(cluster)
        assert requests[0] == {"there", "missing"}
        assert requests[1:] == [{"missing"}] * (len(requests) - 1)
        # 100 ms, 200 ms and 400 ms after the one before, with 20 % jitter; a busy machine sends fewer.
        assert 2 <= len(requests) <= 5


def has_lost_a_connection() -> bool:
    """Whether a producer in this process has lost a connection, or failed to connect."""
    return any(one.network.connection_errors() for one in list(LIVE_PRODUCERS.values()))


def test_no_broker_at_all_is_named_with_the_reason() -> None:
    with refusing_port() as port:
        refused = rf"max\.block\.ms = 300 ms .*127\.0\.0\.1:{port} .*refused"
        with slow_until(has_lost_a_connection), pytest.raises(MetadataTimeoutError, match=refused):
            write(f"127.0.0.1:{port}", "t", max_block_ms=300)


def test_a_topic_that_may_not_be_seen_fails_at_once() -> None:
    with FakeCluster({"secret": 1}) as cluster:
        cluster.script(METADATA, error(TOPIC_AUTHORIZATION_FAILED))
        with pytest.raises(InvalidRowError, match=r"secret.*TOPIC_AUTHORIZATION_FAILED"):
            write(cluster.bootstrap_servers, "secret")


def test_whether_a_broker_may_create_topics_follows_the_option() -> None:
    for allowed in (True, False):
        with FakeCluster({"t": 1}) as cluster:
            write(cluster.bootstrap_servers, "t", allow_auto_create_topics=str(allowed).lower())
            assert {one.body.allow_auto_topic_creation for one in cluster.received(METADATA)} == {allowed}


def test_a_leader_named_in_a_produce_response_needs_no_lookup() -> None:
    with FakeCluster({"t": 1}, brokers=2) as cluster:
        write(cluster.bootstrap_servers, "t")
        lookups = len(asked(cluster))
        cluster.move_leader("t", 0, 1)
        assert write(cluster.bootstrap_servers, "t").retries == 1
        assert len(asked(cluster)) == lookups
        assert written(cluster, "t") == 2


@contextmanager
def moved_cluster(
    *, frozen: bool, **options: object
) -> Iterator[tuple[FakeCluster, Callable[..., TaskResult]]]:
    """A topic is written; then all brokers are gone or frozen, and the bootstrap address leads to others.
    Yields these, and what writes to that address."""
    with (
        FakeCluster({"t": 1}, brokers=2) as old,
        FakeCluster({"t": 1, "u": 1}, brokers=2) as new,
        Proxy(("127.0.0.1", old.port(0))) as entrance,
    ):
        write(entrance.address, "t", **options)
        entrance.target = ("127.0.0.1", new.port(0))
        entrance.cut()
        for node in (0, 1):
            (old.freeze if frozen else old.stop)(node)
        try:
            yield new, partial(write, entrance.address, **options)
        finally:
            for node in (0, 1):
                old.thaw(node)


def test_when_all_known_brokers_are_gone_the_bootstrap_addresses_are_asked() -> None:
    with moved_cluster(frozen=False) as (new, again):
        assert again("u", "t").records == 2
        assert written(new, "t") == written(new, "u") == 1


def test_without_rebootstrap_the_known_brokers_are_all_there_are() -> None:
    options: dict[str, object] = {"metadata_recovery_strategy": "none", "max_block_ms": 1000}
    with slow_time() as sinks, moved_cluster(frozen=False, **options) as (new, again):
        until(has_lost_a_connection, "the connections are lost")
        sinks.go_on()
        with pytest.raises(MetadataTimeoutError, match="refused"):
            again("u")
        assert not new.received(METADATA)


def test_brokers_that_are_silent_for_the_trigger_time_are_given_up() -> None:
    trigger = {"metadata_recovery_rebootstrap_trigger_ms": 600, "metadata_max_age_ms": 100}
    with moved_cluster(frozen=True, request_timeout_ms=20_000, **trigger) as (new, again):
        begun = time.monotonic()
        assert again("u").records == 1
        assert 0.4 < time.monotonic() - begun < 18, "the timeout of a request is 20 s"
        assert written(new, "u") == 1


@pytest.mark.parametrize("breaker", [{}, {"producer_circuit_breaker_class": "none"}])
def test_metadata_is_requested_until_a_dead_leader_has_a_successor(breaker: dict[str, object]) -> None:
    """The cluster misses a broker after its session only; till then it names the dead one."""
    with FakeCluster({"t": 1}, brokers=2) as cluster:
        cluster.move_leader("t", 0, 1)
        with writing(cluster.bootstrap_servers, **breaker) as producer:
            producer.send(rows("t"))
            until(lambda: written(cluster, "t") == 1, "the first row")
            cluster.stop(1)
            before = len(asked(cluster))
            producer.send(rows("t"))
            until(lambda: len(asked(cluster)) >= before + 4, "lookups while the dead broker leads")
            cluster.move_leader("t", 0, 0)
            moved = time.monotonic()
            assert producer.finish().records == 2
        # Lookups back off to a second, 20 % more by jitter. Without them the rows wait for two minutes.
        assert time.monotonic() - moved < 30
        assert len(asked(cluster)) <= before + 40
        assert written(cluster, "t") == 2


def test_rows_that_no_metadata_comes_for_fail_naming_the_refusal() -> None:
    with FakeCluster({"t": 1}, brokers=2) as cluster:
        options = {"delivery_timeout_ms": 1500, "request_timeout_ms": 1000}
        refused = r"delivery\.timeout\.ms = 1500.*TOPIC_AUTHORIZATION_FAILED"
        with (  # noqa: PT012 - either may raise it
            pytest.raises(DeliveryError, match=refused),
            slow_until(lambda: len(asked(cluster)) >= 3),
            writing(cluster.bootstrap_servers, **options) as producer,
        ):
            producer.send(rows("t"))
            until(lambda: written(cluster, "t") == 1, "the first row")
            cluster.script(METADATA, *[error(TOPIC_AUTHORIZATION_FAILED)] * 1_000)
            cluster.stop(0)
            producer.send(rows("t"))
            producer.finish()


@pytest.mark.parametrize("newest_metadata", [9, 5], ids=["2.4 to 2.7", "1.0"])
def test_a_topic_recreated_on_brokers_without_topic_ids_is_written(newest_metadata: int) -> None:
    """Its epochs start at 0 again, and nothing but that tells it from the one before."""
    versions = {METADATA: (0, newest_metadata), PRODUCE: (3, 8)}
    with FakeCluster({"t": 1}, brokers=2, versions=versions) as cluster:
        for node in (1, 0, 1):
            cluster.move_leader("t", 0, node)
        options: dict[str, object] = {"delivery_timeout_ms": 20_000, "request_timeout_ms": 5000}
        with writing(cluster.bootstrap_servers, **options) as producer:
            producer.send(rows("t"))
            until(lambda: written(cluster, "t") == 1, "the first row")
            cluster.create_topic("t", 1)
            begun = time.monotonic()
            producer.send(rows("t"))
            assert producer.finish().records == 2
        assert time.monotonic() - begun < 18
        assert written(cluster, "t") == 1


def test_a_bootstrap_name_that_leads_to_another_cluster_fails_the_task_and_mixes_nothing() -> None:
    with (
        FakeCluster({"t": 1}, brokers=2, cluster_id="old") as old,
        FakeCluster({"t": 1, "u": 1}, brokers=2, cluster_id="new") as new,
        Proxy(("127.0.0.1", old.port(0))) as entrance,
    ):
        moved = r"bootstrap\.servers now leads to cluster new.*cluster old"
        with (  # noqa: PT012 - either may raise it
            pytest.raises(DeliveryError, match=moved),
            writing(entrance.address) as producer,
        ):
            producer.send(rows("t"))
            until(lambda: written(old, "t") == 1, "the first row")
            entrance.target = ("127.0.0.1", new.port(0))
            entrance.cut()
            old.stop(0)
            old.stop(1)
            producer.send(rows("t"))
            producer.finish()
        assert not new.received(PRODUCE)
        assert write(entrance.address, "t", "u").records == 2
        assert written(new, "t") == written(new, "u") == 1


@contextmanager
def hinted(partitions: int, now: int, **options: str) -> Iterator[tuple[Producer, FakeCluster, FakeCluster]]:
    """A task that was told of the former cluster, in epoch 7, whose brokers are gone; the old one, the new.
    Partitions then and ``now``."""
    with (
        FakeCluster({"t": partitions}, brokers=partitions, cluster_id="old") as old,
        FakeCluster({"t": now}, cluster_id="new") as new,
    ):
        raw = {"kafka.bootstrap.servers": new.bootstrap_servers, "kafka.linger.ms": "0", **options}
        led = tuple(PartitionMetadata("t", number, number, 7) for number in range(partitions))
        nodes = tuple(Node(number, "127.0.0.1", old.port(number)) for number in range(partitions))
        known = TopicSnapshot(topic_of("t", b"i" * 16, led), 0.0)
        for number in range(partitions):
            old.stop(number)
        hints = MetadataSnapshot((known,), nodes, 0.0, "old")
        with task_producer(parse(raw).options, PLAN, snapshot=hints) as producer:
            yield producer, old, new


def test_a_producer_that_was_hinted_the_former_cluster_starts_over_with_the_one_that_responds() -> None:
    with hinted(2, 1) as (producer, old, new):
        producer.send(rows("t"))
        # The row may have been put into the second partition, which the topic does not have there.
        until(lambda: producer.cluster.topic("t").topic_id != b"i" * 16, "the new cluster")  # type: ignore[union-attr]
        producer.send(rows("t"))
        until(lambda: written(new, "t") >= 1, "rows in the new cluster")
        assert set(producer.cluster.nodes()) == {0}
        assert not old.received(PRODUCE)


def test_no_producer_id_comes_from_a_cluster_whose_metadata_is_not_known() -> None:
    """Catches: an id from the new cluster that is used in the former one, where another may have it."""
    with hinted(1, 1) as (producer, _, new):
        throughout(lambda: not new.received(INIT_PRODUCER_ID), 0.3, "it asks the old cluster only")
        producer.send(rows("t"))
        until(lambda: written(new, "t") == 1, "the row in the new cluster")
        assert producer.finish().records == 1
        kinds = [one.api_key for one in new.requests if one.api_key in (METADATA, INIT_PRODUCER_ID)]
        assert kinds[0] == METADATA


def test_a_task_with_transactions_connects_to_leaders_before_it_has_rows() -> None:
    """Catches: it began to connect after its transaction had begun, a round trip later."""
    with FakeCluster({"t": 2}, brokers=2) as cluster:
        led = tuple(PartitionMetadata("t", number, number, 7) for number in range(2))
        nodes = tuple(Node(number, "127.0.0.1", cluster.port(number)) for number in range(2))
        hints = MetadataSnapshot((TopicSnapshot(topic_of("t", b"i" * 16, led), 0.0),), nodes, 0.0, None)
        options = parse(
            {"kafka.bootstrap.servers": cluster.bootstrap_servers, "delivery.guarantee": "exactly-once"}
        ).options
        with task_producer(options, PLAN, snapshot=hints) as producer:
            network = producer.network
            until(lambda: len([one for one in list(network.connections.values()) if one.is_ready]) == 2)


def test_mutes_of_the_former_cluster_end_when_another_one_answers() -> None:
    """Catches: a broker's id was still muted in the cluster that the bootstrap name had moved to."""
    with hinted(2, 2, **{"kafka.producer.circuit.breaker.mute.retry.interval": "60000"}) as (producer, _, _):
        manager = producer.breaker.manager
        manager.mute(0)
        until(lambda: 0 in manager.task_mutes.avoided.nodes, "the mute")
        producer.send(rows("t"))
        until(lambda: producer.cluster.cluster_id == "new", "the new cluster")  # type: ignore[union-attr]
        until(lambda: not manager.task_mutes.avoided.nodes, "the end of the mute")
        assert producer.finish().records == 1


def test_a_task_that_is_run_again_gets_a_new_producer() -> None:
    """An idle one may know as little as the one that failed."""
    with FakeCluster({"t": 1}) as cluster:
        options = parse({"kafka.bootstrap.servers": cluster.bootstrap_servers}).options
        made = []
        for again in (False, False, True):
            with task_producer(options, PLAN, again=again) as producer:
                made.append(producer)
        assert made[0] is made[1]
        assert made[2] is not made[1]
        assert not made[1].sender.is_alive()
