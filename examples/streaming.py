"""Stream files into Kafka, stop, and go on where it stopped.

    python examples/streaming.py localhost:9092 [topic]

The address can also stand in KAFKA_BOOTSTRAP_SERVERS. The folder holds the input and the checkpoint; both are
made here so that the example runs as it stands.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

from pyspark.sql import SparkSession
from pyspark.sql import functions as F

servers = sys.argv[1] if len(sys.argv) > 1 else os.environ.get("KAFKA_BOOTSTRAP_SERVERS")
if not servers:
    sys.exit("Give HOST:PORT of a broker, or set KAFKA_BOOTSTRAP_SERVERS")
topic = sys.argv[2] if len(sys.argv) > 2 else "streaming-example"

# Spark's workers otherwise use the python3 on PATH, which may lack pyarrow and kafka-chunked.
os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
spark = SparkSession.builder.master("local[2]").appName("streaming example").getOrCreate()


def add_file(folder: Path, name: str, first: int, count: int) -> None:
    """One more file of sensor readings in the input folder."""
    lines = (json.dumps({"sensor": f"s{n % 10}", "reading": n}) for n in range(first, first + count))
    (folder / name).write_text("\n".join(lines), encoding="utf-8")


def run_until_caught_up(source: Path, checkpoint: Path) -> None:
    """Send what is new since the checkpoint, one micro-batch per file, and end."""
    readings = (
        spark.readStream.schema("sensor string, reading long")
        .option("maxFilesPerTrigger", 1)
        .json(str(source))
    )
    query = (
        readings.select(F.col("sensor").alias("key"), F.to_json(F.struct("sensor", "reading")).alias("value"))
        .writeStream.format("kafka-chunked")
        .option("kafka.bootstrap.servers", servers)
        .option("topic", topic)
        .option("topic.create", "true")  # if it does not exist
        .option("checkpointLocation", str(checkpoint))
        .trigger(availableNow=True)  # leave it out, or use processingTime="1 second", to run for good
        .start()
    )
    query.awaitTermination()


with tempfile.TemporaryDirectory(prefix="streaming-example-") as folder:
    source, checkpoint = Path(folder) / "input", Path(folder) / "checkpoint"
    source.mkdir()
    add_file(source, "first.json", 0, 1_000)
    add_file(source, "second.json", 1_000, 1_000)
    run_until_caught_up(source, checkpoint)
    print("2,000 readings sent; the query has stopped.")
    add_file(source, "third.json", 2_000, 500)
    run_until_caught_up(source, checkpoint)
    print(f"500 more sent after the restart; the first 2,000 were not sent again. They are in {topic}.")
spark.stop()
