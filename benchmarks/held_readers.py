"""How long readers of committed rows are held up, by what left a transaction open.

Rows of an open transaction are in a topic, and a row of somebody else behind them. Counted is from when the
transaction's end begins to when a reader gets the row behind. ``without_spark`` calls the sink as Spark does;
``through_spark`` are jobs and queries of Spark itself, one of them on a cluster with executors.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from confluent_kafka import Consumer, Producer, TopicPartition

from benchmarks.surroundings import environment, spark_session
from kafka_sink.clock import wall_ms
from kafka_sink.local_broker import LocalBroker
from kafka_sink.options import parse
from kafka_sink.rows.column_plan import ColumnPlan
from kafka_sink.task.producer_cache import task_producer
from kafka_sink.transactions import batch as batches
from kafka_sink.transactions import driver, planning
from kafka_sink.transactions.attempt import TaskAttempt
from kafka_sink.transactions.batch import Handover, TaskReport
from kafka_sink.transactions.client import TransactionClient
from kafka_sink.transactions.decision import BatchIdentity, next_decision
from kafka_sink.transactions.operations import EndTransaction, ListOpen, Steps, describe
from kafka_sink.transactions.scope import Scope
from tests.support.standalone_cluster import StandaloneCluster

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_PATIENCE_S = 90.0
# Spark gives 10,000 at a time to a Python sink, and its buffers keep the last ones back.
_ROWS, _BATCHES_BEFORE_THE_END = 80_000, 6


def without_spark(cluster: LocalBroker, smoke: bool) -> dict[str, float]:
    """Seconds by what left a transaction open.

    Counted from when its end begins: a driver that is started again plans, one that lives commits or aborts.
    """
    cases: dict[str, Callable[[Held], float]] = {
        "an attempt died; the commit of its batch with another attempt": Held.attempt_died,
        "the driver's abort": Held.job_failed,
        "driver died before its decision, started again": Held.driver_died,
        "driver died between decision and commits, started again": Held.driver_died_after_decision,
    }
    if not smoke:
        cases |= {
            "coordinator's broker killed, then the commit": Held.broker_killed,
            "coordinator's broker frozen for 5 s, then the commit": Held.broker_frozen,
            "nobody starts it again; time-out of 5 s, brokers look each second": Held.no_one,
        }
    found = {}
    for number, (name, case) in enumerate(cases.items()):
        with Held(cluster, f"held-{number}", 5_000 if case is Held.no_one else 60_000) as held:
            began = case(held)
            found[name] = round(held.reader.seen() - began, 3)
    return found


def through_spark(spark: SparkSession, cluster: LocalBroker, folder: Path) -> dict[str, float]:
    """Seconds from a task's failure, from ``query.stop()``, and from an executor's kill."""
    cases: dict[str, Callable[[SparkSession, LocalBroker, Path], tuple[float, float]]] = {
        "a task fails, and with it the job": _job_failed,
        "query.stop() in a micro-batch": _query_stopped,
        "an executor is killed; its task runs again elsewhere": _executor_killed,
    }
    found = {}
    for number, (name, case) in enumerate(cases.items()):
        place = folder / f"held-{number}"
        place.mkdir()
        began, seen = case(spark, cluster, place)
        found[name] = round(seen - began, 3)
    return found


class Reader:
    """A reader of committed rows that waits for the row behind the open transaction, from now on."""

    def __init__(self, cluster: LocalBroker, topic: str) -> None:
        self._consumer = Consumer(
            {
                "bootstrap.servers": cluster.bootstrap_servers,
                "group.id": "held",
                "isolation.level": "read_committed",
                "enable.auto.commit": False,
            }
        )
        self._consumer.assign([TopicPartition(topic, 0, 0)])
        self._seen = 0.0
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()
        # It has connections and waits by then.
        time.sleep(0.5)
        if self._seen:
            raise RuntimeError(f"no transaction in {topic} holds up readers")

    def _read(self) -> None:
        deadline = time.monotonic() + _PATIENCE_S
        while time.monotonic() < deadline:
            message = self._consumer.poll(0.02)
            if message is not None and message.error() is None and message.value() == b"after":
                self._seen = time.time()
                break
        self._consumer.close()

    def seen(self) -> float:
        """When it got the row. Raises TimeoutError."""
        self._thread.join()
        if not self._seen:
            raise TimeoutError(f"readers are held up for {_PATIENCE_S:.0f} s")
        return self._seen


def _write_after(cluster: LocalBroker, topic: str) -> Reader:
    """The row that readers wait for, and a reader."""
    producer = Producer({"bootstrap.servers": cluster.bootstrap_servers})
    producer.produce(topic, b"after")
    if producer.flush(30):
        raise TimeoutError(f"no row could be written to {topic}")
    return Reader(cluster, topic)


# -- without Spark --------------------------------------------------------------------------------


class Held:
    """A topic, a driver with an open transaction, and a row of somebody else behind it."""

    reader: Reader

    def __init__(self, cluster: LocalBroker, topic: str, timeout_ms: int) -> None:
        self._cluster = cluster
        self.topic = topic
        cluster.create_topic(topic, 1)
        raw = _options(cluster, topic) | {
            "kafka.transaction.timeout.ms": str(timeout_ms),
            "kafka.request.timeout.ms": "5000",
        }
        self._options, self._scope = parse(raw).options, Scope(topic, topic, 1)
        self._client = TransactionClient(self._options)
        self._handover = Handover.of(
            self._scope, self._run(driver.take_over(self._scope, wall_ms())), wall_ms()
        )

    def _plan(self) -> Handover:
        now_ms = wall_ms()
        return Handover.of(self._scope, self._run(driver.take_over(self._scope, now_ms)), now_ms)

    def __enter__(self) -> Held:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def _run(self, steps: Steps[Any]) -> Any:
        return self._client.run(steps, 60_000)

    def _write(self, number: int = 0) -> TaskReport:
        """A task attempt, with all of its rows acknowledged."""
        batch = BatchIdentity.of_query("held", 0)
        attempt = TaskAttempt(self._client, self._scope, self._handover, batch, 0, number, [0], 60_000.0)
        with task_producer(self._options, ColumnPlan.of([("value", "binary")], self.topic)) as ours:
            rows = iter([pa.record_batch({"value": pa.array([b"row"], pa.binary())})])
            for one in attempt.rows(rows, ours):
                ours.send(one)
            ours.finish()
        return attempt.finish()

    def _write_after(self) -> None:
        self.reader = _write_after(self._cluster, self.topic)

    def _again(self) -> float:
        """A driver that is started, with connections of its own."""
        began = time.time()
        client = TransactionClient(self._options)
        client.run(driver.take_over(self._scope, wall_ms()), 60_000)
        client.close()
        return began

    def _commit(self, *reports: TaskReport) -> float:
        began = time.time()
        self._run(batches.commit(reports, records_empty=False))
        return began

    def attempt_died(self) -> float:
        self._write()
        report = self._write(1)
        self._write_after()
        return self._commit(report)

    def job_failed(self) -> float:
        self._write()
        self._write_after()
        began = time.time()
        planning.abort(self._options, planning.PlannedTransactions(self._scope, None, self._handover))
        return began

    def driver_died(self) -> float:
        self._write()
        self._write_after()
        return self._again()

    def driver_died_after_decision(self) -> float:
        report = self._write()
        self._write_after()

        def decide() -> Steps[None]:
            assert report.part is not None
            decision = next_decision(self._scope, None, report.run.batch, 1, [report.part])
            yield from driver._record(self._scope, report.run.claim, decision)
            yield (EndTransaction(self._scope.driver_id, report.run.claim, commit=True),)

        self._run(decide())
        return self._again()

    def no_one(self) -> float:
        began = time.time()
        self._write()
        self._write_after()
        return began

    def _coordinator(self) -> int:
        """The broker that coordinates the task's transaction."""
        return self._client._coordinators[False, self._scope.task_id(0, 0)]

    def broker_killed(self) -> float:
        report = self._write()
        self._write_after()
        broker = self._coordinator()
        self._cluster.kill(broker)
        try:
            return self._commit(report)
        finally:
            self._cluster.start(broker)

    def broker_frozen(self) -> float:
        report = self._write()
        self._write_after()
        broker = self._coordinator()
        self._cluster.freeze(broker)
        thaw = threading.Timer(5.0, self._cluster.thaw, [broker])
        thaw.start()
        try:
            return self._commit(report)
        finally:
            thaw.join()


