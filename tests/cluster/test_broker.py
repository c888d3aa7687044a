"""What is known of one broker: requests in flight, throttling, availability, slow start; at exact times."""

from __future__ import annotations

import math

import pyarrow as pa
import pytest

from kafka_sink import kafka_errors
from kafka_sink.cluster.broker import Broker, BrokerCounts, unavailable
from kafka_sink.engine.batch import ProducerBatch
from kafka_sink.model import TopicPartition
from tests.support.brokers import Brokers, batch
from tests.support.fake_broker import PRODUCE, FakeCluster
from tests.support.fake_replies import error
from tests.support.scripted_cluster import TOPIC, attempts, send, written

P0 = TopicPartition("t", 0)
REFUSAL = kafka_errors.NOT_LEADER_OR_FOLLOWER


def test_requests_end_in_the_order_in_which_they_were_sent() -> None:
    brokers = Brokers(1)
    broker = brokers[1]
    first, second = brokers.send(1, [P0], 5.0), brokers.send(1, [P0], 6.0)
    assert (broker.oldest_request_ms, len(list(broker.batches()))) == (5.0, 2)
    assert broker.responded(9.0, 500.0) == (first, True)
    assert (broker.request_sent_ms, broker.oldest_request_ms) == (5.0, 6.0)
    assert broker.failed() is second
    assert broker.oldest_request_ms is None
    metrics = broker.metrics(20.0)
    assert (metrics.requests, metrics.failures, metrics.in_flight, metrics.sent_bytes) == (2, 1, 0, 200)
    assert (metrics.latency_ms, metrics.max_latency_ms, sum(metrics.latency_buckets)) == (4.0, 4.0, 1)


def test_a_request_that_throttling_delays_counts_from_its_end() -> None:
    brokers = Brokers(1)
    brokers.send(1, [P0], 5.0)
    connection = brokers[1].connection
    assert connection is not None
    connection.throttled_until_ms = 900.0
    assert not brokers[1].accepts(899.0)
    assert brokers[1].accepts(900.0)
    assert brokers[1].oldest_request_ms == 900.0
    brokers[1].responded(30.0, 500.0)
    assert brokers[1].request_sent_ms == 900.0
    assert brokers[1].metrics(30.0).latency_ms == 25.0


def test_a_tasks_counts_begin_at_zero() -> None:
    brokers = Brokers(1)
    brokers.send(1, [P0], 5.0)
    connection = brokers[1].connection
    assert connection is not None
    connection.throttled_until_ms = 76.0
    brokers[1].responded(6.0, 500.0)
    assert brokers[1].metrics(6.0).throttle_ms == 70.0
    brokers[1].counts = BrokerCounts()
    metrics = brokers[1].metrics(6.0)
    assert (metrics.requests, metrics.latency_ms, metrics.throttle_ms) == (0, 0.0, 0.0)


def test_throttling_outlives_its_connection_and_time_that_overlaps_counts_once() -> None:
    """Catches: the figure fell to 0 after a change of address, and in a report after the last response."""
    brokers = Brokers(1)
    for responded_ms, until_ms in [(10.0, 50.0), (20.0, 60.0), (70.0, 60.0)]:
        brokers.send(1, [P0], 5.0)
        brokers.throttle(1, until_ms)
        brokers[1].responded(responded_ms, 500.0)
    brokers[1].connection = None
    assert brokers[1].metrics(80.0).throttle_ms == 50.0


def test_without_an_address_nothing_can_be_sent() -> None:
    brokers = Brokers(1)
    brokers[1].connection = None
    broker = brokers[1]
    assert (broker.accepts(0.0), broker.is_connected, broker.is_gone) == (False, False, True)
    assert broker.delay_ms(0.0) == math.inf
    with pytest.raises(ValueError, match="address of broker 1 is unknown"):
        brokers.send(1, [P0], 0.0)
    assert not broker.sent


class Waits:
    """Which of two brokers keyless rows avoid."""

    def __init__(self) -> None:
        self.brokers = Brokers(1, 2)

    def observe(self, waiting: list[int], accepting: list[int], now_ms: float) -> set[int]:
        brokers = self.brokers
        late = unavailable(
            brokers.values(), [brokers[n] for n in waiting], [brokers[n] for n in accepting], 100, now_ms
        )
        return set(late)


def test_a_broker_that_takes_nothing_for_longer_is_left_out_until_it_does() -> None:
    waits = Waits()
    waits.observe([1], [2], 0)
    assert waits.observe([1], [2], 100) == set()
    assert waits.observe([1], [], 100.5) == {1}
    assert waits.observe([], [2], 150) == {1}
    assert waits.observe([], [1], 160) == set()
    assert waits.observe([1], [], 170) == set()


def test_a_broker_for_which_nothing_waits_any_more_gets_another_chance() -> None:
    waits = Waits()
    waits.observe([1], [], 0)
    assert waits.observe([1], [], 101) == {1}
    assert waits.observe([], [], 5_201) == {1}
    assert waits.observe([], [], 5_202) == set()


