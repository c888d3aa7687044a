"""Slow start on partitions that their broker does not serve yet, at exact times and in a whole producer."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable

import pyarrow as pa

from kafka_sink import kafka_errors
from kafka_sink.cluster.broker import Broker
from kafka_sink.cluster.partition import ProducerBatch
from kafka_sink.model import TopicPartition
from tests.support.brokers import Brokers, batch
from tests.support.fake_broker import PRODUCE, FakeCluster
from tests.support.fake_replies import error
from tests.support.scripted_cluster import TOPIC, attempts, send, written

REFUSAL = kafka_errors.NOT_LEADER_OR_FOLLOWER


class Limits:
    """One broker, and the partitions that have taken a batch."""

    def __init__(self) -> None:
        self.brokers = Brokers(1, 2)
        self.broker: Broker = self.brokers[1]

    def taken(self, one: ProducerBatch) -> None:
        self._end(one)
        one.queue.has_taken = True
        self.broker.slow_starts.on_taken([one])

    def failed(self, one: ProducerBatch, code: int, now_ms: float) -> None:
        self._end(one)
        self.broker.slow_starts.on_refused(one, code, now_ms)

    def _end(self, one: ProducerBatch) -> None:
        self.broker.sent = deque(sent for sent in self.broker.sent if one not in sent.batches)

    def may_send(
        self, now_ms: float, otherwise: Callable[[ProducerBatch], bool] = lambda _: True, node_id: int = 1
    ) -> Callable[[ProducerBatch], bool]:
        broker = self.brokers[node_id]
        return broker.slow_starts.limited(otherwise, broker.batches_in_flight(), now_ms)

    def send(self, batches: list[ProducerBatch], now_ms: float) -> list[ProducerBatch]:
        """Those that go into the next request."""
        may_send = self.may_send(now_ms)
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
    assert limits.broker.slow_starts.pause_ms(5) == 45
    first = limits.send(waiting, 50)
    assert len(first) == 1
    assert limits.broker.slow_starts.pause_ms(50) == math.inf
    assert limits.send(waiting, 90) == []
    limits.failed(first[0], REFUSAL, 100)
    assert limits.broker.slow_starts.pause_ms(100) == 50


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
    assert limits.broker.slow_starts.pause_ms(1) == math.inf, "its leader moved"
    assert all(map(limits.may_send(1), new(*range(1000))))
    limits.failed(fresh, REFUSAL, 0)
    may_send = limits.may_send(1)
    assert [may_send(one) for one in (served, fresh, *new(1, topic="other"))] == [True, False, True]
    assert limits.may_send(1, node_id=2)(fresh)
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
    may_send = limits.may_send(50, lambda one: one is not other)
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
