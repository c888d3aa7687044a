"""Rate and pool memory of one producer as partitions grow from 1 to 5,000.

    python -m benchmarks.partition_growth [--seconds N] [--partitions 1,10,...] [--folder PATH] [--smoke]

Keyed, keyless and explicit-partition rows (110-byte values, lz4, batch.size 4 MiB, linger 1 s, buffer.memory
64 MiB), as fast as one task takes them; keyed rows also with the `full` strategy, with gzip and zstd, and to
topics that admit messages of 64 KiB only, so that batches are split. Each case writes a moment beforehand,
untimed, which teaches ratios and the broker's limit (splits are of both). 5,000 partitions of one 16 KiB
chunk are more than the pool has. No Spark; rows come in batches of 10,000, as Spark hands them over.

The broker keeps its data in memory where there is /dev/shm (--folder names another place): on a disk with
ext4, thousands of index files each cost a millisecond whenever the first row after a write-back comes, which
is what would be measured.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import pyarrow as pa

from benchmarks import charts
from benchmarks import direct_producer as direct
from benchmarks.direct_producer import MIB, pool_of
from benchmarks.surroundings import keep, machine, parser_of
from kafka_sink.model import TaskResult
from kafka_sink.rows.column_plan import ColumnPlan
from kafka_sink.spark.reading import send_tables
from kafka_sink.task.producer import Producer
from local_kafka import LocalBroker

SPLIT_LIMIT = 65_536
MEMORY = 64 * MIB
WARM_S = 1.0
WARM_ROUNDS = 2


@dataclass(frozen=True)
class Case:
    """``columns`` of (key, value, partition) that rows have; ``limit``: the topic's max.message.bytes.

    ``drawn``: whether the plot shows it."""

    name: str
    key: int | None = None
    partition: int | None = None
    strategy: str = "incremental"
    limit: int = 8 * MIB
    codec: str = "lz4"
    drawn: bool = True


CASES = (
    Case("keyless"),
    Case("keyed", key=0),
    Case("explicit", partition=2),
    Case("keyed, 64 KiB messages", key=0, limit=SPLIT_LIMIT),
    Case("keyed, full", key=0, strategy="full"),
    Case("keyed, full, 64 KiB messages", key=0, strategy="full", limit=SPLIT_LIMIT, drawn=False),
    Case("keyed, gzip", key=0, codec="gzip", drawn=False),
    Case("keyed, gzip, full", key=0, strategy="full", codec="gzip", drawn=False),
    Case("keyed, zstd", key=0, codec="zstd", drawn=False),
    Case("keyed, zstd, full", key=0, strategy="full", codec="zstd", drawn=False),
)


@dataclass(frozen=True)
class Row:
    case: str
    partitions: int
    rows_per_second: float
    processor_ns: float  # of this process, a row
    peak_used_mib: float
    peak_heap_mib: float
    batch_bytes: float
    requests: int
    retries: int
    splits: int
    pool_wait_s: float
    flush_s: float


def paced(batches: list[pa.RecordBatch], seconds: float) -> Iterator[pa.RecordBatch]:
    until = time.monotonic() + seconds
    for batch in cycle(batches):
        if time.monotonic() >= until:
            return
        yield batch


def write(producer: Producer, plan: ColumnPlan, batches: list[pa.RecordBatch], seconds: float) -> TaskResult:
    producer.begin()
    producer.plan = plan.narrowed()
    send_tables(paced(batches, seconds), producer, plan, direct.LINGER_MS)
    return producer.finish()


def run(broker: LocalBroker, case: Case, partitions: int, seconds: float) -> Row:
    topic = f"grows-{partitions}-{case.limit}"
    options = direct.options_for(
        broker.bootstrap_servers,
        compression_type=case.codec,
        buffer_memory_allocation_strategy=case.strategy,
        max_block_ms=600_000,
    )
    plan = ColumnPlan(value=1, topic=topic, key=case.key, partition=case.partition)
    batches = direct.row_batches(20, partitions=partitions)
    producer = Producer(options)
    try:
        warm = write(producer, plan, batches, min(WARM_S, seconds))
        started_s = time.process_time()
        result = write(producer, plan, batches, seconds)
        processor_s = time.process_time() - started_s
        pool = pool_of(producer)
    finally:
        producer.close()
    return Row(
        case.name,
        partitions,
        result.records / result.elapsed_ms * 1000,
        processor_s / max(1, result.records) * 1e9,
        pool.max_used_bytes / MIB,
        pool.max_heap_bytes / MIB,
        result.sent_bytes / max(1, result.batches),
        result.requests,
        warm.retries + result.retries,
        warm.splits + result.splits,
        result.pool_wait_ms / 1000,
        result.flush_ms / 1000,
    )


def prepare(broker: LocalBroker, counts: list[int], seconds: float) -> None:
    """Topics whose logs and indexes have been written to."""
    for limit in {case.limit for case in CASES}:
        for partitions in counts:
            topic = f"grows-{partitions}-{limit}"
            broker.create_topic(topic, partitions, config={"max.message.bytes": limit})
            producer = Producer(direct.options_for(broker.bootstrap_servers, max_block_ms=600_000))
            try:
                plan = ColumnPlan(value=1, topic=topic, partition=2)
                batches = direct.row_batches(10, partitions=partitions)
                for _ in range(WARM_ROUNDS):
                    write(producer, plan, batches, seconds)
            finally:
                producer.close()


def plot(found: dict[str, Any], file: Path) -> None:
    drawn = {case.name for case in CASES if case.drawn}
    rows = [row for row in found["rows"] if row["case"] in drawn]
    made, [[left, right]] = charts.figure(
        "One producer, by the number of partitions", [found["conditions"]], (11, 4.6), 1, 2
    )
    colours = (charts.OURS, charts.ALERT, charts.SECOND, "#d98b2b", charts.OTHER)
    for name, colour in zip(dict.fromkeys(row["case"] for row in rows), colours, strict=True):
        mine = [row for row in rows if row["case"] == name]
        style = "s--" if "full" in name else "o-"
        counts = [row["partitions"] for row in mine]
        rates = [row["rows_per_second"] / 1e3 for row in mine]
        left.plot(counts, rates, style, color=colour, label=name)
        right.plot(counts, [row["peak_used_mib"] for row in mine], style, color=colour, alpha=0.8)
    left.set_ylabel("thousand rows per second, acknowledged")
    left.set_title("Rate")
    right.set_ylabel("MiB taken from the pool, at most")
    right.set_title("Memory (the pool has 64 MiB)")
    for axes in (left, right):
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.yaxis.set_major_formatter("{x:,.0f}")
        axes.set_xlabel("partitions")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.6)
    made.legend(loc="outside right center")
    charts.save(made, file)


def measure(broker: LocalBroker, counts: list[int], seconds: float) -> list[Row]:
    prepare(broker, counts, min(WARM_S, seconds))
    titles = (
        *("partitions", "rows/s", "CPU ns/row", "pool MiB", "heap MiB", "batch", "requests", "retries"),
        *("splits", "waited s", "flush s"),
    )
    print(f"{'':30}" + "".join(f"{title:>12}" for title in titles), flush=True)
    rows = []
    for case in CASES:
        for partitions in counts:
            row = run(broker, case, partitions, seconds)
            rows.append(row)
            numbers: dict[str, Any] = asdict(row)
            del numbers["case"]
            shown = (f"{one:12,.1f}" if "_s" in name else f"{one:12,.0f}" for name, one in numbers.items())
            print(f"{case.name:30}" + "".join(shown), flush=True)
    return rows


def main() -> None:
    parser = parser_of(__doc__, "few partitions")
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--partitions", default="1,10,100,1000,5000")
    parser.add_argument("--folder", default="/dev/shm" if os.access("/dev/shm", os.W_OK) else None)
    options = parser.parse_args()
    counts = [int(word) for word in options.partitions.split(",")]
    if options.smoke:
        options.seconds, counts = 0.05, [20]
    conditions = (
        "one producer, 110-byte values, lz4 unless named, batch.size 4 MiB, linger 1 s, "
        f"buffer.memory 64 MiB, {options.seconds:.1f} s a case, "
        f"{machine(' with its data in memory' if options.folder == '/dev/shm' else '')}"
    )
    print(conditions, flush=True)
    tempfile.tempdir = options.folder
    with LocalBroker(heap="1g") as broker:
        rows = measure(broker, counts, options.seconds)
    if not options.smoke:
        keep("partition_growth", {"conditions": conditions, "rows": [asdict(row) for row in rows]}, plot)


if __name__ == "__main__":
    main()
