"""Where the milliseconds of a micro-batch go, from its trigger to its commit.

    python -m benchmarks.micro_batch_stages [--batches N] [--warm N] [--repeats N] [--sinks FORMS]
        [--conf NAME=VALUE] [--smoke]

The stream of ``benchmarks.streaming``. Spark's share comes from its progress and its event log, Python's
from moments that wrapped writers note. A Python sink that does nothing shows Spark's own share; ours is the
difference to it. ``--idle-is-plain`` leaves out what this package does for its workers there (imported
objects exempt from garbage collections, archives not read again, rows acknowledged at once). Workers are
shared and keep what was done for them, so measure it alone: ``--sinks idle-stamped``.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from pyspark.sql.datasource import DataSource, DataSourceStreamArrowWriter, WriterCommitMessage

from benchmarks import peers, throughput
from benchmarks.streaming import (
    IDLE,
    JVM,
    OURS,
    PARTITIONS,
    IdleSink,
    await_batches,
    parser_of,
    settings_of,
    start_query,
)
from kafka_sink.local_broker import LocalBroker
from kafka_sink.spark.datasource import KafkaChunkedDataSource, StreamWriter

FORMS = {OURS: "stamped-chunked", JVM: "kafka", IDLE: "idle-stamped"}
_PLAIN = "KAFKA_CHUNKED_IDLE_IS_PLAIN"
_FILE = "KAFKA_CHUNKED_STAMPS"
_MEMORY = "/dev/shm"
_IN_COMMIT = "python_streaming_sink_runner"


# -- moments ------------------------------------------------------------------------------------------


def stamp(name: str) -> None:
    """Appends a moment to the file of the run, in one write."""
    path = os.environ.get(_FILE)
    if path:
        with open(path, "ab", 0) as file:
            file.write(f"{name} {os.getpid()} {time.time() * 1000:.3f}\n".encode())


def _planning() -> str:
    return "commit plan" if any(_IN_COMMIT in one for one in sys.argv) else "plan"


def _stamped_rows(rows: Iterator[Any]) -> Iterator[Any]:
    is_first = True
    for batch in rows:
        if is_first:
            stamp("rows first")
            is_first = False
        yield batch
    stamp("rows end")


# Module, class ("" for a function of the module), name, and the moment.
_STEPS = (
    ("kafka_sink.task.producer", "Producer", "begin", "producer taken"),
    ("kafka_sink.task.producer", "Producer", "send", "table sent"),
    ("kafka_sink.task.producer", "Producer", "_order", "rows ordered"),
    ("kafka_sink.task.producer", "Producer", "finish", "finish"),
    ("kafka_sink.network.client", "NetworkClient", "send", "request"),
    ("kafka_sink.sending.response_handler", "ResponseHandler", "on_response", "response"),
    ("kafka_sink.coordinator.writes.channel", "", "end_attempts", "commit tells coordinator"),
    ("kafka_sink.reports.write_reports", "", "report", "commit reports"),
)
_installed = False


def install() -> None:
    """Has the steps of this process note when they begin and end."""
    global _installed
    if _installed:
        return
    _installed = True
    for module, owner, name, moment in _STEPS:
        home = importlib.import_module(module)
        found = getattr(home, owner) if owner else home
        setattr(found, name, _noted(getattr(found, name), moment))


def _noted(step: Callable[..., Any], moment: str) -> Callable[..., Any]:
    def noted(*given: Any, **named: Any) -> Any:
        stamp(f"{moment} begin")
        try:
            return step(*given, **named)
        finally:
            stamp(f"{moment} end")

    return noted


class StampedWriter(StreamWriter):
    """Ours, with moments."""

    def write(self, iterator: Iterator[Any]) -> WriterCommitMessage:
        install()
        message: WriterCommitMessage = _noted(super().write, "write")(_stamped_rows(iterator))
        return message

    def commit(self, messages: Any, batchId: int) -> None:  # noqa: N803 - Spark's name
        install()
        _noted(super().commit, "commit")(messages, batchId)


class StampedSource(KafkaChunkedDataSource):
    """``format("stamped-chunked")``."""

    @classmethod
    def name(cls) -> str:
        return "stamped-chunked"

    def streamWriter(self, schema: Any, overwrite: bool) -> StreamWriter:  # noqa: N802 - Spark's name
        return StampedWriter(_noted(super().streamWriter, _planning())(schema, overwrite).planned)


class PlainIdleWriter(DataSourceStreamArrowWriter):
    """Reads the rows and drops them, and does nothing else for its worker."""

    def write(self, iterator: Iterator[Any]) -> WriterCommitMessage:
        for _ in iterator:
            pass
        return WriterCommitMessage()


class StampedIdleWriter(DataSourceStreamArrowWriter):
    """A sink that does nothing, with moments."""

    def __init__(self, writer: DataSourceStreamArrowWriter) -> None:
        self._writer = writer

    def write(self, iterator: Iterator[Any]) -> WriterCommitMessage:
        message: WriterCommitMessage = _noted(self._writer.write, "write")(_stamped_rows(iterator))
        return message

    def commit(self, messages: Any, batchId: int) -> None:  # noqa: N803 - Spark's name
        _noted(self._writer.commit, "commit")(messages, batchId)


class StampedIdleSink(IdleSink):
    """``format("idle-stamped")``."""

    @classmethod
    def name(cls) -> str:
        return "idle-stamped"

    def streamWriter(self, schema: Any, overwrite: bool) -> DataSourceStreamArrowWriter:  # noqa: N802 - Spark's name
        make = _plain if os.environ.get(_PLAIN) else super().streamWriter
        return StampedIdleWriter(_noted(make, _planning())(schema, overwrite))


def _plain(_schema: Any, _overwrite: bool) -> DataSourceStreamArrowWriter:
    return PlainIdleWriter()


SOURCES: tuple[type[DataSource], ...] = (StampedSource, StampedIdleSink)


# -- measuring ----------------------------------------------------------------------------------------


def run_query(
    spark: Any, form: str, bootstrap: str, folder: str, trigger_ms: int, batches: int
) -> list[dict[str, Any]]:
    """The progress of ``batches`` micro-batches."""
    query = start_query(spark, form, bootstrap, folder, trigger_ms)
    try:
        await_batches(query, batches)
        return [dict(one) for one in query.recentProgress if one["numInputRows"]]
    finally:
        query.stop()


def events_of(folder: Path) -> list[dict[str, Any]]:
    """Spark's events so far."""
    found = []
    for file in sorted(folder.iterdir()):
        if file.is_file():
            for line in file.read_text().splitlines():
                try:
                    found.append(json.loads(line))
                except ValueError:
                    continue
    return found


