"""What a record batch's memory costs, incremental against full: nanoseconds on one core, no broker.

    python benchmarks/allocation.py [--smoke]

A batch is opened, given its 61-byte header and runs of rows (about 4 KiB for 1,000 open partitions), each
after a reservation, then viewed, trimmed and released: all that the accumulator asks of it. ``scattered``
are chunks in random order, as an hour of uneven partitions leaves them, ``fresh`` memory that the kernel has
to back first. Times are the least of many rounds, so that whatever else runs here is left out.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).resolve().parent / "results"
sys.path.insert(0, str(ROOT))

from kafka_sink.accumulator.batch_buffer import BufferAllocator  # noqa: E402 - needs the path above
from kafka_sink.accumulator.buffer_pool import BufferPool  # noqa: E402 - needs the path above
from kafka_sink.accumulator.chunked_buffer import (  # noqa: E402 - needs the path above
    IncrementalAllocator,
    chunk_size,
)
from kafka_sink.accumulator.single_buffer import FullAllocator  # noqa: E402 - needs the path above

HEADER = bytes(61)
RUN = 4096
MEMORY = 64 << 20
# bytes in the batch, batch.size
CASES = (
    *((4096, 1 << 14), (1 << 14, 1 << 14)),
    *((4096, 1 << 20), (1 << 16, 1 << 20), (1 << 20, 1 << 20)),
    *((4096, 4 << 20), (1 << 20, 4 << 20)),
)
STRATEGIES = ("full", "incremental", "incremental, scattered", "full, fresh", "incremental, fresh")


@dataclass
class Row:
    strategy: str
    batch_size: int
    batch_bytes: int
    batch_ns: float
    append_ns: float
    held_bytes: int
    open_at_once: int


def allocator_of(strategy: str, batch_size: int) -> tuple[BufferPool, BufferAllocator]:
    full = strategy == "full"
    size = batch_size if full else chunk_size(batch_size)
    pool = BufferPool(MEMORY, size, clock_ms=lambda: time.monotonic() * 1000)
    return pool, FullAllocator(pool, batch_size) if full else IncrementalAllocator(pool, batch_size)


def scatter(pool: BufferPool) -> None:
    """Takes every chunk once and returns them in random order."""
    arena = pool.arena(pool.poolable_size)
    chunks = pool.try_take(arena, pool.total_bytes // arena.size)
    assert chunks is not None
    for chunk in chunks:
        chunk.view[:] = bytes(arena.size)
    random.Random(4).shuffle(chunks)
    pool.give(arena, chunks)


def one_batch(allocator: BufferAllocator, runs: int, run: memoryview) -> None:
    buffer = allocator.try_open(len(HEADER) + len(run))
    assert buffer is not None
    buffer.write(HEADER)
    for _ in range(runs):
        projected = buffer.size + len(run)
        # As the accumulator does it: the pool is asked only for what the buffer does not have.
        if projected > buffer.capacity:
            assert allocator.try_grow(buffer, projected)
        buffer.write(run)
    buffer.trim()
    buffer.views(len(HEADER))
    buffer.release()


def least_ns(work: Callable[[], None], seconds: float, number: int, between: Callable[[], None]) -> float:
    least = float("inf")
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        between()
        started = time.perf_counter_ns()
        for _ in range(number):
            work()
        least = min(least, (time.perf_counter_ns() - started) / number)
    return least


def measure(strategy: str, batch_bytes: int, batch_size: int, seconds: float) -> Row:
    pool, allocator = allocator_of(strategy.split(",")[0], batch_size)
    if "scattered" in strategy:
        scatter(pool)
    run = memoryview(os.urandom(min(RUN, batch_bytes) - (len(HEADER) if batch_bytes <= RUN else 0)))
    runs = max(1, (batch_bytes - len(HEADER)) // len(run))
    number = max(1, min(200, 400 // runs))
    between = pool.trim_free if "fresh" in strategy else lambda: None
    if "fresh" in strategy:
        number = 1
    batch_ns = least_ns(lambda: one_batch(allocator, runs, run), seconds, number, between)
    buffers = []
    while True:
        buffer = allocator.try_open(len(HEADER) + runs * len(run))
        if buffer is None:
            break
        buffers.append(buffer)
    held = buffers[0].capacity
    at_once = len(buffers)
    for buffer in buffers:
        buffer.release()
    return Row(strategy, batch_size, batch_bytes, batch_ns, batch_ns / runs, held, at_once)


def copy_ns(seconds: float) -> float:
    """The floor: 4 KiB copied by one slice assignment, the destination warm but not in the first cache."""
    target, data = bytearray(1 << 20), memoryview(os.urandom(RUN))
    view = memoryview(target)

    def copy() -> None:
        for at in range(0, 1 << 20, RUN):
            view[at : at + RUN] = data

    return least_ns(copy, seconds, 1, lambda: None) / ((1 << 20) // RUN)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    arguments.add_argument("--smoke", action="store_true", help="a moment per case: does it run at all?")
    seconds = 0.01 if arguments.parse_args().smoke else 0.6
    floor = copy_ns(seconds)
    print(f"Python {platform.python_version()}, {platform.machine()}; 4 KiB are copied in {floor:.0f} ns\n")
    titles = ("batch.size", "batch", "ns/batch", "ns/append", "held", "open in 64 MiB")
    print(f"{'strategy':<22}" + "".join(f"{title:>15}" for title in titles))
    rows = []
    for batch_bytes, batch_size in CASES:
        for strategy in STRATEGIES:
            row = measure(strategy, batch_bytes, batch_size, seconds)
            rows.append(row)
            numbers = list(asdict(row).values())[1:]
            print(f"{row.strategy:<22}" + "".join(f"{number:>15,.0f}" for number in numbers))
        print()
    if seconds > 0.1:
        RESULTS.mkdir(exist_ok=True)
        found = {"copy_4096_ns": floor, "rows": [asdict(row) for row in rows]}
        (RESULTS / "allocation.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
