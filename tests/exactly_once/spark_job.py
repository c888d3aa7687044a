"""A query of its own: ``spark_job.py SETTINGS`` (JSON) runs until its commit log has a batch, and stops."""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql import SparkSession


def main(settings: dict[str, Any]) -> None:
    builder = SparkSession.builder.master(settings["master"]).appName("exactly once")
    for name, value in {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.log.level": "ERROR",
        "spark.cores.max": "3",
        "spark.executor.cores": "1",
        "spark.executor.memory": "512m",
        "spark.speculation": settings["speculation"],
        "spark.speculation.interval": "50ms",
        "spark.speculation.multiplier": "1.2",
        "spark.speculation.quantile": "0.4",
        "spark.speculation.minTaskRuntime": "50ms",
    }.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()

    pause_s = settings["pause_ms"] / 1000

    def slowly(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            time.sleep(random.random() * pause_s)
            yield batch

    rows = (
        spark.readStream.format("rate-micro-batch")
        .option("rowsPerBatch", settings["rows"])
        .option("numPartitions", settings["tasks"])
        .load()
        .selectExpr("cast(value as string) value")
        .mapInArrow(slowly, "value string")
    )
    query = (
        rows.writeStream.format("kafka-chunked")
        .options(**settings["options"])
        .option("checkpointLocation", settings["checkpoint"])
        .start()
    )
    last = Path(settings["checkpoint"]) / "commits" / str(settings["until"])
    while query.isActive and not last.exists():
        time.sleep(0.05)
    failure = query.exception()
    query.stop()
    spark.stop()
    if failure is not None:
        print(f"    query: {str(failure)[-400:]}", file=sys.stderr, flush=True)
        sys.exit(1)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
