"""Runs what was written for one allocation strategy under the other.

KAFKA_SINK_TEST_STRATEGY names the strategy that every producer of a process then gets, whatever its options
say. ``pytest --allocation-strategy full`` sets it for the whole run, subprocesses and Spark's workers
included: they find ``sitecustomize`` beside this file on their PYTHONPATH.
"""

from __future__ import annotations

import os
from pathlib import Path

from kafka_sink.accumulator.batch_buffer import BufferAllocator
from kafka_sink.accumulator.buffer_pool import BufferPool
from kafka_sink.accumulator.chunked_buffer import IncrementalAllocator
from kafka_sink.accumulator.single_buffer import FullAllocator
from kafka_sink.accumulator.worker_pools import WorkerPools

VARIABLE = "KAFKA_SINK_TEST_STRATEGY"
FOLDER = str(Path(__file__).resolve().parent)

_chosen = WorkerPools.allocator


def _allocator(pools: WorkerPools, strategy: str, buffer_memory: int, batch_size: int) -> BufferAllocator:
    return _chosen(pools, os.environ.get(VARIABLE) or strategy, buffer_memory, batch_size)


def install() -> None:
    """Makes the producers of this process obey the variable, read whenever one is made."""
    WorkerPools.allocator = _allocator  # type: ignore[method-assign, assignment]  # on purpose


def allocator(pool: BufferPool, batch_size: int, chunk: int) -> BufferAllocator:
    """For tests that make their own pool: ``chunk`` is the size that `incremental` takes at a time."""
    if os.environ.get(VARIABLE) == "full":
        return FullAllocator(pool, batch_size)
    return IncrementalAllocator(pool, chunk)
