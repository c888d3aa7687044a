"""A Spark driver that writes to one broker in every way the sink claims, and reads everything back.

``python job.py BOOTSTRAP [admin] [transactions]``: one JSON line per check on stdout, ``{"check", "problem",
"seconds"}``, with an empty problem where it held, and ``{"ended": true}``. It runs with any Python and
PySpark; before 4.0, which has no data sources, by ``kafka_sink.write`` and ``foreach_batch``. Brokers without
``admin`` make topics themselves; those without ``transactions`` cannot do what exactly-once needs.
``python job.py BOOTSTRAP query TOPIC FOLDER`` is the driver that one check kills.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pyarrow
from confluent_kafka import Consumer, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic
from pyspark import TaskContext
from pyspark.sql import DataFrame, SparkSession

import kafka_sink

_ROWS = 20_000
_WAIT_S = 60.0
_KILLED_AFTER_S = 240.0


class Checks:
    """Each method is one claim; it raises where the claim does not hold."""

    def __init__(
        self,
        bootstrap: str,
        spark: SparkSession,
        *,
        admin: bool = True,
        transactions: bool = True,
        codecs: Sequence[str] = ("none", "gzip", "snappy", "lz4", "zstd"),
        functions: bool = False,
    ) -> None:
        # Whether to write by kafka_sink.write and foreach_batch.
        self._functions = functions
        self._bootstrap = bootstrap
        self._spark = spark
        self._has_admin = admin
        # Whether the brokers can do what exactly-once needs.
        self._transactions = transactions
        self._codecs = codecs
        self._admin = AdminClient({"bootstrap.servers": bootstrap, "log_level": 0})

    def batch(self) -> None:
        """Keys, headers, timestamps and every codec; brokers since 2.1 take all five."""
        for codec in self._codecs:
            topic = self._topic(f"batch-{codec}")
            self._create(topic, 4)
            self._write(self._numbers(), topic, **{"kafka.compression.type": codec})
            self._expect_once(topic)

    def created_topic(self) -> None:
        """``topic.create`` makes the topic before tasks start. Brokers that cannot do that are named."""
        topic = self._topic("created")
        if not self._has_admin:
            try:
                self._write(self._numbers(), topic, **{"topic.create": "true", "topic.partitions": "3"})
            except Exception as error:
                if "does not support CreateTopics requests" not in str(error):
                    raise
                return
            raise AssertionError("brokers without CreateTopics were not refused")
        self._write(self._numbers(), topic, **{"topic.create": "true", "topic.partitions": "3"})
        self._expect_once(topic)
        if len(self._partitions(topic)) != 3:
            raise AssertionError(f"{len(self._partitions(topic))} partitions where 3 were asked for")

    def streaming(self) -> None:
        """Micro-batches from files, with a restart from the checkpoint between them."""
        topic = self._topic("streamed")
        self._create(topic, 4)
        with tempfile.TemporaryDirectory() as folder:
            for part in range(3):
                start = part * _ROWS // 2
                self._numbers(start, start + _ROWS // 2).write.mode("append").json(f"{folder}/in")
                source = self._spark.readStream.schema("value string, key string").json(f"{folder}/in")
                self._stream(source, topic, f"{folder}/checkpoint")
        self._expect_once(topic, 3 * (_ROWS // 2))

    def recreated_topic(self) -> None:
        """A topic deleted and made again, with another number of partitions, between two jobs."""
        topic = self._topic("recreated")
        self._create(topic, 2)
        self._write(self._numbers(), topic)
        self._admin.delete_topics([topic])[topic].result(30)
        deadline = time.monotonic() + _WAIT_S
        while True:
            # Deletion goes on after its response, and a topic of that name cannot be made meanwhile.
            try:
                self._create(topic, 4)
                break
            except KafkaException:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.5)
        self._write(self._numbers(), topic)
        self._expect_once(topic)
        if len(self._partitions(topic)) != 4:
            raise AssertionError("the topic that was read is the old one")

    def exactly_once(self) -> None:
        """A job that runs twice and a query write each row once. Brokers that cannot do that are refused."""
        topic = self._topic("transactions")
        self._create(topic, 2)
        job = {"delivery.guarantee": "exactly-once", "txnAppId": topic, "txnVersion": "1"}
        if not self._transactions:
            try:
                self._write(self._numbers(), topic, **job)
            except Exception as error:
                if "needs brokers of Apache Kafka 3.8 or later" not in str(error):
                    raise
                self._expect_once(topic, 0)
                return
            raise AssertionError("brokers without transactions of version 2 were not refused")
        for _ in range(2):
            self._write(self._numbers(), topic, **job)
        self._expect_once(topic)
        streamed = self._topic("transactions-streamed")
        self._create(streamed, 2)
        with tempfile.TemporaryDirectory() as folder:
            self._numbers().write.json(f"{folder}/in")
            source = self._spark.readStream.schema("value string, key string").json(f"{folder}/in")
            for _ in range(2):
                self._stream(
                    source, streamed, f"{folder}/checkpoint", **{"delivery.guarantee": "exactly-once"}
                )
        self._expect_once(streamed)

    def all(self) -> dict[str, Callable[[], None]]:
        checks = {
            "batch": self.batch,
            "topic.create": self.created_topic,
            "streaming": self.streaming,
            "exactly once": self.exactly_once,
            "dead letters": self.dead_letters,
            "functions": self.functions,
        }
        if self._has_admin:
            checks["recreated topic"] = self.recreated_topic
        if self._transactions:
            checks["retried task"] = self.retried_task
            checks["cancelled job"] = self.cancelled_job
            checks["killed driver"] = self.killed_driver
        return checks

    def dead_letters(self) -> None:
        """A row for a partition that is not there goes to the dead letter topic, the others are written."""
        topic, dead_letters = self._topic("tolerant"), self._topic("dead-letters")
        self._create(topic, 2)
        self._create(dead_letters, 1)
        rows = self._numbers().selectExpr("*", "if(value = '7', 99, null) AS partition")
        more = {"errors.tolerance": "all", "errors.deadletterqueue.topic.name": dead_letters}
        self._write(rows, topic, **more, **{"kafka.max.block.ms": "5000"})
        if self._read(dead_letters) != Counter([b"7"]):
            raise AssertionError("the dead letter topic has other rows than the refused one")
        if self._read(topic).total() != _ROWS - 1:
            raise AssertionError("the other rows are not there once")

    def retried_task(self) -> None:
        """A task fails half-way, and its second attempt writes. Readers see the rows of one attempt."""
        topic = self._topic("retried")
        self._create(topic, 2)
        rows = self._numbers().mapInArrow(_failing_once, "value string, key string")
        self._write(rows, topic, **{"delivery.guarantee": "exactly-once"})
        self._expect_once(topic)

    def cancelled_job(self) -> None:
        """Of a job that is cancelled half-way readers see nothing, and nothing stays open."""
        topic = self._topic("cancelled")
        self._create(topic, 2)
        failed: list[BaseException] = []

        def job() -> None:
            self._spark.sparkContext.setJobGroup(topic, topic, interruptOnCancel=True)
            if not self._functions:
                kafka_sink.register(self._spark)
            try:
                rows = self._numbers().mapInArrow(_slow, "value string, key string")
                self._write(rows, topic, **{"delivery.guarantee": "exactly-once"})
            except BaseException as error:  # noqa: BLE001 - Spark's class for it differs by version
                failed.append(error)

        thread = threading.Thread(target=job)
        thread.start()
        deadline = time.monotonic() + _WAIT_S
        tracker = self._spark.sparkContext.statusTracker()
        while not any(tracker.getJobIdsForGroup(topic)) and time.monotonic() < deadline:
            time.sleep(0.1)
        time.sleep(3)
        self._spark.sparkContext.cancelJobGroup(topic)
        thread.join(_WAIT_S)
        if not failed:
            raise AssertionError("the job was not cancelled")
        self._expect_once(topic, 0)

    def killed_driver(self) -> None:
        """Another driver of the query is killed with its JVM. This one goes on: each row is there once."""
        topic = self._topic("killed")
        self._create(topic, 2)
        with tempfile.TemporaryDirectory() as folder:
            self._numbers().repartition(6).write.json(f"{folder}/in")
            command = [sys.executable, __file__, self._bootstrap, "query", topic, folder]
            with open(f"{folder}/log", "wb") as log:
                driver = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
            try:
                deadline = time.monotonic() + _KILLED_AFTER_S
                while not self._read(topic):
                    if driver.poll() is not None or time.monotonic() > deadline:
                        raise AssertionError(f"the other driver wrote nothing: {_end_of(f'{folder}/log')}")
                    time.sleep(0.5)
            finally:
                os.killpg(driver.pid, signal.SIGKILL)
                driver.wait()
            self.query(topic, folder)
        self._expect_once(topic)

    def query(self, topic: str, folder: str) -> None:
        """Six micro-batches, each once."""
        source = self._spark.readStream.schema("value string, key string").option("maxFilesPerTrigger", 1)
        once = {"delivery.guarantee": "exactly-once"}
        self._stream(source.json(f"{folder}/in"), topic, f"{folder}/checkpoint", **once)

    def functions(self) -> None:
        """``kafka_sink.write`` returns what it wrote, also where there are data sources."""
        topic = self._topic("functions")
        self._create(topic, 3)
        options = {"kafka.bootstrap.servers": self._bootstrap, "topic": topic}
        written = kafka_sink.write(self._numbers(), options)
        ends = sum(int(one["endOffset"]) for one in written.partitions)
        if (written.rows, ends) != (_ROWS, _ROWS):
            raise AssertionError(f"{written}")
        self._expect_once(topic)

    def _topic(self, name: str) -> str:
        return f"{name}-{uuid.uuid4().hex[:8]}"

    def _create(self, topic: str, partitions: int) -> None:
        if not self._has_admin:
            return
        new = NewTopic(topic, num_partitions=partitions, replication_factor=1)
        self._admin.create_topics([new], operation_timeout=30)[topic].result(60)

    def _numbers(self, start: int = 0, end: int = _ROWS) -> DataFrame:
        return self._spark.range(start, end, 1, 2).selectExpr(
            "cast(id AS string) AS value", "cast(id % 97 AS string) AS key"
        )

    def _write(self, rows: DataFrame, topic: str, **options: str) -> None:
        rows = rows.selectExpr(
            "*",
            "array(named_struct('key', 'from', 'value', cast('matrix' AS binary))) AS headers",
            "timestamp'2026-01-02 03:04:05' AS timestamp",
        )
        given = {"kafka.bootstrap.servers": self._bootstrap, "topic": topic, **options}
        if self._functions:
            kafka_sink.write(rows, given)
        else:
            rows.write.format("kafka-chunked").mode("append").options(**given).save()

    def _stream(self, rows: DataFrame, topic: str, checkpoint: str, **options: str) -> None:
        given = {"kafka.bootstrap.servers": self._bootstrap, "topic": topic, **options}
        if self._functions:
            writer = rows.writeStream.foreachBatch(kafka_sink.foreach_batch(given))
        else:
            writer = rows.writeStream.format("kafka-chunked").options(**given)
        query = writer.option("checkpointLocation", checkpoint).trigger(availableNow=True).start()
        if not query.awaitTermination(240):
            raise AssertionError("the query did not end within 240 s")

    def _partitions(self, topic: str) -> list[int]:
        return list(self._admin.list_topics(topic, timeout=30).topics[topic].partitions)

    def _expect_once(self, topic: str, rows: int = _ROWS) -> None:
        found = self._read(topic)
        wanted = Counter(str(number).encode() for number in range(rows))
        if found != wanted:
            lost, doubled = wanted - found, found - wanted
            raise AssertionError(f"{topic}: {lost.total()} rows are missing, {doubled.total()} too many")

    def _read(self, topic: str) -> Counter[bytes]:
        consumer = Consumer(
            {
                "bootstrap.servers": self._bootstrap,
                "group.id": "matrix",
                "enable.auto.commit": False,
                "isolation.level": "read_committed",
                "enable.partition.eof": True,
            }
        )
        found: Counter[bytes] = Counter()
        partitions = self._partitions(topic)
        consumer.assign([TopicPartition(topic, partition, 0) for partition in partitions])
        left = len(partitions)
        try:
            while left:
                message = consumer.poll(30)
                if message is None:
                    raise AssertionError(f"{topic}: no response to a fetch within 30 s")
                error = message.error()
                if error is None:
                    found[message.value() or b""] += 1
                elif error.name() == "_PARTITION_EOF":
                    left -= 1
                else:
                    raise KafkaException(error)
        finally:
            consumer.close()
        return found


def _failing_once(batches: Iterator[pyarrow.RecordBatch]) -> Iterator[pyarrow.RecordBatch]:
    context = TaskContext.get()
    yield from batches
    if context is not None and context.partitionId() == 1 and context.attemptNumber() == 0:
        raise ValueError("the first attempt fails after its rows")


def _slow(batches: Iterator[pyarrow.RecordBatch]) -> Iterator[pyarrow.RecordBatch]:
    for batch in batches:
        yield batch.slice(0, 1)
        time.sleep(_WAIT_S)
        yield batch.slice(1)


def _end_of(log: str) -> str:
    return Path(log).read_text(errors="replace")[-1500:]


def _session() -> SparkSession:
    return (
        # A task may fail twice.
        SparkSession.builder.master("local[2,3]")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.log.level", "ERROR")
        .config("spark.sql.session.timeZone", "UTC")
        .getOrCreate()
    )


def main(bootstrap: str, *, admin: bool, transactions: bool) -> None:
    spark = _session()
    functions = not hasattr(spark, "dataSource")
    versions = f"Python {sys.version.split()[0]}, PySpark {spark.version}, PyArrow {pyarrow.__version__}"
    print(json.dumps({"versions": versions}), flush=True)
    checks = Checks(bootstrap, spark, admin=admin, transactions=transactions, functions=functions)
    for name, check in checks.all().items():
        started = time.monotonic()
        problem = ""
        try:
            check()
        except Exception as error:  # noqa: BLE001 - whatever it is, it is this check's result
            problem = f"{type(error).__name__}: {error}"[:2000]
        seconds = round(time.monotonic() - started, 1)
        print(json.dumps({"check": name, "problem": problem, "seconds": seconds}), flush=True)
    print(json.dumps({"ended": True}), flush=True)
    spark.stop()


if __name__ == "__main__":
    if sys.argv[2:3] == ["query"]:
        started = _session()
        Checks(sys.argv[1], started, functions=not hasattr(started, "dataSource")).query(*sys.argv[3:5])
        sys.exit(0)
    main(sys.argv[1], admin="admin" in sys.argv, transactions="transactions" in sys.argv)
