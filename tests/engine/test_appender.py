"""Rows of tables into batches: passes, held batches, memory that is short, and who is woken."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pyarrow as pa
import pytest

from kafka_sink.cluster.broker import Broker
from kafka_sink.cluster.partition import BatchState, Partition, ProducerBatch
from kafka_sink.engine import appender
from kafka_sink.engine.accumulator import RecordAccumulator
from kafka_sink.engine.appender import RecordAppender
from kafka_sink.engine.produce_requests import fill_request
from kafka_sink.engine.splitting import split_batch
from kafka_sink.errors import BufferExhaustedError, DeliveryError
from kafka_sink.memory.allocator import BufferAllocator
from kafka_sink.memory.buffer import ChunkedBuffer
from kafka_sink.memory.pool import BufferPool
from kafka_sink.model import CompressionType, TopicPartition
from kafka_sink.records import batch_header
from kafka_sink.records.compression import decompressed
from kafka_sink.records.ordered_rows import OrderedRows
from kafka_sink.records.record_columns import RecordColumns
from tests.support.allocators import full_allocator, incremental_allocator, limit_heap
from tests.support.brokers import Brokers
from tests.support.partitioners import ordered
from tests.support.queues import limits_of, settings, teach_ratio
from tests.support.strategy import forced

pytestmark = pytest.mark.usefixtures("allocation_strategy")

BATCH_SIZE = 1_024
DONE = DeliveryError("the sender was done with it")


def each_codec(*codecs: CompressionType) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("codec", codecs, ids=lambda codec: codec.name.lower())


def unit(start: int, partitions: list[int], size: int = 20, timestamp: int = 0) -> OrderedRows:
    """Rows "<start>", "<start + 1>", ... of these partitions."""
    values = [b"<%d>" % (start + index) + b"x" * size for index in range(len(partitions))]
    return ordered(values, partitions, timestamp)


def half_noise(chance: random.Random, count: int, half: int = 500) -> OrderedRows:
    """Rows half of which shrink to nothing."""
    return ordered([chance.randbytes(half) + bytes(half) for _ in range(count)])


def noise(count: int, partitions: int = 1, size: int = 1_000) -> OrderedRows:
    """Rows that do not shrink."""
    chance = random.Random(5)
    values = [chance.randbytes(size) for _ in range(count)]
    return ordered(values, [number % partitions for number in range(count)])


class Observed(BufferAllocator):
    """Tells its bench of each request that may wait: its bytes, and for how long (ms)."""

    def __init__(self, bench: Bench, pool: BufferPool, size: int, *, full: bool) -> None:
        super().__init__(pool, size, full=full)
        self.bench = bench

    def open(self, projected: int, timeout_ms: float, *more: Any) -> ChunkedBuffer:
        self.bench.on_open(projected, timeout_ms)
        return super().open(projected, timeout_ms, *more)


class Bench:
    """An appender over a pool of ``memory`` bytes in chunks of 128."""

    def __init__(
        self,
        memory: int = 1 << 20,
        batch_size: int = BATCH_SIZE,
        compression: CompressionType = CompressionType.NONE,
        max_block_ms: int = 0,
        strategy: Callable[[BufferPool, int], BufferAllocator] | None = None,
        chunk: int | None = None,
        linger_ms: int = 0,
        heap: int | None = None,
    ) -> None:
        self.pool = BufferPool(memory, clock_ms=lambda: 0.0)
        if heap is not None:
            limit_heap(self.pool, heap)
        self.on_open: Callable[[int, float], object] = lambda *_: None
        full = forced.is_full()
        if strategy is not None:
            self.allocator = strategy(self.pool, batch_size)
        elif chunk is not None:
            self.allocator = incremental_allocator(self.pool, chunk)
        else:
            self.allocator = Observed(self, self.pool, batch_size if full else 128, full=full)
        self.brokers = Brokers()
        times = {"linger_ms": linger_ms, "max_block_ms": max_block_ms}
        options = settings(batch_size=batch_size, compression_type=compression, **times)
        self.accumulator = RecordAccumulator(options, self.allocator)
        self.wakes = 0
        self.on_wake: Callable[[], object] = lambda: None
        self.sent: list[int] = []  # bytes of batches
        self.appender = RecordAppender(self.accumulator, lambda: 0.0, self._wake)

    def _wake(self) -> None:
        self.wakes += 1
        self.on_wake()

    def append(self, one: OrderedRows, check: Callable[[], None] = lambda: None) -> None:
        self.appender.append(one, check)

    def batches(self, partition: int) -> list[ProducerBatch]:
        return list(self.accumulator.partition(TopicPartition("t", partition)).batches)

    def rows(self, partition: int) -> list[int]:
        data = b"".join(view for batch in self.batches(partition) for view in batch.buffer.views())
        return [int(number) for number in re.findall(rb"<(\d+)>", data)]

    def ready(self) -> dict[Broker, list[Partition]]:
        """Each partition has a broker of its own."""
        return self.accumulator.ready(self.brokers.led_by(lambda p: p.partition), 1e6)[0]

    def answer(self) -> None:
        """The brokers take all that is ready."""
        while ready := self.ready():
            self.take(ready)

    def answer_once(self) -> None:
        """One broker takes a batch, a sealed one if there is any."""
        found = sorted(self.ready().items(), key=lambda one: one[1][0].batches[0].state is BatchState.OPEN)
        self.take(dict(found[:1]))

    def take(self, ready: dict[Broker, list[Partition]]) -> None:
        for broker, queues in ready.items():
            for batch in fill_request(self.accumulator, broker, queues, 1 << 30, lambda batch: True):
                batch.move_to(BatchState.IN_FLIGHT)
                self.sent.append(batch.size)
                self.accumulator.complete([(batch, 0, -1)])

    def unowned(self) -> int:
        """Bytes lent out that no batch holds."""
        held = sum(batch.buffer.capacity for batch in self.accumulator.live)
        return self.pool.metrics().used_bytes - held


def test_rows_keep_their_order_per_partition_over_batches_and_units() -> None:
    bench = Bench()
    wanted: dict[int, list[int]] = {0: [], 1: [], 2: []}
    for start in range(0, 600, 100):
        partitions = [(start + index) % 3 for index in range(100)]
        for index, partition in enumerate(partitions):
            wanted[partition].append(start + index)
        bench.append(unit(start, partitions))
    for partition, numbers in wanted.items():
        assert bench.rows(partition) == numbers
        batches = bench.batches(partition)
        assert len(batches) > 3
        assert all(batch.size <= BATCH_SIZE for batch in batches)
        assert [batch.state for batch in batches[:-1]] == [BatchState.SEALED] * (len(batches) - 1)
        assert sum(batch.record_count for batch in batches) == len(numbers)
    assert not any(batch.held for batch in bench.accumulator.live)


def test_a_row_larger_than_a_batch_gets_one_of_its_own() -> None:
    bench = Bench()
    bench.append(unit(0, [0, 0]))
    bench.append(unit(2, [0], size=5_000))
    bench.append(unit(3, [0]))
    assert [batch.record_count for batch in bench.batches(0)] == [2, 1, 1]
    assert bench.rows(0) == [0, 1, 2, 3]
    # Its estimate has reached the limit, so it is full (Kafka's isFull); linger would only delay it.
    bench = Bench(linger_ms=1_000)
    bench.append(unit(0, [0], size=BATCH_SIZE * 2))
    bench.append(unit(1, [1]))
    assert [batch.state for batch in bench.batches(0)] == [BatchState.SEALED]
    ready, _, _ = bench.accumulator.ready(bench.brokers.led_by(lambda p: p.partition), 0)
    assert [broker.id for broker in ready] == [0]


@each_codec(*CompressionType)
@pytest.mark.parametrize("later", [-1_700_000_000_000, 9_000_000_000_000])
def test_units_may_be_any_time_apart(codec: CompressionType, later: int) -> None:
    """Deltas to the first row of a batch are wider then than between the rows of a table."""
    bench = Bench(batch_size=60_000, compression=codec)
    first = 1_700_000_000_000
    for start in range(0, 1_200, 300):
        bench.append(unit(start, [0] * 300, size=0, timestamp=first + later * bool(start)))
    (batch,) = bench.batches(0)
    assert (batch.record_count, batch.raw_bytes > 1_200 * 15) == (1_200, True)
    assert batch.buffer.heap_bytes == 0


def test_the_sender_is_woken_for_new_and_full_batches_and_for_held_ones_it_met() -> None:
    bench = Bench()
    bench.append(unit(0, [0]))
    assert bench.wakes == 1
    bench.append(unit(1, [0]))
    assert bench.wakes == 1
    bench.accumulator.held_batch_skipped = True
    bench.append(unit(2, [0]))
    assert (bench.wakes, bench.accumulator.held_batch_skipped) == (2, False)
    bench.append(unit(3, [0] * 40))
    assert bench.wakes > 2
    # A flush closes every open batch, on the task's thread.
    bench = Bench()
    bench.append(unit(0, [0, 1, 2]))
    bench.wakes = 0
    bench.appender.flush()
    assert bench.accumulator.flushing
    assert bench.wakes > 0
    for partition in range(3):
        (batch,) = bench.batches(partition)
        assert (batch.state, batch.held) == (BatchState.SEALED, False)


@pytest.mark.parametrize("strategy", [full_allocator, incremental_allocator])
def test_uncompressed_rows_never_take_more_than_batch_size(
    strategy: Callable[[BufferPool, int], BufferAllocator],
) -> None:
    """Records' upper bounds exceed what the batch has room for by their exact sizes."""
    # A size that is no multiple of a chunk would be rounded up.
    bench = Bench(batch_size=8 * 128, strategy=strategy)
    for start in range(0, 4_000, 100):
        bench.append(unit(start, [index % 4 for index in range(100)]))
    held = [batch.buffer.capacity for batch in bench.accumulator.live]
    assert len(held) > 100
    assert max(held) == 8 * 128
    assert sum(held) == bench.pool.metrics().used_bytes