# -- through Spark --------------------------------------------------------------------------------


def _query_stopped(spark: SparkSession, cluster: LocalBroker, folder: Path) -> tuple[float, float]:
    cluster.create_topic("held-stop", 1)
    rows = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", _ROWS)
    query = (
        _waiting(rows.option("numPartitions", 1).load().select("value"), folder / "end", "")
        .writeStream.format("kafka-chunked")
        .options(**_options(cluster, "held-stop"))
        .option("checkpointLocation", str(folder / "checkpoint"))
        .start()
    )
    reader = _held(cluster, "held-stop")
    began = time.time()
    query.stop()
    return began, reader.seen()


def _job_failed(spark: SparkSession, cluster: LocalBroker, folder: Path) -> tuple[float, float]:
    cluster.create_topic("held-fail", 1)
    found: list[tuple[float, float]] = []
    # A thread of its own for the reader: Spark knows its session in this one.
    watch = threading.Thread(target=lambda: found.append(_ended(cluster, "held-fail", folder)), daemon=True)
    watch.start()
    try:
        _write_rows(spark, cluster.bootstrap_servers, "held-fail", folder, "fail")
    except Exception:
        if not (folder / "ended").exists():
            raise
    watch.join()
    return found[0]


def _executor_killed(_: SparkSession, cluster: LocalBroker, folder: Path) -> tuple[float, float]:
    cluster.create_topic("held-kill", 1)
    environ = environment()
    with StandaloneCluster(workers=2, cores=1, environ=environ) as workers:
        command = [sys.executable, "-m", "benchmarks.held_readers", workers.url, cluster.bootstrap_servers]
        with subprocess.Popen([*command, "held-kill", str(folder)], env=environ) as job:
            found = _ended(cluster, "held-kill", folder)
            job.wait()
            return found


