"""What a micro-batch costs: 2,000 rows every 200 ms, against the JVM sink and an idle Python sink.

    python -m benchmarks.streaming [--batches N] [--repeats N] [--beside PYTHON] [--daemon MODULE] [--smoke]

All sinks run in one Spark, in an order that turns from round to round. A round is a query of its own: its
first micro-batches start workers and are left out. Times are Spark's (StreamingQueryProgress): ``trigger`` is
a whole micro-batch, ``addBatch`` its planning, tasks and commit. Processor time is that of the driver's JVM
and of all Python processes. The sink that does nothing shows what Spark takes for any Python sink. Needs
pyspark 4.1.1 for the JVM sink. ``--beside`` names an interpreter with another PySpark, which is measured
afterwards.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pyspark.sql.datasource import DataSource, DataSourceStreamArrowWriter, WriterCommitMessage

from benchmarks import charts, processor_time, throughput
from benchmarks.surroundings import RESULTS, environment
from benchmarks.throughput import JVM_SINK_SPARK
from kafka_sink.local_broker import LocalBroker

ROWS, TRIGGER_MS, PARTITIONS, WARM_BATCHES = 2000, 200, 4, 15
OURS, JVM, IDLE = "kafka-chunked", "JVM sink", "a Python sink that does nothing"
FORMS = {OURS: "kafka-chunked", JVM: "kafka", IDLE: "idle"}
GOAL_MS = 20.0


# -- the sink that does nothing -----------------------------------------------------------------------


class IdleWriter(DataSourceStreamArrowWriter):
    """Reads the rows and drops them."""

    def write(self, iterator: Iterator[Any]) -> WriterCommitMessage:
        for _ in iterator:
            pass
        return WriterCommitMessage()

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's name
        pass

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's name
        pass


class IdleSink(DataSource):
    """``format("idle")``."""

    @classmethod
    def name(cls) -> str:
        return "idle"

    def streamWriter(self, schema: Any, overwrite: bool) -> DataSourceStreamArrowWriter:  # noqa: N802 - Spark's name
        return IdleWriter()


# -- measuring ----------------------------------------------------------------------------------------


def run_query(spark: Any, name: str, bootstrap: str, folder: str, batches: int) -> dict[str, Any]:
    """The durations of each micro-batch by Spark's name, and processor seconds for all of them."""
    jvm = spark.sparkContext._gateway.proc.pid
    rows = (
        spark.readStream.format("rate-micro-batch")
        .option("rowsPerBatch", ROWS)
        .option("numPartitions", 2)
        .load()
        .selectExpr(
            "cast(value as string) as key",
            "rpad(concat('{\"id\":', value, '}'), 110, ' ') as value",
        )
    )
    writer = rows.writeStream.format(FORMS[name]).trigger(processingTime=f"{TRIGGER_MS} milliseconds")
    writer = writer.option("checkpointLocation", tempfile.mkdtemp(dir=folder))
    query = writer.option("kafka.bootstrap.servers", bootstrap).option("topic", "stream").start()
    try:
        _await_batches(query, WARM_BATCHES)
        before, started = processor_time.of_spark(jvm), time.monotonic()
        first = query.lastProgress["batchId"]
        _await_batches(query, first + batches)
        used, seconds = processor_time.of_spark(jvm).since(before), time.monotonic() - started
        found = [one for one in query.recentProgress if one["batchId"] > first and one["numInputRows"]]
        done = query.lastProgress["batchId"] - first
    finally:
        query.stop()
    return {
        "durations": [dict(one["durationMs"]) for one in found],
        "processor_ms": {name: spent * 1000 / done for name, spent in used.items()},
        "every_ms": seconds * 1000 / done,
    }


def _await_batches(query: Any, number: int) -> None:
    deadline = time.monotonic() + 600
    while (query.lastProgress or {"batchId": -1})["batchId"] < number:
        if (failure := query.exception()) is not None:
            raise RuntimeError(str(failure))
        if time.monotonic() > deadline:
            raise RuntimeError(f"{number} micro-batches took more than 10 min")
        time.sleep(0.02)


def run_here(batches: int, repeats: int, with_jvm: bool, daemon: str | None) -> dict[str, Any]:
    import pyspark

    conditions = (
        f"{ROWS:,} keyed 110-byte rows every {TRIGGER_MS} ms in 2 tasks, defaults, {PARTITIONS} partitions, "
        f"pyspark {pyspark.__version__} local[2], {f'{daemon}, ' if daemon else ''}Kafka 4.3.0 on the same "
        f"machine, {os.cpu_count()} cores, Python {platform.python_version()}"
    )
    print(conditions, flush=True)
    names = [name for name in FORMS if with_jvm or name != JVM]
    settings = {"spark.sql.streaming.numRecentProgressUpdates": "10000"}
    if daemon:
        settings["spark.python.daemon.module"] = daemon
    found: dict[str, Any] = {name: [] for name in names}
    folder = tempfile.mkdtemp(prefix="kafka-chunked-bench-")
    try:
        with LocalBroker() as broker:
            broker.create_topic("stream", PARTITIONS)
            spark = throughput.session(with_jvm, settings)
            spark.dataSource.register(IdleSink)
            for turn in range(repeats):
                at = turn % len(names)
                for name in names[at:] + names[:at]:
                    run = run_query(spark, name, broker.bootstrap_servers, folder, batches)
                    found[name].append(run)
                    print(f"  round {turn + 1}  {name:32}{_summary([run])}", flush=True)
            spark.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    report(found)
    return {"conditions": conditions, "sinks": found}


