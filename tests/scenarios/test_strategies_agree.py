"""Same rows, no pressure on memory: `full` and `incremental` send the same batches, byte by byte."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from unittest.mock import patch

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kafka_sink.engine.accumulator import RecordAccumulator
from kafka_sink.engine.appender import RecordAppender
from kafka_sink.engine.batch import BatchState, ProducerBatch
from kafka_sink.engine.produce_requests import fill_request
from kafka_sink.engine.splitting import split_batch
from kafka_sink.memory import allocator, arena
from kafka_sink.memory.allocator import BufferAllocator, chunk_size
from kafka_sink.memory.pool import BufferPool
from kafka_sink.model import CompressionType, PartitionMetadata, TopicMetadata, TopicPartition
from kafka_sink.network.produce import produce_body
from kafka_sink.options import SinkOptions
from kafka_sink.records.batch_header import ProducerSequence
from kafka_sink.rows.column_plan import ColumnPlan
from kafka_sink.rows.columns import extract
from kafka_sink.rows.partitioner import BatchCapacity, Partitioner
from tests.support.allocators import full_allocator, incremental_allocator
from tests.support.brokers import Brokers
from tests.support.effort import tries
from tests.support.queues import limits_of

PARTITIONS = 7
POOL_BYTES = 1 << 30  # mapped lazily; nothing presses
NOW = 1_700_000_000_000
TOPICS = {
    "t": TopicMetadata.of("t", None, tuple(PartitionMetadata("t", p, p % 2, 0) for p in range(PARTITIONS)))
}
PLAN = ColumnPlan.of(
    [
        ("key", "binary"),
        ("value", "binary"),
        ("headers", "array<struct<key:string,value:binary>>"),
        ("timestamp", "timestamp"),
        ("partition", "int"),
    ],
    "t",
)
HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
CODECS = list(CompressionType)

Wire = list[bytes]


def scattered(pool: BufferPool, batch_size: int) -> BufferAllocator:
    """Chunks that were used before, in any order, so that few lie side by side."""
    arena = pool.arena(chunk_size(batch_size))
    chunks = pool.try_take(arena, min(2000, (4 << 20) // arena.size))
    assert chunks is not None
    for chunk in chunks:
        chunk.view[:] = b"\xa5" * arena.size
    random.Random(batch_size).shuffle(chunks)
    pool.give(arena, chunks)
    return incremental_allocator(pool, batch_size)


def finest(pool: BufferPool, batch_size: int) -> BufferAllocator:
    """As where very many batches are open."""
    with patch.object(allocator, "_SHARE_OF_CHUNKS", POOL_BYTES + 1):
        return incremental_allocator(pool, batch_size)


@dataclass(frozen=True)
class Shape:
    """What a run is like; ``seed`` decides the rest."""

    seed: int
    batch_size: int
    units: tuple[int, ...]
    value_bytes: int
    random_share: float  # of each value: what no codec shrinks
    times: str
    drains: float
    split_every: int


shapes = st.builds(
    Shape,
    seed=st.integers(0, 2**32),
    batch_size=st.sampled_from([0, 1, 128, 500, 4096, 16_384, 70_000, 300_000]),
    units=st.lists(st.sampled_from([1, 2, 30, 400]), min_size=1, max_size=5).map(tuple),
    value_bytes=st.sampled_from([0, 1, 20, 110, 1500, 4000]),
    random_share=st.sampled_from([0.0, 0.3, 1.0]),
    times=st.sampled_from(["now", "rising", "any", "leaping"]),
    drains=st.sampled_from([0.0, 0.3, 1.0]),
    split_every=st.sampled_from([0, 3]),
)


@lru_cache(maxsize=1)
def units_of(shape: Shape) -> list[pa.RecordBatch]:
    """The rows of all runs of a shape; making them takes as long as a run."""
    chance = random.Random(shape.seed)
    return [unit_rows(chance, count, shape) for count in shape.units]


def unit_rows(chance: random.Random, count: int, shape: Shape) -> pa.RecordBatch:
    keys: list[Any] = []
    values: list[Any] = []
    headers: list[Any] = []
    times: list[Any] = []
    # Units years apart share batches.
    leap = chance.choice([0, 10**9, 10**12]) if shape.times == "leaping" else 0
    for _ in range(count):
        keys.append(chance.choice([None, b"", b"k%d" % chance.randrange(50)]))
        size = chance.choice([shape.value_bytes, chance.randrange(shape.value_bytes + 1), 0])
        if chance.random() < 0.003:
            size = 90_000
        noise = chance.randbytes(int(size * shape.random_share))
        values.append(None if chance.random() < 0.02 else noise + b"ab" * ((size - len(noise)) // 2))
        headers.append([{"key": "h", "value": noise[:9]}] if chance.random() < 0.1 else None)
        late = chance.randrange(10**9) if shape.times == "any" else 0
        times.append((NOW + (len(times) if shape.times == "rising" else 0) - late - leap) * 1000)
    partitions = [chance.choice([None, *range(PARTITIONS)]) for _ in range(count)]
    return pa.record_batch(
        {
            "key": pa.array(keys, pa.binary()),
            "value": pa.array(values, pa.binary()),
            "headers": pa.array(headers, HEADERS),
            "timestamp": pa.array(times, pa.timestamp("us", tz="UTC")),
            "partition": pa.array(partitions, pa.int32()),
        }
    )


class Run:
    """One task: units are appended, the sender drains now and then, every request's bytes are kept."""

    def __init__(
        self,
        shape: Shape,
        codec: CompressionType,
        strategy: Callable[..., BufferAllocator],
    ) -> None:
        self.chance = random.Random(shape.seed)
        self.shape = shape
        self.pool = BufferPool(POOL_BYTES, max(1, shape.batch_size), clock_ms=lambda: 0.0)
        self.allocator = strategy(self.pool, shape.batch_size)
        self.brokers = Brokers()
        self.accumulator = RecordAccumulator(
            SinkOptions(
                bootstrap_servers=(),
                batch_size=shape.batch_size,
                linger_ms=0,
                max_block_ms=0,
                delivery_timeout_ms=10**9,
                buffer_memory=POOL_BYTES,
                compression_type=codec,
            ),
            self.allocator,
        )
        self.appender = RecordAppender(self.accumulator, lambda: 0.0, lambda: None)
        self.partitioner = Partitioner(
            capacity=lambda *_: BatchCapacity(None, 1000),
            loads=self.accumulator.queued_batches,
            ignore_keys=False,
            adaptive=True,
            random=self.chance.random,
        )
        self.sequences = dict.fromkeys(range(PARTITIONS), 0)
        self.wire: Wire = []
        self.batches = 0

    def everything(self) -> Wire:
        for unit in units_of(self.shape):
            rows = extract(PLAN, unit, NOW)
            ordered = self.partitioner.order(rows, TOPICS, NOW)
            self.appender.append(ordered, lambda: None)
            while self.chance.random() < self.shape.drains and self.drain():
                pass
        self.appender.flush()
        while self.drain():
            pass
        assert not self.accumulator.live
        metrics = self.pool.metrics()
        assert (metrics.used_bytes, metrics.heap_bytes, metrics.full_strategy_bytes) == (0, 0, 0)
        return self.wire

    def drain(self) -> bool:
        """One Produce request for each broker with something ready; False where none has."""
        leader = self.brokers.led_by(lambda p: TOPICS["t"].partitions[p.partition].leader)
        ready, _, _ = self.accumulator.ready(leader, 1e6)
        for broker, queues in sorted(ready.items(), key=lambda one: one[0].id):
            taken = fill_request(self.accumulator, broker, queues, 200_000, lambda batch: True, None)
            parts = []
            for batch in taken:
                self.batches += 1
                number = batch.partition.partition
                batch.assign_sequence(ProducerSequence(7, 1, self.sequences[number]))
                batch.write_header()
                batch.move_to(BatchState.IN_FLIGHT)
                batch.attempts += 1
                parts.append((number, batch.buffer.views(), batch.size))
            self.wire.append(b"".join(produce_body(12, -1, 1000, None, [("t", None, parts)])))
            for batch in taken:
                self.answer(batch)
        return bool(ready)

    def answer(self, batch: ProducerBatch) -> None:
        every = self.shape.split_every
        if every and self.batches % every == 0 and batch.record_count > 1:
            self.accumulator.note_too_large(batch)
            self.accumulator.reenqueue_split(batch, split_batch(batch, self.shape.batch_size))
            return
        self.sequences[batch.partition.partition] += batch.record_count
        self.accumulator.complete([(batch, 0, -1)], lambda _: None)


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name.lower())
@settings(max_examples=tries(5), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(shape=shapes, slab_chunks=st.sampled_from([1, 3, 64]))
def test_the_wire_is_the_same_whatever_holds_the_batches(
    codec: CompressionType, shape: Shape, slab_chunks: int
) -> None:
    with patch.object(arena, "_SLAB_CHUNKS", slab_chunks):
        expected = Run(shape, codec, full_allocator).everything()
        for strategy in (incremental_allocator, scattered, finest):
            assert Run(shape, codec, strategy).everything() == expected, strategy.__name__


def test_the_runs_above_are_of_many_kinds() -> None:
    """Several batches to a partition, several blocks to a batch, and splits: else little was compared."""
    shape = Shape(1, 300_000, (400, 400, 400), 4000, 0.3, "any", 0.3, 3)
    run = Run(shape, CompressionType.LZ4, incremental_allocator)
    wire = run.everything()
    assert run.batches > 2 * PARTITIONS
    assert limits_of(run.accumulator).largest_batch < run.shape.batch_size
    assert max(map(len, wire)) > 2 * 64 * 1024
    assert sum(TopicPartition("t", p) in run.accumulator.partitions for p in range(PARTITIONS)) == PARTITIONS
