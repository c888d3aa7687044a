"""What exactly once costs: jobs and micro-batches with both guarantees in turns, and how long readers are
held up.

    python -m benchmarks.exactly_once [--out FILE] [--smoke] [--parts jobs micro_batches]

Three brokers, topics with three replicas. ``jobs``: a million 110-byte keyed rows from Parquet in two tasks,
lz4, the guarantees alternating. ``micro_batches``: 2,000 rows each by two tasks, median over the batches of a
query. ``held_up``: rows of an open transaction are in the topic; how long until a reader of committed rows
gets a row that was written after them, by what left the transaction open.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from confluent_kafka import Consumer, Producer, TopicPartition

from benchmarks.surroundings import RESULTS
from kafka_sink.clock import wall_ms
from kafka_sink.local_broker import LocalBroker
from kafka_sink.options import parse
from kafka_sink.producer_cache import task_producer
from kafka_sink.rows.column_plan import ColumnPlan
from kafka_sink.transactions import batch as batches
from kafka_sink.transactions import driver, planning
from kafka_sink.transactions.attempt import TaskAttempt
from kafka_sink.transactions.batch import Handover, TaskReport
from kafka_sink.transactions.client import TransactionClient
from kafka_sink.transactions.decision import BatchIdentity, next_decision
from kafka_sink.transactions.operations import EndTransaction, Steps
from kafka_sink.transactions.scope import Scope

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_PARTS = ("held_up", "jobs", "micro_batches")
GUARANTEES = ("at-least-once", "exactly-once")
PARTITIONS = 4
GOAL_SHARE, GOAL_MORE_MS = 0.9, 150.0


def main() -> int:
    """0 where the goals are met."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.exactly_once", description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULTS / "exactly_once.json")
    parser.add_argument("--smoke", action="store_true", help="small, to see that it runs")
    parser.add_argument("--parts", nargs="+", choices=_PARTS, default=_PARTS)
    arguments = parser.parse_args()
    parts = arguments.parts
    rows, turns, batches = (20_000, 1, 1) if arguments.smoke else (1_000_000, 7, 40)
    quick = {"transaction.abort.timed.out.transaction.cleanup.interval.ms": 1000}
    with LocalBroker(brokers=3, properties=quick) as cluster, tempfile.TemporaryDirectory() as folder:
        found: dict[str, Any] = {}
        if "held_up" in parts:
            found["held_up"] = held_up(cluster, arguments.smoke)
        spark = session()
        try:
            if "jobs" in parts:
                found["jobs"] = jobs(spark, cluster, Path(folder), rows, turns)
            if "micro_batches" in parts:
                found["micro_batches"] = micro_batches(spark, cluster, Path(folder), batches)
        finally:
            spark.stop()
    print(json.dumps(found, indent=1))
    if arguments.smoke:
        return 0
    if arguments.out.exists():
        found = json.loads(arguments.out.read_text()) | found
    arguments.out.write_text(json.dumps(found, indent=1) + "\n")
    share = found.get("jobs", {}).get("share_of_the_rate", 1.0)
    more = found.get("micro_batches", {}).get("more_ms", 0.0)
    return 0 if share >= GOAL_SHARE and more <= GOAL_MORE_MS else 1


def session() -> SparkSession:
    from pyspark.sql import SparkSession

    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    return (
        SparkSession.builder.master("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.log.level", "ERROR")
        .getOrCreate()
    )


def jobs(spark: SparkSession, cluster: LocalBroker, folder: Path, rows: int, turns: int) -> dict[str, Any]:
    """Seconds of each job and the share of the rate, from the medians after a turn to warm up."""
    cluster.create_topic("jobs", PARTITIONS)
    value = "rpad(cast(id as string), 100, 'x') value"
    spark.range(0, rows, 1, 2).selectExpr("cast(id % 1000 as string) key", value).write.parquet(
        str(folder / "rows")
    )
    frame = spark.read.parquet(str(folder / "rows"))
    seconds: dict[str, list[float]] = {guarantee: [] for guarantee in GUARANTEES}
    for turn in range(turns + 1):
        for guarantee in GUARANTEES if turn % 2 else reversed(GUARANTEES):
            began = time.monotonic()
            written = frame.write.format("kafka-chunked").mode("append")
            written.options(**_options(cluster, "jobs", guarantee)).save()
            if turn:
                seconds[guarantee].append(round(time.monotonic() - began, 3))
    medians = {guarantee: statistics.median(taken) for guarantee, taken in seconds.items()}
    share = medians["at-least-once"] / medians["exactly-once"]
    return {"rows": rows, "seconds": seconds, "share_of_the_rate": round(share, 3)}


