"""A driver of its own that runs jobs of 300 numbers each. What it needs comes through stdin.

Its exit code is how many of the jobs failed.
"""

from __future__ import annotations

import json
import runpy
import sys
import traceback
from pathlib import Path
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
        SparkSession.builder.master(given["master"])
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
    """One job: a batch, a stream, or the example with these arguments."""
    if job["kind"] == "example":
        example = Path(__file__).parents[3] / "examples" / "secured.py"
        sys.argv = [str(example), *job["arguments"]]
        with lent(spark):
            runpy.run_path(str(example), run_name="__main__")
        return
    if job["kind"] == "batch":
        frame = spark.range(0, 300, 1, 4).selectExpr("cast(id AS string) AS value")
        frame.write.format("kafka-chunked").mode("append").options(**job["options"]).save()
        return
    spark.range(0, 300, 1, 3).selectExpr("cast(id AS string) AS value").write.parquet(f"{folder}/in")
    stream = spark.readStream.schema("value string").option("maxFilesPerTrigger", 1)
    query = (
        stream.parquet(f"{folder}/in")
        .writeStream.format("kafka-chunked")
        .options(**job["options"])
        .option("checkpointLocation", f"{folder}/checkpoint")
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()


if __name__ == "__main__":
    sys.exit(main())
