"""Write Avro values as Confluent's schema registry frames them: a zero byte, the schema's id, the payload.

    python examples/avro_values.py localhost:9092 [topic] [id of the schema]

Register the schema first, with the registry's own client, and pass the id that it returns. Spark fetches the
package spark-avro at its first start. The address can also stand in KAFKA_BOOTSTRAP_SERVERS.
"""

from __future__ import annotations

import json
import os
import sys

import pyspark
from pyspark.sql import Column, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.avro.functions import to_avro

servers = sys.argv[1] if len(sys.argv) > 1 else os.environ.get("KAFKA_BOOTSTRAP_SERVERS")
if not servers:
    sys.exit("Give HOST:PORT of a broker, or set KAFKA_BOOTSTRAP_SERVERS")
topic = sys.argv[2] if len(sys.argv) > 2 else "avro-example"
schema_id = int(sys.argv[3]) if len(sys.argv) > 3 else 17

# Spark's workers otherwise use the python3 on PATH, which may lack pyarrow and kafka-chunked.
os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
spark = (
    SparkSession.builder.master("local[2]")
    .appName("Avro example")
    .config("spark.jars.packages", f"org.apache.spark:spark-avro_2.13:{pyspark.__version__}")
    .getOrCreate()
)

SCHEMA = json.dumps(
    {
        "type": "record",
        "name": "Order",
        "namespace": "com.example",
        "fields": [
            {"name": "order", "type": "long"},
            {"name": "customer", "type": "string"},
            {"name": "total", "type": ["null", "double"], "default": None},
        ],
    }
)


def framed(payload: Column, schema_id: int) -> Column:
    """The payload in Confluent's wire format, for the schema with this id."""
    return F.concat(F.lit(bytes([0]) + schema_id.to_bytes(4, "big")), payload)


orders = spark.range(5_000).select(
    F.col("id").alias("order"),
    F.concat(F.lit("customer-"), F.col("id") % 100).alias("customer"),
    F.when(F.col("id") % 10 != 0, F.col("id") / 4).alias("total"),
)
(
    orders.select(
        F.col("customer").alias("key"),
        framed(to_avro(F.struct("order", "customer", "total"), SCHEMA), schema_id).alias("value"),
    )
    .write.format("kafka-chunked")
    .mode("append")
    .option("kafka.bootstrap.servers", servers)
    .option("topic", topic)
    .option("topic.create", "true")  # if it does not exist
    .save()
)
print(f"5,000 Avro orders are in {topic}, framed for schema {schema_id}.")
spark.stop()
