"""What users rely on when things go wrong, on real brokers and without Spark in between."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pyarrow as pa
import pytest

from kafka_sink.coordinator.live.messages import TaskIdentity
from kafka_sink.errors import MetadataTimeoutError, RecordTooLargeError
from kafka_sink.model import TaskResult
from kafka_sink.options import parse
from kafka_sink.rows.column_plan import ColumnPlan
from kafka_sink.task.producer import Producer
from kafka_sink.task.producer_cache import task_producer
from local_kafka import LocalBroker
from tests.support.scripted_cluster import sender_threads
from tests.support.topics import numbers_in
from tests.support.waiting import until


def numbered(start: int, count: int, size: int = 100) -> pa.RecordBatch:
    values = [b"%d:" % number + b"x" * size for number in range(start, start + count)]
    keys = [b"k%d" % (number % 97) for number in range(start, start + count)]
    return pa.record_batch({"key": pa.array(keys, pa.binary()), "value": pa.array(values, pa.binary())})


@contextmanager
def producing(bootstrap: str, topic: str, **options: object) -> Iterator[Producer]:
    raw = {"kafka.bootstrap.servers": bootstrap, "topic": topic}
    raw |= {f"kafka.{name.replace('_', '.')}": str(value) for name, value in options.items()}
    plan = ColumnPlan.of([("key", "binary"), ("value", "binary")], topic)
    with task_producer(parse(raw).options, plan) as producer:
        yield producer


def send(bootstrap: str, topic: str, batches: Iterator[pa.RecordBatch], **options: object) -> TaskResult:
    with producing(bootstrap, topic, **options) as producer:
        for batch in batches:
            producer.send(batch)
        return producer.finish()


def assert_once_and_in_order(found: dict[int, list[int]], count: int) -> None:
    assert sorted(number for numbers in found.values() for number in numbers) == list(range(count))
    for numbers in found.values():
        for key in range(97):
            of_key = [number for number in numbers if number % 97 == key]
            assert of_key == sorted(of_key)


def test_a_batch_that_the_topic_refuses_is_split(broker: LocalBroker) -> None:
    for codec in ("none", "lz4", "zstd", "gzip", "snappy"):
        topic = f"small-messages-{codec}"
        broker.create_topic(topic, 2, config={"max.message.bytes": 3000})
        options = {"compression_type": codec, "batch_size": 60_000, "linger_ms": 50}
        result = send(broker.bootstrap_servers, topic, iter([numbered(0, 5000)]), **options)
        assert result.records == 5000
        assert result.splits > 0, codec
        assert_once_and_in_order(numbers_in(broker.bootstrap_servers, topic), 5000)


def test_a_row_over_max_request_size_fails_before_it_is_sent(broker: LocalBroker) -> None:
    options = {"max_request_size": 2000, "batch_size": 1000}
    text = r"for topic '.*kafka\.max\.request\.size = 2000.*errors\.tolerance=all"
    with pytest.raises(RecordTooLargeError, match=text):
        send(broker.bootstrap_servers, "never-made", iter([numbered(0, 1, 5000)]), **options)


@pytest.mark.parametrize("acks", ["0", "1", "all"])
def test_every_acks_setting_delivers(broker: LocalBroker, acks: str) -> None:
    topic = f"acks-{acks}"
    broker.create_topic(topic, 3)
    # With acks=0 nobody hears of a new topic's leader that is not ready yet.
    send(broker.bootstrap_servers, topic, iter([numbered(0, 300)]))
    result = send(broker.bootstrap_servers, topic, iter([numbered(300, 19_700)]), acks=acks)
    assert (result.records, result.unconfirmed) == ((0, 19_700) if acks == "0" else (19_700, 0))

    def all_of_them() -> dict[int, list[int]] | None:
        read = numbers_in(broker.bootstrap_servers, topic)
        return read if sum(map(len, read.values())) >= 20_000 else None

    found = until(all_of_them, "all rows, which acks=0 does not wait for")
    assert_once_and_in_order(found, 20_000)
    reported = {part.partition: sum(b - a + 1 for a, b in part.offset_ranges) for part in result.partitions}
    if acks != "0":
        assert sum(reported.values()) == 19_700
        assert all(reported[partition] <= len(found[partition]) for partition in reported)


def test_a_producer_is_reused_and_a_failed_one_is_not(broker: LocalBroker) -> None:
    broker.create_topic("reused", 2)
    senders = set()
    for _ in range(5):
        send(broker.bootstrap_servers, "reused", iter([numbered(0, 100)]))
        senders.update(sender_threads())
    assert len(senders) == 1
    missing = {"max_block_ms": 3000, "allow_auto_create_topics": "false"}
    with pytest.raises(MetadataTimeoutError, match="UNKNOWN_TOPIC"):
        send(broker.bootstrap_servers, "missing-here", iter([numbered(0, 1)]), **missing)
    assert not set(sender_threads()) - senders


def test_memory_full_of_batches_that_are_too_large_does_not_stall(broker: LocalBroker) -> None:
    """KAFKA-20576. Catches: batches that are too large fill the pool, and their pieces the heap."""
    topic = "small-for-memory"
    broker.create_topic(topic, 8, config={"max.message.bytes": 65_536})
    chance = random.Random(1)

    def tables() -> Iterator[pa.RecordBatch]:
        for start in range(0, 50_000, 10_000):
            noise = chance.randbytes(10_000 * 60).hex().encode()
            values = [b"%d:" % (start + row) + noise[row * 120 : row * 120 + 120] for row in range(10_000)]
            keys = [b"k%d" % ((start + row) % 97) for row in range(10_000)]
            yield pa.record_batch({"key": keys, "value": values})

    options = {"buffer_memory": 4 << 20, "compression_type": "lz4", "linger_ms": 100}
    result = send(broker.bootstrap_servers, topic, tables(), **options)
    assert result.splits > 0
    assert_once_and_in_order(numbers_in(broker.bootstrap_servers, topic), 50_000)


def test_refused_record_of_a_large_batch_costs_one_dead_letter(broker: LocalBroker) -> None:
    """Its batch of 1 MiB holds more raw bytes than the pool has."""
    topic = "one-refused"
    limits = {"max.message.bytes": 2 << 20, "message.timestamp.after.max.ms": 3_600_000}
    broker.create_topic(topic, 1, config=limits)
    broker.create_topic(f"{topic}-dead-letters", 1)
    raw = {"kafka.bootstrap.servers": broker.bootstrap_servers, "topic": topic, "errors.tolerance": "all"}
    raw |= {"errors.deadletterqueue.topic.name": f"{topic}-dead-letters", "kafka.linger.ms": "5000"}
    raw |= {"kafka.buffer.memory": str(4 << 20), "kafka.batch.size": str(1 << 20)}
    raw |= {"kafka.max.request.size": str(2 << 20), "kafka.compression.type": "lz4"}
    now_us = int(time.time() * 1e6)
    plan = ColumnPlan.of([("value", "binary"), ("timestamp", "timestamp")], topic)
    with task_producer(parse(raw).options, plan, task=TaskIdentity("w", 1, 1)) as producer:
        for start in range(0, 150_000, 5_000):
            values = [b"%d:" % number + b"page" * 20 for number in range(start, start + 5_000)]
            times = [now_us] * 5_000
            if start == 50_000:
                times[777] += 400 * 86_400 * 1_000_000
            stamps = pa.array(times, pa.timestamp("us", tz="UTC"))
            producer.send(pa.record_batch({"value": pa.array(values, pa.binary()), "timestamp": stamps}))
        result = producer.finish()
    assert (result.records, result.skipped) == (149_999, 1)
    found = numbers_in(broker.bootstrap_servers, topic)[0]
    assert found == [number for number in range(150_000) if number != 50_777]