def run_beside(python: str, batches: int, repeats: int) -> dict[str, Any]:
    """The same in another interpreter."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run.json"
        command = [python, "-m", "benchmarks.streaming", "--out", str(out)]
        command += ["--batches", str(batches), "--repeats", str(repeats)]
        subprocess.run(command, env=environment(python), check=True)
        result: dict[str, Any] = json.loads(out.read_text())
        return result


# -- results ------------------------------------------------------------------------------------------


def spans(runs: list[dict[str, Any]], name: str) -> list[float]:
    """One duration of all micro-batches, in milliseconds."""
    return [one.get(name, 0) for run in runs for one in run["durations"]]


def percentile_95(values: list[float]) -> float:
    """The nearest rank."""
    return sorted(values)[max(0, -(-len(values) * 95 // 100) - 1)]


def _summary(runs: list[dict[str, Any]]) -> str:
    triggers, batches = spans(runs, "triggerExecution"), spans(runs, "addBatch")
    used = {
        name: statistics.mean(run["processor_ms"][name] for run in runs) for name in runs[0]["processor_ms"]
    }
    return (
        f"{statistics.median(triggers):9.0f}{percentile_95(triggers):9.0f}{statistics.median(batches):10.0f}"
        f"{used['jvm']:9.0f}{used['python']:9.0f}{used['coordinator']:9.1f}"
        f"{statistics.mean(run['every_ms'] for run in runs):9.0f}"
    )


def report(found: dict[str, Any]) -> None:
    print(f"\n{'ms a micro-batch':34}{'trigger':>9}{'p95':>9}{'addBatch':>10}", end="")
    print(f"{'CPU JVM':>9}{'Python':>9}{'coord.':>9}{'every':>9}")
    for name, runs in found.items():
        print(f"{name:34}{_summary(runs)}")
    if JVM in found:
        ours, theirs = (statistics.median(spans(found[name], "triggerExecution")) for name in (OURS, JVM))
        short = "" if ours - theirs <= GOAL_MS else "   too much"
        print(f"{OURS} over {JVM}: {ours - theirs:+.0f} ms (goal {GOAL_MS:+.0f}){short}")


def plot(runs: list[dict[str, Any]], file: Path) -> None:
    heights = [len(run["sinks"]) for run in runs]
    made, all_axes = charts.figure(
        "How long a micro-batch takes",
        [run["conditions"] for run in runs],
        (9, 1.5 + 0.5 * sum(heights)),
        len(runs),
        height_ratios=heights,
        sharex=True,
    )
    for axes, run in zip(all_axes[:, 0], runs, strict=True):
        names = list(run["sinks"])
        triggers = [spans(run["sinks"][name], "triggerExecution") for name in names]
        medians = [statistics.median(one) for one in triggers]
        late = [percentile_95(one) for one in triggers]
        beyond = [high - median for high, median in zip(late, medians, strict=True)]
        colours = [charts.OURS if name == OURS else charts.OTHER for name in names]
        charts.bars(axes, names, medians, color=colours, xerr=[[0] * len(names), beyond], ecolor="#606060")
        for place, (median, high) in enumerate(zip(medians, late, strict=True)):
            axes.text(high, place, f"  {median:.0f}  ({high:.0f})", va="center", fontsize=8)
        version = re.search(r"pyspark ([\d.]+)", run["conditions"])
        axes.set_title(f"PySpark {version[1]}" if version else "")
    all_axes[-1, 0].set_xlabel("milliseconds: median; thin line and (figure): 95th percentile")
    charts.save(made, file)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batches", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--beside", metavar="PYTHON", help="also measure with the PySpark of this interpreter"
    )
    parser.add_argument("--daemon", help="spark.python.daemon.module")
    parser.add_argument("--out", type=Path, help="write the figures here instead of to results/")
    parser.add_argument(
        "--smoke", action="store_true", help="few micro-batches, no files: does it run at all"
    )
    options = parser.parse_args()
    batches, repeats = (5, 1) if options.smoke else (options.batches, options.repeats)
    import pyspark

    with_jvm = pyspark.__version__ == JVM_SINK_SPARK and not options.smoke
    runs = [run_here(batches, repeats, with_jvm, options.daemon)]
    if options.out is not None:
        options.out.write_text(json.dumps(runs[0]) + "\n")
        return
    if options.beside:
        runs.append(run_beside(options.beside, batches, repeats))
    if not options.smoke:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "streaming.json").write_text(json.dumps(runs, indent=1) + "\n")
        plot(runs, RESULTS / "streaming.png")


if __name__ == "__main__":
    main()
