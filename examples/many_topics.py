"""Write each row to the topic that a column names.

    python examples/many_topics.py localhost:9092 [prefix of the topics]

The address can also stand in KAFKA_BOOTSTRAP_SERVERS. A Kafka to try it on: local-kafka
"""

from __future__ import annotations

import os
import sys

from pyspark.sql import SparkSession
from pyspark.sql import functions as F

servers = sys.argv[1] if len(sys.argv) > 1 else os.environ.get("KAFKA_BOOTSTRAP_SERVERS")
if not servers:
    sys.exit("Give HOST:PORT of a broker, or set KAFKA_BOOTSTRAP_SERVERS")
prefix = sys.argv[2] if len(sys.argv) > 2 else "sales"

# Spark's workers otherwise use the python3 on PATH, which may lack pyarrow and kafka-chunked.
os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
spark = SparkSession.builder.master("local[2]").appName("many topics example").getOrCreate()

countries = ("de", "fr", "it", "nl", "pl")
sales = spark.range(20_000).select(
    F.col("id").alias("sale"),
    F.element_at(F.lit(list(countries)), (F.col("id") % len(countries) + 1).cast("int")).alias("country"),
)

(
    sales.select(
        F.concat(F.lit(f"{prefix}-"), "country").alias("topic"),  # instead of the option topic, which wins
        F.col("sale").cast("string").alias("key"),
        F.to_json(F.struct("sale", "country")).alias("value"),
    )
    .write.format("kafka-chunked")
    .mode("append")
    .option("kafka.bootstrap.servers", servers)
    .option("topic.create", "true")  # even if brokers do not create topics
    .option("topic.create.names", ",".join(f"{prefix}-{country}" for country in countries))
    .option("topic.partitions", "2")
    .save()
)
print(f"20,000 sales are in {', '.join(f'{prefix}-{country}' for country in countries)}.")
spark.stop()
