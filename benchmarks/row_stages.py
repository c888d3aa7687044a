"""What a row of 110 bytes to 100 kB costs in the sink by stage: processor time, page faults.

    python -m benchmarks.row_stages [--sizes BYTES,...] [--megabytes N] [--smoke]

A task's producer without Spark reads an Arrow stream from a socket, in batches as large as Spark's by
default, and writes keyed rows with lz4, linger.ms 20 and batch.size 1 MiB to four partitions of a scripted
broker. Feeder and broker are other processes. Each stage is measured around its functions, less the stages
within it; "the rest" is what the threads took besides. Reading the clock adds some 2 us to a call.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import multiprocessing
import os
import resource
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from benchmarks import charts, peers
from benchmarks.direct_producer import BATCH_ROWS, row_batches
from benchmarks.surroundings import RESULTS
from kafka_sink.options import parse
from kafka_sink.rows.column_plan import ColumnPlan
from kafka_sink.spark.kept_memory import memory_kept
from kafka_sink.spark.writer import send_tables
from kafka_sink.task.producer import Producer

SIZES = (110, 1_000, 10_000, 100_000)
PARTITIONS = 4
# Spark's largest Arrow batch.
_BATCH_BYTES = 64 << 20
_SPARKS_BUFFER = 65_536
_DIGESTS = 1_000
# By stage: where its functions are.
STAGES = {
    "LZ4": ("records.compression:Lz4Codec.compress_block",),
    "putting records together": ("records.encoder:_interleave", "records.encoder:_sliced"),
    "hash and order": ("task.producer:extract", "task.producer:ordered_rows_of"),
    "heads of records": ("records.encoder:heads_of",),
    "joining blocks": ("accumulator.producer_batch:ProducerBatch.append",),
    "writing into chunks": (
        "accumulator.chunked_buffer:ChunkedBuffer.write_growing",
        "accumulator.chunked_buffer:ChunkedBuffer.write",
    ),
    "planning and sealing": ("task.producer:Producer.send",),
    "sender: headers, CRC32C": ("accumulator.producer_batch:ProducerBatch.write_header",),
    "sender: sockets": ("network.transport:PlaintextTransport.send",),
    "sender: requests, responses": ("sending.sender:Sender.run_once",),
}
READING, REST = "reading the stream", "the rest"


@dataclass
class Cost:
    """Of threads or a stage: seconds of processor time, page faults, calls."""

    seconds: float = 0.0
    faults: int = 0
    calls: int = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.seconds + other.seconds, self.faults + other.faults, self.calls + other.calls)

    def __sub__(self, other: Cost) -> Cost:
        return self + Cost(-other.seconds, -other.faults, -other.calls)


def _of_thread() -> Cost:
    # The kernel brings the seconds of getrusage up to date only when it looks at the thread.
    return Cost(time.thread_time(), resource.getrusage(resource.RUSAGE_THREAD).ru_minflt)


def _of_process() -> Cost:
    return Cost(time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_minflt)


class Stages(threading.local):
    """What functions cost. Each thread has a stack of those that it is in; ``costs`` is for all threads."""

    def __init__(self) -> None:
        self.inner: list[Cost] = []

    def around(self, stage: str, called: Callable[..., Any], costs: dict[str, Cost]) -> Callable[..., Any]:
        """``called``, measured."""

        @functools.wraps(called)
        def measured(*values: Any, **named: Any) -> Any:
            before = _of_thread()
            self.inner.append(Cost())
            try:
                return called(*values, **named)
            finally:
                whole = _of_thread() - before
                within = self.inner.pop()
                costs[stage] = costs.get(stage, Cost()) + (whole - within) + Cost(calls=1)
                if self.inner:
                    self.inner[-1] += whole

        return measured


def measure_stages(costs: dict[str, Cost]) -> Stages:
    """From now on ``costs`` has what each stage takes in this process."""
    stages = Stages()
    for stage, places in STAGES.items():
        for place in places:
            module, _, name = place.partition(":")
            owner = importlib.import_module(f"kafka_sink.{module}")
            *outer, name = name.split(".")
            for one in outer:
                owner = getattr(owner, one)
            setattr(owner, name, stages.around(stage, getattr(owner, name), costs))
    return stages


# -- rows, and the processes beside -------------------------------------------------------------------------


def rows_of(size: int, count: int) -> pa.RecordBatch:
    """Keyed rows; from 1 kB on digests in a frame of text, of which lz4 leaves two thirds."""
    if size < _DIGESTS:
        batches = pa.Table.from_batches(row_batches(-(-count // BATCH_ROWS)))
        return batches.slice(0, count).combine_chunks().to_batches()[0].select(["key", "value"])
    draw = np.random.default_rng(1)
    values = []
    for _ in range(count):
        digests = draw.bytes(20 * (size // 71)).hex()
        parts = (digests[at : at + 40] for at in range(0, len(digests), 40))
        text = ",".join(f'{{"part":{n},"digest":"{one}","ok":true}}' for n, one in enumerate(parts, 1))
        values.append(text[:size].ljust(size))
    keys = [f"k{number * 7919 % 1000000007:09d}" for number in range(count)]
    return pa.record_batch({"key": pa.array(keys, pa.string()), "value": pa.array(values, pa.string())})


def feed(stream: socket.socket, batch: pa.RecordBatch, batches: int) -> None:
    """Writes an Arrow stream as Spark does, and ends."""
    with stream.makefile("wb", _SPARKS_BUFFER) as file, pa.ipc.new_stream(file, batch.schema) as writer:
        for _ in range(batches):
            writer.write_batch(batch)


def answer(pipe: Connection) -> None:
    """A broker that takes everything and keeps nothing, until something comes through the pipe."""
    from tests.support import fake_broker, fake_log

    keep = fake_log.PartitionLog.append

    def append(log: Any, batch: Any) -> Any:
        object.__setattr__(batch, "data", batch.data[:61])
        return keep(log, batch)

    setattr(fake_log.PartitionLog, "append", append)  # noqa: B010 - no override, as its records are dropped
    with fake_broker.FakeCluster({"t": PARTITIONS}, max_message_bytes=8 << 20) as cluster:
        pipe.send(cluster.bootstrap_servers)
        pipe.recv()


# -- measuring ----------------------------------------------------------------------------------------------


def measure(size: int, megabytes: float) -> dict[str, Any]:
    """One run in this process, which must be new: the stages stay measured."""
    fresh = multiprocessing.get_context("fork")
    per_batch = max(1, min(BATCH_ROWS, _BATCH_BYTES // size, int(megabytes * 1e6 / size)))
    batch = rows_of(size, per_batch)
    batches = max(1, round(megabytes * 1e6 / size / per_batch))
    pipe, theirs = fresh.Pipe()
    broker = fresh.Process(target=answer, args=(theirs,), daemon=True)
    broker.start()
    tuned = {f"kafka.{name}": value for name, value in peers.TUNED.items()}
    given = {"kafka.bootstrap.servers": pipe.recv(), "topic": "t", "kafka.compression.type": "lz4", **tuned}
    options = parse(given).options
    with socket.create_server(("127.0.0.1", 0)) as server:
        there = socket.create_connection(server.getsockname())
        here, _ = server.accept()
    feeder = fresh.Process(target=feed, args=(there, batch, batches), daemon=True)
    feeder.start()
    there.close()
    producer = Producer(options)
    producer.plan = ColumnPlan.of([("key", "string"), ("value", "string")], "t")
    producer.begin()
    producer.send(batch.slice(0, 4))
    producer.finish()
    costs: dict[str, Cost] = {}
    stages = measure_stages(costs)
    producer.begin()
    before = _of_process()
    with memory_kept(), here.makefile("rb", _SPARKS_BUFFER) as file:
        stream = pa.ipc.open_stream(file)
        read = stages.around(READING, lambda: next(stream, None), costs)
        arrived: Iterator[pa.RecordBatch] = iter(read, None)
        send_tables(arrived, producer, producer.plan, options.linger_ms)
        result = producer.finish()
    whole = _of_process() - before
    rows = per_batch * batches
    assert result.records == rows, f"{result.records} of {rows} rows were acknowledged"
    costs[REST] = replace(functools.reduce(Cost.__sub__, costs.values(), whole), calls=0)
    producer.close()
    pipe.send(None)
    broker.join()
    feeder.join()
    return {"rows": rows, "stages": {stage: asdict(cost) for stage, cost in costs.items()}}


def measure_apart(size: int, megabytes: float) -> dict[str, Any]:
    """In a process of its own."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(measure, size, megabytes).result()


