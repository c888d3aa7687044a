"""Write change events, as Debezium has them, with keys and values that a schema registry knows.

    local-kafka --port 9092                       # in a terminal of its own
    local-kafka-registry --port 8081       # in another one
    python examples/schema_registry.py localhost:9092 http://127.0.0.1:8081/apis/ccompat/v7 [topic]

The rows are what a MERGE changed, before and after. A tombstone follows the event of a deleted row, so that a
compacted topic forgets its key. Consumers with Confluent's Avro deserializers read keys and values.
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
spark.stop()
