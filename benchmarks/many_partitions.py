"""Keyed rows over 1,000 partitions with batches that could be 4 MiB: rate and memory, against the JVM sink.

    python -m benchmarks.many_partitions [--part PART] [--rows N] [--repeats N] [--smoke]

``rates``: 5 million keyed 110-byte rows, batch.size 4 MiB, linger 1 s, buffer.memory 64 MiB, lz4, to a topic
of 1,000 partitions and to one of 4; the JVM sink with the same settings on 500,000 rows, as is the `full`
strategy of ours. Spark's sink has one producer an executor and this one has one a Python worker, of which
there are two here: so ours runs with 32 MiB each, too. ``memory``: the private memory (USS) of the largest
Python worker by codec, in workers that are new for every job. ``large``: the same with 30 kB rows. All
partitions have been written to before. Needs pyspark 4.1.1 for the JVM sink.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import charts, peers, throughput
from benchmarks.surroundings import keep, kept, machine, parser_of, rows_in
from benchmarks.worker_memory import Peak, WorkerMemory
from local_kafka import LocalBroker

MIB = 1 << 20
MANY, FEW = 1000, 4
LARGE_ROW = 30_000
WARM_ROWS = 100_000
SETTINGS = {
    "batch.size": str(4 * MIB),
    "linger.ms": "1000",
    "buffer.memory": str(64 * MIB),
    "compression.type": "lz4",
}
CODECS = ("none", "gzip", "snappy", "lz4", "zstd")
OURS, OURS_FEW = "kafka-chunked", "kafka-chunked, 4 partitions"
JVM, JVM_FEW = "JVM sink", "JVM sink, 4 partitions"
PARTS = ("rates", "memory", "large")
GOALS = ((OURS, JVM, 20.0), (OURS, OURS_FEW, 0.5))
MEMORY_GOALS_MIB = {"memory": 250, "large": 300}


@dataclass(frozen=True)
class Contender:
    """``share`` of the rows is enough for slow ones."""

    name: str
    form: str
    partitions: int
    share: float = 1.0
    changed: dict[str, str] = field(default_factory=dict)


CONTENDERS = (
    Contender(OURS, "kafka-chunked", MANY),
    Contender(OURS_FEW, "kafka-chunked", FEW),
    Contender(f"{OURS}, 32 MiB a worker", "kafka-chunked", MANY, changed={"buffer.memory": str(32 * MIB)}),
    Contender(f"{OURS}, full", "kafka-chunked", MANY, 0.1, {"buffer.memory.allocation.strategy": "full"}),
    Contender(JVM, "kafka", MANY, 0.1),
    Contender(JVM_FEW, "kafka", FEW, 0.1),
)


class Job:
    """Writes frames to topics whose logs exist, and checks that every row arrived."""

    def __init__(self, broker: LocalBroker, smoke: bool) -> None:
        self._bootstrap = broker.bootstrap_servers
        self._written = {MANY: 0, FEW: 0}
        for partitions, count in ((MANY, 50 if smoke else MANY), (FEW, FEW)):
            # A batch of batch.size must be welcome.
            broker.create_topic(_topic(partitions), count, config={"max.message.bytes": 8 * MIB})

    def warm(self, frame: Any) -> None:
        """Starts the Python workers, and makes the brokers open every partition's log."""
        for partitions in self._written:
            self.run("kafka-chunked", frame, partitions, {})

    def run(self, form: str, frame: Any, partitions: int, changed: dict[str, str]) -> float:
        """Seconds from ``save()`` to its return."""
        write, rows = peers.sink(form, {**SETTINGS, **changed}), frame.count()
        started = time.perf_counter()
        write(frame, self._bootstrap, _topic(partitions))
        took = time.perf_counter() - started
        self._written[partitions] += rows
        arrived = rows_in(self._bootstrap, _topic(partitions))
        assert arrived == self._written[partitions], f"{arrived} of {self._written[partitions]} rows arrived"
        return took


def _topic(partitions: int) -> str:
    return f"over-{partitions}"


# -- the parts ----------------------------------------------------------------------------------------


