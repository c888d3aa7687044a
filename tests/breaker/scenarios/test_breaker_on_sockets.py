"""The breaker in a whole producer, against scripted brokers: errors, refusals, silence, flapping."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from kafka_sink.errors import DeliveryError
from kafka_sink.model import TopicPartition
from kafka_sink.task.producer import LIVE_PRODUCERS, Producer
from tests.support.fake_broker import PRODUCE, FakeCluster
from tests.support.fake_replies import OK, error
from tests.support.proxy import ProxyCluster
from tests.support.scripted_cluster import (
    PATIENCE_S,
    TOPIC,
    attempts,
    keyless,
    mutes,
    rows,
    send,
    task,
    written,
)
from tests.support.sink_time import slow_until
from tests.support.topics import moved_in
from tests.support.waiting import repeat_until, until

BREAKER = "producer_circuit_breaker_"
# On a loaded machine healthy brokers may take a while to respond.
PATIENT = {f"{BREAKER}slow_request_min_ms": 0}
QUICK = {f"{BREAKER}slow_request_min_ms": 150, f"{BREAKER}mute_retry_interval": 200}
P0 = TopicPartition(TOPIC, 0)


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    """Broker n leads partition n."""
    with FakeCluster({TOPIC: 3}, brokers=3) as running:
        yield running


@contextmanager
def stalls() -> Iterator[list[float]]:
    """By how much a thread has woken later than it asked: next to nothing on an idle machine."""
    over, late_s = threading.Event(), [0.0]

    def measure() -> None:
        while not over.is_set():
            began = time.monotonic()
            over.wait(0.01)
            late_s.append(time.monotonic() - began - 0.01)

    thread = threading.Thread(target=measure, daemon=True)
    thread.start()
    try:
        yield late_s
    finally:
        over.set()
        thread.join()


class Keyless:
    """Numbered rows without a partition, sent until something has happened."""

    def __init__(self, producer: Producer) -> None:
        self._producer = producer
        self.count = 0
        self.longest_pause_s = 0.0

    def send_until(self, condition: Callable[[], object], what: str) -> None:
        repeat_until(condition, self._send, what, PATIENCE_S, 0.002)

    def send_for(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        self.send_until(lambda: time.monotonic() >= end, "time passes")

    def _send(self) -> None:
        before = time.monotonic()
        self._producer.send(keyless(self.count))
        self.longest_pause_s = max(self.longest_pause_s, time.monotonic() - before)
        self.count += 1

    def assert_all_written(self, cluster: FakeCluster) -> None:
        by_partition = [written(cluster, partition) for partition in range(3)]
        assert sorted(itertools.chain(*by_partition)) == list(range(self.count))
        late = itertools.chain(*map(moved_in, by_partition))
        assert len([*late]) <= self._producer.metrics()["record-moved-total"], "what was sent keeps its order"


def at(cluster: FakeCluster, *partitions: int) -> int:
    """Rows there."""
    return sum(len(written(cluster, partition)) for partition in partitions)


def send_elsewhere(producer: Producer, number: int) -> None:
    """A row for one of the partitions that broker 0 does not lead."""
    producer.send(rows(number, 1, partition=1 + number % 2))


def test_batches_of_a_muted_partition_go_in_order_once_a_probe_succeeds(cluster: FakeCluster) -> None:
    cluster.script(PRODUCE, *[error(19)] * 5, node_id=0)
    options = {f"{BREAKER}trigger_message_count": 1, f"{BREAKER}mute_retry_interval": 150, **PATIENT}
    with task(cluster, retry_backoff_ms=1, retry_backoff_max_ms=1, **options) as producer:
        producer.send(rows(0, 10))
        until(lambda: mutes(producer), "the failing partition is muted")
        before = time.monotonic()
        for start in range(10, 50, 10):
            producer.send(rows(start, 10))
            producer.send(rows(start, 10, partition=1))
        until(lambda: written(cluster, 1) == list(range(10, 50)), "others go on")
        until(lambda: len(cluster.received(PRODUCE, 0)) >= 6, "the last probe")
        result = producer.finish()
    assert time.monotonic() - before > 0.4, "two more probes failed, each an interval apart"
    assert written(cluster, 0) == list(range(50))
    assert result.breaker_trips == 1
    assert result.breaker_probes == 3
    sent = [batch for batch in attempts(cluster) if batch.base_sequence == 0]
    assert len(sent) >= 6


def test_a_muted_partition_gets_the_next_keyless_rows_once_its_probe_is_due(cluster: FakeCluster) -> None:
    with task(cluster, **PATIENT, **{f"{BREAKER}mute_retry_interval": 300}) as producer:
        producer.send(keyless(0))
        producer.finish()
        producer.begin()
        producer.breaker.manager.mute(P0)
        producer.network.wakeup()
        until(lambda: producer.breaker.avoided.probes, "the probe is due")
        before = len(written(cluster))
        producer.send(keyless(1))
        until(lambda: not producer.breaker.manager.is_muted(P0), "the probe ends the mute")
        producer.finish()
        assert len(written(cluster)) == before + 1


def test_expired_rows_name_broker_partitions_time_and_last_error(cluster: FakeCluster) -> None:
    cluster.script(PRODUCE, *[error(19)] * 1_000, node_id=0)
    options = {f"{BREAKER}trigger_message_count": 1, f"{BREAKER}mute_retry_interval": 100, **PATIENT}

    def is_muted() -> bool:
        return any(P0 in mutes(one) for one in list(LIVE_PRODUCERS.values()))

    with slow_until(is_muted), pytest.raises(DeliveryError) as failed:
        send(cluster, rows(0, 10), delivery_timeout_ms=1_500, request_timeout_ms=500, **options)
    text = str(failed.value)
    assert "the circuit breaker has muted t-0, led by 127.0.0.1:" in text
    assert "(id 0) since " in text
    assert "batches failed; last error: t-0: NOT_ENOUGH_REPLICAS" in text
    assert text.count("last error") == 1


def test_keyless_rows_avoid_a_frozen_broker_until_it_is_back(cluster: FakeCluster) -> None:
    """Catches: a mute that outlasts the absence, one that is missed the second time, rows out of order."""
    with task(cluster, batch_size=1_024, **QUICK) as producer:
        stream = Keyless(producer)
        stream.send_until(lambda: all(written(cluster, p) for p in range(3)), "all partitions have rows")
        for _ in range(2):
            cluster.freeze(0)
            stream.send_until(lambda: mutes(producer), "the frozen broker is muted")
            others = at(cluster, 1, 2)
            stream.send_until(
                lambda before=others: at(cluster, 1, 2) > before + 50, "the others take all rows"
            )
            cluster.thaw(0)
            stream.send_until(lambda: not mutes(producer), "it is back")
        result = producer.finish()
    assert result.breaker_trips >= 2
    stream.assert_all_written(cluster)


def test_keyless_rows_avoid_a_broker_that_refuses_connections(cluster: FakeCluster) -> None:
    """Catches: rows that are the probe of a broker that is gone; probes that never find it again."""
    options = {"partitioner_adaptive_partitioning_enable": "false", **QUICK}
    with task(cluster, batch_size=1_024, **options) as producer:
        stream = Keyless(producer)
        stream.send_until(lambda: all(written(cluster, p) for p in range(3)), "all partitions have rows")
        cluster.stop(0)
        stream.send_until(lambda: mutes(producer), "the absent broker is muted")
        queue = producer.accumulator.partition(P0)
        # What was on its way when the broker went stays.
        stream.send_until(
            lambda: not any(batch.can_move for batch in queue.batches), "what was never sent goes elsewhere"
        )
        stayed = list(queue.batches)
        before = stream.count
        # Four intervals.
        stream.send_for(0.8)
        stream.send_until(lambda: stream.count > before + 10, "rows go on")
        assert list(queue.batches) == stayed
        cluster.start(0)
        stream.send_until(lambda: not mutes(producer), "a probe finds it again")
        result = producer.finish()
    assert result.breaker_probes >= 1
    stream.assert_all_written(cluster)


def test_a_broker_that_has_become_slow_gets_less_while_it_is(cluster: FakeCluster) -> None:
    """At the defaults. Catches: a slow broker that fills the memory, or stays muted once it is quick."""
    small = {"batch_size": 1_024, "buffer_memory": 131_072}
    with (
        ProxyCluster(cluster.bootstrap_servers) as proxies,
        stalls() as late_s,
        task(proxies, **small) as producer,  # type: ignore[arg-type]  # it has an address, too
    ):
        stream = Keyless(producer)
        stream.send_until(lambda: min(at(cluster, p) for p in range(3)) > 10, "all brokers are known")
        stream.longest_pause_s = 0.0
        proxies[0].slow(delay_ms=600)
        stream.send_until(lambda: mutes(producer), "the slow broker is muted")
        sent, at_slow, end = stream.count, at(cluster, 0), time.monotonic() + 3.0
        # It gets a probe now and then, however few rows a busy machine sends in this time.
        stream.send_until(
            lambda: time.monotonic() >= end and stream.count >= sent + 300, "rows for half an even share"
        )
        assert at(cluster, 0) - at_slow < (stream.count - sent) / 6, "half of an even share"
        proxies[0].slow()
        stream.send_until(lambda: not mutes(producer), "it is quick again")
        producer.finish()
    assert stream.longest_pause_s < 2.0 + 2 * max(late_s)
    stream.assert_all_written(cluster)


def test_rows_do_not_gather_for_a_frozen_broker_that_owes_a_response(cluster: FakeCluster) -> None:
    """Catches: a memory that fills with keyless rows for a broker whose window is full."""
    alone = {"max_in_flight_requests_per_connection": 1, "partitioner_adaptive_partitioning_enable": "false"}
    with task(cluster, batch_size=1_024, **QUICK, **alone) as producer:
        producer.send(rows(0, 1))
        until(lambda: written(cluster), "the broker's usual time is known")
        cluster.freeze(0)
        producer.send(rows(1, 1))
        numbers = itertools.count(2)
        repeat_until(
            lambda: mutes(producer),
            lambda: send_elsewhere(producer, next(numbers)),
            "it is muted",
            pause_s=0.002,
        )
        stream = Keyless(producer)
        queue = producer.accumulator.partition(P0)
        stream.send_for(0.8)
        stream.send_until(lambda: stream.count > 10, "rows go on")
        assert not queue.batches
        cluster.thaw(0)
        producer.finish()


def test_rows_that_keep_their_partition_keep_their_order_through_mutes_and_retries(
    cluster: FakeCluster,
) -> None:
    """Catches: a batch that overtakes another of its partition when a mute begins or ends."""
    options = {f"{BREAKER}trigger_message_count": 8, **QUICK}
    with task(cluster, batch_size=1_024, **options) as producer:
        numbers = itertools.count()

        def send_one() -> None:
            number = next(numbers)
            producer.send(rows(number, 1))
            producer.send(rows(number, 1, partition=1))

        def send_until(condition: Callable[[], object], what: str) -> None:
            repeat_until(condition, send_one, what, PATIENCE_S, 0.001)

        send_until(lambda: len(written(cluster)) > 20, "both brokers are known")
        for _ in range(2):
            cluster.freeze(0)
            send_until(lambda: mutes(producer), "the frozen broker is muted")
            cluster.thaw(0)
            send_until(lambda: not mutes(producer), "it is back")
            cluster.script(PRODUCE, *[OK, error(19), error(19), OK, error(20, append=True)] * 5, node_id=0)
            done = len(written(cluster))
            send_until(lambda had=done: len(written(cluster)) > had + 30, "some are refused, some written")
        result = producer.finish()
        count = next(numbers)
    assert written(cluster) == written(cluster, 1) == list(range(count))
    assert result.breaker_trips >= 2
    assert result.retries > 0


def test_frozen_broker_is_muted_after_one_request(cluster: FakeCluster) -> None:
    """Catches: a sender that sleeps until the response, though the breaker has a deadline for it."""
    patient = {"request_timeout_ms": 300_000, "delivery_timeout_ms": 600_000}
    with task(cluster, **QUICK, **patient) as producer:
        producer.sender.max_poll_ms = 1e9
        for partition in range(3):
            producer.send(rows(0, 1, partition=partition))
        until(lambda: all(written(cluster, p) for p in range(3)), "all brokers are known")
        cluster.freeze(0)
        producer.send(rows(1, 1))
        until(lambda: mutes(producer), "it is muted, and no other row woke the sender")
        cluster.thaw(0)
        producer.finish()
