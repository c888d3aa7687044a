"""Write a job that takes longer than a transaction may, exactly once: in parts, each a write of its own.

    python examples/long_job.py localhost:9092 [topic]

The first run dies after two parts, and the second one writes the rest. The topic must be new, as all of its
rows are counted in the end. Brokers must be Kafka 4.0 or later. The address can also stand in
KAFKA_BOOTSTRAP_SERVERS. A Kafka to try it on: local-kafka
"""

from __future__ import annotations

import os
import sys
import time
from collections import Counter

from confluent_kafka import Consumer, TopicPartition
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

servers = sys.argv[1] if len(sys.argv) > 1 else os.environ.get("KAFKA_BOOTSTRAP_SERVERS")
if not servers:
    sys.exit("Give HOST:PORT of a broker, or set KAFKA_BOOTSTRAP_SERVERS")
topic = sys.argv[2] if len(sys.argv) > 2 else f"long-job-{int(time.time())}"  # counted below
ORDERS = 20_000
# This many parts, so that each takes minutes. The number is the same whenever this version is run again.
PARTS = 4

# Spark's workers otherwise use the python3 on PATH, which may lack pyarrow and kafka-chunked.
os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
spark = SparkSession.builder.master("local[2]").appName("long job example").getOrCreate()
orders = spark.range(ORDERS).withColumnRenamed("id", "order")


def write(version: int, dies_after: int = PARTS) -> None:
    """All orders, in this version of the job."""
    for part in range(PARTS):
        if part == dies_after:
            raise RuntimeError(f"died after {dies_after} parts")
        # The part depends on the row's content, not on its place: another run may find it in another task or
        # order.
        mine = F.pmod(F.xxhash64("order"), F.lit(PARTS)) == part
        (
            orders.where(mine)
            .select(F.to_json(F.struct("order")).alias("value"))
            .write.format("kafka-chunked")
            .mode("append")
            .option("kafka.bootstrap.servers", servers)
            .option("topic", topic)
            .option("topic.create", "true")
            .option("delivery.guarantee", "exactly-once")
            .option("txnAppId", f"nightly-orders-{part}")
            .option("txnVersion", version)
            .save()
        )


def committed_values() -> Counter[bytes]:
    """How often a reader sees each value."""
    consumer = Consumer(
        {
            "bootstrap.servers": servers,
            "group.id": "long-job-example",
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


try:
    write(20260131, dies_after=2)
except RuntimeError as error:
    print(f"The first run {error}.")
write(20260131)

# Brokers end transactions a moment after the commit has returned.
until = time.monotonic() + 30
while (values := committed_values()).total() < ORDERS and time.monotonic() < until:
    time.sleep(0.1)
seen_once = sum(count == 1 for count in values.values())
print(f"After the second, readers see {values.total():,} orders, {seen_once:,} of them exactly once.")
spark.stop()
