"""The cost of a row for each size of its value, 20 bytes to 100 kB, with every sink in one run.

    python -m benchmarks.value_sizes [--sizes BYTES,...] [--repeats N] [--smoke]

Keyed rows from Parquet, lz4, four partitions, local[2], a real broker on this machine. Besides both sinks,
at their defaults and tuned: Spark's ``noop`` sink, which takes rows in the JVM, and a sink that only counts,
which takes them in Python. Contenders take turns, in an order drawn anew for each round; the first round is
apart, since caches are cold in it. "tune" is with the settings of ``kafka_sink.tune``. Needs pyspark 4.1.1
for the JVM sink.
"""

from __future__ import annotations

import os
import random
import tempfile
from dataclasses import asdict, replace
from typing import Any

import kafka_sink
from benchmarks import charts, peers
from benchmarks.surroundings import delete_topic, keep, parser_of
from benchmarks.throughput import PARTITIONS, Job, medians, run_job, session
from benchmarks.throughput_shapes import Case
from local_kafka import LocalBroker

# Value bytes, and rows of a job: some seconds for each sink.
ROWS = {20: 4_000_000, 110: 3_000_000, 1_000: 500_000, 10_000: 50_000, 100_000: 5_000}
NOOP, COUNTING = "noop", "counting sink"
OURS, OURS_TUNED = "kafka-chunked", "kafka-chunked, tuned"
JVM, JVM_TUNED = "JVM sink", "JVM sink, tuned"
IN_PYTHON = (COUNTING, OURS, OURS_TUNED)
KEY_BYTES = 10
Jobs = dict[str, list[Job]]


def contenders(with_jvm: bool) -> list[peers.Contender]:
    """The contenders that run here."""

    def noop(frame: Any, _bootstrap: str, _topic: str) -> None:
        frame.write.format("noop").mode("append").save()

    found = [
        peers.Contender(NOOP, noop, writes=False),
        peers.Contender(COUNTING, peers.count_only, writes=False),
        peers.Contender(OURS, peers.sink("kafka-chunked", peers.LZ4)),
        peers.Contender(OURS_TUNED, peers.sink("kafka-chunked", peers.TUNED)),
    ]
    if with_jvm:
        found += [
            peers.Contender(JVM, peers.sink("kafka", peers.LZ4)),
            peers.Contender(JVM_TUNED, peers.sink("kafka", peers.TUNED)),
        ]
    return found


def with_tune(one: peers.Contender, row_bytes: int) -> peers.Contender:
    """The same in a session with the settings of ``kafka_sink.tune``."""

    def write(frame: Any, bootstrap: str, topic: str) -> None:
        made = kafka_sink.tune(frame.sparkSession, row_bytes)
        try:
            one.write(frame, bootstrap, topic)
        finally:
            for name in made:
                frame.sparkSession.conf.unset(name)

    return replace(one, name=f"{one.name}, tune", write=write)


