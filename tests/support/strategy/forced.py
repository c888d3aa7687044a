"""Runs tests written for one allocation strategy under the other one.

KAFKA_SINK_TEST_STRATEGY names the strategy that every producer of a process then gets, whatever its options
are. ``pytest --allocation-strategy full`` sets it for the whole run, subprocesses and Spark's workers
included: they find ``sitecustomize`` next to this file on their PYTHONPATH.
"""

from __future__ import annotations

import os
from pathlib import Path

from kafka_sink.memory.allocator import BufferAllocator, WorkerPools
from kafka_sink.memory.pool import BufferPool
from tests.support.allocators import full_allocator, incremental_allocator

VARIABLE = "KAFKA_SINK_TEST_STRATEGY"
FOLDER = str(Path(__file__).resolve().parent)

_chosen = WorkerPools.allocator


def _allocator(pools: WorkerPools, strategy: str, buffer_memory: int, batch_size: int) -> BufferAllocator:
    return _chosen(pools, os.environ.get(VARIABLE) or strategy, buffer_memory, batch_size)


def install() -> None:
    """Makes the producers of this process obey the variable, read whenever one is made."""
    WorkerPools.allocator = _allocator  # type: ignore[method-assign, assignment]  # on purpose


def is_full() -> bool:
    """Whether the variable names `full`."""
    return os.environ.get(VARIABLE) == "full"


def allocator(pool: BufferPool, batch_size: int, chunk: int) -> BufferAllocator:
    """The strategy for tests that make their own pool: ``chunk`` is the size that `incremental` takes at a
    time."""
    if is_full():
        return full_allocator(pool, batch_size)
    return incremental_allocator(pool, chunk)
