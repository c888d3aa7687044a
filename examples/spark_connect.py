"""Write a batch and a stream through Spark Connect.

    python examples/spark_connect.py localhost:9092 [topic] [sc://host:port]

Without an address of a Spark Connect server it starts one here. It needs: pip install 'pyspark[connect]'. The
server and its executors need kafka-chunked; this program does not. Brokers are reached from there, not from
here. The address can also stand in KAFKA_BOOTSTRAP_SERVERS.
"""

from __future__ import annotations

import os
import sys
import tempfile

from pyspark.sql import SparkSession
from pyspark.sql import functions as F

servers = sys.argv[1] if len(sys.argv) > 1 else os.environ.get("KAFKA_BOOTSTRAP_SERVERS")
if not servers:
    sys.exit("Give HOST:PORT of a broker, or set KAFKA_BOOTSTRAP_SERVERS")
topic = sys.argv[2] if len(sys.argv) > 2 else "connect-example"
remote = sys.argv[3] if len(sys.argv) > 3 else "local[2]"

# This is for a server that starts here. A server elsewhere has its own PYSPARK_PYTHON.
os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
spark = SparkSession.builder.remote(remote).getOrCreate()
(
    spark.range(10_000)
    .select(F.col("id").cast("string").alias("key"), F.to_json(F.struct("id")).alias("value"))
    .write.format("kafka-chunked")
    .mode("append")
    .option("kafka.bootstrap.servers", servers)
    .option("topic", topic)
    .option("topic.create", "true")  # if it does not exist
    .save()
)
print(f"10,000 rows of a batch are in {topic}.")

# Files of the server, as it is the server that reads them.
folder = tempfile.mkdtemp(prefix="connect-example-")
spark.range(1_000).write.parquet(f"{folder}/input")
query = (
    spark.readStream.schema("id long")
    .parquet(f"{folder}/input")
    .select(F.concat(F.lit("stream-"), "id").alias("value"))
    .writeStream.format("kafka-chunked")
    .option("kafka.bootstrap.servers", servers)
    .option("topic", topic)
    .option("topic.create", "true")  # if it does not exist
    .option("checkpointLocation", f"{folder}/checkpoint")
    .trigger(availableNow=True)  # leave it out, or use processingTime="1 second", to run for good
    .start()
)
query.awaitTermination()
print(f"1,000 rows of a stream are in {topic}.")
spark.stop()
