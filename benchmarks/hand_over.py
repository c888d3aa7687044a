"""What Spark's hand-over of rows to a Python sink costs by Spark's settings, one by one and together.

    python -m benchmarks.hand_over [--sizes BYTES,...] [--repeats N] [--patched JAR] [--smoke]

Processor time of a row, without the broker's: rows from Parquet into Spark's ``noop`` sink, which takes them
in the JVM, and into a sink that only counts, which takes them in Python. The difference is the hand-over.
Settings of a session take turns in one application. Those that need an application of their own have one in
each round. ``--patched``: a jar with classes of Spark's that stand before its own (docs/spark-patches.md).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from typing import Any

import kafka_sink
from benchmarks import charts, peers
from benchmarks.surroundings import RESULTS, environment
from benchmarks.throughput import run_job, session
from benchmarks.throughput_shapes import Case
from benchmarks.value_sizes import COUNTING, KEY_BYTES, NOOP, contenders

# Value bytes, and rows of a job.
ROWS = {110: 1_000_000, 1_000: 200_000, 10_000: 30_000}
_ARROW = "spark.sql.execution.arrow."
DEFAULTS, TUNE = "defaults", "kafka_sink.tune"
# Of a session. A job with ``tune`` has what that sets for its size.
OF_SESSION: dict[str, dict[str, str]] = {
    DEFAULTS: {},
    TUNE: {},
    "maxBytesPerBatch=2147483647": {f"{_ARROW}maxBytesPerBatch": str(2**31 - 1)},
    "maxRecordsPerBatch=1000": {f"{_ARROW}maxRecordsPerBatch": "1000"},
    "compression.codec=lz4": {f"{_ARROW}compression.codec": "lz4"},
    "udf.buffer.size=1 MiB": {"spark.sql.execution.python.udf.buffer.size": "1048576"},
}
# Of an application.
SOCKETS = {"spark.python.unix.domain.socket.enabled": "true"}
PIPELINED = {"spark.python.udf.pipelined.enabled": "true"}
OF_APPLICATION: dict[str, dict[str, str]] = {DEFAULTS: {}, "Unix sockets": SOCKETS}
PATCHED = "patched Spark"
Costs = dict[str, list[float]]


def application(name: str, settings: dict[str, str], sizes: list[int], share: float, folder: str) -> None:
    """Prints a line of JSON for each job: size, settings and microseconds of processor time a row."""
    spark = session(with_jvm_sink=False, settings=settings)
    noop, counting = (one for one in contenders(False) if one.name in (NOOP, COUNTING))
    tried = OF_SESSION if name == DEFAULTS else {DEFAULTS: {}, TUNE: {}}
    jobs = [
        (own if name == DEFAULTS else name if own == DEFAULTS else f"{name}, {own}", own) for own in tried
    ]
    for size in sizes:
        rows = int(ROWS[size] * share)
        frame = Case("", rows, size).frame(spark, folder)

        nothing = frame.where("key is null")

        def cost(one: peers.Contender, frame: Any = frame, nothing: Any = nothing, rows: int = rows) -> float:
            # Less what a job takes that has no rows: planning, and processes for it.
            begun = run_job(one, nothing, rows, set(), "", "").spark_s
            return run_job(one, frame, rows, set(), "", "").spark_s - begun

        cost(counting)  # workers start, and code is compiled
        print(json.dumps([size, NOOP, cost(noop)]), flush=True)
        for shown, own in random.sample(jobs, len(jobs)):
            made = dict(tried[own])
            for key, value in made.items():
                spark.conf.set(key, value)
            if own == TUNE:
                made = kafka_sink.tune(spark, size + KEY_BYTES)
            print(json.dumps([size, shown, cost(counting)]), flush=True)
            for key in made:
                spark.conf.unset(key)
    spark.stop()


def run(
    name: str, settings: dict[str, str], sizes: list[int], share: float, folder: str, costs: dict[int, Costs]
) -> None:
    """One application in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.hand_over", "--application"]
    command += [name, json.dumps(settings), json.dumps(sizes), str(share), folder]
    with subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("["):
                size, shown, cost = json.loads(line)
                costs[size][shown].append(cost)
                print(f"  {size:7,} bytes  {shown:36}{cost * 1000:9,.0f} ns", flush=True)
    if process.returncode:
        raise RuntimeError(f"{name} ended with {process.returncode}")


