"""When the sender's thread goes round, and when not; what it forgets, and what it says."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import patch

import pytest

from kafka_sink.breaker import ProducerStatusContext
from kafka_sink.breaker.breaker import Breaker
from kafka_sink.clock import monotonic_ms
from kafka_sink.cluster.broker import Broker
from kafka_sink.cluster.partition import ProducerBatch
from kafka_sink.engine.responses import ResponseHandler
from kafka_sink.engine.sender import Sender, log_moves, split_off_muted
from kafka_sink.model import MetadataUpdate, Node, TopicPartition
from kafka_sink.network.apis import PRODUCE
from kafka_sink.network.client import NetworkClient
from kafka_sink.rows.column_plan import ColumnPlan
from tests.support.breaker_cluster import IdleBreaker
from tests.support.brokers import Brokers
from tests.support.fake_broker import FakeCluster
from tests.support.fake_replies import error
from tests.support.queues import partition_of
from tests.support.scripted_cluster import keyless, mutes, rows, task, written
from tests.support.sequences import batch
from tests.support.sink_time import slow_time
from tests.support.waiting import throughout, until

# Kafka's defaults: what a cluster that is away is tried with.
BACKOFFS: dict[str, object] = {
    "retry_backoff_ms": 100,
    "retry_backoff_max_ms": 1000,
    "reconnect_backoff_ms": 50,
    "reconnect_backoff_max_ms": 1000,
}


def noting(owner: type, name: str, note: Callable[..., object]) -> Any:
    """Within the block, ``note`` gets the arguments of each call of this method first."""
    call = getattr(owner, name)

    def noted(*args: Any) -> Any:
        note(*args)
        return call(*args)

    return patch.object(owner, name, noted)


@pytest.fixture
def passes() -> Iterator[list[float]]:
    """Gets an entry for each pass."""
    found: list[float] = []
    with noting(Sender, "run_once", lambda _, now_ms: found.append(now_ms)):
        yield found


def assert_rests(passes: list[float]) -> None:
    """Less than 100 passes a second."""
    passes.clear()
    began = time.monotonic()
    # However much longer this thread sleeps.
    throughout(lambda: len(passes) < 100 * max(1.0, time.monotonic() - began), 0.6, "it does not spin")


def _stop(cluster: FakeCluster, node: int) -> None:
    cluster.stop(node)


def _lose_and_say_nothing(cluster: FakeCluster, node: int) -> None:
    """It takes connections, though."""
    cluster.freeze(node)
    cluster.disconnect(node)


@pytest.mark.parametrize(
    ("strategy", "goes_away", "comes_back"),
    [
        ("rebootstrap", _stop, FakeCluster.start),
        ("none", _stop, FakeCluster.start),
        ("rebootstrap", _lose_and_say_nothing, FakeCluster.thaw),
    ],
)
def test_a_sender_does_not_spin_while_every_broker_is_away(
    passes: list[float],
    strategy: str,
    goes_away: Callable[[FakeCluster, int], None],
    comes_back: Callable[[FakeCluster, int], None],
) -> None:
    options = {**BACKOFFS, "metadata_recovery_strategy": strategy}
    with FakeCluster({"t": 1}, brokers=2) as cluster, task(cluster, **options) as producer:
        producer.send(rows(0, 1))
        until(lambda: written(cluster), "the first row")
        for node in (0, 1):
            goes_away(cluster, node)
        until(producer.network.connection_errors, "the connections are lost")
        producer.send(rows(1, 1))
        assert_rests(passes)
        for node in (0, 1):
            comes_back(cluster, node)
        assert producer.finish().records == 2


def test_a_request_that_takes_all_rows_is_followed_by_a_wait_for_its_response(passes: list[float]) -> None:
    """Catches: a further pass after each request, which finds nothing to send."""
    sent: list[tuple[int, float]] = []
    with FakeCluster({"t": 1}) as cluster, task(cluster) as producer:
        producer.send(rows(0, 1))
        until(lambda: producer.acknowledged == producer.rows, "the first response")
        cluster.freeze(0)
        with noting(Broker, "send", lambda _, request, now_ms: sent.append((len(passes), now_ms))):
            producer.send(rows(1, 1))
            until(lambda: sent, "the second request")
        number, at_ms = sent[0]
        throughout(lambda: len(passes) == number, 0.1, "it waits for the response")
        cluster.thaw(0)
        assert producer.finish().records == 2
    assert passes[number] - at_ms > 50


def test_a_wait_ends_with_the_deadline_that_its_own_pass_has_set() -> None:
    """Catches: a lost broker was judged up to a second late, as the wait was chosen before it was noted."""
    calls: list[float] = []

    def waits() -> list[float]:
        """Those that followed when the broker was first noted."""
        first = next((at for at, call in enumerate(calls) if math.isnan(call)), len(calls))
        return [call for call in calls[first:] if not math.isnan(call)]

    slow: dict[str, object] = dict.fromkeys(BACKOFFS, 60_000)
    with FakeCluster({"t": 1}, brokers=2) as cluster, task(cluster, **slow) as producer:
        producer.send(rows(0, 1))
        until(lambda: producer.acknowledged == 1, "the first response")
        until(lambda: not producer.breaker.is_due(monotonic_ms()), "nothing left to judge")
        cluster.stop(0)
        until(producer.network.connection_errors, "the connection is lost")
        with (
            noting(Breaker, "on_unreachable", lambda *_: calls.append(math.nan)),
            noting(NetworkClient, "poll", lambda _, timeout_ms, now_ms: calls.append(timeout_ms)),
        ):
            producer.send(rows(1, 1))
            until(waits, "the wait for the broker")
            producer.close(abort=True)
    assert waits()[0] <= 500.0, "slow.request.min.ms"


class AsksOnce(IdleBreaker):
    """With the second response it wants to know whether the broker responds."""

    responses = 0

    def on_complete(
        self, context: ProducerStatusContext, topic_partition: TopicPartition, exception: Exception | None
    ) -> bool:
        self.responses += 1
        if self.responses == 2:
            self.manager.ask(context.node_id)
        return False


@pytest.mark.parametrize(
    ("options", "expected"),
    [({}, "poll"), ({"producer_circuit_breaker_class": f"{__name__}.{AsksOnce.__name__}"}, "pass")],
)
def test_an_acknowledgement_after_which_nothing_can_be_sent_is_no_reason_for_a_pass(
    options: dict[str, object], expected: str
) -> None:
    """Catches: a second pass for each request, which costs nearly as much as the request; a request that the
    breaker class wants at once, which waits for up to a second."""
    log: list[str] = []
    with slow_time(), FakeCluster({"t": 1}) as cluster, task(cluster, **options) as producer:
        producer.send(rows(0, 1))
        until(lambda: producer.acknowledged == 1, "the first response")
        # The response comes once nothing else wakes the sender.
        cluster.freeze(0)
        with (
            noting(NetworkClient, "poll", lambda *_: log.append("poll")),
            noting(ResponseHandler, "on_produce", lambda *_: log.append("acknowledged")),
            noting(Sender, "run_once", lambda *_: log.append("pass")),
        ):
            producer.send(rows(1, 1))
            until(lambda: producer.accumulator.unacknowledged_records() == 1, "the request")
            until(lambda: log[-1:] == ["poll"], "the wait for its response")
            cluster.thaw(0)
            until(lambda: log[-1:] == ["poll"] and "acknowledged" in log, "the next poll")
            after = log[log.index("acknowledged") + 1]
            assert producer.finish().records == 2
    assert after == expected


def test_brokers_that_the_cluster_no_longer_lists_are_forgotten() -> None:
    """Catches: a peer that names other brokers each time fills this task's memory."""
    with FakeCluster({"t": 1}, brokers=2) as cluster, task(cluster) as producer:
        producer.send(rows(0, 1))
        until(lambda: producer.acknowledged == producer.rows, "the first response")
        known = producer.cluster
        for round_ in range(3):
            others = (Node(1000 + 100 * round_ + number, "127.0.0.1", 9) for number in range(100))
            wanted = MetadataUpdate((*dict(known.nodes()).values(), *others), (), {}, known.cluster_id)
            known.on_response(wanted, (), monotonic_ms())
            producer.network.wakeup()
            until(lambda: len(known.brokers) > 100, "a pass")
            listed = MetadataUpdate(tuple(known.nodes()[node] for node in (0, 1)), (), {}, known.cluster_id)
            known.on_response(listed, (), monotonic_ms())
            producer.network.wakeup()
            until(lambda: len(known.brokers) <= 3, "the others are forgotten")
        producer.send(rows(1, 1))
        assert producer.finish().records == 2
    assert producer.sender.broker_metrics(0.0)[0].requests == 2