# -- what came out ------------------------------------------------------------------------------------------


def report(size: str, run: dict[str, Any]) -> None:
    """Prints each stage's microseconds a row, the dearest first."""
    stages = {stage: Cost(**cost) for stage, cost in run["stages"].items()}
    whole = functools.reduce(Cost.__add__, stages.values())
    print(f"\n{f'{int(size):,} bytes':30}{'us a row':>12}{'faults':>10}{'calls':>10}")
    for stage, cost in [*sorted(stages.items(), key=lambda item: -item[1].seconds), ("all", whole)]:
        line = f"{stage:30}{cost.seconds * 1e6 / run['rows']:12.3f}{cost.faults:10,}{cost.calls:10,}"
        print(line, flush=True)


def plot(found: dict[str, Any], file: Path) -> None:
    """For each size: each stage's processor time a kB of value."""
    sizes = found["sizes"]
    names = [*STAGES, READING, REST]
    made, all_axes = charts.figure(
        "What a row costs in the sink, by stage",
        [found["conditions"], "labels: nanoseconds a row; page faults a MB, where there are any"],
        (14, 4.4),
        1,
        len(sizes),
        sharey=True,
    )
    for axes, (size, run) in zip(all_axes[0], sizes.items(), strict=True):
        costs = [Cost(**run["stages"].get(name, {})) for name in names]
        kilobytes = run["rows"] * int(size) / 1e3
        drawn = charts.bars(
            axes, names, [cost.seconds * 1e6 / kilobytes for cost in costs], color=charts.OURS
        )
        nanoseconds = [cost.seconds * 1e9 / run["rows"] for cost in costs]
        faults = [round(cost.faults * 1e3 / kilobytes) for cost in costs]
        texts = [
            f"{one:,.0f}" + (f"; {few}" if few > 0 else "")
            for one, few in zip(nanoseconds, faults, strict=True)
        ]
        charts.label(axes, drawn, texts)
        axes.set_title(f"{int(size):,} bytes: {sum(nanoseconds) / 1e3:,.2f} us a row")
        axes.set_xlabel("us of processor time a kB")
    charts.save(made, file)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", help="bytes, separated by commas; nothing is kept if some are left out")
    parser.add_argument("--megabytes", type=float, default=500.0, help="of values, for each size")
    parser.add_argument("--smoke", action="store_true", help="tiny input, no files: does it run at all")
    options = parser.parse_args()
    chosen = [int(size) for size in options.sizes.split(",")] if options.sizes else list(SIZES)
    if options.smoke:
        chosen, options.megabytes = [110], 0.1
    found = {}
    for size in chosen:
        found[str(size)] = measure_apart(size, options.megabytes)
        report(str(size), found[str(size)])
    if options.smoke or options.sizes:
        return
    version = ".".join(map(str, sys.version_info[:2]))
    conditions = (
        f"one producer without Spark, {options.megabytes:,.0f} MB of keyed rows of each size, in Arrow "
        f"batches of 10,000 rows or 64 MiB, lz4, linger.ms 20, batch.size 1 MiB, {PARTITIONS} partitions, a "
        f"scripted broker in another process; {os.cpu_count()} cores, Python {version}; "
        "the clock of each stage counts"
    )
    RESULTS.mkdir(exist_ok=True)
    kept = {"conditions": conditions, "sizes": found}
    (RESULTS / "row_stages.json").write_text(json.dumps(kept, indent=1) + "\n")
    plot(kept, RESULTS / "row_stages.png")


if __name__ == "__main__":
    main()
