"""What a record batch's memory costs, incremental against full: nanoseconds on one core, no broker.

    python -m benchmarks.allocation [--smoke]

First memory alone: a batch is opened, given its 61-byte header and runs of rows (about 4 KiB for 1,000 open
partitions), each after a reservation, then viewed, trimmed and released: all that the accumulator asks of
it. ``scattered`` are chunks in random order, as an hour of uneven partitions leaves them, ``fresh`` memory
that the kernel has to back first. Then whole appends: units of 110-byte rows through the accumulator, from
columns to sealed batches and back to the pool, with as much buffer.memory as ``full`` asks for. Times are the
least of many rounds, so that whatever else runs here is left out.
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
from typing import Any

import pyarrow as pa

from benchmarks import charts
from benchmarks.surroundings import RESULTS
from kafka_sink.accumulator.batch_buffer import BufferAllocator
from kafka_sink.accumulator.batch_limits import SizeEstimates
from kafka_sink.accumulator.buffer_pool import BufferPool
from kafka_sink.accumulator.chunked_buffer import (
    IncrementalAllocator,
    chunk_size,
)
from kafka_sink.accumulator.producer_batch import BatchState
from kafka_sink.accumulator.record_accumulator import (
    RecordAccumulator,
)
from kafka_sink.accumulator.record_appender import RecordAppender
from kafka_sink.accumulator.single_buffer import FullAllocator
from kafka_sink.model import CompressionType, TopicPartition
from kafka_sink.options import SinkOptions
from kafka_sink.records.ordered_rows import OrderedRows
from kafka_sink.records.record_columns import RecordColumns

HEADER = bytes(61)
RUN = 4096
MEMORY = 64 << 20
# bytes in the batch, batch.size
CASES = (
    *((4096, 1 << 14), (1 << 14, 1 << 14)),
    *((4096, 1 << 20), (1 << 16, 1 << 20), (1 << 20, 1 << 20)),
    *((4096, 4 << 20), (1 << 20, 4 << 20)),
)
# batch.size, partitions, rows for each in a unit, of which there are eight
APPEND_CASES = ((4 << 20, 1000, 4), (4 << 20, 1000, 30), (4 << 20, 100, 150), (1 << 20, 4, 4000))
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


def allocator_of(strategy: str, batch_size: int, memory: int = MEMORY) -> tuple[BufferPool, BufferAllocator]:
    full = strategy == "full"
    size = batch_size if full else chunk_size(batch_size)
    pool = BufferPool(memory, size, clock_ms=lambda: time.monotonic() * 1000)
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


# -- whole appends ------------------------------------------------------------------------------------


@dataclass
class AppendRow:
    """``batch_ns`` is a record batch's share from columns to release, ``run_ns`` that of one run of rows."""

    strategy: str
    batch_size: int
    partitions: int
    batch_bytes: float
    batch_ns: float
    run_ns: float
    pool_bytes: int


def unit_over(partitions: list[TopicPartition], rows: int) -> OrderedRows:
    """``rows`` keyed 110-byte rows for each partition."""
    count = rows * len(partitions)
    keys = pa.array([b"k%09d" % number for number in range(count)], pa.binary())
    values = pa.array([b"%0110d" % number for number in range(count)], pa.binary())
    columns = RecordColumns.of(keys, (values,), None)
    starts = list(range(0, count + 1, rows))
    return OrderedRows(columns, 0, partitions, starts)


class Appending:
    """An accumulator without a sender: what it took is settled by hand."""

    def __init__(self, strategy: str, batch_size: int, partitions: int, rows: int, units: int) -> None:
        # `full` holds a batch.size for each; the kernel backs what is written.
        memory = max(MEMORY, 2 * partitions * batch_size)
        settings = SinkOptions(
            bootstrap_servers=(),
            batch_size=batch_size,
            linger_ms=10**9,
            max_block_ms=0,
            delivery_timeout_ms=10**9,
            buffer_memory=memory,
            compression_type=CompressionType.NONE,
        )
        self.pool, allocator = allocator_of(strategy, batch_size, memory)
        self._accumulator = RecordAccumulator(settings, allocator)
        estimates = SizeEstimates(self._accumulator.options, None, self._accumulator.limits)
        self._appender = RecordAppender(self._accumulator, estimates, lambda: 0.0, lambda: None)
        self._unit = unit_over([TopicPartition("t", number) for number in range(partitions)], rows)
        self._units = units
        self.batches = 0
        self.batch_bytes = 0.0

    def round(self) -> None:
        for _ in range(self._units):
            self._appender.append(self._unit, lambda: None)
        self._appender.flush()
        accumulator = self._accumulator
        with accumulator.planning() as batches:
            queues = [batches.queue(partition) for partition in {b.partition: None for b in batches.queued()}]
        self.batches = size = 0
        while accumulator.incomplete:
            for batch in accumulator.drain(0, queues, sys.maxsize, lambda _: True):  # type: ignore[arg-type]
                size += batch.size
                self.batches += 1
                batch.move_to(BatchState.IN_FLIGHT)
                accumulator.finish(batch, BatchState.SUCCEEDED, lambda: None)
        accumulator.begin_task()
        self.batch_bytes = size / self.batches


