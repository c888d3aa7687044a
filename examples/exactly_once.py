"""Stream files into Kafka exactly once, over a restart that makes Spark run a micro-batch again.

    python examples/exactly_once.py localhost:9092 [topic]

The topic must be new, as all of its rows are counted in the end. Brokers must be Kafka 4.0 or later. The
address can also stand in KAFKA_BOOTSTRAP_SERVERS. A Kafka to try it on: local-kafka
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from confluent_kafka import Consumer, TopicPartition
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

servers = sys.argv[1] if len(sys.argv) > 1 else os.environ.get("KAFKA_BOOTSTRAP_SERVERS")
if not servers:
    sys.exit("Give HOST:PORT of a broker, or set KAFKA_BOOTSTRAP_SERVERS")
topic = sys.argv[2] if len(sys.argv) > 2 else f"exactly-once-{int(time.time())}"  # counted below

# Spark's workers otherwise use the python3 on PATH, which may lack pyarrow and kafka-chunked.
os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
spark = SparkSession.builder.master("local[2]").appName("exactly-once example").getOrCreate()


def add_file(folder: Path, first: int, count: int) -> None:
    """One more file of payments in the input folder."""
    lines = (json.dumps({"payment": number}) for number in range(first, first + count))
    (folder / f"payments-{first}.json").write_text("\n".join(lines), encoding="utf-8")


def run_until_caught_up(source: Path, checkpoint: Path) -> None:
    """Send what is new since the checkpoint, and end."""
    query = (
        spark.readStream.schema("payment long")
        .json(str(source))
        .select(F.to_json(F.struct("payment")).alias("value"))
        .writeStream.format("kafka-chunked")
        .option("kafka.bootstrap.servers", servers)
        .option("topic", topic)
        .option("topic.create", "true")
        .option("delivery.guarantee", "exactly-once")
        .option("checkpointLocation", str(checkpoint))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()


def committed_values() -> Counter[bytes]:
    """How often a reader sees each value. Without read_committed it would see more."""
    consumer = Consumer(
        {
            "bootstrap.servers": servers,
            "group.id": "exactly-once-example",
            "isolation.level": "read_committed",
            "enable.auto.commit": False,
            "enable.partition.eof": True,
        }
    )
    places = [
        TopicPartition(topic, number, 0) for number in consumer.list_topics(topic).topics[topic].partitions
    ]
    consumer.assign(places)
    found: Counter[bytes] = Counter()
    ends = 0
    while ends < len(places):
        message = consumer.poll(30)
        if message is None:
            sys.exit("no row came for 30 s")
        if message.error() is not None:
            ends += 1  # of a partition
        else:
            found[message.value() or b""] += 1
    consumer.close()
    return found


with tempfile.TemporaryDirectory(prefix="exactly-once-example-") as folder:
    source, checkpoint = Path(folder) / "input", Path(folder) / "checkpoint"
    source.mkdir()
    add_file(source, 0, 1_000)
    run_until_caught_up(source, checkpoint)
    print("1,000 payments sent.")

    # Pretend that the driver died after the rows were committed in Kafka and before Spark recorded it: Spark
    # runs the same micro-batch again.
    for name in ("0", ".0.crc"):
        (checkpoint / "commits" / name).unlink(missing_ok=True)
    add_file(source, 1_000, 500)
    run_until_caught_up(source, checkpoint)

    # Brokers end transactions a moment after the query's commit has returned.
    until = time.monotonic() + 30
    while (values := committed_values()).total() < 1_500 and time.monotonic() < until:
        time.sleep(0.1)
    seen_once = sum(count == 1 for count in values.values())
    print(f"After the restart, readers see {values.total():,} payments, {seen_once:,} of them exactly once.")
spark.stop()
