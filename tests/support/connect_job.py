"""A client of Spark Connect: ``connect_job.py REMOTE BOOTSTRAP TOPIC FOLDER``. It prints JSON at its end.

A process of its own, as one Python cannot hold a session of Spark Connect beside one of the usual kind.
"""

from __future__ import annotations

import json
import sys

from pyspark.sql import SparkSession

import kafka_sink


def main(remote: str, bootstrap: str, topic: str, folder: str) -> None:
    spark = SparkSession.builder.remote(remote).getOrCreate()
    spark.range(100).selectExpr("cast(id AS string) AS value").write.parquet(f"{folder}/input")
    for coordinator in ("true", "false"):
        options = {
            "kafka.bootstrap.servers": bootstrap,
            "topic": f"{topic}-{coordinator}",
            "topic.create": "true",
            "coordinator.enabled": coordinator,
            "delivery.report.path": f"{folder}/report-{coordinator}",
        }
        rows = spark.read.parquet(f"{folder}/input")
        rows.write.format("kafka-chunked").mode("append").options(**options).save()
        stream = spark.readStream.schema("value string").parquet(f"{folder}/input")
        query = (
            stream.selectExpr("concat('stream-', value) AS value")
            .writeStream.format("kafka-chunked")
            .options(**options)
            .option("checkpointLocation", f"{folder}/checkpoint-{coordinator}")
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()
        # The second round writes through the class that this call has sent to the server.
        kafka_sink.register(spark)
    print(json.dumps({"wrong": error_of(rows, bootstrap)}))
    spark.stop()


def error_of(rows: object, bootstrap: str) -> str:
    from pyspark.errors import PySparkException

    writer = rows.write.format("kafka-chunked").mode("append")  # type: ignore[attr-defined]
    try:
        writer.option("kafka.bootstrap.servers", bootstrap).option("topic", "x").option(
            "kafka.linger", "5"
        ).save()
    except PySparkException as error:
        return str(error)
    return ""


if __name__ == "__main__":
    main(*sys.argv[1:])
