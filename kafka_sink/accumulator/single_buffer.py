"""``full``: Kafka's own strategy, which reserves a whole batch.size when a batch opens.

Compressed bytes fill that buffer. Rows that the codec has not compressed yet may need more: lz4 and snappy
hold up to a block of them raw, gzip and zstd all of the batch's, packed (see ProducerBatch). What does not
fit into the buffer lies beside it in heap chunks, which the pool counts and limits to as much again as
buffer.memory. Kafka's producer compresses record by record instead, in a context of its own for each open
batch, whose memory it does not count: two buffers of 64 KiB for lz4, a quarter MiB for gzip, one MiB and more
for zstd.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from kafka_sink.accumulator.batch_buffer import BatchBuffer, BufferAllocator, Data
from kafka_sink.accumulator.buffer_pool import BufferPool, LentChunks, give_all
from kafka_sink.accumulator.chunked_buffer import chunk_size
from kafka_sink.accumulator.memory_arena import Chunk, ChunkArena
from kafka_sink.errors import BufferOwnershipError


class SingleBuffer:
    """A BatchBuffer: one contiguous buffer from the pool. The rest lies in heap chunks ``beside`` it."""

    __slots__ = (
        "_arena",
        "_begin",
        "_beside",
        "_chunk",
        "_heap_arena",
        "_pool",
        "_released",
        "_slab",
        "_step",
        "_within",
        "capacity",
        "overflowed",
        "size",
    )

    def __init__(self, pool: BufferPool, arena: ChunkArena, chunk: Chunk, heap_arena: ChunkArena) -> None:
        self._pool = pool
        self._arena = arena
        self._chunk = chunk
        self._slab = chunk.slab
        self._begin = chunk.start
        self._heap_arena = heap_arena
        self._step = heap_arena.size
        self._beside: list[Chunk] = []
        self._released = False
        # Bytes of the pool's buffer; the rest of the capacity lies beside it.
        self._within = self.capacity = arena.size
        self.overflowed = False
        self.size = 0

    @property
    def heap_bytes(self) -> int:
        return self.capacity - self._within

    def write(self, data: Data) -> None:
        size = self.size
        end = size + len(data)
        if end > self._within:
            self._write_beside(data)
            return
        begin = self._begin
        self._slab[begin + size : begin + end] = data
        self.size = end

    def _write_beside(self, data: Data) -> None:
        view = memoryview(data)
        size = self.size
        end = size + len(view)
        if end > self.capacity:
            raise ValueError(f"{len(view)} bytes do not fit: {size} of {self.capacity} are written")
        if not view.contiguous:
            raise ValueError("data must be contiguous")
        self._put(view, size)
        self.size = end

    def _put(self, view: memoryview, position: int) -> None:
        done = 0
        for chunk, begin, stop in self._places(position, position + len(view)):
            # Assigned to the mapping: a memoryview takes bytes of its own format only.
            chunk.slab[chunk.start + begin : chunk.start + stop] = view[done : done + stop - begin]
            done += stop - begin

    def _places(self, start: int, end: int) -> Iterator[tuple[Chunk, int, int]]:
        """Where the bytes from ``start`` to ``end`` lie: a chunk, and from where to where in it."""
        within, step = self._within, self._step
        if start < within:
            yield self._chunk, start, min(end, within)
        at = max(start, within) - within
        while at < end - within:
            index, begin = divmod(at, step)
            stop = min(step, begin + end - within - at)
            yield self._beside[index], begin, stop
            at += stop - begin

    def write_growing(self, *parts: Data) -> bool:
        projected = self.size + sum(map(len, parts))
        overflow = projected > self.capacity
        if overflow:
            if not self.grow(projected):
                self.grow_beyond_limit(projected)
            self.overflowed = True
        for part in parts:
            self.write(part)
        return overflow

    def grow(self, projected: int) -> bool:
        if projected <= self.capacity:
            return True
        if self._released:
            raise BufferOwnershipError("a batch whose memory was released cannot grow")
        chunks = self._pool.try_take_heap(self._heap_arena, self._missing(projected))
        if chunks is None:
            return False
        self._add(chunks)
        return True

    def grow_beyond_limit(self, projected: int) -> None:
        """Add heap chunks for what cannot wait, or has waited."""
        self._add(self._pool.take_heap(self._heap_arena, self._missing(projected)))

    def _missing(self, projected: int) -> int:
        return -(-(projected - self.capacity) // self._step)

    def _add(self, chunks: list[Chunk]) -> None:
        self._beside += chunks
        self.capacity += len(chunks) * self._step

    def truncate(self, size: int) -> None:
        if not 0 <= size <= self.size:
            raise ValueError(f"cannot truncate {self.size} bytes to {size}")
        self.size = size

    def views(self, start: int = 0, end: int | None = None) -> list[memoryview]:
        if end is None:
            end = self.size
        if not 0 <= start <= end <= self.size:
            raise ValueError(f"no bytes {start} to {end} in {self.size} that are written")
        if end > self._within:
            return [chunk.view[begin:stop] for chunk, begin, stop in self._places(start, end) if begin < stop]
        return [self._chunk.view[start:end]] if start < end else []

    def patch(self, data: Data, position: int = 0) -> None:
        end = position + len(data)
        if not 0 <= position <= end <= self.size:
            raise ValueError(f"no bytes {position} to {end} in {self.size} that are written")
        self._put(memoryview(data), position)

    def trim(self) -> None:
        """The pool's buffer is one piece, and stays."""
        if not self._beside:
            return
        keep = max(0, -(-(self.size - self._within) // self._step))
        surplus = self._beside[keep:]
        if surplus:
            del self._beside[keep:]
            self.capacity = self._within + keep * self._step
            self._pool.give(self._heap_arena, surplus)
        self.overflowed = self.overflowed and keep > 0

    def release(self, returned: list[LentChunks] | None = None) -> None:
        if self._released:
            raise BufferOwnershipError("a batch's memory was released twice")
        if self._beside:
            self._pool.give(self._heap_arena, self._beside)
            self._beside = []
        lent = self._pool, self._arena, [self._chunk], self._within
        self._released = True
        if returned is None:
            give_all((lent,))
        else:
            returned.append(lent)
        self._within = self.capacity = self.size = 0


class FullAllocator(BufferAllocator):
    """Takes batch.size at once, from the free list, or a buffer of the first record's size if that is larger.

    What the codec needs beside it comes from the heap, up to as much as the pool has.
    """

    def __init__(self, pool: BufferPool, batch_size: int | None = None) -> None:
        super().__init__(pool, batch_size, pool.total_bytes)
        self._arena = pool.arena(self._batch_size)
        self._heap_arena = pool.heap_arena(chunk_size(self._batch_size))

    def _arena_for(self, projected: int, first_record: int | None) -> ChunkArena:
        if projected <= self._batch_size:
            return self._arena
        pooled = projected if first_record is None else min(projected, first_record)
        return self._arena if pooled <= self._batch_size else ChunkArena(pooled, kept=False)

    def try_open(self, projected: int, first_record: int | None = None) -> SingleBuffer | None:
        if self._client.closed or self.pool.overdrawn:
            return None
        arena = self._arena_for(projected, first_record)
        chunks = self.pool.try_take(arena, 1, arena.size, new_batches=1)
        if chunks is None:
            return None
        buffer = SingleBuffer(self.pool, arena, chunks[0], self._heap_arena)
        grown = False
        try:
            grown = buffer.grow(projected)
        finally:
            if not grown:
                buffer.release()
        return buffer if grown else None

    def open(
        self,
        projected: int,
        timeout_ms: float,
        watch: Callable[[], None] | None = None,
        first_record: int | None = None,
    ) -> SingleBuffer:
        arena = self._arena_for(projected, first_record)
        chunks = self.pool.take(arena, 1, timeout_ms, self._client, arena.size, watch)
        buffer = SingleBuffer(self.pool, arena, chunks[0], self._heap_arena)
        try:
            if not buffer.grow(projected):
                # It has waited for memory; it gets no more than one grant beyond the heap's limit.
                buffer.grow_beyond_limit(projected)
        except BaseException:
            buffer.release()
            raise
        return buffer

    def try_grow(self, buffer: BatchBuffer, projected: int) -> bool:
        if not isinstance(buffer, SingleBuffer):
            raise TypeError(f"not a buffer of this allocator: {type(buffer).__name__}")
        return buffer.grow(projected)

    def growable_bytes(self, buffer: BatchBuffer) -> int:
        step = self._heap_arena.size
        return self.pool.heap_room // step * step

    @property
    def has_fixed_buffers(self) -> bool:
        return True
