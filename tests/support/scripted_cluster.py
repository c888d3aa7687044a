"""Helpers that the tests of delivery on the scripted cluster share."""

from __future__ import annotations

import threading
from collections.abc import Container, Iterator
from contextlib import contextmanager

import pyarrow as pa

from kafka_sink.coordinator.address import CoordinatorAddress
from kafka_sink.model import TaskResult, TopicPartition
from kafka_sink.options import parse
from kafka_sink.rows.column_plan import ColumnPlan
from kafka_sink.task.producer import Producer
from kafka_sink.task.producer_cache import task_producer
from tests.support.fake_broker import PRODUCE, FakeCluster
from tests.support.fake_log import RecordBatch, numbers_in
from tests.support.partitioners import row_batch

TOPIC = "t"
PLAN = ColumnPlan.of([("value", "binary"), ("partition", "int")], TOPIC)
SECRET = "payload-that-no-message-may-show"
# The bound for steps that should take a moment: on a busy machine they may take long.
PATIENCE_S = 60.0


def rows(start: int, count: int, partition: int = 0) -> pa.RecordBatch:
    values = [b"<%d>%s" % (number, SECRET.encode()) for number in range(start, start + count)]
    return row_batch(values, [partition] * count)


def keyless(number: int) -> pa.RecordBatch:
    """Rows without a partition, and larger than a batch.size of 1,024, so that partitions take turns."""
    return row_batch([b"<%d>" % number + b"x" * 2_000], [None])


def finish_with(producer: Producer, batch: pa.RecordBatch) -> TaskResult:
    """Send these last rows, and finish. Without linger, a failure of the rows can already end ``send``."""
    producer.send(batch)
    return producer.finish()


def task_options(cluster: FakeCluster, **options: object) -> dict[str, str]:
    """Options as a user would write them; short backoffs, no linger."""
    raw = {
        "kafka.bootstrap.servers": cluster.bootstrap_servers,
        "topic": TOPIC,
        "kafka.linger.ms": "0",
        "kafka.retry.backoff.ms": "20",
        "kafka.retry.backoff.max.ms": "50",
        "kafka.reconnect.backoff.ms": "10",
        "kafka.reconnect.backoff.max.ms": "50",
    }
    return raw | {f"kafka.{name.replace('_', '.')}": str(value) for name, value in options.items()}


@contextmanager
def task(
    cluster: FakeCluster, coordinator: CoordinatorAddress | None = None, /, **options: object
) -> Iterator[Producer]:
    with task_producer(parse(task_options(cluster, **options)).options, PLAN, coordinator) as producer:
        yield producer


def send(cluster: FakeCluster, *batches: pa.RecordBatch, **options: object) -> TaskResult:
    with task(cluster, **options) as producer:
        for batch in batches:
            producer.send(batch)
        return producer.finish()


def written(cluster: FakeCluster, partition: int = 0) -> list[int]:
    batches = cluster.batches(TOPIC, partition)
    return [number for batch in batches for number in numbers_in(batch.data)]


def attempts(cluster: FakeCluster) -> list[RecordBatch]:
    return [batch for request in cluster.received(PRODUCE) for batch in request.batches]


def marks(batch: RecordBatch) -> tuple[int, int, int]:
    return batch.producer_id, batch.producer_epoch, batch.base_sequence


def mutes(producer: Producer) -> Container[TopicPartition]:
    return producer.breaker.avoided


def sender_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "kafka-chunked-sender"]
