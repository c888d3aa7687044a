"""Any codec, strategy, batch.size, pool and max.message.bytes, with rows that brokers refuse: the task never
waits for memory that nobody can free, and every row arrives once and in order or is refused.

One thread: whenever the task is about to wait, the broker answers all that it may. What it cannot get then,
it would have waited for until max.block.ms is over.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kafka.record.default_records import DefaultRecordBatch

from kafka_sink.cluster.partition import BatchState, ProducerBatch
from kafka_sink.engine.accumulator import RecordAccumulator
from kafka_sink.engine.appender import RecordAppender
from kafka_sink.engine.produce_requests import fill_request
from kafka_sink.engine.splitting import split, take_out
from kafka_sink.memory.pool import BufferPool
from kafka_sink.model import CompressionType
from kafka_sink.options import SinkOptions
from kafka_sink.records.ordered_rows import OrderedRows
from tests.support.allocators import full_allocator, incremental_allocator
from tests.support.brokers import Brokers
from tests.support.effort import tries
from tests.support.partitioners import ordered
from tests.support.taken_records import values_of

PARTITIONS = 5
BAD = b"refused"
CODECS = list(CompressionType)


@dataclass(frozen=True)
class Shape:
    """One task and its topic; ``seed`` decides the rest."""

    seed: int
    codec: CompressionType
    full: bool
    batch_size: int
    batches: int  # of batch.size in the pool
    max_message_bytes: int
    value_bytes: int
    noise: float  # the share of a value that no codec shrinks
    refused: float
    units: int
    partitions: int


shapes = st.builds(
    Shape,
    seed=st.integers(0, 2**32),
    codec=st.sampled_from(CODECS),
    full=st.booleans(),
    batch_size=st.sampled_from([0, 500, 4_096, 16_384, 70_000, 300_000]),
    batches=st.sampled_from([1, 2, 5, 16]),
    max_message_bytes=st.sampled_from([300, 2_000, 10_000, 65_536, 1 << 20]),
    value_bytes=st.sampled_from([12, 110, 1_500]),
    noise=st.sampled_from([0.0, 0.4, 1.0]),
    refused=st.sampled_from([0.0, 0.0, 0.001, 0.05, 1.0]),
    units=st.integers(1, 8),
    partitions=st.integers(1, PARTITIONS),
)


class Task:
    """A task's thread and its broker in one."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.chance = random.Random(shape.seed)
        memory = max(shape.batch_size * shape.batches, 8_192)
        self.pool = BufferPool(memory, clock_ms=lambda: 0.0)
        make = full_allocator if shape.full else incremental_allocator
        self.allocator = make(self.pool, shape.batch_size)
        self.accumulator = RecordAccumulator(
            SinkOptions(
                bootstrap_servers=(),
                batch_size=shape.batch_size,
                linger_ms=1_000,
                max_block_ms=0,
                delivery_timeout_ms=10**9,
                buffer_memory=memory,
                compression_type=shape.codec,
            ),
            self.allocator,
        )
        self.appender = RecordAppender(self.accumulator, lambda: 0.0, lambda: None)
        self.brokers = Brokers()
        self.written: dict[int, list[bytes]] = {number: [] for number in range(PARTITIONS)}
        self.dead_letters: list[bytes] = []
        self.too_large = self.unit_bytes = self.sent = 0

    def run(self) -> None:
        wanted: dict[int, list[bytes]] = {number: [] for number in range(PARTITIONS)}
        for unit in range(self.shape.units):
            values, rows = self.unit(unit)
            for number, value in values:
                wanted[number].append(value)
            self.unit_bytes = max(self.unit_bytes, rows.bound(0, len(rows)))
            self.appender.append(rows, self.answer_if_waited_for)
            self.check()
            if self.chance.random() < 0.3:
                self.answer()
        self.appender.flush()
        self.answer()
        refused = set(self.dead_letters)
        assert len(refused) == len(self.dead_letters)
        for number, found in self.written.items():
            assert found == [value for value in wanted[number] if value not in refused]
        assert all(self.is_refused(value) for value in refused)
        assert not self.accumulator.incomplete
        assert not self.accumulator.live
        metrics = self.pool.metrics()
        assert (metrics.used_bytes, metrics.heap_bytes, self.pool.open_batches) == (0, 0, 0)

    def unit(self, unit: int) -> tuple[list[tuple[int, bytes]], OrderedRows]:
        shape, chance = self.shape, self.chance
        made = []
        for row in range(chance.choice([1, 30, 400])):
            noise = chance.randbytes(int(shape.value_bytes * shape.noise))
            mark = BAD if chance.random() < shape.refused else b""
            value = b"%d.%d:" % (unit, row) + mark + noise
            made.append((chance.randrange(shape.partitions), value.ljust(shape.value_bytes, b"x")))
        partitions, values = zip(*made, strict=True)
        return made, ordered(values, partitions)

    def is_refused(self, value: bytes) -> bool:
        # As many bytes as a record has with its batch's header at least.
        return BAD in value or len(value) + 70 > self.shape.max_message_bytes

    # -- the broker ---------------------------------------------------------------------------------

    def answer_if_waited_for(self) -> None:
        self.check()
        if self.allocator.pool.queued:
            self.answer()

    def answer(self) -> None:
        """Takes, or refuses, whatever may be sent."""
        leader = self.brokers.led_by(lambda p: p.partition % 2)
        while brokers := self.accumulator.ready(leader, 0.0)[0]:
            for broker, queues in brokers.items():
                for batch in fill_request(self.accumulator, broker, queues, 200_000, lambda batch: True):
                    batch.write_header()
                    batch.move_to(BatchState.IN_FLIGHT)
                    batch.attempts += 1
                    self.sent += 1
                    self.decide(batch)
                    self.check()

    def decide(self, batch: ProducerBatch) -> None:
        data = b"".join(batch.buffer.views())
        assert len(data) == batch.size
        if batch.size > self.shape.max_message_bytes:
            self.too_large += batch.record_count > 1
            if batch.record_count > 1:
                self.accumulator.on_too_large(batch)
                split(self.accumulator, batch)
            else:
                self.take_out(batch, [0])
            return
        values = [record.value for record in DefaultRecordBatch(data)]
        bad = [position for position, value in enumerate(values) if BAD in value]
        if bad:
            self.take_out(batch, bad)
            return
        self.written[batch.topic_partition.partition] += values
        self.accumulator.complete([(batch, 0, -1)])

    def take_out(self, batch: ProducerBatch, positions: list[int]) -> None:
        pieces, records = take_out(batch, positions, 2_000)
        self.dead_letters += values_of(records)
        self.accumulator.reenqueue_split(batch, pieces)

    # -- bounds -------------------------------------------------------------------------------------

    def check(self) -> None:
        metrics = self.pool.metrics()
        total = metrics.buffer_total_bytes
        assert metrics.used_bytes <= metrics.allocated_bytes <= total
        # Encoded rows of one pass; headers of pieces, and what small ones shrink less than their batch.
        batches = len(self.accumulator.live)
        beyond = self.unit_bytes + total // 4 + batches * 2 * 16_384
        assert metrics.heap_bytes <= self.pool.heap_limit_bytes + beyond


@settings(max_examples=tries(12), deadline=None)
@given(shape=shapes)
def test_a_task_ends_with_every_row_written_or_refused_whatever_its_memory(shape: Shape) -> None:
    Task(shape).run()


# Under full all codecs reserve raw bytes, as gzip does under both.
@pytest.mark.parametrize(
    ("codec", "full"), [*((codec, False) for codec in CODECS), (CompressionType.LZ4, True)], ids=str
)
def test_refusals_cease_once_the_topic_has_taught_what_it_takes(codec: CompressionType, full: bool) -> None:
    """512, 256 and 128 KiB are refused; then every batch, a queued one too, is cut to 64 before it goes."""
    shape = Shape(3, codec, full, 512 << 10, 4, 65_536, 1_500, 0.5, 0.0, 30, 2)
    task = Task(shape)
    task.run()
    assert 0 < task.too_large <= 4 * shape.partitions < task.sent
