"""Writes of a script that fail each in their own way; the last one, of a stream, ends it.

    python failing_job.py SERVERS CHECKPOINT

What is printed between `begin` and `end` with a write's name is what its user sees.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from pyspark.sql import SparkSession
from pyspark.sql.functions import udf


def fails(write: Callable[[], object], name: str) -> None:
    print("begin", name, file=sys.stderr, flush=True)
    try:
        write()
    except Exception:  # noqa: BLE001 - its text is what a test looks at
        print("end", name, file=sys.stderr, flush=True)
    else:
        sys.exit("it succeeded")


def main(servers: str, checkpoint: str) -> None:
    spark = SparkSession.builder.getOrCreate()
    spark.sparkContext.setLogLevel("WARN")

    def options(writer: Any) -> Any:
        given = {"kafka.bootstrap.servers": servers, "kafka.max.block.ms": "3000"}
        return writer.format("kafka-chunked").options(**given, topic="last-line", **{"topic.create": "true"})

    rows = spark.range(20).selectExpr("cast(id as string) value", "7 as partition").coalesce(1)
    fails(options(spark.range(1).write).mode("append").save, "planning")
    fails(options(rows.write).mode("append").save, "task")
    for name, rows in {
        "cast": spark.sql("SELECT string(int(id || 'x')) AS value FROM range(9)"),
        "udf": spark.range(9).select(udf(lambda id: str(1 / 0))("id").alias("value")),
    }.items():
        # One task: Spark waits for other tasks that it kills.
        fails(options(rows.coalesce(1).write).mode("append").save, name)
    stream = spark.readStream.format("rate").option("rowsPerSecond", 100).load()
    stream = stream.selectExpr("cast(value as string) value", "7 as partition").coalesce(1)
    options(stream.writeStream).option("checkpointLocation", checkpoint).start().awaitTermination()


if __name__ == "__main__":
    main(*sys.argv[1:])
