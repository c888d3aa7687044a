"""What the allocators of both values of buffer.memory.allocation.strategy have in common."""

from __future__ import annotations

from kafka_sink.accumulator.buffer_pool import BufferPool, PoolClient
from kafka_sink.accumulator.pool_metrics import PoolMetrics


class PoolAllocator:
    """One client of a pool. See BufferAllocator for the methods.

    ``batch_size``: default the pool's poolable size; given if producers share a pool.
    """

    def __init__(self, pool: BufferPool, batch_size: int | None = None) -> None:
        self._pool = pool
        # batch.size = 0 is legal: every record then gets a buffer of its own size.
        self._batch_size = max(1, pool.poolable_size if batch_size is None else batch_size)
        self._tenant = PoolClient()
        # As growing and splitting one may need.
        pool.admit_heap(self._tenant, 2 * self._batch_size)

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

    def restart_maxima(self) -> None:
        """See BufferAllocator."""
        self._pool.restart_maxima()

    def trim_free(self) -> None:
        """See BufferAllocator."""
        self._pool.trim_free()

    def close(self) -> None:
        """See BufferAllocator."""
        self._pool.close_tenant(self._tenant)
        self._pool.trim_free()
