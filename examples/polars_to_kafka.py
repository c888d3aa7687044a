"""Write a Polars frame to Kafka, without Spark.

    python examples/polars_to_kafka.py localhost:9092 [topic]

The address can also stand in KAFKA_BOOTSTRAP_SERVERS. A Kafka to try it on: local-kafka

You will see the line that the sink logs for each write (rows, topic, partitions, time), and below it the one
that this script prints. Run it twice: the second run finds that Kafka has this day already.
"""

from __future__ import annotations

import os
import sys

import polars as pl

import kafka_sink

servers = sys.argv[1] if len(sys.argv) > 1 else os.environ["KAFKA_BOOTSTRAP_SERVERS"]
topic = sys.argv[2] if len(sys.argv) > 2 else "polars-example"

number = pl.int_range(100_000)
orders = pl.select(
    order=number,
    customer=number * 7919 % 1000,
    total=(number * 31 % 50_000) / 100,
    time=pl.lit("2026-01-02").str.to_datetime(time_zone="UTC") + pl.duration(milliseconds=number * 800),
)
rows = orders.select(
    key=pl.col("customer").cast(pl.String),
    value=pl.struct("order", "customer", "total").struct.json_encode(),
    timestamp="time",
)
written = kafka_sink.write_arrow(
    rows,
    {
        "kafka.bootstrap.servers": servers,
        "topic": topic,
        "topic.create": True,  # if it does not exist
        "kafka.compression.type": "zstd",
        # A name and a version: Kafka gets the orders of this day once, however often the script runs.
        "delivery.guarantee": "exactly-once",
        "txnAppId": "orders",
        "txnVersion": 20260102,
    },
)
if written.already_written:
    print(f"{topic} has the orders of this day already.")
else:
    print(f"{written.rows:,} orders are in {topic}, in {len(written.offsets)} partition(s).")
