"""Chunks: reused, neighbours again after some returns, and their pages left to the system."""

from __future__ import annotations

import mmap
import random
from collections.abc import Iterable

import numpy as np
import pytest

from kafka_sink.memory.arena import Chunk, ChunkArena
from kafka_sink.memory.pool import BufferPool, PoolClient


def pool_of(total_bytes: int) -> BufferPool:
    return BufferPool(total_bytes, clock_ms=lambda: 0.0)


def taken(pool: BufferPool, arena: ChunkArena, count: int) -> list[Chunk]:
    return pool.take(arena, count, 0, PoolClient())


def test_chunks_are_reused_and_the_last_returned_come_first() -> None:
    pool = pool_of(1 << 20)
    arena = pool.arena(100)
    first = taken(pool, arena, 3)
    pool.give(arena, first)
    assert pool.try_take(arena, 2) == first[:2]
    assert pool.try_take(arena, 1) == first[2:]
    assert pool.metrics().allocated_bytes == 300


def test_neighbours_stay_neighbours() -> None:
    pool = pool_of(1 << 20)
    arena = pool.arena(4096)
    for _ in range(2):
        chunks = taken(pool, arena, 40)
        assert [chunk.start for chunk in chunks] == [4096 * index for index in range(40)]
        pool.give(arena, chunks)
    pool.give(arena, pool.try_take(arena, 10) or [])
    pool.trim_free()
    some = taken(pool, arena, 10)
    pool.give(arena, some)
    chunks = taken(pool, arena, 40)
    assert [chunk.start for chunk in chunks] == [4096 * index for index in range(40)]


def ranges(chunks: Iterable[Chunk]) -> set[tuple[int, int]]:
    """Where the memory of chunks is mapped: address and size of each slab."""
    return {(np.frombuffer(chunk.slab, np.uint8).ctypes.data, len(chunk.slab)) for chunk in chunks}


def resident_bytes(mapped: set[tuple[int, int]]) -> int:
    """What of these ranges is in memory. The process's total counts what other tests left to allocators."""
    present = 0
    with open("/proc/self/pagemap", "rb") as pagemap:
        for address, size in mapped:
            pagemap.seek(address // mmap.PAGESIZE * 8)
            pages = np.frombuffer(pagemap.read(-(-size // mmap.PAGESIZE) * 8), np.uint64)
            present += int(np.count_nonzero(pages >> np.uint64(63)))
    return present * mmap.PAGESIZE


@pytest.mark.parametrize("keep", [0, 1])
def test_trimmed_memory_leaves_the_process(keep: int) -> None:
    pool = pool_of(64 << 20)
    arena = pool.arena(16384)
    chunks = taken(pool, arena, 4096)
    mapped = ranges(chunks)
    assert resident_bytes(mapped) < 1 << 20  # nothing is touched that is not written
    for chunk in chunks:
        chunk.view[:] = b"\1" * 16384
    assert resident_bytes(mapped) == 64 << 20
    # One chunk in 64 stays lent: the worst for memory that can only go in large pieces.
    stay = chunks[::64] if keep else []
    pool.give(arena, [chunk for index, chunk in enumerate(chunks) if not keep or index % 64])
    del chunks, chunk
    assert resident_bytes(mapped) == 64 << 20
    pool.trim_free()
    assert resident_bytes(mapped) == len(stay) * 16384
    assert pool.metrics().allocated_bytes == len(stay) * 16384
    assert all(bytes(chunk.view) == b"\1" * 16384 for chunk in stay)
    if keep:
        # What was trimmed beside a lent chunk is used again, not mapped again.
        again = taken(pool, arena, 4096 - 64)
        assert {id(chunk.slab) for chunk in again} <= {id(chunk.slab) for chunk in stay}


def test_scattered_chunks_are_neighbours_again_after_some_returns() -> None:
    """Catches: a batch's 16 chunks in 15 places, each with a checksum and a buffer of its own."""
    arena = ChunkArena(4096, kept=True)
    held = [arena.take(4) for _ in range(8)]
    arena.give([chunk for batch in held for chunk in batch[::2]])
    arena.give([chunk for batch in held for chunk in batch[1::2]])
    for _ in range(20):
        arena.give(arena.take(2))
    taken = arena.take(32)
    assert [chunk.start for chunk in taken] == list(range(0, 32 * 4096, 4096))
    assert len({id(chunk.slab) for chunk in taken}) == 1
    # Catches: with 1 GiB free, each sixteenth batch held the pool's lock for 15 ms.
    arena = ChunkArena(128, kept=True)
    arena.give(arena.take(128 * 40))
    returns = 1
    arena.free.reverse()
    while arena.free[-1].place:
        arena.give(arena.take(2))
        returns += 1
    assert returns == 40


@pytest.mark.parametrize("back", [1, 3])
def test_unkept_chunks_leave_their_memory_though_others_of_their_mapping_stay(back: int) -> None:
    arena = ChunkArena(2 * mmap.PAGESIZE, kept=False, heap=True)
    chunks = arena.take(4)
    for chunk in chunks:
        chunk.view[:] = b"\7" * arena.size
    arena.give(chunks[4 - back :])
    # Dropped pages read as zeros.
    assert [chunk.view[0] for chunk in chunks] == [7] * (4 - back) + [0] * back


def test_trimmed_chunks_smaller_than_a_page_keep_their_neighbours_bytes() -> None:
    pool = pool_of(1 << 20)
    arena = pool.arena(128)
    chunks = taken(pool, arena, 64)
    for chunk in chunks:
        chunk.view[:] = b"\7" * 128
    pool.give(arena, chunks[1:40])
    pool.trim_free()
    assert all(bytes(chunk.view) == b"\7" * 128 for chunk in (chunks[0], *chunks[40:]))


@pytest.mark.parametrize("size", [1000, 2048])
def test_chunks_smaller_than_a_page_make_way_for_larger_ones_with_their_pages(size: int) -> None:
    pool = pool_of(16 << 20)
    small, large = pool.arena(size), pool.arena(16384)
    chunks = taken(pool, small, pool.total_bytes // size)
    for chunk in chunks:
        chunk.view[:] = b"\1" * size
    mapped = ranges(chunks)
    # One stays lent, or all mappings could go; the others come back in any order.
    (stay, *rest) = chunks
    random.Random(3).shuffle(rest)
    for at in range(0, len(rest), 5):
        pool.give(small, rest[at : at + 5])
    for _ in range(pool.total_bytes // 16384 - 1):
        (one,) = pool.try_take(large, 1) or []
        one.view[:] = b"\2" * 16384
        mapped |= ranges([one])
    assert resident_bytes(mapped) < pool.total_bytes + (4 << 20)
    assert bytes(stay.view) == b"\1" * size