def test_rows_of_a_forgotten_broker_still_count_for_the_breaker() -> None:
    """Catches: trigger.message.count was reached later after each broker that left."""
    with FakeCluster({"t": 2}, brokers=2) as cluster, task(cluster) as producer:
        producer.send(rows(0, 3, partition=1))
        assert producer.finish().records == 3
        producer.begin()
        known = producer.cluster
        stays = MetadataUpdate((known.nodes()[0],), (), {}, known.cluster_id)
        known.on_response(stays, (), monotonic_ms())
        producer.network.wakeup()
        until(lambda: 1 not in known.brokers, "the other is forgotten")
        assert producer.breaker.manager.rows == 3


@pytest.mark.parametrize(("code", "times"), [(19, 2), (10, 1)], ids=["sent again", "split"])
def test_rows_count_once_for_the_breaker_however_often_they_are_sent(code: int, times: int) -> None:
    """Catches: 350 rows passed trigger.message.count = 1000 with their third attempt."""
    with FakeCluster({"t": 1}) as cluster, task(cluster) as producer:
        cluster.script(PRODUCE, *[error(code)] * times)
        producer.send(rows(0, 40))
        assert producer.finish().records == 40
        assert len(cluster.received(PRODUCE)) > times
        assert producer.breaker.manager.rows == 40


