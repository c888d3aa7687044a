"""What exactly once costs: jobs and micro-batches with both guarantees in turns, and how long readers are
held up.

    python -m benchmarks.exactly_once [--out FILE] [--smoke]

Three brokers, topics with three replicas. ``jobs``: a million 110-byte keyed rows from Parquet in two tasks,
lz4, the guarantees alternating. ``micro_batches``: 2,000 rows each by two tasks, median over the batches of a
query. ``held_up``: a driver is killed in mid-batch with rows of open transactions in the topic; how long
until a reader of committed rows, at the end before, gets a row that was written after: where the query is
started again at once, and where nobody does before the transaction times out.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from confluent_kafka import Consumer, Producer, TopicPartition

from benchmarks.surroundings import RESULTS
from kafka_sink.local_broker import LocalBroker
from kafka_sink.options import SinkOptions, parse
from kafka_sink.producer_cache import task_producer
from kafka_sink.rows.column_plan import ColumnPlan
from kafka_sink.transactions import driver, task
from kafka_sink.transactions.client import TransactionClient
from kafka_sink.transactions.decision import BatchIdentity
from kafka_sink.transactions.operations import ProducerEpoch
from kafka_sink.transactions.scope import Scope

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

GUARANTEES = ("at-least-once", "exactly-once")
PARTITIONS = 4
GOAL_SHARE, GOAL_MORE_MS = 0.9, 150.0


def main() -> int:
    """0 where the goals are met."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.exactly_once", description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULTS / "exactly_once.json")
    parser.add_argument("--smoke", action="store_true", help="small, to see that it runs")
    arguments = parser.parse_args()
    rows, turns, batches = (20_000, 1, 4) if arguments.smoke else (1_000_000, 7, 40)
    quick = {"transaction.abort.timed.out.transaction.cleanup.interval.ms": 1000}
    with LocalBroker(brokers=3, properties=quick) as cluster, tempfile.TemporaryDirectory() as folder:
        found: dict[str, Any] = {"held_up": held_up(cluster)}
        spark = session()
        try:
            found["jobs"] = jobs(spark, cluster, Path(folder), rows, turns)
            found["micro_batches"] = micro_batches(spark, cluster, Path(folder), batches)
        finally:
            spark.stop()
    print(json.dumps(found, indent=1))
    if not arguments.smoke:
        arguments.out.write_text(json.dumps(found, indent=1) + "\n")
    share = found["jobs"]["share_of_the_rate"]
    more = found["micro_batches"]["more_ms"]
    return 0 if arguments.smoke or (share >= GOAL_SHARE and more <= GOAL_MORE_MS) else 1


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
    """Milliseconds of ``addBatch`` for each guarantee, the queries one after the other, twice."""
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
            times[progress["batchId"]] = progress["durationMs"].get("addBatch", 0)
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


def held_up(cluster: LocalBroker) -> dict[str, float]:
    """Seconds that a reader of committed rows waits behind what a dead driver's task has left open."""
    found = {}
    for name, timeout_ms, comes_back in (
        ("query started again after 2 s", 60_000, True),
        ("nobody starts it; kafka.transaction.timeout.ms = 5000", 5_000, False),
    ):
        topic = f"held-{timeout_ms}"
        cluster.create_topic(topic, 1)
        raw = {
            "kafka.bootstrap.servers": cluster.bootstrap_servers,
            "topic": topic,
            "delivery.guarantee": "exactly-once",
            "kafka.transaction.timeout.ms": str(timeout_ms),
        }
        options, scope = parse(raw).options, Scope(topic, topic, 1)
        dead = TransactionClient(options)
        claim = dead.run(driver.take_over(scope), 60_000).claim
        _, producer = dead.run(task.begin(scope, claim, 0, 0), 60_000)
        _write_open(options, topic, scope.task_id(0, 0), producer)
        dead.run(task.finish(scope, claim, BatchIdentity("query", 0), 0, 0, producer), 60_000)
        dead.close()
        began = time.monotonic()
        _write_after(cluster, topic)
        if comes_back:
            time.sleep(2)
            began = time.monotonic()
            again = TransactionClient(options)
            again.run(driver.take_over(scope), 60_000)
            again.close()
        found[name] = round(_first_row(cluster, topic) - began, 3)
    return found


def _write_open(options: SinkOptions, topic: str, name: str, producer: ProducerEpoch) -> None:
    """A row of an open transaction, by the sink's own producer."""
    with task_producer(options, ColumnPlan.of([("value", "binary")], topic)) as ours:
        ours.begin_transaction(name, *producer)
        ours.send(pa.record_batch({"value": pa.array([b"open"], pa.binary())}))
        ours.finish()


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
