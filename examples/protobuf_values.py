"""Write Protobuf values as Confluent's schema registry frames them.

    protoc --include_imports --descriptor_set_out=order.desc order.proto
    python examples/protobuf_values.py localhost:9092 order.desc [topic] [id of the schema]

order.proto:

    syntax = "proto3";
    package example;
    message Order { int64 order = 1; string customer = 2; double total = 3; }

Register the schema first, with the registry's own client, and pass the id that it returns. Spark fetches the
package spark-protobuf at its first start. The address can also stand in KAFKA_BOOTSTRAP_SERVERS.
"""

from __future__ import annotations

import os
import sys

import pyspark
from pyspark.sql import Column, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.protobuf.functions import to_protobuf

servers = sys.argv[1] if len(sys.argv) > 1 else os.environ.get("KAFKA_BOOTSTRAP_SERVERS")
if not servers:
    sys.exit("Give HOST:PORT of a broker, or set KAFKA_BOOTSTRAP_SERVERS")
descriptor = sys.argv[2] if len(sys.argv) > 2 else "order.desc"
topic = sys.argv[3] if len(sys.argv) > 3 else "protobuf-example"
schema_id = int(sys.argv[4]) if len(sys.argv) > 4 else 18

# Spark's workers otherwise use the python3 on PATH, which may lack pyarrow and kafka-chunked.
os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
spark = (
    SparkSession.builder.master("local[2]")
    .appName("Protobuf example")
    .config("spark.jars.packages", f"org.apache.spark:spark-protobuf_2.13:{pyspark.__version__}")
    .getOrCreate()
)


def framed(payload: Column, schema_id: int) -> Column:
    """The payload in Confluent's wire format, for the first message of the schema with this id.

    A zero byte, the id, and the message's place in its file: one more zero byte stands for the first. For
    the third message it would be bytes([2, 4]): how many numbers follow, then 2, both as zigzag varints.
    """
    first_message = bytes([0])
    return F.concat(F.lit(bytes([0]) + schema_id.to_bytes(4, "big") + first_message), payload)


orders = spark.range(5_000).select(
    F.col("id").alias("order"),
    F.concat(F.lit("customer-"), F.col("id") % 100).alias("customer"),
    (F.col("id") / 4).alias("total"),
)
(
    orders.select(
        F.col("customer").alias("key"),
        framed(
            to_protobuf(F.struct("order", "customer", "total"), "example.Order", descFilePath=descriptor),
            schema_id,
        ).alias("value"),
    )
    .write.format("kafka-chunked")
    .mode("append")
    .option("kafka.bootstrap.servers", servers)
    .option("topic", topic)
    .option("topic.create", "true")  # if it does not exist
    .save()
)
print(f"5,000 Protobuf orders are in {topic}, framed for schema {schema_id}.")
spark.stop()
