"""Write headers and event times beside keys and values.

    python examples/headers_and_timestamps.py localhost:9092 [topic]

The address can also stand in KAFKA_BOOTSTRAP_SERVERS. A Kafka to try it on: local-kafka
"""

from __future__ import annotations

import os
import sys

from pyspark.sql import Column, SparkSession
from pyspark.sql import functions as F

servers = sys.argv[1] if len(sys.argv) > 1 else os.environ.get("KAFKA_BOOTSTRAP_SERVERS")
if not servers:
    sys.exit("Give HOST:PORT of a broker, or set KAFKA_BOOTSTRAP_SERVERS")
topic = sys.argv[2] if len(sys.argv) > 2 else "headers-example"

# Spark's workers otherwise use the python3 on PATH, which may lack pyarrow and kafka-chunked.
os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
spark = SparkSession.builder.master("local[2]").appName("headers example").getOrCreate()


def header(name: str, value: Column) -> Column:
    """One element of the column ``headers``. Values are bytes; a null is a header without a value."""
    return F.struct(F.lit(name).alias("key"), value.cast("binary").alias("value"))


measured = spark.range(5_000).select(
    F.concat(F.lit("sensor-"), F.col("id") % 20).alias("sensor"),
    F.round(F.rand(seed=1) * 40, 1).alias("celsius"),
    # One reading a second, up to now. Brokers delete rows by these times: rows older than a topic's
    # retention.ms (a week by default) may be gone minutes after they were written.
    (F.current_timestamp() - F.make_interval(secs=F.lit(5_000) - F.col("id"))).alias("measured_at"),
)
(
    measured.select(
        F.col("sensor").alias("key"),
        F.to_json(F.struct("sensor", "celsius")).alias("value"),
        F.array(
            header("content-type", F.lit("application/json")),
            header("site", F.when(F.col("celsius") > 20, "south").otherwise("north")),
        ).alias("headers"),
        F.col("measured_at").alias("timestamp"),
    )
    .write.format("kafka-chunked")
    .mode("append")
    .option("kafka.bootstrap.servers", servers)
    .option("topic", topic)
    .option("topic.create", "true")  # if it does not exist
    .save()
)
print(f"5,000 readings are in {topic}, each with its own time and two headers.")
spark.stop()
