"""What Spark's hand-over of rows to a Python sink costs by Spark's settings, one by one and together.

    python -m benchmarks.hand_over [--sizes BYTES,...] [--repeats N] [--applications NAME;...]
                                   [--beside PYTHON] [--patched JAR] [--smoke]

Keyed rows from Parquet, two tasks, ``local[2]``. Processor time of a row in Spark with its workers, and page
faults, with two sinks: one that only counts rows, and ours tuned, which writes to a real broker on the same
machine. Beside them ``noop``, which takes rows in the JVM. What a job takes without rows is part of all.

Settings of an application need a process of their own. All live at once, and take turns in an order drawn
anew for each round; so do the jobs of a turn. Two applications have Spark's defaults: settings of a session
are compared within the first, which runs most jobs and is compiled best; the others with the second, which
runs as many jobs as they do. ``--patched``: a jar with classes of Spark's that stand before its own
(docs/spark-patches.md).
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
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import kafka_sink
from benchmarks import charts
from benchmarks.processor_time import grown, page_faults
from benchmarks.surroundings import RESULTS, environment
from benchmarks.throughput import PARTITIONS, run_job, session
from benchmarks.throughput_shapes import Case
from benchmarks.value_sizes import COUNTING, KEY_BYTES, NOOP, OURS_TUNED, contenders
from kafka_sink.local_broker import LocalBroker

# Value bytes, and rows of a job: about a second of processor time.
ROWS = {110: 800_000, 1_000: 160_000, 10_000: 20_000}
SINKS = (COUNTING, OURS_TUNED)
_ARROW = "spark.sql.execution.arrow."
_MAX_ROWS, _MAX_BYTES = f"{_ARROW}maxRecordsPerBatch", f"{_ARROW}maxBytesPerBatch"
DEFAULTS, AGAIN, TUNE = "defaults", "defaults, beside the others", "kafka_sink.tune"
TOGETHER = "tune, Unix sockets, malloc"
# For each application and size; the JVM compiles all sizes alike.
_WARM_JOBS = 3


def of_session(size: int) -> dict[str, dict[str, str]]:
    """Settings of a session by name. A job with ``tune`` has what that sets for its size."""
    row = size + KEY_BYTES
    return {
        DEFAULTS: {},
        TUNE: {},
        "no limit of bytes": {_MAX_BYTES: str(2**31 - 1)},
        "4 MB by bytes": {_MAX_BYTES: "4000000"},
        "4 MB by rows": {_MAX_ROWS: str(4_000_000 // row)},
        "1 MB by rows": {_MAX_ROWS: str(1_000_000 // row)},
        # Not lz4: Arrow's for Java took more than 100 us of processor time for a row of 110 bytes.
        "compressed by zstd": {f"{_ARROW}compression.codec": "zstd"},
        "udf.buffer.size 1 MiB": {"spark.sql.execution.python.udf.buffer.size": "1048576"},
    }


@dataclass(frozen=True)
class Spark:
    """Settings of an application. ``variables`` are its environment's, which workers inherit; ``tried`` are
    the settings of a session that it is tried with."""

    settings: dict[str, str] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)
    tried: tuple[str, ...] = (DEFAULTS,)


_SOCKETS = {"spark.python.unix.domain.socket.enabled": "true"}
# glibc keeps and reuses what it would give back to the kernel: in the JVM, too.
_MALLOC = {"MALLOC_MMAP_THRESHOLD_": "268435456", "MALLOC_TRIM_THRESHOLD_": "536870912"}
APPLICATIONS = {
    DEFAULTS: Spark(tried=tuple(of_session(1))),
    AGAIN: Spark(),
    "Unix sockets": Spark(_SOCKETS),
    "pipelined": Spark({"spark.python.udf.pipelined.enabled": "true"}),
    "malloc keeps memory": Spark(variables=_MALLOC),
    "Arrow's pool: system": Spark(variables={"ARROW_DEFAULT_MEMORY_POOL": "system"}),
    "Arrow's pool: jemalloc": Spark(variables={"ARROW_DEFAULT_MEMORY_POOL": "jemalloc"}),
    # Larger buffers of Arrow's are not pooled. 8 KiB << 14.
    "Netty: chunks of 128 MiB": Spark({"spark.driver.extraJavaOptions": "-Dio.netty.allocator.maxOrder=14"}),
    TOGETHER: Spark(_SOCKETS, _MALLOC, (TUNE,)),
}
_SINCE_4_3 = ("pipelined",)
PATCHED = "patched Spark"
# By size, application, setting and sink: each job's figures by name.
Jobs = dict[str, dict[str, dict[str, dict[str, list[dict[str, float]]]]]]


# -- an application: a process that runs the jobs it is told to --------------------------------------------


def serve(settings: dict[str, str], folder: str) -> None:
    """Reads a job's description from each line, runs it, and prints a line with its figures."""
    spark = session(with_jvm_sink=False, settings={"spark.driver.memory": "1g", **settings})
    sinks = {one.name: one for one in contenders(False)}
    print("{}", flush=True)
    for line in sys.stdin:
        size, rows, setting, sink, topic, bootstrap, broker = json.loads(line)
        frame = Case("", rows, size).frame(spark, folder)
        made = dict(of_session(size)[setting])
        for key, value in made.items():
            spark.conf.set(key, value)
        if setting == TUNE:
            made = kafka_sink.tune(spark, size + KEY_BYTES)
        jvm = spark.sparkContext._gateway.proc.pid
        before = page_faults(jvm)
        job = run_job(sinks[sink], frame, rows, {broker}, bootstrap, topic)
        faults = grown(page_faults(jvm), before)
        for key in made:
            spark.conf.unset(key)
        figures = {"spark_us": job.spark_s, "wall_us": 1e6 / job.rows_per_s, "page_faults": faults}
        print(json.dumps(figures), flush=True)
    spark.stop()