def stamps_of(path: Path) -> list[tuple[str, int, float]]:
    """Name, process and wall clock in milliseconds."""
    found = []
    for line in path.read_text().splitlines():
        name, process, at = line.rsplit(" ", 2)
        found.append((name, int(process), float(at)))
    return found


def timeline(
    progress: dict[str, Any], stamps: list[tuple[str, int, float]], events: list[dict[str, Any]]
) -> dict[str, float]:
    """Milliseconds since the trigger by moment; for tasks those of the last one."""
    start = datetime.fromisoformat(progress["timestamp"].replace("Z", "+00:00")).timestamp() * 1000
    end = start + progress["durationMs"]["triggerExecution"]
    found: dict[str, float] = {}
    for name, _, at in stamps:
        if start <= at <= end + 2:
            key = name
            number = 1
            while name.startswith(("plan", "commit plan")) and key in found:
                number += 1
                key = f"{name} {number}"
            found[key] = max(found.get(key, 0.0), at - start)
    for event in events:
        kind = event["Event"]
        if kind == "SparkListenerJobStart" and start <= event["Submission Time"] <= end:
            found["job start"] = event["Submission Time"] - start
        elif kind == "SparkListenerJobEnd" and start <= event["Completion Time"] <= end:
            found["job end"] = event["Completion Time"] - start
        elif kind == "SparkListenerTaskEnd" and start <= event["Task Info"]["Launch Time"] <= end:
            info, metrics = event["Task Info"], event["Task Metrics"]
            found["task launched"] = max(found.get("task launched", 0.0), info["Launch Time"] - start)
            found["task finished"] = max(found.get("task finished", 0.0), info["Finish Time"] - start)
            for name in ("Executor Deserialize Time", "Executor Run Time", "Result Serialization Time"):
                found[f"({name})"] = max(found.get(f"({name})", 0.0), metrics[name])
    for name, took in progress["durationMs"].items():
        found[f"[{name}]"] = took
    return found


