"""Write rows with a schema registry: change events as Avro, and orders as JSON.

    local-kafka --port 9092                # in a terminal of its own
    local-kafka-registry --port 8081       # in another one
    python examples/schema_registry.py localhost:9092 http://127.0.0.1:8081/apis/ccompat/v7 [topic]

The change events are as Debezium has them: what a MERGE changed, before and after, by a schema derived from
the columns. A tombstone follows the event of a deleted row, so that a compacted topic forgets its key. The
orders go to a second topic, by a schema that is given. Confluent's deserializers read all of it.
"""

from __future__ import annotations

import os
import sys

from pyspark.sql import SparkSession
from pyspark.sql import functions as F

servers, registry = sys.argv[1:3]
topic = sys.argv[3] if len(sys.argv) > 3 else "customers"

# Spark's workers otherwise use the python3 on PATH, which may lack pyarrow and kafka-chunked.
os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
spark = SparkSession.builder.master("local[2]").appName("Schema registry example").getOrCreate()

ROW = "struct<id:bigint,name:string,city:string>"
changes = spark.sql(f"""
    SELECT id, op, cast(before AS {ROW}) AS before, cast(after AS {ROW}) AS after FROM VALUES
      (1L, 'c', null, struct(1L, 'Ada', 'London')),
      (2L, 'u', struct(2L, 'Blaise', 'Rouen'), struct(2L, 'Blaise', 'Paris')),
      (3L, 'd', struct(3L, 'Carl', 'Goettingen'), null)
    AS t(id, op, before, after)
""")
# A tombstone has no value. Both rows of a key go to one partition, in this order.
events = changes.select(
    F.struct("id").alias("key"),
    F.explode(
        F.when(
            F.col("op") == "d",
            F.array(F.struct("before", "after", "op"), F.lit(None)),
        ).otherwise(F.array(F.struct("before", "after", "op")))
    ).alias("value"),
)
(
    events.write.format("kafka-chunked")
    .mode("append")
    .option("kafka.bootstrap.servers", servers)
    .option("topic", topic)
    .option("schema.registry.url", registry)
    .option("key.format", "avro")
    .option("value.format", "avro")
    .option("key.record.name", "com.example.customers.Key")
    .option("value.record.name", "com.example.customers.Envelope")
    .save()
)
print(f"3 changes and a tombstone are in {topic}.")

ORDER = """{
  "$schema": "http://json-schema.org/draft-07/schema#",
  "title": "Order",
  "type": "object",
  "properties": {"order": {"type": "integer"}, "customer": {"type": "string"}, "total": {"type": "number"}},
  "required": ["order", "customer"]
}"""
orders = spark.range(5_000).select(
    F.concat(F.lit("customer-"), F.col("id") % 100).alias("key"),
    # Without a column "value", the value is a record of all columns but "key" and other columns of the sink.
    F.col("id").alias("order"),
    F.concat(F.lit("customer-"), F.col("id") % 100).alias("customer"),
    (F.col("id") / 4).alias("total"),
)
(
    orders.write.format("kafka-chunked")
    .mode("append")
    .option("kafka.bootstrap.servers", servers)
    .option("topic", f"{topic}-orders")
    .option("schema.registry.url", registry)
    .option("value.format", "json")
    .option("value.schema", ORDER)
    .save()
)
print(f"5,000 orders are in {topic}-orders.")
spark.stop()
