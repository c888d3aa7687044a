"""A driver of its own that writes 300 numbers: master, kind and options come through stdin."""

from __future__ import annotations

import json
import sys


def main() -> None:
    from pyspark.sql import SparkSession

    job = json.load(sys.stdin)
    folder = job["folder"]
    spark = (
        SparkSession.builder.master(job["master"])
        .appName("secured")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.log.level", "INFO")
        .config("spark.eventLog.enabled", "true")
        .config("spark.eventLog.dir", f"file://{folder}")
        .config("spark.redaction.regex", "(?i)secret|password|token|jaas|keystore[.]key")
        .getOrCreate()
    )
    try:
        if job["kind"] == "batch":
            frame = spark.range(0, 300, 1, 4).selectExpr("cast(id AS string) AS value")
            frame.write.format("kafka-chunked").mode("append").options(**job["options"]).save()
        else:
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
    finally:
        spark.stop()


if __name__ == "__main__":
    main()
