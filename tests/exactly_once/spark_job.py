"""Queries of one driver: ``spark_job.py SETTINGS`` (JSON) runs each until its commit log has a batch.

A query that fails stays stopped while the others go on; the exit code is 1 then.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql.streaming import StreamingQuery

# Short-lived JVMs: what the optimising compiler and generated code cost at first, they never earn back.
_JVM = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"


def session(settings: dict[str, Any]) -> SparkSession:
    """On the master that the settings name."""
    builder = SparkSession.builder.master(settings["master"]).appName("exactly once")
    for name, value in {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.log.level": "ERROR",
        # Two executors; their Python workers are forked from a process that has imported everything.
        "spark.cores.max": "4",
        "spark.executor.cores": "2",
        "spark.python.daemon.module": "kafka_sink.daemon",
        "spark.executor.memory": "512m",
        "spark.driver.extraJavaOptions": _JVM,
        "spark.executor.extraJavaOptions": _JVM,
        "spark.sql.codegen.wholeStage": "false",
        "spark.sql.codegen.factoryMode": "NO_CODEGEN",
        "spark.task.maxFailures": "6",
        "spark.speculation": settings["speculation"],
        "spark.speculation.interval": "50ms",
        "spark.speculation.multiplier": "1.2",
        "spark.speculation.quantile": "0.4",
        "spark.speculation.minTaskRuntime": "50ms",
    }.items():
        builder = builder.config(name, value)
    return builder.getOrCreate()


def slowly(pause_s: float) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Takes a drawn time for each batch, so that faults find tasks under way and attempts overlap."""

    def rows(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            time.sleep(random.random() * pause_s)
            yield batch

    return rows


def start(spark: SparkSession, one: dict[str, Any]) -> StreamingQuery:
    """One query on its checkpoint."""
    rows = (
        spark.readStream.format("rate-micro-batch")
        .option("rowsPerBatch", one["rows"])
        .option("numPartitions", one["tasks"])
        .load()
        .selectExpr("cast(value as string) value")
        .mapInArrow(slowly(one["pause_ms"] / 1000), "value string")
    )
    return (
        rows.writeStream.format("kafka-chunked")
        .options(**one["options"])
        .option("checkpointLocation", one["checkpoint"])
        .start()
    )


def main(settings: dict[str, Any]) -> int:
    """0 where every query got as far as it was to."""
    spark = session(settings)
    running = {one["checkpoint"]: (one, start(spark, one)) for one in settings["queries"]}
    failed = False
    while running:
        time.sleep(0.05)
        for name, (one, query) in list(running.items()):
            if query.isActive and not (Path(name) / "commits" / str(one["until"])).exists():
                continue
            failure = query.exception()
            query.stop()
            del running[name]
            if failure is not None:
                failed = True
                print(f"    query: {str(failure)[-400:]}", file=sys.stderr, flush=True)
    spark.stop()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
