"""What the allocators of both values of buffer.memory.allocation.strategy have in common."""

from __future__ import annotations

from kafka_sink.accumulator.buffer_pool import BufferPool, PoolClient
from kafka_sink.accumulator.pool_metrics import PoolMetrics


class PoolAllocator:
    """One client of a pool. See BufferAllocator for the methods.

    ``batch_size``: default the pool's poolable size; given if producers share a pool.
    """

    def __init__(
        self, pool: BufferPool, batch_size: int | None = None, heap_bytes: int | None = None
    ) -> None:
        """``heap_bytes``: what batches may need beyond the pool; default two of them, for growing and
        splitting one."""
        self._pool = pool
        # batch.size = 0 is legal: every record then gets a buffer of its own size.
        self._batch_size = max(1, pool.poolable_size if batch_size is None else batch_size)
        self._tenant = PoolClient()
        self._heap_bytes = 2 * self._batch_size if heap_bytes is None else heap_bytes
        self.begin()

    @property
    def queued(self) -> int:
        """See BufferAllocator."""
        return self._pool.queued

    @property
    def overdrawn(self) -> bool:
        """See BufferAllocator."""
        return self._pool.overdrawn

    def metrics(self) -> PoolMetrics:
        """See BufferAllocator."""
        return self._pool.metrics()

    def begin(self) -> None:
        """See BufferAllocator."""
        self._pool.admit_heap(self._tenant, self._heap_bytes)
        self._pool.restart_maxima()

    def rest(self) -> None:
        """See BufferAllocator."""
        self._pool.withdraw_heap(self._tenant)
        self._pool.trim_free()

    def close(self) -> None:
        """See BufferAllocator."""
        self._pool.close_tenant(self._tenant)
        self._pool.trim_free()
