"""The cost of a micro-batch: 2,000 rows every 200 ms, against the JVM sink and an idle Python sink.

    python -m benchmarks.streaming [--warm N] [--batches N] [--repeats N] [--beside PYTHON]
        [--conf NAME=VALUE] [--smoke]

All sinks run in one Spark. Each first writes ``--warm`` micro-batches without a pause, since Spark's JVM
compiles for minutes: a sink that is measured early would pay for that of all. Then they take turns, in an
order that changes from round to round. A round is a query of its own: its first micro-batches start workers
and are left out.

Times are Spark's (StreamingQueryProgress): ``trigger`` is a whole micro-batch, ``addBatch`` its planning,
tasks and commit. Processor time is that of the driver's JVM and of all Python processes. The sink that does
nothing shows what Spark takes for any Python sink at least: it does for its workers what ours does (imported
objects exempt from garbage collections, archives not read again, rows acknowledged at once).
Needs pyspark 4.1.1 for the JVM sink. ``--beside`` names an interpreter with another PySpark, which is
measured afterwards. The results keep the last run of each PySpark.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pyspark.sql.datasource import DataSource, DataSourceStreamArrowWriter, WriterCommitMessage

from benchmarks import charts, peers, processor_time, throughput
from benchmarks.surroundings import keep, kept, machine, parser_of, run_beside
from kafka_sink.spark import worker
from kafka_sink.spark.executor_connection import acknowledged, executor_socket
from local_kafka import LocalBroker

ROWS, TRIGGER_MS, PARTITIONS, WARM_BATCHES = 2000, 200, 4, 15
OURS, JVM = "kafka-chunked", "JVM sink"
IDLE = "a Python sink that does nothing"
FORMS = {OURS: "kafka-chunked", JVM: "kafka", IDLE: "idle"}
GOAL_MS = 20.0


# -- the sink that does nothing -----------------------------------------------------------------------


class IdleWriter(DataSourceStreamArrowWriter):
    """Reads the rows and drops them."""

    def write(self, iterator: Iterator[Any]) -> WriterCommitMessage:
        worker.freeze_when_reused()
        for _ in acknowledged(iterator, executor_socket()):
            pass
        worker.forget_spark_archives()
        return WriterCommitMessage()

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's name
        worker.forget_spark_archives()

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's name
        pass


class IdleSink(DataSource):
    """``format("idle")``."""

    @classmethod
    def name(cls) -> str:
        return "idle"

    def streamWriter(self, schema: Any, overwrite: bool) -> DataSourceStreamArrowWriter:  # noqa: N802 - Spark's name
        worker.freeze_when_reused()
        worker.forget_spark_archives()
        return IdleWriter()


# -- measuring ----------------------------------------------------------------------------------------


def start_query(spark: Any, form: str, bootstrap: str, folder: str, trigger_ms: int) -> Any:
    """The stream, to a sink of this form."""
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
    writer = rows.writeStream.format(form).trigger(processingTime=f"{trigger_ms} milliseconds")
    writer = writer.option("checkpointLocation", tempfile.mkdtemp(dir=folder))
    return writer.option("kafka.bootstrap.servers", bootstrap).option("topic", "stream").start()


def warm(spark: Any, name: str, bootstrap: str, folder: str, batches: int) -> None:
    """Lets the JVM compile what the sink uses."""
    query = start_query(spark, FORMS[name], bootstrap, folder, 0)
    try:
        await_batches(query, batches)
    finally:
        query.stop()


def run_query(spark: Any, name: str, bootstrap: str, folder: str, batches: int) -> dict[str, Any]:
    """The durations of each micro-batch by Spark's name, and processor seconds for all of them."""
    jvm = spark.sparkContext._gateway.proc.pid
    query = start_query(spark, FORMS[name], bootstrap, folder, TRIGGER_MS)
    try:
        await_batches(query, WARM_BATCHES)
        before, started = processor_time.of_spark(jvm), time.monotonic()
        first = query.lastProgress["batchId"]
        await_batches(query, first + batches)
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


def await_batches(query: Any, number: int) -> None:
    """Until this micro-batch has ended. Raises RuntimeError."""
    deadline = time.monotonic() + 600
    while (query.lastProgress or {"batchId": -1})["batchId"] < number:
        if (failure := query.exception()) is not None:
            raise RuntimeError(str(failure))
        if time.monotonic() > deadline:
            raise RuntimeError(f"{number} micro-batches took more than 10 min")
        time.sleep(0.02)