def test_full_takes_batch_size_from_the_pool_and_holds_lz4s_raw_block_beside_it() -> None:
    """lz4's last block of 64 KiB may not fit where the batch's estimated size does."""
    bench = Bench(
        memory=64 << 20, batch_size=512 << 10, compression=CompressionType.LZ4, strategy=full_allocator
    )
    teach_ratio(bench.accumulator, 0.52)
    chance = random.Random(5)
    for _ in range(60):
        bench.append(half_noise(chance, 100))
    live = bench.accumulator.live
    assert len(live) > 5
    assert max(batch.buffer.heap_bytes for batch in live) <= 68 << 10
    assert {batch.buffer.capacity - batch.buffer.heap_bytes for batch in live} == {512 << 10}
    # Only what is not compressed yet needs more.
    assert {batch.buffer.heap_bytes for batch in live if batch.state is BatchState.SEALED} == {0}
    assert bench.pool.metrics().heap_bytes == sum(batch.buffer.heap_bytes for batch in live)


@each_codec(CompressionType.GZIP, CompressionType.SNAPPY, CompressionType.LZ4, CompressionType.ZSTD)
def test_full_fills_buffers_of_batch_size_with_compressed_bytes(codec: CompressionType) -> None:
    """With 16 KiB too, in which no block of lz4 fits raw. The pool has one buffer for each partition."""
    bench = Bench(
        memory=4 * 16384, batch_size=16384, compression=codec, strategy=full_allocator, max_block_ms=60_000
    )
    sizes: list[int] = []

    def answer() -> None:
        if bench.allocator.pool.queued:
            live = bench.accumulator.live
            assert {batch.buffer.capacity - batch.buffer.heap_bytes for batch in live} == {16384}
            sizes.extend(batch.size for batch in live if batch.state is BatchState.SEALED)
            bench.answer()

    chance = random.Random(5)
    for start in range(0, 20_000, 1_000):
        values = [b"%d" % number + chance.randbytes(20) + bytes(40) for number in range(start, start + 1_000)]
        bench.append(ordered(values, [number % 4 for number in range(1_000)]), answer)
    sizes.sort()
    # The first batches of a topic are small, as nothing is known of how its rows shrink.
    assert sizes[len(sizes) // 2] > 16384 * 3 // 4
    assert bench.pool.metrics().used_bytes <= 4 * 16384


def test_rows_that_the_pool_cannot_hold_first_fill_the_batch_that_has_room() -> None:
    bench = Bench(memory=8 * 128, batch_size=16 * 128, chunk=128)
    bench.append(unit(0, [0, 1]))
    records = len(bench.rows(0))
    with pytest.raises(BufferExhaustedError):
        bench.append(unit(10, [0] * 100))
    (batch,) = bench.batches(0)
    assert batch.state is BatchState.SEALED
    # All memory but the one chunk of partition 1.
    assert batch.buffer.capacity == 7 * 128
    assert batch.size > 6 * 128
    assert bench.rows(0) == [0, *range(10, 10 + batch.record_count - records)]
    # With lz4, too.
    bench = Bench(memory=512 << 10, batch_size=1 << 20, compression=CompressionType.LZ4, chunk=4_096)
    teach_ratio(bench.accumulator, 0.5)
    bench.append(unit(0, [0]))
    with pytest.raises(BufferExhaustedError):
        bench.append(half_noise(random.Random(5), 2_000))
    batch = bench.batches(0)[0]
    # What it would hold raw is within the memory, and more where the estimate says that it shrinks.
    assert batch.raw_bytes > 512 << 10
    assert batch.buffer.heap_bytes == 0


@each_codec(CompressionType.GZIP, CompressionType.ZSTD)
def test_batch_closes_for_the_next_one_if_raw_rows_take_all_memory(codec: CompressionType) -> None:
    """gzip and zstd compress a batch when it closes. What that frees is enough: nobody waits, though the
    broker takes nothing."""
    bench = Bench(memory=4 << 20, batch_size=1 << 20, compression=codec, strategy=incremental_allocator)
    teach_ratio(bench.accumulator, 0.2)
    for start in range(0, 8_000, 400):
        bench.append(unit(start, [index % 3 for index in range(400)], size=1_000))
        assert bench.pool.metrics().heap_bytes == 0
    assert sum(batch.raw_bytes for batch in bench.accumulator.live) > 7 << 20
    bench.appender.flush()
    for partition in range(3):
        raw = b"".join(
            part
            for batch in bench.batches(partition)
            for part in decompressed(batch.buffer.views(batch_header.SIZE), codec, batch.raw_bytes)
        )
        numbers = [int(number) for number in re.findall(rb"<(\d+)>", raw)]
        assert numbers == [start + at for start in range(0, 8_000, 400) for at in range(partition, 400, 3)]


def test_rows_that_waited_under_full_take_no_heap_beyond_its_limit() -> None:
    """Catches: one grant beyond the limit for each wait, 5 % of buffer.memory."""
    bench = Bench(
        memory=256 << 10,
        batch_size=32 << 10,
        compression=CompressionType.ZSTD,
        strategy=full_allocator,
        heap=0,
    )
    teach_ratio(bench.accumulator, 0.1)
    limit, peak = bench.pool.heap_limit_bytes, 0

    def check() -> None:
        nonlocal peak
        peak = max(peak, bench.pool.metrics().max_heap_bytes)
        if bench.pool.queued:
            bench.answer_once()

    for start in (0, 320):
        bench.append(unit(start, [index % 8 for index in range(320)], size=1_000), check)
    for start in range(640, 2_640, 400):
        bench.append(unit(start, [8] * 400, size=1_000), check)
    bench.appender.flush()
    bench.answer()
    assert limit - (64 << 10) < peak <= limit
    assert not bench.accumulator.incomplete


def refuse(bench: Bench, partition: int = 0) -> int:
    """The broker takes the head batch for too large; it is split. Returns its size."""
    accumulator = bench.accumulator
    (queue,) = accumulator.ready(bench.brokers.led_by(lambda p: p.partition), 0)[0][
        bench.brokers.of(partition)
    ]
    (batch,) = accumulator.drain(bench.brokers.of(partition), [queue], 1, lambda batch: True)
    if batch.state is BatchState.CLOSED:
        batch.seal()
    batch.move_to(BatchState.IN_FLIGHT)
    size = batch.size
    accumulator.on_too_large(batch)
    accumulator.reenqueue_split(batch, split_batch(batch, batch.queue.limits.largest_batch))
    return size


def test_batches_shrink_after_a_broker_refuses_batch_size() -> None:
    bench = Bench()
    bench.append(unit(0, [0] * 100))
    size = refuse(bench)
    assert size > BATCH_SIZE * 3 / 4
    before = len(bench.batches(0))
    bench.append(unit(100, [0] * 100))
    # The batch that was open takes no more, as it is over the new limit.
    later = bench.batches(0)[before:]
    assert max(batch.size for batch in later) <= size // 2
    bench.append(unit(200, [1] * 100))
    assert max(batch.size for batch in bench.batches(1)) <= size // 2
    assert bench.rows(0) == list(range(200))
    assert not bench.accumulator.too_large_batches
    # Refusals of what was batched before lower the limit only once.
    bench = Bench()
    bench.append(unit(0, [0] * 100))
    bench.append(unit(100, [1] * 100))
    sizes = [refuse(bench, 0), refuse(bench, 1)]
    bench.append(unit(200, [2] * 100))
    assert min(sizes) // 4 < max(batch.size for batch in bench.batches(2)) <= max(sizes) // 2


def test_compression_of_sealed_batches_lets_more_rows_into_later_batches() -> None:
    bench = Bench(batch_size=4_096, compression=CompressionType.LZ4)
    for start in range(0, 2_000, 50):
        bench.append(unit(start, [0] * 50, size=100))
    batches = bench.batches(0)
    sealed = len(batches) - 1
    assert sealed > 10
    # The estimator learns from each; the ratio that a batch began with stays its own.
    assert batches[0].ratio == 1.0
    assert 0.75 in [batch.ratio for batch in batches]
    assert limits_of(bench.accumulator).ratio < 0.5
    assert sorted((batch.ratio for batch in batches), reverse=True) == [batch.ratio for batch in batches]
    remaining = 4_096 - batch_header.SIZE
    for batch in batches[:-1]:
        factor = batch.ratio * 1.05
        assert batch.raw_bytes * factor <= remaining < batch.raw_bytes * factor + 2 * 120
    assert batches[-2].raw_bytes > batches[0].raw_bytes


def test_a_ratio_that_proved_too_low_is_learnt_anew() -> None:
    """The estimate let more rows in than the limit holds: not the limit is wrong, but the ratio."""
    bench = Bench(batch_size=100_000, compression=CompressionType.LZ4)
    teach_ratio(bench.accumulator, 0.1)
    bench.append(half_noise(random.Random(5), 100, 2_500))
    bench.appender.flush()
    assert refuse(bench) > 100_000
    bench.append(unit(0, [0]))
    assert limits_of(bench.accumulator).ratio >= 1.0
    assert limits_of(bench.accumulator).write_limit == 100_000


def test_a_ratio_that_proved_right_is_kept_after_a_refusal() -> None:
    bench = Bench(batch_size=100_000, compression=CompressionType.LZ4)
    teach_ratio(bench.accumulator, 0.6)
    bench.append(half_noise(random.Random(5), 100, 2_500))
    bench.appender.flush()
    limits = limits_of(bench.accumulator)
    estimate = limits.ratio
    size = refuse(bench)
    bench.append(unit(0, [0]))
    assert (limits.write_limit, limits.ratio) == (size // 2, estimate)


def test_a_batch_that_outgrew_its_estimate_beyond_the_pool_goes_early() -> None:
    bench = Bench(memory=96 << 10, batch_size=64 << 10, compression=CompressionType.LZ4)
    bench.pool.heap_limit_bytes = 0
    teach_ratio(bench.accumulator, 0.2)
    bench.append(noise(130))
    (batch,) = bench.batches(0)
    assert batch.buffer.heap_bytes > 0
    assert (batch.state, batch.held) == (BatchState.SEALED, False)
    assert bench.pool.metrics().heap_bytes == batch.buffer.heap_bytes
    bench.accumulator.fail(batch, DONE)
    assert (bench.pool.metrics().heap_bytes, bench.pool.metrics().used_bytes) == (0, 0)


def test_rows_that_turn_incompressible_wait_for_responses_and_do_not_fail_the_task() -> None:
    """The heap's limit is reached in the middle of an append; responses bring memory back."""
    bench = Bench(
        memory=192 << 10,
        batch_size=64 << 10,
        compression=CompressionType.LZ4,
        max_block_ms=60_000,
        heap=128 << 10,
    )
    teach_ratio(bench.accumulator, 0.05)
    peak = 0

    def answer() -> None:
        nonlocal peak
        peak = max(peak, bench.pool.metrics().heap_bytes)
        if bench.allocator.pool.queued:
            bench.answer()

    rows = noise(2_000, 4)
    bench.append(rows, answer)
    # Beyond the limit by what was reserved already, a pass's rows at most.
    limit = bench.pool.heap_limit_bytes
    assert limit < peak < limit + rows.bound(0, len(rows))
    bench.appender.flush()
    bench.answer()
    metrics = bench.pool.metrics()
    assert (metrics.heap_bytes, metrics.used_bytes, bench.accumulator.incomplete) == (0, 0, 0)


def test_to_seal_a_batch_takes_the_heap_that_it_needs() -> None:
    """The sender seals too: it cannot wait for memory that only it can bring back."""
    heap_bytes = 0
    for size in range(1_000, 1_128, 4):
        bench = Bench(memory=8 << 10, batch_size=4 << 10, compression=CompressionType.GZIP, heap=0, chunk=128)
        bench.append(noise(3, size=size))
        bench.pool.heap_limit_bytes = 0
        while bench.allocator.try_open(64) is not None:
            pass
        bench.appender.flush()
        (batch,) = bench.batches(0)
        assert batch.state is BatchState.SEALED
        heap_bytes += batch.buffer.heap_bytes
    assert heap_bytes > 0


@each_codec(CompressionType.LZ4, CompressionType.SNAPPY)
@pytest.mark.parametrize("blocks", [0, 1])
def test_incompressible_rows_have_memory_reserved_with_their_framing(
    codec: CompressionType, blocks: int
) -> None:
    """Wherever near a chunk's end a batch may end: a few bytes too few would cost a chunk of heap."""
    content = random.Random(7).randbytes(65_536 * blocks + 400)
    for size in range(len(content) - 140, len(content)):
        if (batch_header.SIZE + size) % 128 < 70:
            continue
        bench = Bench(memory=96 << 10, batch_size=80 << 10, compression=codec)
        bench.append(ordered([content[:size]]))
        bench.pool.try_take(bench.pool.arena(128), bench.pool.metrics().buffer_available_bytes // 128)
        bench.appender.flush()
        assert bench.pool.metrics().heap_total_bytes == 0


def test_while_it_waits_for_memory_it_holds_no_open_batch_of_that_partition() -> None:
    bench = Bench(memory=4_096)
    blocked: list[tuple[list[BatchState], bool, int]] = []

    def watch(projected: int, _: float) -> None:
        states = [batch.state for batch in bench.batches(0)]
        blocked.append((states, any(b.held for b in bench.accumulator.live), projected))
        for batch in bench.batches(0):
            bench.accumulator.fail(batch, DONE)

    bench.on_open = watch
    bench.append(unit(0, [1]))
    for start in range(1, 401, 100):
        bench.append(unit(start, [0] * 100))
    assert blocked
    for states, held, projected in blocked:
        assert BatchState.OPEN not in states
        assert not held
        # `full` takes batch.size whatever is asked for.
        assert projected <= (BATCH_SIZE if bench.allocator.full else 4_096 // 16 + 128)
    assert bench.unowned() == 0


def test_rows_that_get_no_memory_in_time_are_refused_and_nothing_is_held_for_them() -> None:
    bench = Bench(memory=2_048)
    queued: list[int] = []
    bench.on_wake = lambda: queued.append(bench.allocator.pool.queued)
    with pytest.raises(BufferExhaustedError, match=r"kafka\.max\.block\.ms"):
        bench.append(unit(0, [0] * 200))
    assert queued[-1] == 1, "woken earlier, the sender finds no waiter and lets other batches linger"
    rows = bench.rows(0)
    assert rows == list(range(len(rows)))
    assert bench.unowned() == 0
    assert not any(batch.held for batch in bench.accumulator.live)


def test_waits_for_metadata_and_for_memory_share_max_block_ms() -> None:
    """Until rows were appended: the next wait has all of it again."""
    bench = Bench(memory=2_048, max_block_ms=1_000)
    bounds: list[float] = []

    def answer(_: int, timeout_ms: float) -> None:
        bounds.append(timeout_ms)
        bench.answer()

    bench.on_open = answer
    bench.appender.append(unit(0, [0] * 400), lambda: None, 700.0)
    assert bounds[0] == 300
    assert set(bounds[1:]) == {1_000}
    bench.on_open = lambda *_: None
    with pytest.raises(BufferExhaustedError, match=r"0 of 0 ms.*the wait for metadata had taken 5000 ms"):
        bench.appender.append(unit(400, [0] * 400), lambda: None, 5_000.0)


@pytest.mark.parametrize("waits", [True, False])
def test_a_task_that_is_lost_waits_for_no_memory_and_stops_between_passes(waits: bool) -> None:
    bench = Bench(memory=2_048 if waits else 1 << 20, max_block_ms=60_000)

    def check() -> None:
        if bench.allocator.pool.queued or not waits:
            raise DeliveryError("lost")

    with pytest.raises(DeliveryError, match="lost"):
        bench.append(unit(0, [0] * 200), check)
    assert bench.unowned() == 0
    assert bench.allocator.pool.queued == 0
    assert not any(batch.held for batch in bench.accumulator.live)


@pytest.mark.parametrize("memory", [2_048, 1 << 20], ids=["after a wait", "at once"])
def test_memory_is_given_back_where_a_batch_cannot_be_made(memory: int) -> None:
    """Catches: what was granted after a wait, and belongs to no batch yet, is lost."""
    bench, fails = (
        Bench(memory),
        patch.object(appender, "ProducerBatch", side_effect=RuntimeError("planning")),
    )

    def fail_then(*_: float) -> None:
        for batch in bench.batches(0):
            bench.accumulator.fail(batch, DONE)
        fails.start()

    bench.on_open = fail_then
    if memory > 2_048:
        fails.start()
    with pytest.raises(RuntimeError, match="planning"):
        bench.append(unit(0, [0] * 200))
    fails.stop()
    assert bench.pool.metrics().used_bytes == 0


def test_a_pass_that_fails_keeps_its_batches_held() -> None:
    """Catches: batches that lack rows and are sent."""
    bench = Bench()
    bench.append(unit(0, [0]))
    fails = patch("kafka_sink.engine.appender.encoder.encode", side_effect=KeyboardInterrupt)
    with fails, pytest.raises(KeyboardInterrupt):
        bench.append(unit(1, [0, 1, 1]))
    assert [batch.held for batch in (*bench.batches(0), *bench.batches(1))] == [True, True]


def test_thousands_of_small_batches_are_given_to_the_sender_in_groups() -> None:
    """A lock and a wake-up for each cost as much as a batch of a few rows takes in all."""
    bench = Bench()
    columns = RecordColumns.of(None, (pa.array([b"v" * 50] * 1_200, pa.binary()),), None)
    topics = [TopicPartition(f"t{number}", 0) for number in range(300)]
    bench.append(OrderedRows(columns, 7, topics, list(range(0, 1_204, 4))))
    bench.wakes = 0
    bench.appender.flush()
    sealed = [partition.batches[-1] for partition in bench.accumulator.waiting]
    assert not any(batch.held for batch in sealed)
    assert {batch.state for batch in sealed} == {BatchState.SEALED}
    assert sum(batch.raw_bytes for batch in sealed) > 65_536
    assert bench.wakes == 3, "two groups, and the flush itself"
