"""Write a DataFrame to Kafka.

    python examples/batch.py localhost:9092 [topic]

The address can also stand in KAFKA_BOOTSTRAP_SERVERS. A Kafka to try it on: local-kafka

You will see the line that the sink logs for each job (rows, partitions, bytes, requests, time, memory), and
below it the one that this script prints.
"""

from __future__ import annotations

import os
import sys

from pyspark.sql import SparkSession
from pyspark.sql import functions as F

servers = sys.argv[1] if len(sys.argv) > 1 else os.environ.get("KAFKA_BOOTSTRAP_SERVERS")
if not servers:
    sys.exit("Give HOST:PORT of a broker, or set KAFKA_BOOTSTRAP_SERVERS")
topic = sys.argv[2] if len(sys.argv) > 2 else "batch-example"

# Spark's workers otherwise use the python3 on PATH, which may lack pyarrow and kafka-chunked.
os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
spark = SparkSession.builder.master("local[2]").appName("batch example").getOrCreate()

orders = spark.range(10_000).select(
    (F.col("id") % 100).alias("customer"),
    F.col("id").alias("order"),
    F.round(F.rand(seed=1) * 500, 2).alias("total"),
)
(
    orders.select(
        F.col("customer").cast("string").alias("key"),
        F.to_json(F.struct("customer", "order", "total")).alias("value"),
    )
    .write.format("kafka-chunked")
    .mode("append")  # without it Spark fails the write
    .option("kafka.bootstrap.servers", servers)
    .option("topic", topic)
    .option("topic.create", "true")  # if it does not exist
    .option("kafka.compression.type", "zstd")
    .save()
)
print(f"10,000 orders are in {topic}: save() returns when every row is acknowledged.")
spark.stop()
