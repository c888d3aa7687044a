"""How little is sent to partitions that a broker does not serve yet, at exact times and on sockets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import pyarrow as pa

from kafka_sink import kafka_errors
from kafka_sink.accumulator.producer_batch import ProducerBatch
from kafka_sink.model import TopicPartition
from kafka_sink.sending.new_partitions import NewPartitions
from tests.support.fake_broker import PRODUCE, FakeCluster
from tests.support.fake_replies import error
from tests.support.scripted_cluster import TOPIC, attempts, send, written

NODE = 1
REFUSAL = kafka_errors.NOT_LEADER_OR_FOLLOWER


@dataclass(eq=False)
class OfPartition:
    """All that is looked at of a batch."""

    partition: TopicPartition


def batch(partition: int, topic: str = "t") -> ProducerBatch:
    return cast(ProducerBatch, OfPartition(TopicPartition(topic, partition)))


def sendable(
    limits: NewPartitions, batches: list[ProducerBatch], now_ms: float, node: int = NODE
) -> list[ProducerBatch]:
    """Those that go into the next request."""
    may_send = limits.limited(node, now_ms, lambda _: True)
    taken = [one for one in batches if may_send(one)]
    for one in taken:
        limits.sent(node, [one])
    return taken


def test_without_a_refusal_nothing_is_limited() -> None:
    limits = NewPartitions()
    assert len(sendable(limits, [batch(n) for n in range(1000)], 0)) == 1000
    assert limits.next_change_ms(0) == float("inf")


def test_after_a_refusal_one_batch_goes_at_a_time_and_after_a_pause() -> None:
    limits = NewPartitions()
    waiting = [batch(n) for n in range(100)]
    limits.failed(NODE, batch(0), REFUSAL, 0)
    assert sendable(limits, waiting, 5) == []
    assert limits.next_change_ms(5) == 5
    first = sendable(limits, waiting, 10)
    assert len(first) == 1
    assert limits.next_change_ms(10) == float("inf")
    assert sendable(limits, waiting, 20) == []
    limits.failed(NODE, first[0], REFUSAL, 30)
    # The pause has doubled.
    assert limits.next_change_ms(30) == 20


def test_pauses_have_an_end() -> None:
    limits, now = NewPartitions(), 0.0
    for _ in range(20):
        limits.failed(NODE, batch(0), REFUSAL, now)
        pause = limits.next_change_ms(now)
        now += pause
    assert pause == 80


def test_each_batch_that_is_taken_lets_more_go() -> None:
    limits = NewPartitions()
    waiting = [batch(n) for n in range(2000)]
    limits.failed(NODE, waiting[0], REFUSAL, 0)
    sent, now = [], 10.0
    while waiting:
        taken = sendable(limits, waiting, now)
        sent.append(len(taken))
        for one in taken:
            waiting.remove(one)
            limits.taken(NODE, [one])
        now += 1
    assert sent == [1, 2, 4, 8, 16, 32, 64, 128, 1745]


def test_refusals_in_one_burst_count_once() -> None:
    limits = NewPartitions()
    limits.failed(NODE, batch(0), REFUSAL, 0)
    for n in range(64):
        limits.taken(NODE, [batch(n)])
    for n in range(64, 128):
        limits.failed(NODE, batch(n), REFUSAL, 100)
    assert len(sendable(limits, [batch(n) for n in range(200, 400)], 101)) == 32


def test_partitions_that_took_a_batch_other_topics_and_other_brokers_go_on() -> None:
    limits = NewPartitions()
    served, new = batch(0), batch(1)
    limits.taken(NODE, [served])
    limits.failed(NODE, new, REFUSAL, 0)
    elsewhere = batch(1, "other")
    may_send = limits.limited(NODE, 1, lambda _: True)
    assert [may_send(one) for one in (served, new, elsewhere)] == [True, False, True]
    assert limits.limited(2, 1, lambda _: True)(new)


def test_a_moved_leader_limits_nothing() -> None:
    limits = NewPartitions()
    limits.taken(NODE, [batch(0)])
    limits.failed(NODE, batch(0), REFUSAL, 0)
    assert len(sendable(limits, [batch(n) for n in range(10)], 1)) == 10


def test_other_errors_limit_nothing_and_free_their_places() -> None:
    limits = NewPartitions()
    limits.failed(NODE, batch(0), kafka_errors.NOT_ENOUGH_REPLICAS, 0)
    assert len(sendable(limits, [batch(n) for n in range(10)], 1)) == 10
    limits.failed(NODE, batch(0), REFUSAL, 2)
    (lost,) = sendable(limits, [batch(1)], 12)
    limits.failed(NODE, lost, 0, 500)
    assert len(sendable(limits, [batch(1), batch(2)], 501)) == 1


def test_a_batch_that_may_not_go_for_other_reasons_takes_no_place() -> None:
    limits = NewPartitions()
    limits.failed(NODE, batch(0), REFUSAL, 0)
    held, free = batch(1), batch(2)
    may_send = limits.limited(NODE, 10, lambda one: one is not held)
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