def rates(spark: Any, job: Job, folder: str, rows: int, repeats: int) -> dict[str, list[float]]:
    """Rows per second by contender, in an order that turns from round to round."""
    with_jvm = "spark-sql-kafka" in spark.conf.get("spark.jars", "")
    contenders = [one for one in CONTENDERS if with_jvm or one.form != "kafka"]
    frames = {one.share: throughput.source(spark, int(rows * one.share), folder) for one in contenders}
    job.warm(frames[0.1])
    found: dict[str, list[float]] = {one.name: [] for one in contenders}
    for turn in range(repeats):
        at = turn % len(contenders)
        for one in contenders[at:] + contenders[:at]:
            took = job.run(one.form, frames[one.share], one.partitions, one.changed)
            rate = int(rows * one.share) / took
            found[one.name].append(rate)
            print(f"  round {turn + 1}  {one.name:36}{rate:12,.0f} rows/s", flush=True)
    medians = {name: statistics.median(values) for name, values in found.items()}
    throughput.report_goals(GOALS, medians)
    return found


def memory(
    spark: Any, job: Job, warm: Any, frame: Any, part: str, codecs: Sequence[str]
) -> dict[str, dict[str, float]]:
    """Peaks of the largest worker by codec, in MiB."""
    found: dict[str, dict[str, float]] = {}
    goal = MEMORY_GOALS_MIB[part]
    job.warm(warm)
    for codec in codecs:
        with WorkerMemory(spark.sparkContext._gateway.proc.pid) as watch:
            took = job.run("kafka-chunked", frame, MANY, {"compression.type": codec})
        peak: Peak = watch.peak
        assert peak.workers, "saw no Python worker"
        found[codec] = {
            "private_mib": peak.private / MIB,
            "resident_mib": peak.resident / MIB,
            "seconds": took,
        }
        short = "" if peak.private < goal * MIB else "   too much"
        print(
            f"  {codec:8}{peak.private / MIB:6.0f} MiB private (goal < {goal}){short}, "
            f"{peak.resident / MIB:.0f} resident, {took:.1f} s",
            flush=True,
        )
    return found


def large_rows(spark: Any, rows: int, folder: str) -> Any:
    """Windows of a random text, so that no codec makes little of them."""

    def windows(batches: Iterator[Any]) -> Iterator[Any]:
        import base64
        import random

        import pyarrow as pa

        text = base64.b64encode(random.Random(4).randbytes(MIB))
        for batch in batches:
            numbers = batch.column(0).to_pylist()
            starts = [number * 7919 % (len(text) - LARGE_ROW) for number in numbers]
            keys = pa.array([f"k{number:09}" for number in numbers])
            for at in range(0, len(numbers), 1000):
                values = pa.array([text[start : start + LARGE_ROW] for start in starts[at : at + 1000]])
                yield pa.record_batch([keys[at : at + 1000], values], names=["key", "value"])

    path = f"{folder}/large-{rows}"
    made = spark.range(0, rows, 1, 2).mapInArrow(windows, "key string, value binary")
    made.write.option("compression", "none").mode("overwrite").parquet(path)
    # Spark's reader would hold 4,096 rows at a time, and fail for want of heap.
    spark.conf.set("spark.sql.parquet.columnarReaderBatchSize", "256")
    return spark.read.parquet(path)


# -- results ------------------------------------------------------------------------------------------


_TITLES = {
    "rates": "Rate with 1,000 partitions, and with 4",
    "memory": "Memory of the largest worker: 110-byte rows",
    "large": f"Memory of the largest worker: {LARGE_ROW:,}-byte rows",
}


