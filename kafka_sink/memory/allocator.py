"""How producers get memory, for each buffer.memory.allocation.strategy; and a process's pools."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from weakref import WeakValueDictionary

from kafka_sink.clock import Clock
from kafka_sink.memory.arena import ChunkArena
from kafka_sink.memory.buffer import ChunkedBuffer
from kafka_sink.memory.pool import BufferPool, PoolClient
from kafka_sink.options.checks import MAX_CHUNK
from kafka_sink.process_entries import ProcessEntries

# A chunk is never smaller than the 61-byte batch header.
MIN_CHUNK = 128
# If many batches are open, chunks are smaller by one of these divisors, but never smaller than 1 KiB.
_FINER = (4, 16)
_MIN_FINER = 1024
# The share of the pool, as a divisor, that would be taken if each open batch had one chunk.
_SHARE_OF_CHUNKS = 4


def chunk_size(batch_size: int) -> int:
    return max(MIN_CHUNK, min(MAX_CHUNK, batch_size))


class BufferAllocator:
    """One producer's access to the pool.

    With `incremental`, a batch takes chunks as it grows, and all chunks of one request in a single pool call.
    If a chunk for each open batch would take a quarter of the pool, new batches get chunks a quarter as
    large, and still smaller ones if necessary. Otherwise 5,000 partitions with a few rows each would use up
    64 MiB of which they fill a few per cent, and the producer would send batches of a few rows.

    With `full`, Kafka's own strategy, a batch takes batch.size when it opens (or the size of its first
    record, if that is larger) and nothing from the pool later. Rows that are not compressed yet may need more
    memory: lz4 and snappy hold up to a block of raw rows, gzip and zstd all rows of the batch. The surplus
    lies in heap chunks, which the pool counts and limits to the size of buffer.memory. Kafka's producer
    instead compresses record by record, with a context for each open batch whose memory it does not count.

    ``projected`` is the number of bytes that a batch will contain, with its header. ``first_record`` is the
    size of the batch with its first record only; by default it equals ``projected``.
    """

    def __init__(self, pool: BufferPool, batch_size: int, *, full: bool = False) -> None:
        self.pool = pool
        # True if a batch takes batch.size from the pool when it opens, and nothing later.
        self.full = full
        # batch.size = 0 is legal: every record then gets a buffer of its own size.
        self._batch_size = max(1, batch_size)
        self._client = PoolClient()
        chunk = chunk_size(self._batch_size)
        sizes = [chunk, *(chunk // divisor for divisor in _FINER if chunk // divisor >= _MIN_FINER)]
        self._arenas = [pool.arena(size) for size in ([self._batch_size] if full else sizes)]
        self._heap_arena = pool.arena(chunk, heap=True) if full else None
        self._share = pool.total_bytes // _SHARE_OF_CHUNKS
        # What batches may need beyond the pool. With `incremental`, one may grow and one be split.
        self._heap_bytes = pool.total_bytes if full else 2 * self._batch_size
        self.begin()

    def _needs(
        self, projected: int, first_record: int | None, batches: int = 1
    ) -> tuple[ChunkArena, int, int]:
        """What the last of this many new batches gets: an arena, the number of its chunks, and the bytes that
        the `full` strategy would hold for the batch."""
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
        """Memory for a new batch; None if the pool has none now or a request waits. Never blocks."""
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
        """Call ``try_open`` for each batch until the pool refuses one. Returns the opened buffers."""
        batches, pool = len(projected), self.pool
        if batches > 1 and not self._client.closed:
            arena, _, full_bytes = self._needs(max(projected), None, batches)
            if arena.kept and max(projected) <= arena.size:
                chunks = pool.try_take(arena, batches, batches * full_bytes, new_batches=batches)
                if chunks is not None:
                    heap = self._heap_arena
                    return [ChunkedBuffer(pool, arena, [chunk], full_bytes, heap) for chunk in chunks]
        buffers: list[ChunkedBuffer] = []
        try:
            for size in projected:
                buffer = self.try_open(size)
                if buffer is None:
                    break
                buffers.append(buffer)
        except BaseException:
            for buffer in buffers:
                buffer.release()
            raise
        return buffers

    def open(
        self,
        projected: int,
        timeout_ms: float,
        watch: Callable[[], None] | None = None,
        first_record: int | None = None,
    ) -> ChunkedBuffer:
        """Memory for a new batch. Waits in the pool's queue for it.

        With `full` the heap's limit may leave less than ``projected``, but at least ``first_record``.

        ``watch`` is called at the start of the wait and repeatedly during it. If it raises, the wait ends.

        Raises BufferExhaustedError after the timeout, RecordTooLargeError at once if more than buffer.memory
        is needed, and ProducerClosedError if the producer is closed. Nothing stays reserved after an
        error."""
        arena, count, full_bytes = self._needs(projected, first_record)
        chunks = self.pool.take(arena, count, timeout_ms, self._client, full_bytes, watch)
        buffer = ChunkedBuffer(self.pool, arena, chunks, full_bytes, self._heap_arena)
        try:
            if not buffer.grow(projected):
                buffer.grow(buffer.capacity + buffer.growable_bytes)
        except BaseException:
            buffer.release()
            raise
        return buffer

    def begin(self) -> None:
        """Start a task: let the heap hold what its batches need, and reset the pool's peaks. A new allocator
        is already started."""
        self.pool.admit_heap(self._client, self._heap_bytes)
        self.pool.restart_maxima()

    def rest(self) -> None:
        """End a task: lower the heap's limit to what other producers need, and free unused memory."""
        self.pool.withdraw_heap(self._client)
        self.pool.trim_free()

    def close(self) -> None:
        """End this producer's waits with an error. Memory in use may still grow and be returned."""
        self.pool.close_client(self._client)
        self.pool.trim_free()


class WorkerPools:
    """The pools of a process, by size. Thread-safe. A pool lives as long as a producer uses it.

    Producers with the same buffer.memory share a pool, even if their batch.size or strategy differs.
    Producers with another buffer.memory use another pool, so that each producer may hold what its own options
    allow. Spark runs one task at a time in a worker, and a producer holds no memory between tasks, so a
    worker's memory stays within buffer.memory of the running task.
    """

    def __init__(self, clock_ms: Clock) -> None:
        self._clock_ms = clock_ms
        # Without the lock, two producers could make two pools of one size.
        self._pools = ProcessEntries(WeakValueDictionary[int, BufferPool]())

    def allocator(self, strategy: str, buffer_memory: int, batch_size: int) -> BufferAllocator:
        """Return a producer's access to its pool. ``strategy`` is `full` or `incremental`; sizes in bytes."""
        with self._pools.lock:
            pool = self._pools.entries.get(buffer_memory)
            if pool is None:
                pool = BufferPool(buffer_memory, clock_ms=self._clock_ms)
                self._pools.entries[buffer_memory] = pool
        return BufferAllocator(pool, batch_size, full=strategy == "full")
