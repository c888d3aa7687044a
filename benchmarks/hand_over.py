"""What Spark's hand-over of rows to a Python sink costs by Spark's settings, one by one and together.

    python -m benchmarks.hand_over [--sizes BYTES,...] [--repeats N] [--applications NAME,...] [--patched JAR]
                                   [--smoke]

Processor time of a row, without the broker's: rows from Parquet into Spark's ``noop`` sink, which takes them
in the JVM, and into a sink that only counts, which takes them in Python; the difference is the hand-over.
What a job without rows takes comes off. Settings take turns in an application, in an order drawn anew for
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

import kafka_sink
from benchmarks.surroundings import RESULTS, environment
from benchmarks.throughput import run_job, session
from benchmarks.throughput_shapes import Case
from benchmarks.value_sizes import COUNTING, KEY_BYTES, NOOP, contenders

# Value bytes, and rows of a job.
ROWS = {110: 1_500_000, 1_000: 300_000, 10_000: 40_000}
_ARROW = "spark.sql.execution.arrow."
DEFAULTS, TUNE, EMPTY = "defaults", "kafka_sink.tune", "no rows"
# Of a session. A job with ``tune`` has what that sets for its size.
OF_SESSION: dict[str, dict[str, str]] = {
    DEFAULTS: {},
    TUNE: {},
    "maxBytesPerBatch=2147483647": {f"{_ARROW}maxBytesPerBatch": str(2**31 - 1)},
    "maxRecordsPerBatch=1000": {f"{_ARROW}maxRecordsPerBatch": "1000"},
    # Not lz4: Arrow's for Java took more than 100 us of processor time for a row of 110 bytes.
    "compression.codec=zstd": {f"{_ARROW}compression.codec": "zstd"},
    "udf.buffer.size=1 MiB": {"spark.sql.execution.python.udf.buffer.size": "1048576"},
}
# Of an application. The second is PySpark 4.3's.
SOCKETS = {"spark.python.unix.domain.socket.enabled": "true"}
PIPELINED = {"spark.python.udf.pipelined.enabled": "true"}
OF_APPLICATION = {
    DEFAULTS: {},
    "Unix sockets": SOCKETS,
    "pipelined": PIPELINED,
    "Unix sockets, pipelined": {**SOCKETS, **PIPELINED},
}
PATCHED = "patched Spark"
_WARM_JOBS = 3
# By size and application: for each setting, microseconds a row of each job.
Costs = dict[int, dict[str, dict[str, list[float]]]]


def application(
    settings: dict[str, str], tried: list[str], sizes: list[int], rounds: int, share: float
) -> None:
    """Prints a line of JSON for each job: size, setting and microseconds of processor time a row."""
    spark = session(with_jvm_sink=False, settings=settings)
    noop, counting = (one for one in contenders(False) if one.name in (NOOP, COUNTING))
    folder = tempfile.mkdtemp(prefix="kafka-chunked-bench-")
    try:
        for size in sizes:
            rows = max(1, int(ROWS[size] * share))
            frame = Case("", rows, size).frame(spark, folder)
            nothing = frame.where("key is null")
            for _ in range(_WARM_JOBS):
                run_job(counting, frame, rows, set(), "", "")
            for _ in range(rounds):
                for name in random.sample([NOOP, EMPTY, *tried], len(tried) + 2):
                    made = dict(OF_SESSION.get(name, {}))
                    for key, value in made.items():
                        spark.conf.set(key, value)
                    if name == TUNE:
                        made = kafka_sink.tune(spark, size + KEY_BYTES)
                    written = nothing if name == EMPTY else frame
                    job = run_job(noop if name == NOOP else counting, written, rows, set(), "", "")
                    print(json.dumps([size, name, job.spark_s]), flush=True)
                    for key in made:
                        spark.conf.unset(key)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    spark.stop()


def run(name: str, settings: dict[str, str], sizes: list[int], rounds: int, costs: Costs) -> None:
    """One application in a process of its own."""
    tried = list(OF_SESSION) if name == DEFAULTS else [DEFAULTS, TUNE]
    command = [sys.executable, "-m", "benchmarks.hand_over", "--application"]
    command += map(json.dumps, (settings, tried, sizes, rounds, 1.0))
    with subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("["):
                size, setting, cost = json.loads(line)
                costs[size][name][setting].append(cost)
                print(f"  {name}: {size:,} bytes, {setting} {cost * 1000:,.0f} ns", flush=True)
    if process.returncode:
        raise RuntimeError(f"{name} ended with {process.returncode}")


def hand_over(costs: dict[str, dict[str, list[float]]]) -> dict[str, float]:
    """Of one size: nanoseconds a row by settings. What ``noop`` takes is the least of all applications."""
    noop = min(_median(found[NOOP]) for found in costs.values())
    took: dict[str, float] = {}
    for name, found in costs.items():
        empty = _median(found[EMPTY])
        for setting, jobs in found.items():
            if setting not in (NOOP, EMPTY):
                parts = [part for part in (name, setting) if part != DEFAULTS] or [DEFAULTS]
                took[", ".join(parts)] = (_median(jobs) - empty - noop) * 1000
    return took


def _median(values: list[float]) -> float:
    return statistics.median(values)


def report(costs: Costs) -> None:
    """Prints medians."""
    for size, found in costs.items():
        took = hand_over(found)
        base = took.get(DEFAULTS, next(iter(took.values())))
        print(f"\n{size:,} bytes{'':28}{'ns a row':>10}{'of defaults':>13}")
        for name, cost in took.items():
            print(f"{name:36}{cost:10,.0f}{cost / base:13.2f}", flush=True)


def main() -> None:
    import pyspark

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", help="bytes, separated by commas; nothing is kept if some are left out")
    parser.add_argument("--applications", help="separated by semicolons; nothing is kept then")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--patched", help="a jar with patched classes")
    parser.add_argument("--smoke", action="store_true", help="tiny input, no files: does it run at all")
    parser.add_argument("--application", nargs=5, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.application:
        application(*map(json.loads, options.application))
        return
    if options.smoke:
        application({}, [DEFAULTS, TUNE], [110], 1, 0.001)
        return
    sizes = [int(size) for size in options.sizes.split(",")] if options.sizes else list(ROWS)
    applications = dict(OF_APPLICATION)
    if tuple(map(int, pyspark.__version__.split(".")[:2])) < (4, 3):
        applications = {name: one for name, one in applications.items() if "pipelined" not in name}
    if options.patched:
        applications[PATCHED] = {"spark.driver.extraClassPath": os.path.abspath(options.patched)}
    if options.applications:
        applications = {name: applications[name] for name in options.applications.split(";")}
    costs: Costs = {size: defaultdict(lambda: defaultdict(list)) for size in sizes}
    for name, settings in applications.items():
        run(name, settings, sizes, options.repeats, costs)
    report(costs)
    if options.sizes or options.applications:
        return
    conditions = f"pyspark {pyspark.__version__}, {os.cpu_count()} cores, medians of {options.repeats}"
    file = RESULTS / f"hand_over_{pyspark.__version__}.json"
    file.write_text(json.dumps({"conditions": conditions, "costs": costs}, indent=1) + "\n")


if __name__ == "__main__":
    main()