def measure(
    broker: LocalBroker, frame: Any, size: int, rows: int, repeats: int, everyone: list[peers.Contender]
) -> Jobs:
    """The jobs of each contender with values of ``size`` bytes, the cold one first."""
    # Spark reads 4,096 rows at once, which do not fit into its memory of 1 GB if each has 100 kB.
    frame.sparkSession.conf.set("spark.sql.parquet.columnarReaderBatchSize", str(min(4096, 2**26 // size)))
    jobs: Jobs = {one.name: [] for one in everyone}
    for number in range(repeats + 1):
        for one in random.Random(number).sample(everyone, len(everyone)):
            topic = f"{one.name}-{size}-{number}".replace(", ", "-").replace(" ", "-")
            broker.create_topic(topic, PARTITIONS)
            os.sync()  # the previous contender's data is on the disk
            jobs[one.name].append(run_job(one, frame, rows, {broker.pid(0)}, broker.bootstrap_servers, topic))
            delete_topic(broker.bootstrap_servers, topic)  # all topics would take 40 GB
    return jobs


def report(size: int, jobs: Jobs) -> None:
    """Prints one size's medians; the ratios are to the tuned JVM sink."""
    steady = {name: medians(found[1:]) for name, found in jobs.items()}
    peer = steady.get(JVM_TUNED)
    print(f"\n{f'{size} bytes':22}{'rows/s':>11}{'us a row':>10}{'Spark us':>10}{'broker us':>10}", end="")
    print(f"{'rate':>8}{'Spark':>7}" if peer else "", flush=True)
    for name, job in steady.items():
        line = f"{name:22}{job.rows_per_s:11,.0f}{1e6 / job.rows_per_s:10.2f}{job.spark_s:10.2f}"
        line += f"{job.broker_s:10.2f}"
        if peer:
            line += f"{job.rows_per_s / peer.rows_per_s:8.2f}{job.spark_s / peer.spark_s:7.2f}"
        print(line, flush=True)


def plot(shown: dict[str, dict[str, list[dict[str, float]]]], file: Any) -> None:
    """For each size, rates and processor time as multiples of the tuned JVM sink's."""
    steady = {
        size: {name: medians([Job(**job) for job in found[1:]]) for name, found in jobs.items()}
        for size, jobs in shown.items()
    }
    heights = [len(jobs) for jobs in steady.values()]
    made, all_axes = charts.figure(
        "A row's cost by the size of its value",
        ["labels: rows a second; microseconds of processor time a row, Spark + broker"],
        (11, 1.4 + 0.26 * sum(heights)),
        len(steady),
        2,
        height_ratios=heights,
        sharex="col",
        sharey="row",
    )
    for (rates, costs), (size, jobs) in zip(all_axes, steady.items(), strict=True):
        peer = jobs[JVM_TUNED]
        names = list(jobs)
        colours = [charts.OURS if name.startswith(OURS) else charts.OTHER for name in names]
        speed = [job.rows_per_s / peer.rows_per_s for job in jobs.values()]
        charts.label(
            rates,
            charts.bars(rates, names, speed, color=colours),
            [f"{job.rows_per_s:,.0f}" for job in jobs.values()],
        )
        spark = [job.spark_s / peer.spark_s for job in jobs.values()]
        charts.bars(costs, names, spark, color=colours)
        broker = [job.broker_s / peer.spark_s for job in jobs.values()]
        charts.label(
            costs,
            charts.bars(costs, names, broker, left=spark, color=charts.BROKER),
            [f"{job.spark_s:.2f} + {job.broker_s:.2f}" for job in jobs.values()],
        )
        rates.set_title(f"{int(size):,} bytes")
    all_axes[-1, 0].set_xlabel("rate, tuned JVM sink = 1")
    all_axes[-1, 1].set_xlabel("processor time, tuned JVM sink's Spark = 1")
    charts.save(made, file)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--sizes", help="bytes, separated by commas; nothing is kept if some are left out")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--share", type=float, default=1.0, help="of each size's rows")
    options = parser.parse_args()
    chosen = [int(size) for size in options.sizes.split(",")] if options.sizes else list(ROWS)
    share, repeats = (0.001, 1) if options.smoke else (options.share, options.repeats)

    everything: dict[int, Jobs] = {}
    with_jvm = peers.jvm_sink_is_there()
    with (
        tempfile.TemporaryDirectory(prefix="kafka-chunked-bench-", ignore_cleanup_errors=True) as folder,
        session(with_jvm) as spark,
        LocalBroker(properties={"log.segment.delete.delay.ms": "1000"}) as broker,
    ):
        for size in chosen:
            rows = int(ROWS[size] * share)
            frame = Case("", rows, size).frame(spark, folder)
            everyone = contenders(with_jvm)
            everyone += [with_tune(one, size + KEY_BYTES) for one in everyone if one.name in IN_PYTHON]
            everything[size] = measure(broker, frame, size, rows, repeats, everyone)
            report(size, everything[size])
    if options.smoke or options.sizes:
        return
    shown = {
        str(size): {name: [asdict(job) for job in found] for name, found in jobs.items()}
        for size, jobs in everything.items()
    }
    keep("value_sizes", shown, plot if with_jvm else None)


if __name__ == "__main__":
    main()
