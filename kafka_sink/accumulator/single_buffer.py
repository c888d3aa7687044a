"""``full``: Kafka's own strategy, a whole batch.size reserved when a batch opens."""

from __future__ import annotations

from kafka_sink.accumulator.batch_buffer import BatchBuffer, Data
from kafka_sink.accumulator.buffer_pool import BufferPool
from kafka_sink.errors import KafkaSinkError


class SingleBuffer:
    """One contiguous buffer, from the pool or (``heap``) counted apart."""

    __slots__ = ("_heap", "_memory", "_pool", "_released", "capacity", "size")

    def __init__(self, pool: BufferPool, memory: memoryview, *, heap: bool = False) -> None:
        self._pool = pool
        self._memory = memory
        self._heap = heap
        self._released = False
        self.capacity = len(memory)
        self.size = 0

    def write(self, data: Data) -> None:
        """See BatchBuffer."""
        end = self.size + len(data)
        if end > self.capacity:
            raise ValueError(f"{len(data)} bytes do not fit: {self.size} of {self.capacity} are written")
        self._memory[self.size : end] = data
        self.size = end

    def write_growing(self, data: Data) -> bool:
        """See BatchBuffer."""
        wanted = self.size + len(data)
        overflow = False
        if wanted > self.capacity and not self.grow(wanted):
            overflow = True
            self._replace(self._pool.heap_allocate(wanted), heap=True)
        self.write(data)
        return overflow

    def grow(self, projected: int) -> bool:
        """Moves to a larger unpooled buffer if the pool has the memory now."""
        if projected <= self.capacity:
            return True
        # Doubling keeps the copies of a growing batch linear in its size.
        larger = max(projected, 2 * self.capacity)
        for size in (larger, projected):
            taken = self._pool.try_allocate(1, size)
            if taken is not None:
                self._replace(taken[0], heap=False)
                return True
        return False

    def _replace(self, memory: memoryview, *, heap: bool) -> None:
        memory[: self.size] = self._memory[: self.size]
        self._give_back()
        self._memory = memory
        self._heap = heap
        self.capacity = len(memory)

    def _give_back(self) -> None:
        if self._heap:
            self._pool.heap_deallocate(len(self._memory))
        else:
            self._pool.deallocate([self._memory], len(self._memory))

    def truncate(self, size: int) -> None:
        """See BatchBuffer."""
        if not 0 <= size <= self.size:
            raise ValueError(f"cannot truncate {self.size} bytes to {size}")
        self.size = size

    def views(self, start: int = 0) -> list[memoryview]:
        """See BatchBuffer."""
        return [self._memory[start : self.size]] if start < self.size else []

    def patch(self, data: bytes) -> None:
        """See BatchBuffer."""
        self._memory[: len(data)] = data

    def trim(self) -> None:
        """Nothing to return: the buffer is one piece."""

    def release(self) -> None:
        """See BatchBuffer."""
        if self._released:
            raise KafkaSinkError("a batch's memory was released twice")
        self._released = True
        self._give_back()
        self.capacity = self.size = 0


class FullAllocator:
    """batch.size at once, from the free list; larger first records get a buffer of their own size."""

    def __init__(self, pool: BufferPool) -> None:
        self._pool = pool

    @property
    def queued(self) -> int:
        """See BufferAllocator."""
        return self._pool.queued

    def try_open(self, projected: int) -> SingleBuffer | None:
        """See BufferAllocator."""
        taken = self._pool.try_allocate(1, max(projected, self._pool.poolable_size))
        return None if taken is None else SingleBuffer(self._pool, taken[0])

    def open(self, projected: int, timeout_ms: float) -> SingleBuffer:
        """See BufferAllocator."""
        taken = self._pool.allocate(1, timeout_ms, max(projected, self._pool.poolable_size))
        return SingleBuffer(self._pool, taken[0])

    def try_grow(self, buffer: BatchBuffer, projected: int) -> bool:
        """See BufferAllocator."""
        if not isinstance(buffer, SingleBuffer):
            raise TypeError(f"not a buffer of this allocator: {type(buffer).__name__}")
        return buffer.grow(projected)

    def open_overflow(self, projected: int) -> SingleBuffer:
        """See BufferAllocator."""
        opened = self.try_open(projected)
        if opened is not None:
            return opened
        return SingleBuffer(self._pool, self._pool.heap_allocate(projected), heap=True)

    def trim_free(self) -> None:
        """See BufferAllocator."""
        self._pool.trim_free()

    def close(self) -> None:
        """See BufferAllocator."""
        self._pool.close()
