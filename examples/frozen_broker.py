"""Freeze one of three brokers while a job writes, and watch it in the live view.

    python examples/frozen_broker.py [port of the live view] [seconds]

It starts three brokers of its own. Rows without keys go to the other two; what had been meant for the frozen
one waits in order until it is back. Nothing is lost and no task fails.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import urllib.request
from typing import Any

from confluent_kafka import Consumer, TopicPartition
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from local_kafka import LocalBroker

port = int(sys.argv[1]) if len(sys.argv) > 1 else 8090
seconds = int(sys.argv[2]) if len(sys.argv) > 2 else 30
page = f"http://127.0.0.1:{port}"
topic, partitions, rows_per_second = f"frozen-{int(time.time())}", 6, 2_000

# Spark's workers otherwise use the python3 on PATH, which may lack pyarrow and kafka-chunked.
os.environ.setdefault("PYSPARK_PYTHON", sys.executable)


def metrics() -> dict[str, Any]:
    """The page's data, as JSON; nothing until the job serves it."""
    try:
        with urllib.request.urlopen(f"{page}/metrics.json", timeout=5) as response:
            found: dict[str, Any] = json.load(response)
    except OSError:
        return {"jobs": [], "brokers": []}
    return found


def written() -> int:
    """Rows of this topic that brokers have acknowledged."""
    jobs = (job for job in metrics()["jobs"] if topic in job["topics"])
    return sum(int(job["counters"]["records"]) for job in jobs)


def freeze_and_thaw(kafka: LocalBroker) -> None:
    """Broker 1 stops for a third of the job's time, or until it is muted if that takes longer."""
    while not written():
        time.sleep(0.1)
    kafka.freeze(1)
    print("Broker 1 is frozen: its connections stay open, and it answers nothing.", flush=True)
    frozen_at, before = time.monotonic(), written()
    muted: set[int] = set()
    while time.monotonic() < frozen_at + (seconds / 3 if muted else max(60, seconds / 3)):
        now_muted = {broker["broker"] for broker in metrics()["brokers"] if broker["muted"] is not None}
        for broker in sorted(now_muted - muted):
            after = time.monotonic() - frozen_at
            print(f"Broker {broker} is muted {after:.1f} s later. Rows go to the others.", flush=True)
        muted |= now_muted
        time.sleep(0.2)
    print(f"{written() - before:,} rows were acknowledged meanwhile.", flush=True)
    kafka.thaw(1)
    print("Broker 1 is back.", flush=True)


with LocalBroker(brokers=3) as kafka:
    # A frozen broker also holds up partitions of other leaders if it is one of their replicas.
    kafka.create_topic(topic, partitions, replication_factor=1)
    spark = SparkSession.builder.master("local[2]").appName("frozen broker example").getOrCreate()
    print(f"Open {page} in a browser: it shows tasks, brokers, and what is muted.", flush=True)
    chaos = threading.Thread(target=freeze_and_thaw, args=(kafka,), daemon=True)
    chaos.start()
    rows = seconds * rows_per_second
    (
        spark.range(rows, numPartitions=2)
        .select(F.concat("id", F.repeat(F.lit(" "), 500)).alias("value"))
        .write.format("kafka-chunked")
        .mode("append")
        .option("kafka.bootstrap.servers", kafka.bootstrap_servers)
        .option("topic", topic)
        .option("ui.port", str(port))
        # Rows without keys fill one partition's batch, then the next one's. Small ones go round at this rate.
        .option("kafka.batch.size", "16384")
        .option("max.rows.per.second", str(rows_per_second))  # else the job is over before anything happens
        .save()
    )
    chaos.join()
    consumer = Consumer({"bootstrap.servers": kafka.bootstrap_servers, "group.id": "frozen-example"})
    ends = [consumer.get_watermark_offsets(TopicPartition(topic, number))[1] for number in range(partitions)]
    consumer.close()
    print(f"{sum(ends):,} of {rows:,} rows are in Kafka; by partition: {ends}")
    spark.stop()