class Limits:
    """One broker, and the partitions that have taken a batch."""

    def __init__(self) -> None:
        self.brokers = Brokers(1, 2)
        self.broker: Broker = self.brokers[1]

    def taken(self, one: ProducerBatch) -> None:
        self._end(one)
        one.home.has_taken = True
        self.broker.took([one])

    def failed(self, one: ProducerBatch, code: int, now_ms: float) -> None:
        self._end(one)
        self.broker.refused(one, code, now_ms)

    def _end(self, one: ProducerBatch) -> None:
        for sent in list(self.broker.sent):
            if one in sent.batches:
                self.broker.sent.remove(sent)


def new(partition: int, topic: str = "t") -> ProducerBatch:
    """For a partition."""
    return batch(TopicPartition(topic, partition))


def sendable(limits: Limits, batches: list[ProducerBatch], now_ms: float) -> list[ProducerBatch]:
    """Those that go into the next request."""
    may_send = limits.broker.limited(lambda _: True, now_ms)
    taken = [one for one in batches if may_send(one)]
    for one in taken:
        limits.brokers.send_batches(1, [one], now_ms)
    return taken


def test_without_a_refusal_nothing_is_limited() -> None:
    limits = Limits()
    assert len(sendable(limits, [new(n) for n in range(1000)], 0)) == 1000
    assert limits.broker.pause_ms(0) == math.inf


def test_after_a_refusal_one_batch_goes_at_a_time_and_after_a_pause() -> None:
    limits = Limits()
    waiting = [new(n) for n in range(100)]
    limits.failed(new(0), REFUSAL, 0)
    assert sendable(limits, waiting, 5) == []
    assert limits.broker.pause_ms(5) == 45
    first = sendable(limits, waiting, 50)
    assert len(first) == 1
    assert limits.broker.pause_ms(50) == math.inf
    assert sendable(limits, waiting, 90) == []
    limits.failed(first[0], REFUSAL, 100)
    assert limits.broker.pause_ms(100) == 50


def test_each_batch_that_is_taken_lets_more_go() -> None:
    limits = Limits()
    waiting = [new(n) for n in range(2000)]
    limits.failed(waiting[0], REFUSAL, 0)
    sent, now = [], 50.0
    while waiting:
        taken = sendable(limits, waiting, now)
        sent.append(len(taken))
        for one in taken:
            waiting.remove(one)
            limits.taken(one)
        now += 1
    assert sent == [1, 2, 4, 8, 16, 32, 64, 128, 1745]


def test_refusals_in_one_burst_count_once() -> None:
    limits = Limits()
    limits.failed(new(0), REFUSAL, 0)
    for n in range(64):
        limits.taken(new(n))
    for n in range(64, 128):
        limits.failed(new(n), REFUSAL, 100)
    assert len(sendable(limits, [new(n) for n in range(200, 400)], 101)) == 32


def test_partitions_that_took_a_batch_other_topics_and_other_brokers_go_on() -> None:
    limits = Limits()
    served, fresh = new(0), new(1)
    limits.taken(served)
    limits.failed(fresh, REFUSAL, 0)
    elsewhere = new(1, "other")
    may_send = limits.broker.limited(lambda _: True, 1)
    assert [may_send(one) for one in (served, fresh, elsewhere)] == [True, False, True]
    assert limits.brokers[2].limited(lambda _: True, 1)(fresh)


def test_a_moved_leader_limits_nothing() -> None:
    limits = Limits()
    served = new(0)
    limits.taken(served)
    limits.failed(served, REFUSAL, 0)
    assert len(sendable(limits, [new(n) for n in range(10)], 1)) == 10


def test_other_errors_limit_nothing_and_free_their_places() -> None:
    limits = Limits()
    limits.failed(new(0), kafka_errors.NOT_ENOUGH_REPLICAS, 0)
    sent = sendable(limits, [new(n) for n in range(10)], 1)
    assert len(sent) == 10
    for one in sent:
        limits.failed(one, kafka_errors.NOT_ENOUGH_REPLICAS, 2)
    limits.failed(new(0), REFUSAL, 2)
    (lost,) = sendable(limits, [new(1)], 52)
    limits.failed(lost, 0, 500)
    assert len(sendable(limits, [new(1), new(2)], 501)) == 1


def test_a_batch_that_may_not_go_for_other_reasons_takes_no_place() -> None:
    limits = Limits()
    limits.failed(new(0), REFUSAL, 0)
    held, free = new(1), new(2)
    may_send = limits.broker.limited(lambda one: one is not held, 50)
    assert [may_send(held), may_send(free)] == [False, True]


def test_batches_are_not_sent_again_and_again_while_a_broker_creates_partitions() -> None:
    partitions = 200
    numbers = list(range(partitions))
    values = pa.array([b"<%d>" % number for number in numbers], pa.binary())
    rows = pa.record_batch({"value": values, "partition": pa.array(numbers, pa.int32())})
    with FakeCluster() as cluster:
        cluster.create_topic(TOPIC, partitions)
        cluster.script(PRODUCE, *[error(REFUSAL)] * 5)
        result = send(cluster, rows)
        assert result.records == partitions
        assert [written(cluster, number) for number in numbers] == [[number] for number in numbers]
        # The first request had all of them, the next four had one each.
        assert len(attempts(cluster)) <= 2 * partitions + 10
