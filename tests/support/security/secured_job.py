"""A driver of its own that runs jobs of 300 numbers each, and scripts. What it needs comes through stdin.

Its exit code is how many of the jobs failed.
"""

from __future__ import annotations

import json
import runpy
import sys
import traceback
from typing import TYPE_CHECKING, Any

from kafka_sink.driver import driver_conf
from tests.support.lent_spark import lent

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def main() -> int:
    from pyspark.sql import SparkSession

    given = json.load(sys.stdin)
    folder = given["folder"]
    spark = (
        SparkSession.builder.master("local[2]")
        .appName("secured")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.log.level", "INFO")
        .config("spark.eventLog.enabled", "true")
        .config("spark.eventLog.dir", f"file://{folder}")
        .config("spark.redaction.regex", driver_conf.redaction_regex())
        .getOrCreate()
    )
    failed = 0
    for number, job in enumerate(given["jobs"]):
        try:
            write(spark, job, f"{folder}/{number}")
        except Exception:  # noqa: BLE001 - its text is what a test looks at
            traceback.print_exc()
            failed += 1
    spark.stop()
    return failed


def write(spark: SparkSession, job: dict[str, Any], folder: str) -> None:
    """One job: a batch, a stream, or a script with its arguments."""
    if job["kind"] == "script":
        sys.argv = job["arguments"]
        with lent(spark):
            runpy.run_path(sys.argv[0], run_name="__main__")
        return
    rows = spark.range(0, 300, 1, 4).selectExpr("cast(id AS string) AS value")
    if job["kind"] == "batch":
        rows.write.format("kafka-chunked").mode("append").options(**job["options"]).save()
        return
    rows.coalesce(3).write.parquet(f"{folder}/in")
    stream = spark.readStream.schema("value string").option("maxFilesPerTrigger", 1).parquet(f"{folder}/in")
    writer = stream.writeStream.format("kafka-chunked").options(**job["options"])
    writer = writer.option("checkpointLocation", f"{folder}/checkpoint").trigger(availableNow=True)
    writer.start().awaitTermination()


if __name__ == "__main__":
    sys.exit(main())