def _ended(cluster: LocalBroker, topic: str, folder: Path) -> tuple[float, float]:
    """Let the task end; returns when it did, and when the reader got its row."""
    reader = _held(cluster, topic)
    (folder / "end").touch()
    seen = reader.seen()
    return float((folder / "ended").read_text()), seen


def _held(cluster: LocalBroker, topic: str) -> Reader:
    """Once rows of an open transaction of the prefix, named as the topic, are in the topic."""
    client = TransactionClient(parse(_options(cluster, topic)).options)

    def partitions() -> Steps[int]:
        (names,) = yield (ListOpen(topic),)
        found = yield from describe(*names)
        return sum(one.partitions for one in found.values())

    deadline = time.monotonic() + _PATIENCE_S
    while not client.run(partitions(), 30_000):
        if time.monotonic() > deadline:
            raise TimeoutError(f"no transaction is open in {topic}")
        time.sleep(0.05)
    client.close()
    return _write_after(cluster, topic)


def _write_rows(spark: SparkSession, bootstrap_servers: str, topic: str, folder: Path, end: str) -> None:
    """A job whose only task writes some rows, waits, and then fails, or kills its executor once."""
    frame = _waiting(spark.range(0, _ROWS, 1, 1), folder / "end", end)
    write = frame.write.format("kafka-chunked").mode("append")
    write.options(**_named(bootstrap_servers, topic)).save()


def _waiting(frame: DataFrame, until: Path, end: str) -> DataFrame:
    """Rows, of which the first attempt gives a half, and the rest once ``until`` is there, or ends then."""

    def rows(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from pyspark import TaskContext

        context = TaskContext.get()
        for number, batch in enumerate(batches):
            if number == _BATCHES_BEFORE_THE_END and context is not None and not context.attemptNumber():
                while not until.exists():
                    time.sleep(0.01)
                until.with_name("ended").write_text(str(time.time()))
                if end == "fail":
                    raise RuntimeError("the task fails")
                # A worker's parent is its daemon, and that one's the executor.
                daemon = Path(f"/proc/{os.getppid()}/stat").read_text(encoding="utf-8")
                os.kill(int(daemon.rpartition(")")[2].split()[1]), signal.SIGKILL)
            yield batch

    column = frame.columns[0]
    return frame.selectExpr(f"lpad({column}, 50, '0') value").mapInArrow(rows, "value string")


def _options(cluster: LocalBroker, topic: str) -> dict[str, str]:
    return _named(cluster.bootstrap_servers, topic)


def _named(bootstrap_servers: str, topic: str) -> dict[str, str]:
    return {
        "kafka.bootstrap.servers": bootstrap_servers,
        "topic": topic,
        "delivery.guarantee": "exactly-once",
        "transactional.id.prefix": topic,
    }


def main(master: str, bootstrap_servers: str, topic: str, folder: str) -> None:
    """The driver of the job whose executor is killed."""
    spark = spark_session(master)
    _write_rows(spark, bootstrap_servers, topic, Path(folder), "kill")
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
