"""What a real broker says to sequences at their ends: the wrap, a gap, a new epoch, the last epoch."""

from __future__ import annotations

import pyarrow as pa
import pytest
from confluent_kafka import Consumer, TopicPartition

from kafka_sink.engine.identity import ProducerIdentity
from kafka_sink.options import parse
from kafka_sink.rows.column_plan import ColumnPlan
from kafka_sink.task.producer import Producer
from kafka_sink.task.producer_cache import task_producer
from local_kafka import LocalBroker
from tests.support.waiting import until


def rows(start: int, count: int) -> pa.RecordBatch:
    return pa.record_batch({"value": pa.array([b"%d" % n for n in range(start, start + count)], pa.binary())})


def numbers(broker: LocalBroker, topic: str, count: int) -> list[int]:
    """A one-partition topic's rows in offset order, with librdkafka."""
    consumer = Consumer({"bootstrap.servers": broker.bootstrap_servers, "group.id": "sequences"})
    try:
        end = consumer.get_watermark_offsets(TopicPartition(topic, 0), timeout=20)[1]
        assert end == count
        consumer.assign([TopicPartition(topic, 0, 0)])
        return [int(message.value()) for message in consumer.consume(count, timeout=30)]  # type: ignore[arg-type]
    finally:
        consumer.close()


def task(broker: LocalBroker, topic: str):  # type: ignore[no-untyped-def]
    raw = {"kafka.bootstrap.servers": broker.bootstrap_servers, "topic": topic, "kafka.linger.ms": "0"}
    return task_producer(parse(raw).options, ColumnPlan.of([("value", "binary")], topic))


def identity_of(producer: Producer) -> ProducerIdentity:
    found = producer.sender._identity
    assert found is not None
    return found


def test_sequences_wrap(broker: LocalBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    topic = "sequences-wrap"
    broker.create_topic(topic, 1)
    assign = ProducerIdentity.assign
    seen: list[int] = []

    def near_the_end(self, batch):  # type: ignore[no-untyped-def]
        if not seen:
            batch.home.producer = (self.producer_id, self.producer_epoch)
            batch.home.next_sequence = 2**31 - 7
        assign(self, batch)
        seen.append(batch.sequence.base_sequence)

    monkeypatch.setattr(ProducerIdentity, "assign", near_the_end)
    with task(broker, topic) as producer:
        for start in range(0, 30, 3):
            producer.send(rows(start, 3))
            until(lambda: producer.acknowledged == producer.rows, "the acknowledgement")
        assert producer.finish().retries <= 2  # of a topic that is new
    assert seen[0] == 2**31 - 7
    assert {0, 2} & set(seen), seen
    assert numbers(broker, topic, 30) == list(range(30))


@pytest.mark.parametrize("last_epoch", [False, True])
def test_a_gap_is_answered_by_a_new_epoch_or_a_new_id(broker: LocalBroker, last_epoch: bool) -> None:
    """The epoch is bumped here, without asking; a real broker takes it from sequence 0."""
    topic = f"sequences-gap-{last_epoch}"
    broker.create_topic(topic, 1)
    with task(broker, topic) as producer:
        producer.send(rows(0, 5))
        until(lambda: producer.acknowledged == producer.rows, "the acknowledgement")
        identity = identity_of(producer)
        before = identity.producer_id
        (partition,) = producer.accumulator.partitions.values()
        partition.next_sequence += 1_000
        if last_epoch:
            identity.producer_epoch = 2**15 - 1
            partition.producer = (identity.producer_id, identity.producer_epoch)
        producer.send(rows(5, 5))
        producer.send(rows(10, 5))
        assert producer.finish().records == 15
        assert (identity.producer_id, identity.producer_epoch) == (before, 1) or last_epoch
        assert (identity.producer_id != before) is last_epoch
    assert numbers(broker, topic, 15) == list(range(15))
