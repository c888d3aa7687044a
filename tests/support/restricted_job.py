"""Writes of each kind in one application: ``restricted_job.py BOOTSTRAP TOPIC FOLDER PORT [client]``.

It is a driver, which serves Spark Connect on this port until its input ends, or a client of that server.
It prints JSON: how long each write took, in seconds.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from pyspark.sql import SparkSession

GUARANTEES = ("at-least-once", "exactly-once")
KINDS = ("batch", "stream")
# Each file is a micro-batch.
ROWS, FILES = 60, 3


def main(bootstrap: str, topic: str, folder: str, port: str, role: str = "driver") -> None:
    spark = _client(port) if role == "client" else _driver(port)
    if role == "driver":
        # The first job of an application starts Spark's own workers.
        spark.range(2).mapInArrow(lambda batches: batches, "id long").collect()
    took = {}
    for guarantee in GUARANTEES:
        for kind in KINDS:
            name = f"{kind}-{guarantee}"
            options = {
                "kafka.bootstrap.servers": bootstrap,
                "topic": f"{topic}-{name}",
                "topic.create": "true",
                "delivery.guarantee": guarantee,
            }
            begun = time.monotonic()
            (_batch if kind == "batch" else _stream)(spark, options, Path(folder), f"{topic}-{name}")
            took[name] = time.monotonic() - begun
    if role == "driver":
        took["write"] = _written_by_driver(spark, bootstrap, topic)
    print(json.dumps(took), flush=True)
    if role == "driver":
        sys.stdin.read()
    spark.stop()


def _client(port: str) -> SparkSession:
    return SparkSession.builder.remote(f"sc://127.0.0.1:{port}").getOrCreate()


def _driver(port: str) -> SparkSession:
    settings: dict[str, bool | float | int | str | None] = {
        "spark.ui.enabled": "false",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.sql.session.timeZone": "UTC",
        "spark.log.level": "ERROR",
        "spark.plugins": "org.apache.spark.sql.connect.SparkConnectPlugin",
        "spark.connect.grpc.binding.port": port,
    }
    return SparkSession.builder.master("local[2]").config(map=settings).getOrCreate()


def _batch(spark: SparkSession, options: dict[str, str], _: Path, __: str) -> None:
    rows = spark.range(0, ROWS, 1, 2).selectExpr("cast(id AS string) AS value")
    rows.write.format("kafka-chunked").mode("append").options(**options).save()


def _stream(spark: SparkSession, options: dict[str, str], folder: Path, name: str) -> None:
    rows = spark.readStream.schema("value string").option("maxFilesPerTrigger", "1").text(f"{folder}/input")
    query = (
        rows.writeStream.format("kafka-chunked")
        .options(**options)
        .option("checkpointLocation", f"{folder}/{name}")
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()


def _written_by_driver(spark: SparkSession, bootstrap: str, topic: str) -> float:
    import kafka_sink

    begun = time.monotonic()
    rows = spark.range(0, ROWS, 1, 2).selectExpr("cast(id AS string) AS value")
    options = {"kafka.bootstrap.servers": bootstrap, "topic": f"{topic}-write", "topic.create": "true"}
    kafka_sink.write(rows, options)
    return time.monotonic() - begun


if __name__ == "__main__":
    main(*sys.argv[1:])
