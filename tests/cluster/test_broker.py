"""What is known of one broker: requests in flight, throttling, availability, slow start; at exact times."""

from __future__ import annotations

import math
from collections import deque

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
    assert (broker.oldest_request_ms, len(list(broker.batches_in_flight()))) == (5.0, 2)
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
    brokers.throttle(1, 900.0)
    assert not brokers[1].accepts(899.0)
    assert brokers[1].accepts(900.0)
    assert brokers[1].oldest_request_ms == 900.0
    brokers[1].responded(30.0, 500.0)
    assert brokers[1].request_sent_ms == 900.0
    assert brokers[1].metrics(30.0).latency_ms == 25.0


def test_throttling_outlives_its_connection_and_time_that_overlaps_counts_once() -> None:
    """Catches: the figure fell to 0 after a change of address, and in a report after the last response."""
    brokers = Brokers(1)
    for responded_ms, until_ms in [(10.0, 50.0), (20.0, 60.0), (70.0, 60.0)]:
        brokers.send(1, [P0], 5.0)
        brokers.throttle(1, until_ms)
        brokers[1].responded(responded_ms, 500.0)
    brokers[1].connection = None
    assert brokers[1].metrics(80.0).throttle_ms == 50.0
    # The next task's begin at zero.
    brokers[1].counts = BrokerCounts()
    metrics = brokers[1].metrics(80.0)
    assert (metrics.requests, metrics.latency_ms, metrics.throttle_ms) == (0, 0.0, 0.0)


def test_without_an_address_nothing_can_be_sent() -> None:
    brokers = Brokers(1)
    brokers[1].connection = None
    broker = brokers[1]
    assert (broker.accepts(0.0), broker.is_connected, broker.is_gone) == (False, False, True)
    assert broker.delay_ms(0.0) == math.inf
    with pytest.raises(ValueError, match="address of broker 1 is unknown"):
        brokers.send(1, [P0], 0.0)
    assert not broker.sent


def test_keyless_rows_avoid_a_broker_that_takes_nothing_until_it_does_or_nothing_waits_for_it() -> None:
    brokers = Brokers(1, 2)
    for waiting, accepting, now_ms, late in [
        ([1], [2], 0, set()),
        ([1], [2], 100, set()),
        ([1], [], 100.5, {1}),
        ([], [2], 150, {1}),
        ([], [1], 160, set()),
        ([1], [], 170, set()),
        ([1], [], 271, {1}),
        ([], [], 5_371, {1}),
        # Nothing would ever show that it is back.
        ([], [], 5_372, set()),
    ]:
        found = unavailable(
            brokers.values(), map(brokers.of, waiting), map(brokers.of, accepting), 100, now_ms
        )
        assert found == late, now_ms


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
        self.broker.sent = deque(sent for sent in self.broker.sent if one not in sent.batches)

    def send(self, batches: list[ProducerBatch], now_ms: float) -> list[ProducerBatch]:
        """Those that go into the next request."""
        may_send = self.broker.limited(lambda _: True, now_ms)
        taken = [one for one in batches if may_send(one)]
        for one in taken:
            self.brokers.send_batches(1, [one], now_ms)
        return taken


def new(*partitions: int, topic: str = "t") -> list[ProducerBatch]:
    return [batch(TopicPartition(topic, partition)) for partition in partitions]


def test_after_a_refusal_one_batch_goes_at_a_time_and_after_a_pause() -> None:
    limits = Limits()
    waiting = new(*range(100))
    limits.failed(new(0)[0], REFUSAL, 0)
    assert limits.send(waiting, 5) == []
    assert limits.broker.pause_ms(5) == 45
    first = limits.send(waiting, 50)
    assert len(first) == 1
    assert limits.broker.pause_ms(50) == math.inf
    assert limits.send(waiting, 90) == []
    limits.failed(first[0], REFUSAL, 100)
    assert limits.broker.pause_ms(100) == 50


def test_each_batch_that_is_taken_lets_more_go() -> None:
    limits = Limits()
    waiting = new(*range(2000))
    limits.failed(waiting[0], REFUSAL, 0)
    sent, now = [], 50.0
    while waiting:
        taken = limits.send(waiting, now)
        sent.append(len(taken))
        for one in taken:
            waiting.remove(one)
            limits.taken(one)
        now += 1
    assert sent == [1, 2, 4, 8, 16, 32, 64, 128, 1745]


def test_refusals_in_one_burst_count_once() -> None:
    limits = Limits()
    limits.failed(new(0)[0], REFUSAL, 0)
    for one in new(*range(64)):
        limits.taken(one)
    for one in new(*range(64, 128)):
        limits.failed(one, REFUSAL, 100)
    assert len(limits.send(new(*range(200, 400)), 101)) == 32


def test_partitions_that_took_a_batch_other_topics_and_other_brokers_go_on() -> None:
    limits = Limits()
    served, fresh = new(0, 1)
    limits.taken(served)
    limits.failed(served, REFUSAL, 0)
    assert limits.broker.pause_ms(1) == math.inf, "its leader moved"
    assert all(map(limits.broker.limited(lambda _: True, 1), new(*range(1000))))
    limits.failed(fresh, REFUSAL, 0)
    may_send = limits.broker.limited(lambda _: True, 1)
    assert [may_send(one) for one in (served, fresh, *new(1, topic="other"))] == [True, False, True]
    assert limits.brokers[2].limited(lambda _: True, 1)(fresh)
    assert limits.send([served], 50) == [served]
    assert limits.send([fresh], 51) == [fresh], "one that is in flight elsewhere takes no place"


def test_other_errors_limit_nothing_and_free_their_places() -> None:
    limits = Limits()
    limits.failed(new(0)[0], kafka_errors.NOT_ENOUGH_REPLICAS, 0)
    sent = limits.send(new(*range(10)), 1)
    assert len(sent) == 10
    for one in sent:
        limits.failed(one, kafka_errors.NOT_ENOUGH_REPLICAS, 2)
    limits.failed(new(0)[0], REFUSAL, 2)
    (lost,) = limits.send(new(1), 52)
    limits.failed(lost, 0, 500)
    assert len(limits.send(new(1, 2), 501)) == 1


def test_a_batch_that_may_not_go_for_other_reasons_takes_no_place() -> None:
    limits = Limits()
    limits.failed(new(0)[0], REFUSAL, 0)
    other, free = new(1, 2)
    may_send = limits.broker.limited(lambda one: one is not other, 50)
    assert [may_send(other), may_send(free)] == [False, True]


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
