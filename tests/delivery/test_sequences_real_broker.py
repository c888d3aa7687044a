"""A real broker's responses to sequences at their ends: the wrap, a gap, a new epoch, the last epoch."""

from __future__ import annotations

import pyarrow as pa
import pytest

from kafka_sink.engine.identity import ProducerIdentity
from kafka_sink.options import parse
from kafka_sink.rows.column_plan import ColumnPlan
from kafka_sink.task.producer_cache import PRODUCERS, task_producer
from local_kafka import LocalBroker
from tests.support.topics import read_topic
from tests.support.waiting import until


def rows(start: int, count: int) -> pa.RecordBatch:
    return pa.record_batch({"value": pa.array([b"%d" % n for n in range(start, start + count)], pa.binary())})


def read(broker: LocalBroker, topic: str) -> list[int]:
    """The numbers in its one partition, in offset order."""
    return [int(row.value or b"") for row in read_topic(broker, topic)]


def task(broker: LocalBroker, topic: str):  # type: ignore[no-untyped-def]
    raw = {"kafka.bootstrap.servers": broker.bootstrap_servers, "topic": topic, "kafka.linger.ms": "0"}
    return task_producer(parse(raw).options, ColumnPlan.of([("value", "binary")], topic))


def test_sequences_wrap(broker: LocalBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    topic = "sequences-wrap"
    broker.create_topic(topic, 1)
    assign = ProducerIdentity.assign
    seen: list[int] = []

    def near_the_end(self, batch):  # type: ignore[no-untyped-def]
        if not seen:
            batch.queue.producer = (self.producer_id, self.producer_epoch)
            batch.queue.next_sequence = 2**31 - 7
        assign(self, batch)
        seen.append(batch.sequence.base_sequence)

    # A broker may learn late that it leads a partition of a new topic. Another producer finds out.
    with task(broker, topic) as producer:
        producer.send(rows(0, 3))
        producer.finish()
    PRODUCERS.close()
    monkeypatch.setattr(ProducerIdentity, "assign", near_the_end)
    with task(broker, topic) as producer:
        for start in range(3, 33, 3):
            producer.send(rows(start, 3))
            until(lambda: producer.acknowledged == producer.rows, "the acknowledgement")
        assert producer.finish().retries <= 2
    assert seen[0] == 2**31 - 7
    assert {0, 2} & set(seen), seen
    assert read(broker, topic) == list(range(33))


def test_a_gap_is_answered_by_a_new_epoch(broker: LocalBroker) -> None:
    """The epoch is bumped here, without asking; a real broker takes it from sequence 0."""
    topic = "sequences-gap"
    broker.create_topic(topic, 1)
    with task(broker, topic) as producer:
        producer.send(rows(0, 5))
        until(lambda: producer.acknowledged == producer.rows, "the acknowledgement")
        (partition,) = producer.accumulator.partitions.values()
        producer_id, epoch = partition.producer
        partition.next_sequence += 1_000
        producer.send(rows(5, 5))
        producer.send(rows(10, 5))
        assert producer.finish().records == 15
        assert partition.producer == (producer_id, epoch + 1)
    assert read(broker, topic) == list(range(15))
