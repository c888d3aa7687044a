"""Fill batches of 4 MiB in a topic with many partitions, with keys.

    python examples/wide_keyed_topic.py localhost:9092 [topic] [rows] [partitions]

Batches take memory as rows arrive, so a large batch.size costs what the rows need, not batch.size for each
partition: the line that the job logs ends with the memory of the busiest task. Below it you will see how
large the batches became. As they stand, 1,400,000 rows fill a batch of 3.7 MiB in each of two tasks for each
of 50 partitions; each task has 200 MB of rows in memory then. The address can also stand in
KAFKA_BOOTSTRAP_SERVERS. A Kafka to try it on: local-kafka
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

MIB = 1024 * 1024

servers = sys.argv[1] if len(sys.argv) > 1 else os.environ.get("KAFKA_BOOTSTRAP_SERVERS")
if not servers:
    sys.exit("Give HOST:PORT of a broker, or set KAFKA_BOOTSTRAP_SERVERS")
topic = sys.argv[2] if len(sys.argv) > 2 else "wide-example"
rows = int(sys.argv[3]) if len(sys.argv) > 3 else 1_400_000
partitions = int(sys.argv[4]) if len(sys.argv) > 4 else 50

# Spark's workers otherwise use the python3 on PATH, which may lack pyarrow and kafka-chunked.
os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
spark = SparkSession.builder.master("local[2]").appName("wide topic example").getOrCreate()

# A batch larger than the topic's max.message.bytes (1 MiB by default) is rejected.
new = NewTopic(topic, partitions, config={"max.message.bytes": str(8 * MIB)})
admin = AdminClient({"bootstrap.servers": servers})
if topic not in admin.list_topics(timeout=30).topics:
    admin.create_topics([new], operation_timeout=30)[topic].result(60)

events = spark.range(rows, numPartitions=2).select(
    F.concat(F.lit("user-"), F.col("id") % 100_000).alias("key"),
    F.concat_ws("", *(F.sha2(F.concat("id", F.lit(part)), 256) for part in "abcd")).alias("value"),
)
with tempfile.TemporaryDirectory() as folder:
    report = Path(folder) / "report.jsonl"
    (
        events.write.format("kafka-chunked")
        .mode("append")
        .option("kafka.bootstrap.servers", servers)
        .option("topic", topic)
        .option("kafka.batch.size", str(4 * MIB))
        .option("kafka.max.request.size", str(8 * MIB))  # at least one batch must fit
        .option(
            "kafka.linger.ms", "60000"
        )  # a batch is sent when it is full, or when the task has no more rows
        .option("kafka.buffer.memory", str(256 * MIB))  # a limit of each task: only what rows need is used
        .option("delivery.report.path", str(report))  # what each partition got, as JSON
        .save()
    )
    written = json.loads(report.read_text(encoding="utf-8"))["partitions"]
batches = sum(one["batches"] for one in written)
average = sum(one["bytes"] for one in written) / batches / MIB
print(
    f"{rows:,} events are in {len(written)} partitions of {topic}: "
    f"{batches} batches, {average:.1f} MiB on average."
)
spark.stop()
