"""Producers of one worker process share a buffer.memory."""

from __future__ import annotations

import gc

import pytest

from kafka_sink.errors import BufferExhaustedError
from kafka_sink.memory.allocator import WorkerPools
from tests.support.forked import in_a_fork
from tests.support.strategy import forced
from tests.support.surroundings import Environ

MEMORY = 1 << 20


@pytest.fixture(autouse=True)
def _as_the_options_say(environ: Environ) -> None:
    environ(**{forced.VARIABLE: None})


def make() -> WorkerPools:
    return WorkerPools(lambda: 0.0)


def test_producers_with_one_buffer_memory_share_it_whatever_else_they_differ_in() -> None:
    pools = make()
    first = pools.allocator("incremental", MEMORY, 512 << 10)
    second = pools.allocator("full", MEMORY, 128 << 10)
    assert (first.full, second.full) == (False, True)
    held = first.open(MEMORY, 0)
    assert second.try_open(1) is None
    held.release()
    other = second.open(1, 0)
    assert other.capacity == 128 << 10
    other.release()
    # Another buffer.memory is another pool.
    pools = make()
    first, second = pools.allocator("full", MEMORY, MEMORY), pools.allocator("full", 2 * MEMORY, MEMORY)
    held = first.open(1, 0)
    assert second.try_open(1) is not None
    held.release()


def test_a_pool_ends_with_its_last_producer() -> None:
    pools = make()
    kept, gone = (pools.allocator("incremental", MEMORY, 1024) for _ in range(2))
    held = kept.open(MEMORY, 0)
    with pytest.raises(BufferExhaustedError):
        kept.open(1, 0)
    held.release()

    def exhausted() -> int:
        return pools.allocator("incremental", MEMORY, 1024).pool.metrics().buffer_exhausted_total

    del gone
    gc.collect()
    assert exhausted() == 1, "the pool of the one that is left"
    del kept, held
    gc.collect()
    assert exhausted() == 0, "another one"


def test_a_fork_begins_with_pools_of_its_own() -> None:
    """Catches: the parent's chunks counted."""
    pools = make()
    held = pools.allocator("incremental", MEMORY, 1024).open(MEMORY, 0)
    assert in_a_fork(lambda: pools.allocator("incremental", MEMORY, 1024).try_open(MEMORY) is not None)
    held.release()


def test_no_batching_at_all_gives_every_record_its_own_memory() -> None:
    """batch.size = 0 is legal, as in Kafka."""
    for strategy in ("full", "incremental"):
        allocator = make().allocator(strategy, 4096, 0)
        for projected in (1000, 3000, 500, 4000):
            buffer = allocator.open(projected, 0)
            buffer.release()
