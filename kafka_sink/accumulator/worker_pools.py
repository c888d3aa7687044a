"""One ``buffer.memory`` for all producers of a worker process."""

from __future__ import annotations

import os
import threading
from weakref import WeakValueDictionary

from kafka_sink.accumulator.batch_buffer import BufferAllocator
from kafka_sink.accumulator.buffer_pool import BufferPool
from kafka_sink.accumulator.chunked_buffer import IncrementalAllocator, chunk_size
from kafka_sink.accumulator.single_buffer import FullAllocator
from kafka_sink.clock import Clock


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
        pool = self._pool(buffer_memory, batch_size if strategy == "full" else chunk_size(batch_size))
        if strategy == "full":
            return FullAllocator(pool, batch_size)
        return IncrementalAllocator(pool, batch_size)

    def _pool(self, buffer_memory: int, poolable_size: int) -> BufferPool:
        with self._lock:
            pool = self._pools.get(buffer_memory)
            if pool is None:
                pool = BufferPool(buffer_memory, poolable_size, clock_ms=self._clock_ms)
                self._pools[buffer_memory] = pool
            return pool