def test_muted_partitions_are_taken_out_of_what_is_ready() -> None:
    names = [TopicPartition("t", number) for number in range(3)]
    healthy, held, alone = map(partition_of, names)
    one, two = Brokers(1, 2).values()
    ready = {one: [healthy, held], two: [alone]}
    assert split_off_muted(ready, names[1:]) == {one: [held], two: [alone]}
    assert ready == {one: [healthy]}


def test_a_gone_brokers_muted_partitions_are_looked_up_though_others_wait_for_it_too() -> None:
    """Catches: a broker with muted partitions and with others of another topic, of which only the others'
    topic was looked up, so that the muted partition's rows never found its new leader."""
    muted, other = TopicPartition("t", 1), "other"
    breaker_class = f"{IdleBreaker.__module__}.{IdleBreaker.__name__}"
    options: dict[str, object] = {"producer_circuit_breaker_class": breaker_class}
    options["producer_circuit_breaker_mute_retry_interval"] = 100
    with FakeCluster({"t": 2, other: 2}, brokers=2) as cluster, task(cluster, **options) as producer:
        plan = ColumnPlan.of([("value", "binary"), ("partition", "int")], other)
        producer.send(rows(0, 1, partition=1))
        producer.send(rows(1, 1, partition=1), plan=plan)
        until(lambda: producer.acknowledged == 2, "both topics are known")
        producer.breaker.manager.mute(muted)
        producer.network.wakeup()
        until(lambda: muted in mutes(producer), "the mute")
        cluster.stop(1)
        until(lambda: not producer.cluster.brokers[1].is_connected, "the sender knows")
        cluster.move_leader("t", 1, 0)
        # First, so that the muted one's rows never wait alone.
        producer.send(rows(2, 1, partition=1), plan=plan)
        producer.send(rows(3, 1, partition=1))
        until(lambda: written(cluster, 1)[-1] == 3, "the new leader has the rows")
        producer.close(abort=True)


def test_rows_leave_a_muted_partition_that_its_topic_has_no_more() -> None:
    """Catches: rows that stayed there where no partition that is left is muted."""
    options: dict[str, object] = {
        "producer_circuit_breaker_class": f"{IdleBreaker.__module__}.{IdleBreaker.__name__}",
        "linger_ms": 60_000,
        # No probe is due in this test.
        "producer_circuit_breaker_mute_retry_interval": 600_000,
        "max_block_ms": 30_000,
    }
    left, gone = TopicPartition("t", 0), TopicPartition("t", 1)
    with FakeCluster({"t": 2}) as cluster, task(cluster, **options) as producer:
        manager = producer.breaker.manager
        manager.mute(left)
        producer.network.wakeup()
        until(lambda: left in mutes(producer), "the mute")
        producer.send(keyless(0))
        assert list(producer.accumulator.partitions) == [gone]
        manager.unmute(left)
        manager.mute(gone)
        producer.network.wakeup()
        until(lambda: gone in mutes(producer) and left not in mutes(producer), "the other's mute")
        cluster.delete_topic("t")
        cluster.create_topic("t", 1)
        producer.cluster.mark_stale("t", monotonic_ms())
        producer.network.wakeup()
        until(lambda: producer.cluster.leader(gone) is None, "the topic that is left")
        assert producer.finish().records == 1
        assert written(cluster, 0) == [0]