def measure_append(strategy: str, batch_size: int, partitions: int, rows: int, seconds: float) -> AppendRow:
    units = 8
    appending = Appending(strategy, batch_size, partitions, rows, units)
    ns = least_ns(appending.round, seconds, 1, lambda: None)
    return AppendRow(
        strategy,
        batch_size,
        partitions,
        appending.batch_bytes,
        ns / appending.batches,
        ns / units / partitions,
        appending.pool.metrics().max_used_bytes,
    )


# -- results ------------------------------------------------------------------------------------------


def print_table(first: str, titles: tuple[str, ...], rows: list[Any], group: int) -> None:
    print(f"\n{first:<22}" + "".join(f"{title:>15}" for title in titles))
    for number, row in enumerate(rows):
        if number and not number % group:
            print()
        name, *numbers = asdict(row).values()
        print(f"{name:<22}" + "".join(f"{value:>15,.0f}" for value in numbers))


def plot(found: dict[str, Any], file: Path) -> None:
    made, [[left, right]] = charts.figure(
        "What memory in chunks costs, against one buffer of batch.size (full)",
        [
            f"{found['conditions']}; labels: \u00b5s a record batch",
            "4 of 16 KiB: batches with 4 KiB of rows, batch.size 16 KiB; scattered: chunks in random order",
        ],
        (11, 5),
        1,
        2,
    )
    shown = [row for row in found["rows"] if row["strategy"] in STRATEGIES[:3]]
    _draw(left, shown, "Memory alone")
    _draw(right, found["appends"], "Columns to sealed batches and back")
    made.legend(*left.get_legend_handles_labels(), loc="outside upper right", ncols=3)
    charts.save(made, file)


def _draw(axes: Any, rows: list[dict[str, Any]], title: str) -> None:
    """Bars of every strategy, as times the time of ``full`` in the same case."""
    names = list(dict.fromkeys(row["strategy"] for row in rows))
    cases = [_case(row) for row in rows if row["strategy"] == names[0]]
    whole = [row["batch_ns"] for row in rows if row["strategy"] == names[0]]
    height = 0.8 / len(names)
    for place, (name, colour) in enumerate(
        zip(names, (charts.OTHER, charts.OURS, charts.LIGHT), strict=False)
    ):
        took = [row["batch_ns"] for row in rows if row["strategy"] == name]
        at = [number + (place - (len(names) - 1) / 2) * height for number in range(len(cases))]
        times = [one / full for one, full in zip(took, whole, strict=True)]
        drawn = axes.barh(at, times, height=height * 0.9, color=colour, label=name)
        charts.label(axes, drawn, [f"{one / 1000:,.3g}" for one in took])
    axes.set_yticks(range(len(cases)), cases)
    axes.invert_yaxis()
    axes.set_xlabel("time, as times that of full")
    axes.set_title(title)


def _case(row: dict[str, Any]) -> str:
    size = f"{row['batch_bytes'] / 1024:,.0f} of {row['batch_size'] >> 10:,} KiB"
    return size + (f", {row['partitions']:,} partitions" if "partitions" in row else "")


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    arguments.add_argument("--dry", action="store_true", help="write no files")
    arguments.add_argument("--smoke", action="store_true", help="a moment per case: does it run at all?")
    options = arguments.parse_args()
    seconds = 0.01 if options.smoke else 0.6
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    floor = copy_ns(seconds)
    machine = f"Python {platform.python_version()}, {platform.machine()}"
    conditions = f"one core, {machine}; 4 KiB are copied in {floor:.0f} ns"
    print(conditions)
    memory = [measure(strategy, *case, seconds) for case in CASES for strategy in STRATEGIES]
    titles = ("batch.size", "batch", "ns/batch", "ns/append", "held", "open in 64 MiB")
    print_table("strategy", titles, memory, len(STRATEGIES))
    cases = APPEND_CASES[:1] if options.smoke else APPEND_CASES
    appends = [measure_append(name, *case, 3 * seconds) for case in cases for name in STRATEGIES[:2]]
    titles = ("batch.size", "partitions", "batch", "ns/batch", "ns/run", "pool")
    print_table("whole appends", titles, appends, 2)
    if options.smoke or options.dry:
        return
    RESULTS.mkdir(exist_ok=True)
    found = {
        "conditions": conditions,
        "copy_4096_ns": floor,
        "rows": [asdict(row) for row in memory],
        "appends": [asdict(row) for row in appends],
    }
    (RESULTS / "allocation.json").write_text(json.dumps(found, indent=1) + "\n")
    plot(found, RESULTS / "allocation.png")


if __name__ == "__main__":
    main()