def micro_batches(spark: SparkSession, cluster: LocalBroker, folder: Path, batches: int) -> dict[str, Any]:
    """Milliseconds of a whole micro-batch for each guarantee, the queries one after the other, twice."""
    taken: dict[str, list[int]] = {guarantee: [] for guarantee in GUARANTEES}
    for turn in range(4):
        guarantee = GUARANTEES[turn % 2]
        cluster.create_topic(f"stream-{turn}", PARTITIONS)
        taken[guarantee] += _run_query(_rate(spark), cluster, folder / f"checkpoint-{turn}", turn, batches)
    medians = {guarantee: statistics.median(one) for guarantee, one in taken.items()}
    more = medians["exactly-once"] - medians["at-least-once"]
    return {"median_ms": medians, "more_ms": more, "batches": {k: len(v) for k, v in taken.items()}}


def _rate(spark: SparkSession) -> DataFrame:
    source = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 2000)
    return source.option("numPartitions", 2).load().selectExpr("cast(value as string) value")


def _run_query(
    frame: DataFrame, cluster: LocalBroker, checkpoint: Path, turn: int, batches: int
) -> list[int]:
    options = _options(cluster, f"stream-{turn}", GUARANTEES[turn % 2])
    query = (
        frame.writeStream.format("kafka-chunked")
        .options(**options)
        .option("checkpointLocation", str(checkpoint))
        .start()
    )
    times: dict[int, int] = {}
    while len(times) < batches + 3:
        if not query.isActive:
            raise RuntimeError(str(query.exception()))
        for progress in query.recentProgress:
            times[progress["batchId"]] = progress["durationMs"].get("triggerExecution", 0)
        time.sleep(0.05)
    query.stop()
    # The first ones start processes and load modules.
    return [taken for number, taken in sorted(times.items()) if number >= 3]


def _options(cluster: LocalBroker, topic: str, guarantee: str) -> dict[str, str]:
    return {
        "kafka.bootstrap.servers": cluster.bootstrap_servers,
        "topic": topic,
        "kafka.compression.type": "lz4",
        "delivery.guarantee": guarantee,
        "log.summary": "false",
    }


def held_up(cluster: LocalBroker, smoke: bool) -> dict[str, float]:
    """Seconds that a reader of committed rows waits behind an open transaction, by what left it open.

    Counted from when its end begins: a driver that is started again plans, one that lives commits or aborts.
    """
    cases: dict[str, Callable[[Held], float]] = {
        "attempt died, another one's batch is committed": Held.attempt_died,
        "job failed or query stopped: the driver's abort": Held.job_failed,
        "driver died before its decision, started again": Held.driver_died,
        "driver died between decision and commits, started again": Held.driver_died_after_decision,
    }
    if not smoke:
        cases |= {
            "coordinator's broker killed, then the commit": Held.broker_killed,
            "coordinator's broker frozen for 5 s, then the commit": Held.broker_frozen,
        }
    found = {}
    for number, (name, case) in enumerate(cases.items()):
        with Held(cluster, f"held-{number}") as held:
            began = case(held)
            found[name] = round(_first_row(cluster, held.topic) - began, 3)
    with Held(cluster, "held-timeout", timeout_ms=5_000) as held:
        held.write(0, 0)
        began = time.monotonic()
        held.write_after()
        found["nobody starts it again; kafka.transaction.timeout.ms=5000, brokers look each second"] = round(
            _first_row(cluster, held.topic) - began, 3
        )
    return found


