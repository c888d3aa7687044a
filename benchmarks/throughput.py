"""Rows per second from a DataFrame to acknowledged in Kafka, against the peers, in one run.

    python -m benchmarks.throughput [--rows N] [--repeats N] [--beside PYTHON] [--smoke]

Six million keyed 110-byte rows a job, lz4, four partitions, local[2], a real broker on the same machine; all
on one Spark, in an order drawn anew for each round and after a sync, so that neither a drift of the machine
nor a neighbour favours anyone. The first round is apart: JVM and workers are cold in it. Beside every rate
stands the processor time of Spark with its workers, and apart the broker's. Needs pyspark 4.1.1 for the JVM
sink (``make bench`` brings it); on another Spark the JVM sink is left out and the output says so.
``--beside`` names an interpreter with another PySpark, in which the contenders that run there are measured
afterwards.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks import charts, peers
from benchmarks.processor_time import Meter
from benchmarks.surroundings import keep, machine, parser_of, rows_in, run_beside, spark_session
from local_kafka import LocalBroker

PARTITIONS = 4
# The right end of the plot of processor time.
_MAX_COST_S = 4.5
_TUNED_MEANS = "tuned: linger.ms 20, batch.size 1 MiB"
_COUNTING_MEANS = (
    "a sink that only counts: what Spark takes to hand rows to Python, the bound of each sink in Python"
)
KEY = "format_string('k%09d', (id * 7919) % 1000000007) as key"
# 110 bytes.
JSON = """rpad(format_string(
    '{"id":%012d,"user":"u%06d","event":"click","page":"/item/%08d","ms":%06d,"ok":true}',
    id, id % 999983, (id * 31) % 99999989, (id * 17) % 999983), 110, ' ')"""
# ours, theirs, at least this many times as fast
GOALS = (
    ("kafka-chunked, defaults", "JVM sink, defaults", 1.9),
    ("kafka-chunked, tuned", "JVM sink, tuned", 1.5),
    ("kafka-chunked, tuned", "kafka-chunked, defaults", 1.0),
    ("kafka-chunked, tuned", "confluent-kafka produce_batch", 2.5),
    ("kafka-chunked, tuned", "confluent-kafka produce", 8.0),
    ("kafka-chunked, tuned", "kafka-python", 20.0),
)


@dataclass(frozen=True, slots=True)
class Job:
    """One write: rows a second, and seconds of processor time for a million rows."""

    rows_per_s: float
    spark_s: float
    broker_s: float


def medians(jobs: list[Job]) -> Job:
    """Each figure's median."""
    return Job(*(statistics.median(getattr(job, field) for job in jobs) for field in Job.__slots__))


def session(with_jvm_sink: bool, settings: Mapping[str, str] | None = None) -> Any:
    used = {"spark.driver.memory": "2g", **(settings or {})}
    return spark_session(settings=used, with_jvm_sink=with_jvm_sink)


def source(spark: Any, rows: int, folder: str) -> Any:
    """Rows as Parquet, so that making them costs every contender the same and little."""
    path = f"{folder}/rows-{rows}"
    made = spark.range(0, rows, 1, 2).selectExpr(KEY, f"{JSON} as value")
    made.write.mode("overwrite").parquet(path)
    return spark.read.parquet(path)


def run_job(
    one: peers.Contender, frame: Any, rows: int, servers: set[int], bootstrap: str, topic: str
) -> Job:
    """Writes the frame's ``rows`` to a topic and checks that they arrived. ``servers`` are the brokers."""
    meter = Meter(frame.sparkSession.sparkContext._gateway.proc.pid, servers)
    started = time.perf_counter()
    one.write(frame, bootstrap, topic)
    taken = time.perf_counter() - started
    spark_s, broker_s = meter.read()
    if one.writes:
        arrived = rows_in(bootstrap, topic)
        assert arrived == rows, f"{one.name}: {arrived} of {rows} rows arrived"
    return Job(rows / taken, spark_s / rows * 1e6, broker_s / rows * 1e6)


def measure(spark: Any, broker: LocalBroker, rows: int, repeats: int, folder: str) -> dict[str, list[Job]]:
    """The jobs of each contender, the cold one first."""
    jvm = any("spark-sql-kafka" in jar for jar in (spark.conf.get("spark.jars", None) or "").split(","))
    contenders = [one for one in peers.CONTENDERS if jvm or not one.name.startswith("JVM")]
    frames = {share: source(spark, int(rows * share), folder) for share in {one.share for one in contenders}}
    jobs: dict[str, list[Job]] = {one.name: [] for one in contenders}
    for round_number in range(repeats + 1):
        # Each round has another order: in a fixed order, each contender would always inherit the state that
        # the same one left.
        for one in random.Random(round_number).sample(contenders, len(contenders)):
            topic = f"{one.name.translate(str.maketrans(' ,', '--'))}-{round_number}"
            broker.create_topic(topic, PARTITIONS)
            os.sync()  # the previous contender's data is on the disk
            sent = int(rows * one.share)
            job = run_job(one, frames[one.share], sent, {broker.pid(0)}, broker.bootstrap_servers, topic)
            jobs[one.name].append(job)
            label = f"round {round_number}" if round_number else "cold"
            print(f"  {label:8} {one.name:32} {job.rows_per_s:12,.0f} rows/s", flush=True)
    return jobs