def plot(parts: dict[str, Any], file: Path) -> None:
    values = {part: _values(part, figures["found"]) for part, figures in parts.items()}
    heights = [len(one) for one in values.values()]
    made, all_axes = charts.figure(
        "Keyed rows to 1,000 partitions",
        [
            *dict.fromkeys(figures["conditions"] for figures in parts.values()),
            "full: buffer.memory.allocation.strategy=full; 32 MiB a worker: together what the JVM sink has",
            "rates of full and of the JVM sink are of a tenth of the rows",
        ],
        (9, 1.6 + sum(0.75 + 0.27 * height for height in heights)),
        len(parts),
        height_ratios=[2 + height for height in heights],
    )
    for axes, (part, found) in zip(all_axes[:, 0], values.items(), strict=True):
        colours = [charts.OTHER if name.startswith("JVM") else charts.OURS for name in found]
        drawn = charts.bars(axes, list(found), list(found.values()), color=colours)
        charts.label(axes, drawn, [f"{one:,.0f}" for one in found.values()])
        axes.set_title(_TITLES[part])
        if part == "rates":
            axes.set_xlabel("thousand rows per second, acknowledged (median)")
        else:
            limit = MEMORY_GOALS_MIB[part]
            axes.set_xlabel(
                f"MiB of private memory (peak); the red line is the benchmark's limit, {limit} MiB"
            )
            axes.axvline(limit, color=charts.ALERT, linewidth=1)
    charts.save(made, file)


def _values(part: str, found: dict[str, Any]) -> dict[str, float]:
    """The values that a bar shows, by name."""
    if part == "rates":
        return {name: statistics.median(rates) / 1e3 for name, rates in found.items()}
    return {codec: one["private_mib"] for codec, one in found.items()}


def conditions_of(part: str, rows: int) -> str:
    import pyspark

    size = f"{LARGE_ROW:,}-byte" if part == "large" else "110-byte"
    return (
        f"{rows:,} keyed {size} rows, {MANY:,} partitions, batch.size 4 MiB, linger 1 s, "
        f"buffer.memory 64 MiB, {'lz4, ' if part == 'rates' else ''}pyspark {pyspark.__version__} local[2], "
        f"{machine()}"
    )


def run_parts(parts: list[str], rows: int, repeats: int, smoke: bool) -> dict[str, Any]:
    """The settings of one application: all its parts have workers that are reused, or none."""
    timed = "rates" in parts
    with_jvm = timed and peers.jvm_sink_is_there() and not smoke
    settings = {} if timed else {"spark.python.worker.reuse": "false"}
    outcome: dict[str, Any] = {}
    with (
        tempfile.TemporaryDirectory(prefix="kafka-chunked-bench-", ignore_cleanup_errors=True) as folder,
        LocalBroker() as broker,
        throughput.session(with_jvm, settings) as spark,
    ):
        job = Job(broker, smoke)
        for part in parts:
            count = rows // 125 if part == "large" else rows
            conditions = conditions_of(part, count)
            print(f"{part}: {conditions}", flush=True)
            found: Any
            if part == "rates":
                found = rates(spark, job, folder, count, repeats)
            else:
                codecs = CODECS[-1:] if smoke else CODECS
                # The rows are made once: making them again would delete files that other DataFrames of as
                # many rows read.
                data = (large_rows if part == "large" else throughput.source)(spark, count, folder)
                is_small = part != "large" and count <= WARM_ROWS
                warm = data if is_small else throughput.source(spark, WARM_ROWS, folder)
                found = memory(spark, job, warm, data, part, codecs)
            outcome[part] = {"conditions": conditions, "found": found}
    return outcome


def main() -> None:
    parser = parser_of(__doc__, "few rows")
    parser.add_argument("--part", choices=PARTS, help="only this one")
    parser.add_argument("--rows", type=int, default=5_000_000)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    rows, repeats = (4000, 1) if options.smoke else (options.rows, options.repeats)
    # Memory is measured in new workers, speed in reused ones.
    groups = [[options.part]] if options.part else [["rates"], ["memory", "large"]]
    if options.smoke and not options.part:
        groups = [list(PARTS)]
    found = {}
    for parts in groups:
        found.update(run_parts(parts, rows, repeats, options.smoke))
    if not options.smoke:
        # Parts may come from runs of their own; they are in one order.
        known = {**(kept("many_partitions") or {}), **found}
        keep("many_partitions", {part: known[part] for part in PARTS if part in known}, plot)


if __name__ == "__main__":
    main()