class Application:
    """One of them, from the outside."""

    def __init__(self, spark: Spark, folder: str) -> None:
        self.tried = spark.tried
        command = [sys.executable, "-m", "benchmarks.hand_over"]
        command += ["--serve", json.dumps(spark.settings), folder]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._process: Any = subprocess.Popen(command, env={**environment(), **spark.variables}, **pipes)

    def answer(self) -> dict[str, float]:
        """The next line that it prints."""
        for line in self._process.stdout:
            if line.startswith("{"):
                decoded: dict[str, float] = json.loads(line)
                return decoded
        raise RuntimeError(f"an application ended with {self._process.wait()}")

    def run(self, *job: Any) -> dict[str, float]:
        """One job's figures."""
        print(json.dumps(job), file=self._process.stdin, flush=True)
        return self.answer()

    def __enter__(self) -> Application:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._process:
            self._process.stdin.close()
            try:
                self._process.wait(30)
            except subprocess.TimeoutExpired:
                self._process.kill()


# -- measuring ---------------------------------------------------------------------------------------------


class Measurement:
    """All applications beside one broker."""

    def __init__(self, broker: LocalBroker, applications: dict[str, Application], share: float) -> None:
        from confluent_kafka.admin import AdminClient

        self._broker, self._applications, self._share = broker, applications, share
        self._admin = AdminClient({"bootstrap.servers": broker.bootstrap_servers})
        self._topics = 0

    def _run(self, application: Application, size: int, setting: str, sink: str) -> dict[str, float]:
        topic, rows = f"hand-over-{self._topics}", max(1, int(ROWS[size] * self._share))
        broker = (self._broker.bootstrap_servers, self._broker.pid(0))
        if sink != OURS_TUNED:
            return application.run(size, rows, setting, sink, topic, *broker)
        self._topics += 1
        self._broker.create_topic(topic, PARTITIONS)
        figures = application.run(size, rows, setting, sink, topic, *broker)
        self._admin.delete_topics([topic])[topic].result()
        return figures

    def of_size(self, size: int, rounds: int) -> dict[str, dict[str, dict[str, list[dict[str, float]]]]]:
        """The figures of each job by application, setting and sink."""
        for application in self._applications.values():
            for number in range(_WARM_JOBS):
                self._run(application, size, application.tried[0], SINKS[number % len(SINKS)])
        jobs: dict[str, dict[str, dict[str, list[dict[str, float]]]]] = {
            name: {setting: {sink: [] for sink in SINKS} for setting in application.tried}
            for name, application in self._applications.items()
        }
        if DEFAULTS in jobs:
            jobs[DEFAULTS][DEFAULTS][NOOP] = []
        for number in range(rounds):
            draw = random.Random(number)
            for name in draw.sample(list(jobs), len(jobs)):
                application = self._applications[name]
                # Workers that were idle for a minute have ended. New ones load libraries, in fresh memory.
                for sink in SINKS:
                    self._run(application, size, application.tried[0], sink)
                todo = [(setting, sink) for setting, sinks in jobs[name].items() for sink in sinks]
                for setting, sink in draw.sample(todo, len(todo)):
                    jobs[name][setting][sink].append(self._run(application, size, setting, sink))
        return jobs


