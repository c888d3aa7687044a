"""Access to a pool by one of both strategies of buffer.memory.allocation.strategy; the pools of a process."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from weakref import WeakValueDictionary

from kafka_sink.clock import Clock
from kafka_sink.memory.arena import ChunkArena
from kafka_sink.memory.buffer import ChunkedBuffer
from kafka_sink.memory.pool import BufferPool, PoolClient

MAX_CHUNK = 16384
# A chunk always holds the 61-byte batch header.
MIN_CHUNK = 128
# With many batches open, chunks are smaller by these divisors, but never below 1 KiB.
_FINER = (4, 16)
_MIN_FINER = 1024
# The share of the pool, as a divisor, that one chunk for each open batch may take.
_SHARE_OF_CHUNKS = 4


def chunk_size(batch_size: int) -> int:
    return max(MIN_CHUNK, min(MAX_CHUNK, batch_size))


class BufferAllocator:
    """One producer's access to the pool.

    `incremental` takes only the chunks that a batch lacks, all of one request in a single pool call. If so
    many batches are open that a chunk for each would take a quarter of the pool, further batches get chunks a
    quarter as large, and still smaller ones if necessary. Otherwise 5,000 partitions with a few rows each
    would use up 64 MiB while filling a few per cent of it, and would send batches of a few rows.

    `full`, Kafka's own strategy, takes batch.size when a batch opens, or what its first record needs if that
    is more, and nothing from the pool later. Rows that the codec has not compressed yet may need more: lz4
    and snappy hold up to a block of them raw, gzip and zstd all of the batch's. What does not fit lies in
    heap chunks, which the pool counts and limits to as much again as buffer.memory. Kafka's producer
    compresses record by record instead, in a context for each open batch, whose memory it does not count.

    ``projected`` is the number of bytes that a batch will hold in all, header included; ``first_record`` that
    with its first record alone (default: the same).
    """

    def __init__(self, pool: BufferPool, batch_size: int | None = None, *, full: bool = False) -> None:
        """``batch_size``: default the pool's poolable size; given if producers share a pool."""
        self.pool = pool
        # Whether a batch takes batch.size from the pool when it opens, and nothing later.
        self.full = full
        # batch.size = 0 is legal: every record then gets a buffer of its own size.
        self._batch_size = max(1, pool.poolable_size if batch_size is None else batch_size)
        self._client = PoolClient()
        chunk = chunk_size(self._batch_size)
        sizes = [chunk, *(chunk // divisor for divisor in _FINER if chunk // divisor >= _MIN_FINER)]
        self._arenas = [pool.arena(size) for size in ([self._batch_size] if full else sizes)]
        self._heap_arena = pool.heap_arena(chunk) if full else None
        self._share = pool.total_bytes // _SHARE_OF_CHUNKS
        # What batches may need beyond the pool; `incremental` two of them, for growing and splitting one.
        self._heap_bytes = pool.total_bytes if full else 2 * self._batch_size
        self.begin()

    def _needs(
        self, projected: int, first_record: int | None, batches: int = 1
    ) -> tuple[ChunkArena, int, int]:
        """What the last of so many new batches gets: an arena's chunks, how many, and what `full` would
        hold for it."""
        if self.full:
            pooled = projected if first_record is None else min(projected, first_record)
            arena = self._arenas[0] if pooled <= self._batch_size else ChunkArena(pooled, kept=False)
            return arena, 1, arena.size
        open_batches = self.pool.open_batches + batches - 1
        for arena in self._arenas:
            if projected >= arena.size or open_batches * arena.size < self._share:
                break
        return arena, -(-projected // arena.size) or 1, max(self._batch_size, projected)

    def try_open(self, projected: int, first_record: int | None = None) -> ChunkedBuffer | None:
        """A new batch's memory, or None when the pool cannot give it now or others wait. Never blocks."""
        if self._client.closed:
            return None
        arena, count, full_bytes = self._needs(projected, first_record)
        chunks = self.pool.try_take(arena, count, full_bytes, new_batches=1)
        if chunks is None:
            return None
        buffer = ChunkedBuffer(self.pool, arena, chunks, full_bytes, self._heap_arena)
        if projected <= buffer.capacity:
            return buffer
        grown = False
        try:
            grown = buffer.grow(projected)
        finally:
            if not grown:
                buffer.release()
        return buffer if grown else None

    def try_open_all(self, projected: Sequence[int]) -> Sequence[ChunkedBuffer]:
        """As ``try_open`` for each, up to the first that the pool refuses."""
        batches, pool = len(projected), self.pool
        if batches > 1 and not self._client.closed:
            arena, _, full_bytes = self._needs(max(projected), None, batches)
            if arena.kept and max(projected) <= arena.size:
                chunks = pool.try_take(arena, batches, batches * full_bytes, new_batches=batches)
                if chunks is not None:
                    heap = self._heap_arena
                    return [ChunkedBuffer(pool, arena, [chunk], full_bytes, heap) for chunk in chunks]
        found: list[ChunkedBuffer] = []
        try:
            for size in projected:
                buffer = self.try_open(size)
                if buffer is None:
                    break
                found.append(buffer)
        except BaseException:
            for buffer in found:
                buffer.release()
            raise
        return found

    def open(
        self,
        projected: int,
        timeout_ms: float,
        watch: Callable[[], None] | None = None,
        first_record: int | None = None,
    ) -> ChunkedBuffer:
        """A new batch's memory; waits in line for it. ``watch`` is called at the start of the wait and from
        time to time, and may raise to end it.

        Raises BufferExhaustedError after the timeout, RecordTooLargeError at once for more than
        buffer.memory, ProducerClosedError when closed; nothing stays reserved then."""
        arena, count, full_bytes = self._needs(projected, first_record)
        chunks = self.pool.take(arena, count, timeout_ms, self._client, full_bytes, watch)
        buffer = ChunkedBuffer(self.pool, arena, chunks, full_bytes, self._heap_arena)
        try:
            if not buffer.grow(projected):
                # It has waited for memory; it gets no more than one grant beyond the heap's limit.
                buffer.grow_on_heap(projected)
        except BaseException:
            buffer.release()
            raise
        return buffer

    def begin(self) -> None:
        """A task begins: the heap may hold what its batches need, and the pool's peaks are reset to the
        present values. A new allocator has begun."""
        self.pool.admit_heap(self._client, self._heap_bytes)
        self.pool.restart_maxima()

    def rest(self) -> None:
        """Between tasks: the heap's limit is what other producers need, and free memory goes back to the
        system."""
        self.pool.withdraw_heap(self._client)
        self.pool.trim_free()

    def close(self) -> None:
        """End this producer's waits with an error. Memory in use may still grow and be returned."""
        self.pool.close_client(self._client)
        self.pool.trim_free()


class WorkerPools:
    """The pools of a process by their size. Thread-safe; a pool lives as long as a producer uses it.

    Producers with the same buffer.memory share a pool, whatever their batch.size or strategy. Those with
    another buffer.memory have another: each holds what its own options allow. Spark runs one task at a time
    in a worker, and a producer between tasks holds nothing, so a worker stays within the running task's.
    """

    def __init__(self, clock_ms: Clock) -> None:
        self._clock_ms = clock_ms
        self._lock = threading.Lock()  # guards the one below
        self._pools: WeakValueDictionary[int, BufferPool] = WeakValueDictionary()
        # For the life of the process, as are the pools.
        os.register_at_fork(after_in_child=self._after_fork)

    def _after_fork(self) -> None:
        """A fork copies chunks that the parent's producers hold; another thread may have held the lock."""
        self._lock = threading.Lock()
        self._pools = WeakValueDictionary()

    def allocator(self, strategy: str, buffer_memory: int, batch_size: int) -> BufferAllocator:
        """One producer's access to its memory; ``strategy`` is `full` or `incremental`, sizes are bytes."""
        full = strategy == "full"
        poolable_size = batch_size if full else chunk_size(batch_size)
        with self._lock:
            pool = self._pools.get(buffer_memory)
            if pool is None:
                pool = BufferPool(buffer_memory, poolable_size, clock_ms=self._clock_ms)
                self._pools[buffer_memory] = pool
        return BufferAllocator(pool, batch_size, full=full)