class Held:
    """A topic, a driver with an open transaction, and a row of somebody else behind it."""

    def __init__(self, cluster: LocalBroker, topic: str, timeout_ms: int = 60_000) -> None:
        self._cluster = cluster
        self.topic = topic
        cluster.create_topic(topic, 1)
        raw = {
            "kafka.bootstrap.servers": cluster.bootstrap_servers,
            "topic": topic,
            "delivery.guarantee": "exactly-once",
            "kafka.transaction.timeout.ms": str(timeout_ms),
            "kafka.request.timeout.ms": "5000",
        }
        self._options, self._scope = parse(raw).options, Scope(topic, topic, 1)
        self._client = TransactionClient(self._options)
        self._handover = Handover.of(self._run(driver.take_over(self._scope)), wall_ms())

    def __enter__(self) -> Held:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def _run(self, steps: Steps[Any]) -> Any:
        return self._client.run(steps, 60_000)

    def write(self, index: int, number: int) -> TaskReport:
        """A task attempt, with all of its rows acknowledged."""
        batch = BatchIdentity.of_query("held", 0)
        attempt = TaskAttempt(self._client, self._scope, self._handover, batch, index, number, [0], 60_000.0)
        with task_producer(self._options, ColumnPlan.of([("value", "binary")], self.topic)) as ours:
            rows = iter([pa.record_batch({"value": pa.array([b"row"], pa.binary())})])
            for one in attempt.rows(rows, ours):
                ours.send(one)
            ours.finish()
        return attempt.finish()

    def write_after(self) -> None:
        """The row that readers wait for."""
        _write_after(self._cluster, self.topic)

    def _again(self) -> float:
        """A driver that is started, with connections of its own."""
        began = time.monotonic()
        client = TransactionClient(self._options)
        client.run(driver.take_over(self._scope), 60_000)
        client.close()
        return began

    def _commit(self, *reports: TaskReport) -> float:
        began = time.monotonic()
        self._run(batches.commit(reports, records_empty=False))
        return began

    def attempt_died(self) -> float:
        self.write(0, 0)
        report = self.write(0, 1)
        self.write_after()
        return self._commit(report)

    def job_failed(self) -> float:
        self.write(0, 0)
        self.write_after()
        began = time.monotonic()
        planning.abort(self._options, planning.PlannedTransactions(self._scope, None, self._handover))
        return began

    def driver_died(self) -> float:
        self.write(0, 0)
        self.write_after()
        return self._again()

    def driver_died_after_decision(self) -> float:
        report = self.write(0, 0)
        self.write_after()

        def decide() -> Steps[None]:
            assert report.part is not None
            decision = next_decision(self._scope, None, report.batch, 1, [report.part])
            yield from driver._record(self._scope, report.claim, decision)
            yield (EndTransaction(self._scope.driver_id, report.claim, commit=True),)

        self._run(decide())
        return self._again()

    def _coordinator(self) -> int:
        """The broker that coordinates the task's transaction."""
        return self._client._coordinators[False, self._scope.task_id(0, 0)]

    def broker_killed(self) -> float:
        report = self.write(0, 0)
        self.write_after()
        broker = self._coordinator()
        self._cluster.kill(broker)
        try:
            return self._commit(report)
        finally:
            self._cluster.start(broker)

    def broker_frozen(self) -> float:
        report = self.write(0, 0)
        self.write_after()
        broker = self._coordinator()
        self._cluster.freeze(broker)
        thaw = threading.Timer(5.0, self._cluster.thaw, [broker])
        thaw.start()
        try:
            return self._commit(report)
        finally:
            thaw.join()


def _write_after(cluster: LocalBroker, topic: str) -> None:
    producer = Producer({"bootstrap.servers": cluster.bootstrap_servers})
    producer.produce(topic, b"after")
    producer.flush(30)


def _first_row(cluster: LocalBroker, topic: str) -> float:
    """When a reader of committed rows gets the row behind the open transaction."""
    consumer = Consumer(
        {
            "bootstrap.servers": cluster.bootstrap_servers,
            "group.id": "held",
            "isolation.level": "read_committed",
            "enable.auto.commit": False,
        }
    )
    consumer.assign([TopicPartition(topic, 0, 0)])
    try:
        while True:
            message = consumer.poll(0.02)
            if message is not None and message.error() is None and message.value() == b"after":
                return time.monotonic()
    finally:
        consumer.close()


if __name__ == "__main__":
    sys.exit(main())