def run_here(
    names: list[str], warm_batches: int, batches: int, repeats: int, changed: dict[str, str]
) -> dict[str, Any]:
    """``changed``: settings of Spark."""
    import pyspark

    given = "".join(f"{name}={value}, " for name, value in changed.items())
    conditions = (
        f"{ROWS:,} keyed 110-byte rows every {TRIGGER_MS} ms in 2 tasks, defaults, {PARTITIONS} partitions, "
        f"each sink after {warm_batches} micro-batches, pyspark {pyspark.__version__} local[2], {given}"
        f"{machine()}"
    )
    print(conditions, flush=True)
    settings = {"spark.sql.streaming.numRecentProgressUpdates": "10000", **changed}
    found: dict[str, Any] = {name: [] for name in names}
    with (
        tempfile.TemporaryDirectory(prefix="kafka-chunked-bench-", ignore_cleanup_errors=True) as folder,
        LocalBroker() as broker,
        throughput.session(JVM in names, settings) as spark,
    ):
        broker.create_topic("stream", PARTITIONS)
        spark.dataSource.register(IdleSink)
        for name in names:
            if warm_batches:
                warm(spark, name, broker.bootstrap_servers, folder, warm_batches)
        for turn in range(repeats):
            at = turn % len(names)
            for name in names[at:] + names[:at]:
                run = run_query(spark, name, broker.bootstrap_servers, folder, batches)
                found[name].append(run)
                print(f"  round {turn + 1}  {name:32}{_summary([run])}", flush=True)
    report(found)
    return {"pyspark": pyspark.__version__, "conditions": conditions, "sinks": found}


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
        over = _median(found, OURS) - _median(found, JVM)
        print(f"{OURS} over {JVM}: {over:+.0f} ms (goal {GOAL_MS:+.0f}){'   too much' * (over > GOAL_MS)}")
    print(f"{OURS} over {IDLE}: {_median(found, OURS) - _median(found, IDLE):+.0f} ms")


def _median(found: dict[str, Any], name: str) -> float:
    return statistics.median(spans(found[name], "triggerExecution"))


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
        colours = [charts.OURS if name.startswith(OURS) else charts.OTHER for name in names]
        charts.bars(axes, names, medians, color=colours, xerr=[[0] * len(names), beyond], ecolor="#606060")
        for place, (median, high) in enumerate(zip(medians, late, strict=True)):
            axes.text(high, place, f"  {median:.0f}  ({high:.0f})", va="center", fontsize=8)
        axes.set_title(charts.spark_of(run["conditions"]))
    all_axes[-1, 0].set_xlabel("milliseconds: median; thin line and (figure): 95th percentile")
    charts.save(made, file)


def main() -> None:
    parser = parser_of(__doc__, "few micro-batches", with_beside=True)
    parser.add_argument("--warm", type=int, default=300, help="micro-batches of each sink before the first")
    parser.add_argument("--batches", type=int, default=100, help="micro-batches of a round")
    parser.add_argument("--repeats", type=int, default=3, help="rounds")
    parser.add_argument("--conf", action="append", default=[], help="a setting of Spark, NAME=VALUE")
    options = parser.parse_args()
    if options.smoke:
        options.warm, options.batches, options.repeats = 0, 5, 1
    with_jvm = peers.jvm_sink_is_there()
    names = [name for name in FORMS if name != JVM or (with_jvm and not options.smoke)]
    changed = dict(one.split("=", 1) for one in options.conf)
    runs = [run_here(names, options.warm, options.batches, options.repeats, changed)]
    if options.out is not None:
        options.out.write_text(json.dumps(runs[0]) + "\n")
        return
    if options.beside:
        words = ("--warm", options.warm, "--batches", options.batches, "--repeats", options.repeats)
        runs.append(run_beside(options.beside, "benchmarks.streaming", *words))
    if not options.smoke:
        by_spark = {one["pyspark"]: one for one in [*(kept("streaming") or []), *runs]}
        keep("streaming", [by_spark[version] for version in sorted(by_spark)], plot)


if __name__ == "__main__":
    main()
