"""Allocators of both strategies over a pool that a test has made."""

from __future__ import annotations

from kafka_sink.memory.allocator import BufferAllocator
from kafka_sink.memory.pool import BufferPool


def incremental_allocator(pool: BufferPool, batch_size: int) -> BufferAllocator:
    return BufferAllocator(pool, batch_size)


def full_allocator(pool: BufferPool, batch_size: int) -> BufferAllocator:
    return BufferAllocator(pool, batch_size, full=True)


def limit_heap(pool: BufferPool, limit_bytes: int) -> None:
    """Set the heap's limit of a pool that has no producers yet. Their needs can still raise it."""
    pool.heap_limit_bytes = pool.least_heap_limit = limit_bytes
