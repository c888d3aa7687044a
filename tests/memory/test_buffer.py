"""Both kinds of batch memory hold the same bytes for the same calls, and give all of it back."""

from __future__ import annotations

import random
import time
from array import array
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kafka_sink.engine.deliveries import Deliveries, task_metrics
from kafka_sink.errors import (
    BufferExhaustedError,
    BufferOwnershipError,
    ProducerClosedError,
    RecordTooLargeError,
)
from kafka_sink.memory import arena
from kafka_sink.memory.allocator import BufferAllocator, chunk_size
from kafka_sink.memory.buffer import ChunkedBuffer, Memory
from kafka_sink.memory.pool import BufferPool, LentChunks
from tests.support.allocators import full_allocator, incremental_allocator, limit_heap
from tests.support.effort import tries

BATCH = 400  # four chunks at most in a small batch, so that borders are everywhere
Strategy = Callable[..., BufferAllocator]
ALLOCATORS: list[Strategy] = [incremental_allocator, full_allocator]


def pool_of(total: int, heap: int | None = None) -> BufferPool:
    pool = BufferPool(total, clock_ms=lambda: time.monotonic() * 1000)
    if heap is not None:
        limit_heap(pool, heap)
    return pool


@pytest.fixture(params=ALLOCATORS)
def strategy(request: pytest.FixtureRequest) -> Strategy:
    make: Strategy = request.param
    return make


def scatter(pool: BufferPool, chunk: int, seed: int) -> None:
    """Leaves free chunks in any order, over several mappings: few neighbours in memory follow each other."""
    arena = pool.arena(chunk)
    count = pool.total_bytes // arena.size
    chunks = pool.try_take(arena, count) if count else []
    assert chunks is not None
    random.Random(seed).shuffle(chunks)
    pool.give(arena, chunks)


def content(buffer: Memory) -> bytes:
    return b"".join(buffer.views())


def assert_idle(pool: BufferPool) -> None:
    metrics = pool.metrics()
    assert (metrics.used_bytes, metrics.heap_bytes, metrics.full_strategy_bytes) == (0, 0, 0)
    assert metrics.allocated_bytes <= metrics.buffer_total_bytes


def opened(allocator: BufferAllocator, projected: int) -> Memory:
    buffer = allocator.try_open(projected)
    assert buffer is not None
    return buffer


# -- many batches at once -----------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [[90] * 40, [90, 150, 90], [BATCH + 50, 90], []])
def test_try_open_all_opens_the_same_batches_as_try_open(strategy: Strategy, sizes: list[int]) -> None:
    """Up to the first that the pool has no memory for."""
    pools = [pool_of(8 * BATCH) for _ in range(2)]
    together = strategy(pools[0], BATCH).try_open_all(sizes)
    allocator = strategy(pools[1], BATCH)
    apart: list[Memory] = []
    for size in sizes:
        buffer = allocator.try_open(size)
        if buffer is None:
            break
        apart.append(buffer)
    assert [one.capacity for one in together] == [one.capacity for one in apart]
    assert pools[0].metrics() == pools[1].metrics()
    assert pools[0].open_batches == len(apart)
    returned: dict[BufferPool, list[LentChunks]] = {}
    for one in together:
        one.release(returned)
    for pool, lent in returned.items():
        pool.give_all(lent)
    assert_idle(pools[0])
    assert pools[0].open_batches == 0


# -- any sequence of calls, several batches at once, against bytearrays -------------------------------


@dataclass
class Call:
    name: str
    batch: int
    length: int
    fraction: float


@dataclass
class Batch:
    buffer: Memory
    model: bytearray = field(default_factory=bytearray)


calls = st.lists(
    st.builds(
        Call,
        st.sampled_from(["open", "grow", "write_growing", "truncate", "patch", "trim", "release"]),
        st.integers(0, 7),
        # Around the chunk size of 128 above all.
        st.one_of(st.integers(0, 700), st.integers(120, 136), st.sampled_from([128, 256, 384, 400])),
        st.floats(0, 1),
    ),
    min_size=8,
    max_size=60,
)


