"""Batches and partitions of an idempotent producer, without sockets."""

from __future__ import annotations

from typing import Any

from kafka_sink.clock import ExponentialBackoff
from kafka_sink.cluster.partition import Partition, ProducerBatch
from kafka_sink.engine.identity import ProducerIdentity
from kafka_sink.memory.pool import BufferPool
from kafka_sink.model import CompressionType, TopicPartition
from kafka_sink.records.batch_header import ProducerSequence
from tests.support.allocators import incremental_allocator
from tests.support.queues import partition_of

ALLOCATOR = incremental_allocator(BufferPool(1 << 22, clock_ms=lambda: 0.0), 128)
P0, P1 = partition_of(TopicPartition("t", 0)), partition_of(TopicPartition("t", 1))


def identity(epoch: int = 0) -> ProducerIdentity:
    """An identity with a producer id, and partitions that were never written to."""
    P0.forget_sequences()
    P1.forget_sequences()
    unused: Any = None
    made = ProducerIdentity(unused, 30_000, ExponentialBackoff(100, 1000, lambda: 0.5))
    made.producer_id, made.producer_epoch = 7, epoch
    return made


def batch(records: int = 1, partition: Partition = P0) -> ProducerBatch:
    buffer = ALLOCATOR.try_open(100)
    assert buffer is not None
    made = ProducerBatch(buffer, None, CompressionType.NONE, 1.0, 0, partition, 0.0)
    made.record_count = records
    return made


def sent(of: ProducerIdentity, one: ProducerBatch) -> ProducerBatch:
    assert of.may_send(one, 0)
    of.assign(one)
    one.in_request = True
    one.attempts += 1
    return one


def fail(one: ProducerBatch) -> None:
    one.in_request = False
    one.queue.on_attempt_failed()


def acknowledge(one: ProducerBatch, now_ms: float = 0) -> None:
    one.in_request = False
    one.queue.on_acknowledged(one, -1, now_ms, now_ms)


def ended(one: ProducerBatch, last_offset: int = 0) -> None:
    """Acknowledged, while its request still refers to it."""
    one.queue.on_acknowledged(one, last_offset, 0, 0)


def marks(one: ProducerBatch) -> ProducerSequence:
    return one.sequence
