"""A job for spark-submit.

    spark-submit --master 'local[2]' examples/spark_submit_job.py localhost:9092 [topic]

On a cluster, kafka-chunked must be installed where the executors' Python runs (PYSPARK_PYTHON names it). The
address can also stand in KAFKA_BOOTSTRAP_SERVERS.
"""

from __future__ import annotations

import os
import sys

from pyspark.sql import SparkSession
from pyspark.sql import functions as F


def main(servers: str, topic: str) -> None:
    spark = SparkSession.builder.appName("spark-submit example").getOrCreate()
    events = spark.range(50_000).select(
        F.concat(F.lit("user-"), F.col("id") % 500).alias("key"),
        F.concat(F.lit("event "), F.col("id")).alias("value"),
        F.current_timestamp().alias("timestamp"),
    )
    (
        events.write.format("kafka-chunked")
        .mode("append")
        .option("kafka.bootstrap.servers", servers)
        .option("topic", topic)
        .option("topic.create", "true")  # if it does not exist
        .save()
    )
    print(f"50,000 events are in {topic}.")
    spark.stop()


if __name__ == "__main__":
    servers = sys.argv[1] if len(sys.argv) > 1 else os.environ.get("KAFKA_BOOTSTRAP_SERVERS")
    if not servers:
        sys.exit("Give HOST:PORT of a broker, or set KAFKA_BOOTSTRAP_SERVERS")
    main(servers, sys.argv[2] if len(sys.argv) > 2 else "spark-submit-example")