class Machine:
    """Runs calls on one allocator. What is written is numbered, so that no two batches look alike."""

    def __init__(self, allocator: BufferAllocator) -> None:
        self.allocator = allocator
        self.batches: list[Batch] = []
        self.written = 0

    def data(self, length: int) -> bytes:
        self.written += 1
        return (self.written.to_bytes(3, "big") * (length // 3 + 1))[:length]

    def run(self, call: Call) -> None:
        if call.name == "open":
            self.open(call)
        elif self.batches:
            batch = self.batches[call.batch % len(self.batches)]
            getattr(self, call.name)(batch, call)
        for batch in self.batches:
            self.check(batch, call.fraction)

    def open(self, call: Call) -> None:
        first_record = None if call.fraction < 0.5 else int(call.length * call.fraction)
        if call.fraction > 0.9:
            with suppress(BufferExhaustedError, RecordTooLargeError):
                self.batches.append(Batch(self.allocator.open(call.length, 0, None, first_record)))
            return
        buffer = self.allocator.try_open(call.length, first_record)
        if buffer is not None:
            assert buffer.capacity >= call.length
            self.batches.append(Batch(buffer))

    def grow(self, batch: Batch, call: Call) -> None:
        before = batch.buffer.capacity
        projected = batch.buffer.size + call.length
        if batch.buffer.grow(projected):
            assert batch.buffer.capacity >= max(before, projected)
        else:
            assert batch.buffer.capacity == before < projected

    def write_growing(self, batch: Batch, call: Call) -> None:
        data = self.data(call.length)
        heap = batch.buffer.heap_bytes
        reserved = self.allocator.pool.heap_room if self.allocator.full else 0
        batch.buffer.write_growing(data)
        batch.model += data
        if batch.buffer.heap_bytes - heap > reserved:
            assert batch.buffer.overflowed

    def truncate(self, batch: Batch, call: Call) -> None:
        size = int(len(batch.model) * call.fraction)
        capacity = batch.buffer.capacity
        batch.buffer.truncate(size)
        assert batch.buffer.capacity == capacity
        del batch.model[size:]

    def patch(self, batch: Batch, call: Call) -> None:
        position = int(len(batch.model) * call.fraction)
        data = self.data(call.length)
        if position + len(data) > len(batch.model):
            with pytest.raises(ValueError, match="that are written"):
                batch.buffer.patch(data, position)
        else:
            batch.buffer.patch(data, position)
            batch.model[position : position + len(data)] = data

    def trim(self, batch: Batch, _call: Call) -> None:
        batch.buffer.trim()
        if not self.allocator.full or batch.buffer.heap_bytes:
            step = chunk_size(BATCH) if self.allocator.full else 128
            assert batch.buffer.capacity - batch.buffer.size < step

    def release(self, batch: Batch, _call: Call) -> None:
        batch.buffer.release()
        before = self.allocator.pool.metrics()
        with pytest.raises(BufferOwnershipError):
            batch.buffer.release()
        attempts: list[Callable[[], object]] = [
            lambda: batch.buffer.write_growing(b"x"),
            lambda: batch.buffer.grow(1),
        ]
        for grow in attempts:
            with pytest.raises(BufferOwnershipError):
                grow()
        after = self.allocator.pool.metrics()
        assert (after.used_bytes, after.heap_bytes) == (before.used_bytes, before.heap_bytes)
        self.batches.remove(batch)

    def check(self, batch: Batch, fraction: float) -> None:
        size = len(batch.model)
        assert batch.buffer.size == size <= batch.buffer.capacity
        assert content(batch.buffer) == batch.model
        start = int(size * fraction)
        for first, last in ((start, size), (0, start), (start // 2, start), (start, min(size, start + 128))):
            views = batch.buffer.views(first, last)
            assert b"".join(views) == batch.model[first:last]
            assert all(len(view) for view in views)

    def check_accounts(self) -> None:
        metrics = self.allocator.pool.metrics()
        assert self.allocator.pool.open_batches == len(self.batches)
        assert metrics.used_bytes + metrics.heap_bytes == sum(batch.buffer.capacity for batch in self.batches)
        assert metrics.heap_bytes == sum(batch.buffer.heap_bytes for batch in self.batches)
        assert metrics.used_bytes <= metrics.allocated_bytes <= metrics.buffer_total_bytes

    def finish(self) -> None:
        for batch in self.batches:
            batch.buffer.release()
        assert_idle(self.allocator.pool)
        self.allocator.rest()
        assert self.allocator.pool.metrics().allocated_bytes == 0


@pytest.mark.parametrize("make", ALLOCATORS)
@settings(max_examples=tries(100), deadline=None)
@given(
    script=calls,
    total=st.integers(0, 6000),
    heap=st.integers(0, 3000),
    slab_chunks=st.sampled_from([1, 3, 64]),
    seed=st.one_of(st.none(), st.integers(0, 9)),
)
def test_a_batch_holds_what_was_written_whatever_the_pool_can_give(
    make: Strategy, script: list[Call], total: int, heap: int, slab_chunks: int, seed: int | None
) -> None:
    # Chunks are the smallest there are, so that a few hundred bytes cross many borders.
    batch_size = 128 if make is incremental_allocator else BATCH
    with patch.object(arena, "_SLAB_CHUNKS", slab_chunks):
        machine = Machine(make(pool_of(total, heap), batch_size))
        if seed is not None:
            scatter(machine.allocator.pool, batch_size, seed)
        for call in script:
            machine.run(call)
            machine.check_accounts()
        machine.finish()


# -- writing ------------------------------------------------------------------------------------------


def test_any_contiguous_bytes_are_taken(strategy: Strategy) -> None:
    buffer = opened(strategy(pool_of(10_000), BATCH), 300)
    numpys = np.frombuffer(b"abc", dtype=np.uint8).data
    given: list[bytes | bytearray | memoryview] = [b"abc", bytearray(b"abc"), memoryview(b"abc"), numpys]
    for data in given * 25:
        buffer.write_growing(data)
    assert content(buffer) == b"abc" * 100


@pytest.mark.parametrize(
    "data",
    [memoryview(array("q", range(20))), memoryview(bytes(range(200)))[::2]],
    ids=["wide items", "strided"],
)
def test_write_rejects_non_contiguous_memory(strategy: Strategy, data: memoryview) -> None:
    for size in (0, 10, 120, 127, 130):
        pool = pool_of(10_000)
        batch_size = 128 if strategy is incremental_allocator else BATCH
        scatter(pool, batch_size, 1)
        buffer = opened(strategy(pool, batch_size), 384)
        buffer.write_growing(b"\5" * size)
        with pytest.raises((ValueError, IndexError, BufferError)):
            buffer.write_growing(data)
        assert content(buffer) == b"\5" * size
        buffer.write_growing(b"\6" * 250)
        assert content(buffer) == b"\5" * size + b"\6" * 250


def test_scattered_chunks_are_viewed_one_by_one_and_neighbours_together() -> None:
    pool = pool_of(128 * 12)
    allocator = incremental_allocator(pool, 128)
    left, right = opened(allocator, 128), opened(allocator, 128)
    for index in range(5):
        for buffer in (left, right):
            assert buffer.grow(128 * (index + 2))
    left.write_growing(bytes(range(256)) * 3)
    right.write_growing(b"\xff" * 768)
    assert content(left) == bytes(range(256)) * 3
    assert [len(view) for view in left.views(100, 700)] == [28, 128, 128, 128, 128, 60]
    left.release()
    right.release()
    pool.trim_free()
    together = opened(allocator, 768)
    together.write_growing(bytes(range(256)) * 3)
    assert [bytes(view) for view in together.views(100, 700)] == [(bytes(range(256)) * 3)[100:700]]


def test_a_new_chunk_beside_the_current_one_is_not_the_next_while_another_is() -> None:
    allocator = incremental_allocator(pool_of(1024), 128)
    buffer, between = opened(allocator, 128), opened(allocator, 128)
    assert buffer.grow(256)
    buffer.write_growing(b"\1" * 100)
    between.release()
    assert buffer.grow(384), "by the chunk beside its first"
    buffer.write_growing(b"\2" * 100)
    buffer.write_growing(b"\3" * 100)
    assert content(buffer) == b"\1" * 100 + b"\2" * 100 + b"\3" * 100


def test_over_neighbours_writing_goes_straight_on() -> None:
    """Catches: a search for the next chunk where the memory simply goes on."""
    buffer = opened(incremental_allocator(pool_of(1024), 128), 256)
    buffer.write_growing(b"\1" * 130)
    assert buffer.grow(512)
    with patch.object(ChunkedBuffer, "_write_across", side_effect=AssertionError):
        for _ in range(38):
            buffer.write_growing(b"\2" * 10)
    assert content(buffer) == b"\1" * 130 + b"\2" * 380


def test_unwritten_bytes_are_neither_viewed_nor_truncated_to(strategy: Strategy) -> None:
    buffer = opened(strategy(pool_of(10_000), BATCH), 100)
    buffer.write_growing(b"0123456789")
    for start, end in [(-1, 5), (0, 11), (6, 5), (11, None)]:
        with pytest.raises(ValueError, match="that are written"):
            buffer.views(start, end)
    for size in (-1, 11):
        with pytest.raises(ValueError, match="cannot truncate 10 bytes"):
            buffer.truncate(size)
    assert content(buffer) == b"0123456789"


# -- growing ------------------------------------------------------------------------------------------


def test_chunks_follow_batch_size_within_bounds() -> None:
    chunks = {1: 128, 128: 128, 1000: 1000, 16384: 16384, 1 << 22: 16384}
    assert {batch_size: chunk_size(batch_size) for batch_size in chunks} == chunks
    for batch_size, least in {16384: 1024, 8192: 2048, 4096: 1024, 1000: 1000}.items():
        allocator = incremental_allocator(pool_of(1 << 20), batch_size)
        assert min(opened(allocator, 1).capacity for _ in range(300)) == least, batch_size


def test_a_batch_holds_what_its_strategy_takes_for_the_projection() -> None:
    """`full`: batch.size, or what a larger first record needs; `incremental`: whole chunks."""
    for projected, held in [(1, 128), (128, 128), (129, 256), (1000, 1024)]:
        pool = pool_of(4096)
        assert (
            opened(incremental_allocator(pool, 128), projected).capacity == pool.metrics().used_bytes == held
        )
    for projected, held in [(1, BATCH), (BATCH, BATCH), (BATCH + 1, BATCH + 1)]:
        pool = pool_of(4096)
        buffer = opened(full_allocator(pool, BATCH), projected)
        assert buffer.capacity == pool.metrics().used_bytes == held
        buffer.release()
        # Only buffers of exactly batch.size are kept.
        assert pool.metrics().allocated_bytes == (BATCH if held == BATCH else 0)


def test_chunks_get_finer_where_one_for_each_open_batch_would_take_a_quarter_of_the_pool() -> None:
    pool = pool_of(1 << 20)
    allocator = incremental_allocator(pool, 512 << 10)
    buffers = [opened(allocator, 100) for _ in range(200)]
    # 16 of a quarter pool are 16 KiB, 64 are 4 KiB; from then on 1 KiB.
    assert [buffer.capacity for buffer in buffers] == [16384] * 16 + [4096] * 48 + [1024] * 136
    # What needs a large chunk at once gets it all the same, and a batch keeps its kind as it grows.
    assert opened(allocator, 20_000).capacity == 32768
    assert buffers[100].grow(1500)
    assert buffers[100].capacity == 2048
    for buffer in buffers[50:]:
        buffer.release()
    assert opened(allocator, 100).capacity == 4096
    # What `full` would hold for it is no measure of how many batches are open.
    pool = pool_of(1 << 20)
    allocator = incremental_allocator(pool, 16384)
    large = opened(allocator, 300 << 10)
    assert pool.open_batches == 1
    small = [opened(allocator, 100) for _ in range(15)]
    assert [buffer.capacity for buffer in small] == [16384] * 15
    for buffer in (large, *small):
        buffer.release()
    assert pool.open_batches == 0


def test_a_batch_that_went_on_outside_the_pool_stays_there() -> None:
    pool = pool_of(256, heap=1024)
    allocator = incremental_allocator(pool, 128)
    other, buffer = opened(allocator, 128), opened(allocator, 128)
    buffer.write_growing(b"\1" * 200)
    assert buffer.overflowed
    other.release()
    # Its heap chunks are its last ones: there is memory now, but it is for others.
    assert not buffer.grow(300)
    buffer.write_growing(b"\2" * 100)
    assert (buffer.heap_bytes, content(buffer)) == (256, b"\1" * 200 + b"\2" * 100)
    buffer.release()
    assert_idle(pool)
    metrics = pool.metrics()
    assert (metrics.max_heap_bytes, metrics.heap_total_bytes, metrics.allocated_bytes) == (256, 256, 256)


def test_full_takes_nothing_from_the_pool_after_batch_size() -> None:
    """What does not fit lies beside it, counted and limited, and goes back as soon as it is not needed."""
    pool = pool_of(3 * BATCH)
    allocator = full_allocator(pool, BATCH)
    pool.heap_limit_bytes = 2 * BATCH
    buffer = opened(allocator, 10)
    buffer.write_growing(b"abc")
    assert buffer.growable_bytes == 2 * BATCH
    assert buffer.grow(BATCH + 1)
    assert (buffer.capacity, buffer.heap_bytes, content(buffer)) == (2 * BATCH, BATCH, b"abc")
    assert (pool.metrics().used_bytes, pool.metrics().heap_bytes) == (BATCH, BATCH)
    assert buffer.grow(3 * BATCH)
    assert not buffer.grow(3 * BATCH + 1)
    assert (buffer.capacity, buffer.overflowed) == (3 * BATCH, False)
    buffer.write_growing(b"x" * (2 * BATCH))
    views = buffer.views()
    buffer.truncate(BATCH)
    buffer.trim()
    # A request that refers to the buffer goes on to see its bytes.
    assert bytes(views[0]) == b"abc" + b"x" * (BATCH - 3) == content(buffer)
    assert (buffer.capacity, pool.metrics().heap_bytes) == (BATCH, 0)
    buffer.release()
    assert_idle(pool)


def test_full_opens_with_batch_size_whatever_its_rows_take_before_they_are_compressed() -> None:
    pool = pool_of(4 * BATCH)
    allocator = full_allocator(pool, BATCH)
    pool.heap_limit_bytes = 2 * BATCH
    buffer = allocator.try_open(2 * BATCH, 10)
    assert buffer is not None
    assert (pool.metrics().used_bytes, pool.metrics().heap_bytes) == (BATCH, BATCH)
    # A first record that is larger takes its size from the pool, as in Kafka's producer.
    large = allocator.try_open(3 * BATCH, 2 * BATCH)
    assert large is not None
    assert (pool.metrics().used_bytes, pool.metrics().heap_bytes) == (3 * BATCH, 2 * BATCH)
    assert allocator.try_open(BATCH + 1, 10) is None
    assert pool.metrics().used_bytes == 3 * BATCH
    # A request that has waited gets batch.size, which holds its first rows, and nothing beyond the limit.
    waited = allocator.open(BATCH + 1, 0, first_record=10)
    assert (pool.metrics().heap_bytes, waited.capacity) == (2 * BATCH, BATCH)
    for one in (buffer, large, waited):
        one.release()
    assert_idle(pool)


def test_reserved_rows_may_exceed_the_heaps_limit_and_nothing_new_is_reserved_then(
    strategy: Strategy,
) -> None:
    pool = pool_of(2 * BATCH, heap=1000)
    allocator = strategy(pool, BATCH)
    buffer, other = opened(allocator, BATCH), opened(allocator, BATCH)
    buffer.write_growing(b"abc")
    buffer.write_growing(bytes(2000))
    assert buffer.overflowed
    assert content(buffer) == b"abc" + bytes(2000)
    assert allocator.pool.overdrawn
    # There is memory in the pool, but the heap comes first.
    other.release()
    assert allocator.try_open(10) is None
    with pytest.raises(BufferExhaustedError, match=r"hold \d+ bytes .* more than the limit of 1000"):
        allocator.open(10, 0)
    # Whoever waits gets its memory as soon as the limit is kept again.
    waited = allocator.open(10, 60_000, buffer_releaser(buffer))
    assert not allocator.pool.overdrawn
    waited.release()
    assert_idle(pool)


def buffer_releaser(buffer: Memory) -> Callable[[], None]:
    """Releases it once, when called."""
    left = [buffer]
    return lambda: left.pop().release() if left else None


def test_the_heap_limit_is_a_quarter_of_the_pool_but_enough_for_a_batch() -> None:
    assert pool_of(64 << 20).heap_limit_bytes == 16 << 20
    assert pool_of(32_768).heap_limit_bytes == 1 << 20
    pool = pool_of(8 << 20)
    for batch_size, limit in ((1 << 20, 2 << 20), (3 << 20, 6 << 20), (1 << 20, 6 << 20), (1 << 30, 8 << 20)):
        incremental_allocator(pool, batch_size)
        assert pool.heap_limit_bytes == limit


def test_the_heap_limit_is_that_of_the_producers_at_work() -> None:
    """Catches: after one task with `full`, the heap of all later ones in the worker as large as the pool."""
    pool = pool_of(8 << 20)
    kept, large = incremental_allocator(pool, 1 << 20), incremental_allocator(pool, 3 << 20)
    full, other = full_allocator(pool, 16384), full_allocator(pool, 16384)
    acts = [
        full.close,
        full.close,
        other.rest,
        other.begin,
        other.close,
        other.begin,
        large.close,
        kept.close,
    ]
    limits = []
    for act in acts:
        act()
        limits.append(pool.heap_limit_bytes >> 20)
    assert limits == [8, 8, 6, 8, 6, 6, 2, 2]


def test_requests_wait_while_the_heap_of_a_closed_producer_exceeds_the_others_limit() -> None:
    pool = pool_of(8 << 20)
    kept, full = incremental_allocator(pool, 1 << 20), full_allocator(pool, 16384)
    held = full.try_open(4 << 20, first_record=1)
    assert held is not None
    assert held.heap_bytes > 2 << 20
    full.close()
    assert kept.try_open(1) is None
    held.release()
    opened(kept, 1).release()


def test_a_closed_producer_opens_no_batch_but_ends_those_it_has(strategy: Strategy) -> None:
    pool = pool_of(10 * BATCH)
    allocator, other = strategy(pool, BATCH), strategy(pool, BATCH)
    buffer = opened(allocator, 10)
    allocator.close()
    assert allocator.try_open(10) is None
    with pytest.raises(ProducerClosedError):
        allocator.open(10, 60_000)
    # What it holds is still sealed, or split, and sent.
    buffer.write_growing(bytes(BATCH + 50))
    opened(other, 10).release()
    buffer.release()
    assert_idle(pool)


# -- what incremental saves ---------------------------------------------------------------------------


def saved(pool: BufferPool, name: str = "buffer-saved-bytes") -> float:
    now = pool.metrics()
    return task_metrics(now, now, Deliveries())[name]


def test_savings_are_measured_against_a_batch_size_for_each_open_batch() -> None:
    pool = pool_of(64 << 20)
    allocator = incremental_allocator(pool, 1 << 20)
    buffers = [opened(allocator, 5000) for _ in range(10)]
    assert buffers[0].grow(3 << 20)
    metrics = pool.metrics()
    assert metrics.full_strategy_bytes == (9 << 20) + (3 << 20)
    assert metrics.used_bytes == 9 * 16384 + (3 << 20)
    assert saved(pool) == (9 << 20) - 9 * 16384
    for buffer in buffers:
        buffer.write_growing(b"x")
        buffer.trim()
        buffer.release()
    metrics = pool.metrics()
    assert saved(pool) == metrics.full_strategy_bytes == 0
    assert saved(pool, "buffer-saved-bytes-max") == (9 << 20) - 9 * 16384
    assert_idle(pool)
    # `full` saves nothing against itself.
    pool = pool_of(64 << 20)
    buffers = [opened(full_allocator(pool, 1 << 20), size) for size in (10, 1 << 20, 3 << 20)]
    buffers[0].write_growing(bytes(1 << 20))
    buffers[0].write_growing(bytes(1 << 20))
    assert pool.metrics().full_strategy_bytes == pool.metrics().used_bytes
    for buffer in buffers:
        buffer.release()
    assert saved(pool) == 0
    assert_idle(pool)