def measure(applications: dict[str, Spark], sizes: list[int], rounds: int, share: float) -> Jobs:
    found: Jobs = {}
    with ExitStack() as stack:
        folder = tempfile.mkdtemp(prefix="kafka-chunked-bench-")
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        properties = {"log.segment.delete.delay.ms": "1000"}
        broker = stack.enter_context(LocalBroker(properties=properties))
        living = {name: stack.enter_context(Application(one, folder)) for name, one in applications.items()}
        for application in living.values():
            application.answer()
        measurement = Measurement(broker, living, share)
        for size in sizes:
            started = time.monotonic()
            found[str(size)] = measurement.of_size(size, rounds)
            report(size, found[str(size)])
            print(f"({time.monotonic() - started:.0f} s)", flush=True)
    return found


# -- what came out -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Line:
    """One setting: microseconds a row of processor time of each sink, the median of its ratios to the
    defaults of the same round, and page faults of a job."""

    name: str
    costs: dict[str, float]
    ratios: dict[str, float]
    faults: dict[str, float]


def lines(jobs: dict[str, dict[str, dict[str, list[dict[str, float]]]]]) -> list[Line]:
    """Of one size, in the order of their settings."""
    found = []
    for application, settings in jobs.items():
        base = jobs.get(DEFAULTS if application == DEFAULTS else AGAIN, settings)
        for setting, sinks in settings.items():
            costs, ratios, faults = {}, {}, {}
            for sink in SINKS:
                there = next(iter(base.values()))[sink]
                costs[sink] = _median(sinks[sink], "spark_us")
                faults[sink] = _median(sinks[sink], "page_faults")
                ratios[sink] = statistics.median(
                    one["spark_us"] / other["spark_us"] for one, other in zip(sinks[sink], there, strict=True)
                )
            found.append(Line(setting if application == DEFAULTS else application, costs, ratios, faults))
    return found


def _median(jobs: list[dict[str, float]], figure: str) -> float:
    return statistics.median(job[figure] for job in jobs) if jobs else 0.0


def report(size: int, jobs: dict[str, dict[str, dict[str, list[dict[str, float]]]]]) -> None:
    """Prints medians."""
    taken = _median(jobs.get(DEFAULTS, {}).get(DEFAULTS, {}).get(NOOP, []), "spark_us")
    print(f"\n{f'{size:,} bytes':30}{'counting':>30}{'ours':>30}   (noop {taken:.2f} us a row)")
    print(f"{'':30}" + f"{'us a row':>10}{'ratio':>8}{'faults':>12}" * 2)
    for line in lines(jobs):
        texts = [f"{line.costs[s]:10.2f}{line.ratios[s]:8.2f}{line.faults[s]:12,.0f}" for s in SINKS]
        print(f"{line.name:30}{''.join(texts)}", flush=True)


def report_together(jobs: Jobs) -> None:
    """Prints the ratios of all sizes as a table for docs/benchmarks.md."""
    sizes = {f"{int(size):,} bytes": {one.name: one for one in lines(found)} for size, found in jobs.items()}
    print(f"\n| counting, ours | {' | '.join(sizes)} |\n|---|{'---|' * len(sizes)}")
    for name in next(iter(sizes.values())):
        ratios = [", ".join(f"{found[name].ratios[sink]:.2f}" for sink in SINKS) for found in sizes.values()]
        print(f"| {name} | {' | '.join(ratios)} |", flush=True)