def run_here(
    names: list[str], batches: int, warm: int, repeats: int, settings: dict[str, str]
) -> dict[str, list[dict[str, float]]]:
    """The moments of micro-batches by sink."""
    folder = tempfile.mkdtemp(prefix="kafka-chunked-bench-")
    # Not on a disk: a write there waits for the checkpoint's.
    memory = tempfile.mkdtemp(prefix="kafka-chunked-bench-", dir=_MEMORY if Path(_MEMORY).is_dir() else None)
    log, stamps = Path(memory, "events"), Path(memory, "stamps")
    log.mkdir()
    os.environ[_FILE] = str(stamps)
    settings = {
        "spark.sql.streaming.numRecentProgressUpdates": "10000",
        "spark.eventLog.enabled": "true",
        "spark.eventLog.dir": log.as_uri(),
        "spark.eventLog.compress": "false",
        "spark.eventLog.rolling.enabled": "false",
        "spark.eventLog.buffer.kb": "1k",
        **settings,
    }
    progress: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    try:
        with LocalBroker() as broker:
            broker.create_topic("stream", PARTITIONS)
            spark = throughput.session(JVM in names, settings)
            for source in SOURCES:
                spark.dataSource.register(source)
            for turn in range(repeats + 1):
                at = turn % len(names)
                for name in names[at:] + names[:at]:
                    count, trigger_ms = (warm, 0) if turn == 0 else (batches + 15, 200)
                    run = run_query(spark, FORMS[name], broker.bootstrap_servers, folder, trigger_ms, count)
                    took = statistics.median(one["durationMs"]["triggerExecution"] for one in run[-batches:])
                    print(
                        f"  {'warming' if turn == 0 else f'round {turn}':10}{name:34}{took:6.0f} ms",
                        flush=True,
                    )
                    if turn:
                        progress[name].extend(run[-batches:])
            spark.stop()
        events, moments = events_of(log), stamps_of(stamps)
        return {name: [timeline(one, moments, events) for one in found] for name, found in progress.items()}
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(memory, ignore_errors=True)


def report(found: dict[str, list[dict[str, float]]]) -> None:
    for name, runs in found.items():
        print(f"\n{name}: {len(runs)} micro-batches, median (p90) ms since the trigger; [Spark's durations]")
        keys = dict.fromkeys(key for one in runs for key in one)
        rows = []
        for key in keys:
            values = [one[key] for one in runs if key in one]
            rows.append((statistics.median(values), key, values))
        for median, key, values in sorted(rows, key=lambda one: (one[1][0] in "[(", one[0])):
            p90 = sorted(values)[len(values) * 9 // 10]
            print(
                f"  {median:8.1f}{p90:8.1f}  {key}"
                + ("" if len(values) == len(runs) else f"  ({len(values)})")
            )


def main() -> None:
    parser = parser_of(__doc__, batches=80, repeats=1)
    parser.add_argument("--sinks", help="some of: " + ", ".join(FORMS.values()))
    parser.add_argument("--idle-is-plain", action="store_true")
    options = parser.parse_args()
    if options.smoke:
        options.batches, options.warm, options.repeats = 5, 5, 1
    with_jvm = peers.jvm_sink_is_there() and not options.smoke
    chosen = (options.sinks or ",".join(FORMS.values())).split(",")
    names = [name for name, form in FORMS.items() if form in chosen and (with_jvm or name != JVM)]
    if options.idle_is_plain:
        os.environ[_PLAIN] = "true"
    report(run_here(names, options.batches, options.warm, options.repeats, settings_of(options)))


if __name__ == "__main__":
    main()
