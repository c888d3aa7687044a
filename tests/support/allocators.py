"""Allocators of both strategies over a pool that a test has made."""

from __future__ import annotations

from kafka_sink.memory.allocator import BufferAllocator
from kafka_sink.memory.pool import BufferPool


def incremental_allocator(pool: BufferPool, batch_size: int | None = None) -> BufferAllocator:
    return BufferAllocator(pool, batch_size)


def full_allocator(pool: BufferPool, batch_size: int | None = None) -> BufferAllocator:
    return BufferAllocator(pool, batch_size, full=True)