def plot(found: dict[str, Any], file: Path) -> None:
    """For each version of Spark and size: processor time as a multiple of the defaults'."""
    made, all_axes = charts.figure(
        "Processor time of a row by Spark's settings, its defaults = 1",
        [run["conditions"] for run in found.values()],
        (13, 1.4 + 4.2 * len(found)),
        len(found),
        len(ROWS),
        sharex=True,
    )
    for row, (version, run) in zip(all_axes, found.items(), strict=True):
        for place, (axes, (size, jobs)) in enumerate(zip(row, run["jobs"].items(), strict=True)):
            shown = [line for line in lines(jobs) if line.name != DEFAULTS]
            names = [line.name for line in shown]
            for sink, colour, shift in ((COUNTING, charts.OTHER, -0.2), (OURS_TUNED, charts.OURS, 0.2)):
                places = [number + shift for number in range(len(shown))]
                ratios = [line.ratios[sink] for line in shown]
                drawn = axes.barh(places, ratios, height=0.36, color=colour, label=sink)
                charts.label(axes, drawn, [f"{ratio:.2f}" for ratio in ratios])
            axes.axvline(1, color="black", linewidth=0.6)
            axes.set_yticks(range(len(shown)), [] if place else names)
            axes.set_ylim(len(shown) - 0.4, -0.6)
            axes.tick_params(axis="y", length=0)
            axes.set_title(f"PySpark {version}, {int(size):,} bytes")
    all_axes[0, -1].legend(loc="lower right", bbox_to_anchor=(1, 1.06), ncols=2)
    charts.save(made, file)


def main() -> None:
    import pyspark

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", help="bytes, separated by commas; nothing is kept if some are left out")
    parser.add_argument("--applications", help="separated by semicolons; nothing is kept then")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--beside", metavar="PYTHON", help="then measure the PySpark of this interpreter")
    parser.add_argument("--patched", help="a jar with patched classes")
    parser.add_argument("--smoke", action="store_true", help="tiny input, no files: does it run at all")
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(json.loads(options.serve[0]), options.serve[1])
        return
    if options.smoke:
        measure({TOGETHER: APPLICATIONS[TOGETHER]}, [110], 1, 0.001)
        return
    sizes = [int(size) for size in options.sizes.split(",")] if options.sizes else list(ROWS)
    applications = dict(APPLICATIONS)
    if tuple(map(int, pyspark.__version__.split(".")[:2])) < (4, 3):
        applications = {name: one for name, one in applications.items() if name not in _SINCE_4_3}
    if options.patched:
        jar = os.path.abspath(options.patched)
        applications[PATCHED] = Spark({"spark.driver.extraClassPath": jar}, tried=(DEFAULTS, TUNE))
    if options.applications:
        applications = {name: applications[name] for name in options.applications.split(";")}
    conditions = (
        f"PySpark {pyspark.__version__} local[2], keyed rows from Parquet, lz4, Kafka 4.3.0 on the same "
        f"{os.cpu_count()} cores, medians of {options.repeats} rounds"
    )
    print(conditions, flush=True)
    jobs = measure(applications, sizes, options.repeats, 1.0)
    report_together(jobs)
    if not (options.sizes or options.applications or options.patched):
        file = RESULTS / "hand_over.json"
        known = json.loads(file.read_text()) if file.exists() else {}
        known[pyspark.__version__] = {"conditions": conditions, "jobs": jobs}
        known = dict(sorted(known.items()))
        file.write_text(json.dumps(known, indent=1) + "\n")
        plot(known, file.with_suffix(".png"))
    if options.beside:
        command = [options.beside, "-m", "benchmarks.hand_over", "--repeats", str(options.repeats)]
        subprocess.run(command, env=environment(options.beside), check=True)


if __name__ == "__main__":
    main()
