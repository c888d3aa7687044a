"""The cost of exactly once: jobs and micro-batches with both guarantees in turns.

    python -m benchmarks.exactly_once [--smoke] [--parts jobs micro_batches]

Three brokers, topics with three replicas. ``jobs``: a million keyed rows with values of 100 bytes from
Parquet in two tasks, lz4, the guarantees alternating; with a name, so that rows are summed up.
``micro_batches``: 2,000 rows each by two tasks, median over the batches of a query. Both also give the
processor time of Spark with its Python processes, and of the brokers, which other load changes less. Brokers
first serve 250 micro-batches of each guarantee: just started ones spend half their time on compiling.
Parts that are not run keep their earlier figures.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import charts
from benchmarks.processor_time import Meter
from benchmarks.streaming import await_batches
from benchmarks.surroundings import keep, kept, machine, parser_of, spark_session
from local_kafka import LocalBroker

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_PARTS = ("jobs", "micro_batches")
GUARANTEES = ("at-least-once", "exactly-once")
PARTITIONS = 4
_COLOURS = {"at-least-once": charts.LIGHT, "exactly-once": charts.OURS}
GOAL_SHARE, GOAL_MORE_MS = 0.97, 50.0
_WARM_BATCHES = 250


def main() -> int:
    """0 if the goals are met."""
    parser = parser_of(__doc__)
    parser.add_argument("--parts", nargs="+", choices=_PARTS, default=_PARTS)
    arguments = parser.parse_args()
    parts = arguments.parts
    rows, turns, batches = (20_000, 1, 1) if arguments.smoke else (1_000_000, 7, 40)
    quick = {"transaction.abort.timed.out.transaction.cleanup.interval.ms": 1000}
    with LocalBroker(brokers=3, properties=quick) as cluster, tempfile.TemporaryDirectory() as folder:
        spark = spark_session()
        conditions = f"3 brokers, 3 replicas, pyspark {spark.version} local[2], {machine()}"
        found: dict[str, Any] = {"conditions": conditions}
        try:
            if not arguments.smoke:
                micro_batches(spark, cluster, Path(folder), "warm", len(GUARANTEES), _WARM_BATCHES)
            if "jobs" in parts:
                found["jobs"] = jobs(spark, cluster, Path(folder), rows, turns)
            if "micro_batches" in parts:
                turns = 2 if arguments.smoke else 4
                found["micro_batches"] = micro_batches(spark, cluster, Path(folder), "stream", turns, batches)
        finally:
            spark.stop()
    print(json.dumps(found, indent=1))
    if arguments.smoke:
        return 0
    found = (kept("exactly_once") or {}) | found
    keep("exactly_once", found, plot if set(_PARTS) <= found.keys() else None)
    share = found.get("jobs", {}).get("share_of_the_rate", 1.0)
    more = found.get("micro_batches", {}).get("more_ms", 0.0)
    return 0 if share >= GOAL_SHARE and more <= GOAL_MORE_MS else 1


def jobs(spark: SparkSession, cluster: LocalBroker, folder: Path, rows: int, turns: int) -> dict[str, Any]:
    """Seconds of each job and the share of the rate, from the medians after a turn to warm up."""
    cluster.create_topic("jobs", PARTITIONS)
    value = "rpad(cast(id as string), 100, 'x') value"
    spark.range(0, rows, 1, 2).selectExpr("cast(id % 1000 as string) key", value).write.parquet(
        str(folder / "rows")
    )
    frame = spark.read.parquet(str(folder / "rows"))
    seconds: dict[str, list[float]] = {guarantee: [] for guarantee in GUARANTEES}
    processor_s: dict[str, list[tuple[float, float]]] = {guarantee: [] for guarantee in GUARANTEES}
    for turn in range(turns + 1):
        for guarantee in GUARANTEES if turn % 2 else reversed(GUARANTEES):
            meter, began = _meter(spark, cluster), time.monotonic()
            written = frame.write.format("kafka-chunked").mode("append")
            written.options(**_options(cluster, "jobs", guarantee)).options(**_name(guarantee, turn)).save()
            if turn:
                seconds[guarantee].append(round(time.monotonic() - began, 3))
                processor_s[guarantee].append(meter.read())
    share = _ratio({guarantee: statistics.median(taken) for guarantee, taken in seconds.items()})
    return {
        "rows": rows,
        "seconds": seconds,
        "share_of_the_rate": share,
        "processor_s": {name: _medians(taken) for name, taken in processor_s.items()},
    }


def _name(guarantee: str, turn: int) -> dict[str, str]:
    return {"txnAppId": "jobs", "txnVersion": str(turn)} if guarantee == "exactly-once" else {}


def _ratio(medians: dict[str, float]) -> float:
    return round(medians["at-least-once"] / medians["exactly-once"], 3)


def _meter(spark: SparkSession, cluster: LocalBroker) -> Meter:
    jvm = spark.sparkContext._gateway.proc.pid  # type: ignore[union-attr]
    return Meter(jvm, [cluster.pid(broker) for broker in range(3)])


def _medians(taken: list[tuple[float, float]]) -> dict[str, float]:
    spark, brokers = (round(statistics.median(one), 4) for one in zip(*taken, strict=True))
    return {"spark": spark, "brokers": brokers}


def micro_batches(
    spark: SparkSession, cluster: LocalBroker, folder: Path, name: str, turns: int, batches: int
) -> dict[str, Any]:
    """Milliseconds of a whole micro-batch for each guarantee, the queries in turns, one after the other.

    ``name``: of the topics and checkpoints, with the turn behind it.
    """
    taken: dict[str, list[int]] = {guarantee: [] for guarantee in GUARANTEES}
    processor_s: dict[str, list[tuple[float, float]]] = {guarantee: [] for guarantee in GUARANTEES}
    for turn in range(turns):
        guarantee = GUARANTEES[turn % 2]
        topic = f"{name}-{turn}"
        cluster.create_topic(topic, PARTITIONS)
        meter = _meter(spark, cluster)
        times = _run_query(_rate(spark), _options(cluster, topic, guarantee), folder / topic, batches)
        # The first ones start processes and load modules.
        taken[guarantee] += [one for number, one in sorted(times.items()) if number >= 3]
        used, of_brokers = meter.read()
        processor_s[guarantee].append((used / len(times), of_brokers / len(times)))
    medians = {guarantee: statistics.median(one) for guarantee, one in taken.items()}
    more = medians["exactly-once"] - medians["at-least-once"]
    return {
        "median_ms": medians,
        "more_ms": more,
        "batches_ms": taken,
        "processor_s": {name: _medians(one) for name, one in processor_s.items()},
    }


def _rate(spark: SparkSession) -> DataFrame:
    source = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 2000)
    return source.option("numPartitions", 2).load().selectExpr("cast(value as string) value")


def _run_query(frame: DataFrame, options: dict[str, str], checkpoint: Path, batches: int) -> dict[int, int]:
    """Milliseconds by batch."""
    query = (
        frame.writeStream.format("kafka-chunked")
        .options(**options)
        .option("checkpointLocation", str(checkpoint))
        .start()
    )
    await_batches(query, batches + 2)
    query.stop()
    return {one["batchId"]: one["durationMs"].get("triggerExecution", 0) for one in query.recentProgress}


def _options(cluster: LocalBroker, topic: str, guarantee: str) -> dict[str, str]:
    return {
        "kafka.bootstrap.servers": cluster.bootstrap_servers,
        "topic": topic,
        "kafka.compression.type": "lz4",
        "delivery.guarantee": guarantee,
        "log.summary": "false",
    }


def plot(found: dict[str, Any], file: Path) -> None:
    """Each job and micro-batch as a dot, medians as bars."""
    made, [[rates, times]] = charts.figure(
        "What exactly once costs",
        [
            f"{found['conditions']}; bars are medians, dots the single jobs and micro-batches",
            "left: lz4, 2 tasks; right: 2 tasks",
        ],
        (8.5, 4.6),
        columns=2,
    )
    millions = found["jobs"]["rows"] / 1e6
    of_jobs = {name: [millions / one for one in taken] for name, taken in found["jobs"]["seconds"].items()}
    _draw_spread(rates, of_jobs, f"Jobs of {millions:.0f} M rows", "million rows per second")
    _draw_spread(times, found["micro_batches"]["batches_ms"], "Micro-batches of 2,000 rows", "milliseconds")
    charts.save(made, file)


def _draw_spread(axes: Any, by_guarantee: dict[str, list[float]], title: str, unit: str) -> None:
    for place, (name, values) in enumerate(by_guarantee.items()):
        axes.bar(place, statistics.median(values), 0.6, color=_COLOURS[name])
        spread = [place + 0.4 * (one / max(1, len(values) - 1) - 0.5) for one in range(len(values))]
        axes.plot(spread, values, ".", color=charts.OTHER, markersize=4)
    axes.set_xticks(range(len(by_guarantee)), list(by_guarantee))
    axes.set_title(title)
    axes.set_ylabel(unit)


if __name__ == "__main__":
    sys.exit(main())