def report(jobs: dict[str, list[Job]]) -> None:
    """Prints medians and ratios."""
    steady = {name: medians(found[1:]) for name, found in jobs.items()}
    print(f"\n{'':34}{'rows/s':>12}{'min':>12}{'max':>12}{'cold':>12}{'Spark s/M':>11}{'broker s/M':>11}")
    for name, found in jobs.items():
        rates = [job.rows_per_s for job in found[1:]]
        print(
            f"{name:34}{steady[name].rows_per_s:12,.0f}{min(rates):12,.0f}{max(rates):12,.0f}"
            f"{found[0].rows_per_s:12,.0f}{steady[name].spark_s:11.2f}{steady[name].broker_s:11.2f}"
        )
    report_goals(GOALS, {name: job.rows_per_s for name, job in steady.items()})


def report_goals(goals: Sequence[tuple[str, str, float]], rates: Mapping[str, float]) -> None:
    """Prints ratios of rates next to their goals."""
    print(f"\n{'ratio':66}{'is':>7}{'goal':>7}")
    for ours, theirs, goal in goals:
        if theirs not in rates:
            print(f"{ours} / {theirs}: not measured (needs pyspark {peers.JVM_SINK_SPARK})")
            continue
        ratio = rates[ours] / rates[theirs]
        short = "" if ratio >= goal else f"   short by {100 * (1 - ratio / goal):.0f} %"
        print(f"{ours + ' / ' + theirs:66}{ratio:7.2f}{goal:7.1f}{short}")


def plot(runs: list[dict[str, Any]], file: Path) -> None:
    """Rates and processor time, one row of axes for each run."""
    heights = [len(run["jobs"]) for run in runs]
    made, all_axes = charts.figure(
        "Writing from Spark to Kafka: rate, and what it costs",
        [*(run["conditions"] for run in runs), _TUNED_MEANS, _COUNTING_MEANS],
        (11, 1.6 + 0.42 * sum(heights)),
        len(runs),
        2,
        height_ratios=heights,
        sharex="col",
        sharey="row",
    )
    for (rates, costs), run in zip(all_axes, runs, strict=True):
        found = {name: medians([Job(**job) for job in jobs[1:]]) for name, jobs in run["jobs"].items()}
        names = list(found)
        colours = [_colour(name) for name in names]
        millions = [found[name].rows_per_s / 1e6 for name in names]
        drawn = charts.bars(rates, names, millions, color=colours)
        charts.label(rates, drawn, [f"{value:.2f}" for value in millions])
        _draw_costs(costs, found, colours)
        rates.set_title(charts.spark_of(run["conditions"]))
    all_axes[-1, 0].set_xlabel("million rows per second, acknowledged (median)")
    all_axes[-1, 1].set_xlabel("processor seconds for a million rows (median)")
    charts.save(made, file)


def _colour(name: str) -> str:
    if name.startswith("kafka-chunked"):
        return charts.OURS
    return charts.SHADE if "counts" in name else charts.OTHER


def _draw_costs(axes: Any, found: dict[str, Job], colours: list[str]) -> None:
    names = list(found)
    spark = [found[name].spark_s for name in names]
    brokers = [found[name].broker_s for name in names]
    charts.bars(axes, names, spark, color=colours)
    drawn = charts.bars(axes, names, brokers, left=spark, color=charts.BROKER, label="broker")
    axes.barh([0], [0], color=charts.OTHER, label="Spark with its workers")
    texts = [f"{ours:.2f} + {broker:.2f}" for ours, broker in zip(spark, brokers, strict=True)]
    # The slowest contenders would make all other bars too short to compare: their bars go beyond the frame.
    sums = [ours + broker for ours, broker in zip(spark, brokers, strict=True)]
    inside = [text if total < _MAX_COST_S else "" for text, total in zip(texts, sums, strict=True)]
    charts.label(axes, drawn, inside)
    for place, (text, total) in enumerate(zip(texts, sums, strict=True)):
        if total >= _MAX_COST_S:
            axes.text(_MAX_COST_S - 0.05, place, f"{text} \u2192", ha="right", va="center", fontsize=8)
    axes.set_xlim(0, _MAX_COST_S)
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2, reverse=True)


def run_here(rows: int, repeats: int, with_jvm: bool) -> dict[str, Any]:
    import pyspark

    conditions = (
        f"{rows:,} keyed 110-byte rows, lz4, {PARTITIONS} partitions, "
        f"pyspark {pyspark.__version__} local[2], {machine()}"
    )
    print(conditions, flush=True)
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
        LocalBroker() as broker,
        session(with_jvm) as spark,
    ):
        jobs = measure(spark, broker, rows, repeats, folder)
    report(jobs)
    found = {name: [asdict(job) for job in of_one] for name, of_one in jobs.items()}
    return {"conditions": conditions, "jobs": found}


def main() -> None:
    parser = parser_of(__doc__, with_beside=True)
    parser.add_argument("--rows", type=int, default=6_000_000)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    rows, repeats = (4000, 1) if options.smoke else (options.rows, options.repeats)

    runs = [run_here(rows, repeats, peers.jvm_sink_is_there() and not options.smoke)]
    if options.out is not None:
        options.out.write_text(json.dumps(runs[0]) + "\n")
        return
    if options.beside:
        words = ("--rows", rows, "--repeats", repeats)
        runs.append(run_beside(options.beside, "benchmarks.throughput", *words))
    if not options.smoke:
        keep("throughput", runs, plot)


if __name__ == "__main__":
    main()