def test_rows_stay_in_a_muted_partition_while_the_others_fail_too() -> None:
    """Catches: with every leader failing, rows moved round and lost their order."""
    options: dict[str, object] = {
        "producer_circuit_breaker_class": f"{IdleBreaker.__module__}.{IdleBreaker.__name__}",
        "linger_ms": 60_000,
        # No probe is due in this test.
        "producer_circuit_breaker_mute_retry_interval": 600_000,
    }
    muted, other = TopicPartition("t", 0), TopicPartition("t", 1)
    with FakeCluster({"t": 2}) as cluster, task(cluster, **options) as producer:
        producer.breaker.manager.mute(other)
        producer.network.wakeup()
        until(lambda: other in mutes(producer), "the other's mute")
        producer.send(keyless(0))
        assert list(producer.accumulator.partitions) == [muted]
        with producer.accumulator.lock:
            failing = producer.accumulator.partition(other)
        producer.breaker.manager.unmute(other)
        producer.network.wakeup()
        until(lambda: other not in mutes(producer), "the end of the other's mute")
        failing.outcomes.on_failure(monotonic_ms(), monotonic_ms())
        producer.breaker.manager.mute(muted)
        producer.network.wakeup()
        until(lambda: muted in mutes(producer), "the mute")
        # Only now: in the middle of a pass, the sender would send what is not muted yet.
        producer.accumulator.flushing = True
        producer.network.wakeup()
        throughout(lambda: producer.metrics()["record-moved-total"] == 0, 0.1, "the rows stay")
        failing.outcomes.forget()
        until(lambda: written(cluster, 1) == [0], "a target")
        assert producer.finish().records == 1


def test_rows_do_not_move_to_a_muted_partition_that_is_open_for_its_probe() -> None:
    """Catches: the empty queue of a partition that was due for one probe got most of the moved batches."""
    options: dict[str, object] = {
        "producer_circuit_breaker_class": f"{IdleBreaker.__module__}.{IdleBreaker.__name__}",
        "producer_circuit_breaker_mute_retry_interval": 100,
    }
    muted, probed, healthy = (TopicPartition("t", number) for number in range(3))
    with FakeCluster({"t": 3}) as cluster, task(cluster, **options) as producer:
        producer.send(rows(0, 1))
        until(lambda: producer.acknowledged == 1, "the topic is known")
        producer.breaker.manager.mute(probed)
        producer.network.wakeup()
        until(lambda: probed in producer.breaker.avoided.probes, "the probe is due")
        targets = producer.sender._targets
        assert targets("t", {muted}, monotonic_ms()) == [healthy]
        assert targets("t", {muted, healthy}, monotonic_ms()) == []
        producer.close(abort=True)


def test_tiny_batches_take_memory_for_their_objects_too() -> None:
    """Catches: 62,500 batches in a pool of 8 MB, whose objects took 70 MB beside it."""
    memory = 100_000
    options: dict[str, object] = {"batch_size": 1, "buffer_memory": memory}
    with (
        FakeCluster({"t": 1}) as cluster,
        ThreadPoolExecutor(1) as threads,
        task(cluster, **options) as producer,
    ):
        producer.send(rows(0, 1))
        until(lambda: producer.acknowledged == producer.rows, "the first response")
        cluster.freeze(0)
        sending = threads.submit(producer.send, rows(1, 150))
        until(lambda: producer.accumulator.allocator.pool.queued, "the task waits for memory")
        assert len(producer.accumulator.live) <= memory // 1024
        cluster.thaw(0)
        sending.result()


@pytest.mark.parametrize(
    ("batches", "rows", "text"),
    [
        ([(3, False)], 3, "3 rows without a key (not written yet)"),
        ([(3, False), (4, True)], 3, "3 rows without a key and 4 dead letters (not written yet)"),
        ([(4, True)], 0, "4 dead letters (not written yet)"),
    ],
)
def test_dead_letters_that_move_are_no_rows(
    batches: list[tuple[int, bool]], rows: int, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    moved: list[ProducerBatch] = []
    for count, dead_letters in batches:
        moved.append(batch(count))
        moved[-1].dead_letters = dead_letters
    with caplog.at_level(logging.WARNING):
        assert log_moves({TopicPartition("t", 0): moved}, "muted") == rows
    assert text in caplog.text
    assert caplog.text.count("dead letters") == text.count("dead letters")