def report(costs: dict[int, Costs]) -> None:
    """Prints medians in ns a row: the whole job, and the hand-over, without what ``noop`` takes."""
    for size, found in costs.items():
        noop = statistics.median(found[NOOP]) * 1000
        base = statistics.median(found[DEFAULTS]) * 1000 - noop
        print(f"\n{size:,} bytes: noop {noop:,.0f} ns a row")
        print(f"{'':36}{'job':>9}{'hand-over':>11}{'of defaults':>13}{'least to most':>20}")
        for name, each in found.items():
            if name == NOOP:
                continue
            cost = statistics.median(each) * 1000
            spread = f"{min(each) * 1000:,.0f} to {max(each) * 1000:,.0f}"
            print(
                f"{name:36}{cost:9,.0f}{cost - noop:11,.0f}{(cost - noop) / base:13.2f}{spread:>20}",
                flush=True,
            )


def plot(costs: dict[str, Costs], conditions: str, file: Any) -> None:
    """For each size, the hand-over as a multiple of what it takes with Spark's defaults."""
    made, all_axes = charts.figure(
        "The hand-over of a row to Python, by Spark's settings",
        [conditions, "labels: nanoseconds of processor time a row; a job with noop is taken off"],
        (11, 1.4 + 0.3 * sum(map(len, costs.values()))),
        len(costs),
        1,
        sharex="col",
    )
    for (axes,), (size, found) in zip(all_axes, costs.items(), strict=True):
        noop = statistics.median(found[NOOP])
        cost = {name: statistics.median(each) - noop for name, each in found.items() if name != NOOP}
        values = [one / cost[DEFAULTS] for one in cost.values()]
        charts.label(
            axes, charts.bars(axes, list(cost), values), [f"{one * 1000:,.0f}" for one in cost.values()]
        )
        axes.set_title(f"{int(size):,} bytes")
    charts.save(made, file)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", help="bytes, separated by commas; nothing is kept if some are left out")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--patched", help="a jar with patched classes")
    parser.add_argument("--smoke", action="store_true", help="tiny input, no files: does it run at all")
    parser.add_argument("--application", nargs=5, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.application:
        name, settings, sizes, share, folder = options.application
        application(name, json.loads(settings), json.loads(sizes), float(share), folder)
        return
    import pyspark

    chosen = [int(size) for size in options.sizes.split(",")] if options.sizes else list(ROWS)
    applications = dict(OF_APPLICATION)
    if tuple(map(int, pyspark.__version__.split(".")[:2])) >= (4, 3):
        applications["pipelined"] = PIPELINED
        applications["Unix sockets, pipelined"] = {**SOCKETS, **PIPELINED}
    if options.patched:
        applications[PATCHED] = {"spark.driver.extraClassPath": os.path.abspath(options.patched)}
    if options.smoke:
        applications, chosen, options.repeats = {DEFAULTS: {}}, chosen[:1], 1
    costs: dict[int, Costs] = {size: defaultdict(list) for size in chosen}
    folder = tempfile.mkdtemp(prefix="kafka-chunked-bench-")
    try:
        for number in range(options.repeats):
            for name in random.Random(number).sample(list(applications), len(applications)):
                share = 0.001 if options.smoke else 1.0
                run(name, applications[name], chosen, share, folder, costs)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    report(costs)
    if options.smoke or options.sizes:
        return
    conditions = f"pyspark {pyspark.__version__}, {os.cpu_count()} cores, medians of {options.repeats}"
    file = RESULTS / f"hand_over_{pyspark.__version__}.json"
    file.write_text(json.dumps({"conditions": conditions, "costs": costs}, indent=1) + "\n")
    plot(json.loads(json.dumps(costs)), conditions, file.with_suffix(".png"))


if __name__ == "__main__":
    main()
