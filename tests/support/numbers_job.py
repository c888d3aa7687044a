"""A driver of its own: ``numbers_job.py MASTER BOOTSTRAP TOPIC ROWS TASKS [WRITES]`` writes numbered rows.

A row's key says which executor wrote it. For a topic ``*`` rows name one of 50 topics ``numbers-NN``. More
options of the sink may come through stdin, as JSON.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator

import pyarrow as pa
from pyspark.sql import SparkSession


def tell_executor(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    # A standalone worker's folder is named after its host here, and an executor's after its number.
    where = os.getcwd().rpartition(".work/")[0].rpartition("/")[2]
    for batch in batches:
        yield pa.record_batch(
            [pa.array([where] * batch.num_rows), batch.column(0), batch.column(1)],
            names=["key", "value", "topic"],
        )


def main(master: str, bootstrap: str, topic: str, rows: str, tasks: str, writes: str = "1") -> None:
    spark = (
        SparkSession.builder.master(master)
        .appName("numbers")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.log.level", "ERROR")
        # Tasks of a short job would all run on the executor that registers first.
        .config("spark.scheduler.minRegisteredResourcesRatio", "1.0")
        .config("spark.scheduler.maxRegisteredResourcesWaitingTime", "60s")
        .getOrCreate()
    )
    named = f"'{topic}'" if topic != "*" else "format_string('numbers-%02d', id % 50)"
    frame = spark.range(0, int(rows), 1, int(tasks)).selectExpr(
        "cast(id AS string) AS value", f"{named} AS topic"
    )
    options = {"kafka.bootstrap.servers": bootstrap, **json.loads(sys.stdin.read() or "{}")}
    with_executor = frame.mapInArrow(tell_executor, "key string, value string, topic string")
    for _ in range(int(writes)):
        with_executor.write.format("kafka-chunked").mode("append").options(**options).save()
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
