"""A Spark driver that writes to one broker in every way the sink claims, and reads everything back.

``python job.py BOOTSTRAP [no-transactions]``: one JSON line per check on stdout, ``{"check", "problem",
"seconds"}``, with an empty problem where it held. It runs with any Python and PySpark.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence

import pyarrow
from confluent_kafka import Consumer, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic
from pyspark.sql import DataFrame, SparkSession

_ROWS = 20_000
_WAIT_S = 60.0


class Checks:
    """Each method is one claim; it raises where the claim does not hold."""

    def __init__(
        self,
        bootstrap: str,
        spark: SparkSession,
        *,
        transactions: bool = True,
        codecs: Sequence[str] = ("none", "gzip", "snappy", "lz4", "zstd"),
    ) -> None:
        self._bootstrap = bootstrap
        self._spark = spark
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
        """``topic.create`` makes the topic before tasks start."""
        topic = self._topic("created")
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
        return {
            "batch": self.batch,
            "topic.create": self.created_topic,
            "streaming": self.streaming,
            "recreated topic": self.recreated_topic,
            "exactly once": self.exactly_once,
        }

    def _topic(self, name: str) -> str:
        return f"{name}-{uuid.uuid4().hex[:8]}"

    def _create(self, topic: str, partitions: int) -> None:
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
        writer = rows.write.format("kafka-chunked").mode("append").options(**options)
        writer.option("kafka.bootstrap.servers", self._bootstrap).option("topic", topic).save()

    def _stream(self, rows: DataFrame, topic: str, checkpoint: str, **options: str) -> None:
        writer = rows.writeStream.format("kafka-chunked").options(**options)
        writer = writer.option("kafka.bootstrap.servers", self._bootstrap).option("topic", topic)
        query = writer.option("checkpointLocation", checkpoint).trigger(availableNow=True).start()
        if not query.awaitTermination(120):
            raise AssertionError("the query did not end within 120 s")

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


def main(bootstrap: str, *, transactions: bool) -> None:
    spark = (
        SparkSession.builder.master("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.log.level", "ERROR")
        .config("spark.sql.session.timeZone", "UTC")
        .getOrCreate()
    )
    versions = f"Python {sys.version.split()[0]}, PySpark {spark.version}, PyArrow {pyarrow.__version__}"
    print(json.dumps({"versions": versions}), flush=True)
    for name, check in Checks(bootstrap, spark, transactions=transactions).all().items():
        started = time.monotonic()
        problem = ""
        try:
            check()
        except Exception as error:  # noqa: BLE001 - whatever it is, it is this check's result
            problem = f"{type(error).__name__}: {error}"[:2000]
        seconds = round(time.monotonic() - started, 1)
        print(json.dumps({"check": name, "problem": problem, "seconds": seconds}), flush=True)
    spark.stop()


if __name__ == "__main__":
    main(sys.argv[1], transactions="no-transactions" not in sys.argv)
