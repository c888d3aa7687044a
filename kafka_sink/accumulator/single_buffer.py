"""``full``: Kafka's own strategy, which reserves a whole batch.size when a batch opens."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from kafka_sink.accumulator.batch_buffer import BatchBuffer, Data
from kafka_sink.accumulator.buffer_pool import BufferPool
from kafka_sink.accumulator.memory_arena import Chunk, ChunkArena
from kafka_sink.accumulator.pool_allocator import PoolAllocator
from kafka_sink.errors import BufferOwnershipError

# Bytes that a batch may hold beyond its estimated size while its last block is raw: a 64 KiB block of lz4.
_RAW_TAIL = 68 << 10


class SingleBuffer:
    """One contiguous buffer, from the pool or from the heap, replaced by a larger one when it must grow."""

    __slots__ = (
        "_arena",
        "_begin",
        "_chunk",
        "_pool",
        "_released",
        "_roomier",
        "_slab",
        "capacity",
        "size",
    )

    def __init__(self, pool: BufferPool, arena: ChunkArena, chunk: Chunk, roomier: ChunkArena) -> None:
        """``roomier``: the arena of buffers for batches that outgrow batch.size by a little."""
        self._pool = pool
        self._roomier = roomier
        self._released = False
        self.size = 0
        self._hold(arena, chunk)

    def _hold(self, arena: ChunkArena, chunk: Chunk) -> None:
        self._arena = arena
        self._chunk = chunk
        self._slab = chunk.slab
        self._begin = chunk.start
        self.capacity = arena.size

    @property
    def heap_bytes(self) -> int:
        """See BatchBuffer."""
        return self.capacity if self._arena.heap else 0

    def write(self, data: Data) -> None:
        """See BatchBuffer."""
        size = self.size
        end = size + len(data)
        if end > self.capacity:
            raise ValueError(f"{len(data)} bytes do not fit: {size} of {self.capacity} are written")
        begin = self._begin
        self._slab[begin + size : begin + end] = data
        self.size = end

    def write_growing(self, *parts: Data) -> bool:
        """See BatchBuffer."""
        projected = self.size + sum(map(len, parts))
        overflow = projected > self.capacity and not self.grow(projected)
        if overflow:
            arena = ChunkArena(projected, kept=False, heap=True)
            self._move_to(arena, self._pool.take_heap(arena, 1, projected, reserved=True))
        for part in parts:
            self.write(part)
        return overflow

    def grow(self, projected: int) -> bool:
        """Moves to a larger unpooled buffer if the pool has the memory for both now."""
        if projected <= self.capacity:
            return True
        if self._released:
            raise BufferOwnershipError("a batch whose memory was released cannot grow")
        for arena in self._arenas_for(projected):
            chunks = self._pool.try_take(arena, 1, arena.size)
            if chunks is not None:
                self._move_to(arena, chunks)
                return True
        return False

    def _arenas_for(self, projected: int) -> Iterator[ChunkArena]:
        """Arenas to move to, best first. Doubling keeps the copying of a growing batch linear in its size."""
        doubled = 2 * self.capacity
        if projected <= self._roomier.size < doubled:
            yield self._roomier
        else:
            yield ChunkArena(max(projected, doubled), kept=False)
        yield ChunkArena(projected, kept=False)

    def _move_to(self, arena: ChunkArena, chunks: list[Chunk]) -> None:
        chunk = chunks[0]
        chunk.view[: self.size] = self._chunk.view[: self.size]
        old_arena, old_chunk = self._arena, self._chunk
        self._hold(arena, chunk)
        self._pool.give(old_arena, [old_chunk], old_arena.size)

    def truncate(self, size: int) -> None:
        """See BatchBuffer."""
        if not 0 <= size <= self.size:
            raise ValueError(f"cannot truncate {self.size} bytes to {size}")
        self.size = size

    def views(self, start: int = 0, end: int | None = None) -> list[memoryview]:
        """See BatchBuffer."""
        if end is None:
            end = self.size
        if not 0 <= start <= end <= self.size:
            raise ValueError(f"no bytes {start} to {end} in {self.size} that are written")
        return [self._chunk.view[start:end]] if start < end else []

    def patch(self, data: Data, position: int = 0) -> None:
        """See BatchBuffer."""
        end = position + len(data)
        if not 0 <= position <= end <= self.size:
            raise ValueError(f"no bytes {position} to {end} in {self.size} that are written")
        self._slab[self._begin + position : self._begin + end] = data

    def trim(self) -> None:
        """Nothing to return: the buffer is one piece."""

    def release(self) -> None:
        """See BatchBuffer."""
        if self._released:
            raise BufferOwnershipError("a batch's memory was released twice")
        self._pool.give(self._arena, [self._chunk], self.capacity, last=True)
        self._released = True
        self.capacity = self.size = 0


class FullAllocator(PoolAllocator):
    """Takes batch.size at once, from the free list. A larger first record gets an unpooled buffer."""

    def __init__(self, pool: BufferPool, batch_size: int | None = None) -> None:
        super().__init__(pool, batch_size)
        self._arena = pool.arena(self._batch_size)
        self._roomier = pool.arena(self._batch_size + _RAW_TAIL)

    def _arena_for(self, projected: int) -> ChunkArena:
        return self._arena if projected <= self._batch_size else ChunkArena(projected, kept=False)

    def try_open(self, projected: int) -> SingleBuffer | None:
        """See BufferAllocator."""
        if self._tenant.closed or self._pool.overdrawn:
            return None
        return self._try_open(projected)

    def _try_open(self, projected: int) -> SingleBuffer | None:
        arena = self._arena_for(projected)
        chunks = self._pool.try_take(arena, 1, arena.size, new_batch=True)
        return None if chunks is None else SingleBuffer(self._pool, arena, chunks[0], self._roomier)

    def open(
        self, projected: int, timeout_ms: float, watch: Callable[[], None] | None = None
    ) -> SingleBuffer:
        """See BufferAllocator."""
        arena = self._arena_for(projected)
        chunks = self._pool.take(arena, 1, timeout_ms, self._tenant, arena.size, watch)
        return SingleBuffer(self._pool, arena, chunks[0], self._roomier)

    def try_grow(self, buffer: BatchBuffer, projected: int) -> bool:
        """See BufferAllocator."""
        if not isinstance(buffer, SingleBuffer):
            raise TypeError(f"not a buffer of this allocator: {type(buffer).__name__}")
        return buffer.grow(projected)

    def growable_bytes(self, buffer: BatchBuffer) -> int:
        """Zero: growing needs both buffers for a while, and the batch had a batch.size from the start."""
        return 0

    @property
    def moves_to_grow(self) -> bool:
        """See BufferAllocator."""
        return True

    def open_overflow(self, projected: int) -> SingleBuffer:
        """See BufferAllocator."""
        opened = self._try_open(projected)
        if opened is not None:
            return opened
        arena = ChunkArena(max(projected, 1), kept=False, heap=True)
        return SingleBuffer(self._pool, arena, self._pool.take_heap(arena, 1, arena.size)[0], self._roomier)
