"""Processor time of a row with ``value.format=avro``, beside Spark's ``to_avro`` into this sink.

    python -m benchmarks.avro_cost [--rows N] [--repeats N] [--package NAME]

A record of ten fields, and one of forty with three structs, a list and a map in it. Both ways write the same
values; the bytes of ``to_avro`` get no framing, which saves it a copy. Both are measured with Spark's default
and with ``spark.sql.execution.arrow.maxBytesPerBatch=2147483647``, with which Spark does not add up the bytes
of each row, column by column. The ways take turns, after one run each that does not count. Times are of the
JVM and of the Python workers below it, so a busy machine does little harm.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable

from benchmarks.processor_time import of_spark
from kafka_sink.local_broker import LocalBroker
from kafka_sink.local_broker.schema_registry import LocalRegistry

_FIELDS = (
    "id AS a",
    "cast(id % 1000000 AS int) AS b",
    "concat('customer-', id % 100000) AS c",
    "concat('order-', id) AS d",
    "id * 0.25D AS e",
    "sqrt(id) AS f",
    "id % 3 = 0 AS g",
    "timestamp_micros(1700000000000000 + id * 1000) AS h",
    "date_add(DATE '2024-01-01', cast(id % 1000 AS int)) AS i",
    "if(id % 10 = 0, null, concat('note ', id % 977)) AS j",
)
_FLAT = ", ".join(_FIELDS)
_STRUCT = f"struct({_FLAT})"
_NESTED = (
    f"{', '.join(_FIELDS[:8])}, {_STRUCT} AS s1, {_STRUCT} AS s2, {_STRUCT} AS s3, "
    "array(id, id + 1, id + 2) AS list, map('x', id, 'y', id + 1) AS map"
)
SHAPES = {"ten fields": _FLAT, "forty fields, nested": _NESTED}


def main() -> None:
    """Print a line of JSON for each shape and way, in nanoseconds a row."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--package", default="org.apache.spark:spark-avro_2.13:4.1.1")
    args = parser.parse_args()
    os.environ["PYSPARK_PYTHON"] = sys.executable
    from pyspark.sql import SparkSession

    spark = (
        SparkSession.builder.master("local[2]")
        .config("spark.jars.packages", args.package)
        .config("spark.ui.enabled", "false")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.log.level", "ERROR")
        .getOrCreate()
    )
    from pyspark.sql.avro.functions import to_avro
    from pyspark.sql.functions import struct

    jvm = int(spark._jvm.java.lang.ProcessHandle.current().pid())  # type: ignore[union-attr]
    with LocalBroker() as broker, LocalRegistry() as registry:
        common = {"kafka.bootstrap.servers": broker.bootstrap_servers}
        for number, (shape, columns) in enumerate(SHAPES.items()):
            topic = f"avro-{number}"
            broker.create_topic(topic, 4)
            frame = spark.range(0, args.rows, 1, 2).selectExpr(*_split(columns))
            own = {"value.format": "avro", "schema.registry.url": registry.url, "topic": topic}

            def by_sink(frame=frame, own=own) -> None:  # type: ignore[no-untyped-def]
                frame.write.format("kafka-chunked").mode("append").options(**common, **own).save()

            def by_to_avro(frame=frame, topic=topic) -> None:  # type: ignore[no-untyped-def]
                values = frame.select(to_avro(struct(*frame.columns)).alias("value"))
                values.write.format("kafka-chunked").mode("append").options(**common, topic=topic).save()

            writes: dict[str, Callable[[], None]] = {"value.format=avro": by_sink, "to_avro": by_to_avro}
            ways = [(name, limit) for limit in ("64MB", "2147483647") for name in writes]
            times: dict[tuple[str, str], list[dict[str, float]]] = {way: [] for way in ways}
            for turn in range(args.repeats + 1):
                for way in ways:
                    spark.conf.set("spark.sql.execution.arrow.maxBytesPerBatch", way[1])
                    write = writes[way[0]]
                    before = of_spark(jvm)
                    write()
                    spent = of_spark(jvm).since(before)
                    if turn:
                        times[way].append({name: round(s / args.rows * 1e9) for name, s in spent.items()})
            for way, found in times.items():
                totals = [sum(one.values()) for one in found]
                best = found[totals.index(min(totals))]
                figures = {"ns": round(statistics.median(totals)), "least": best}
                line = {"shape": shape, "way": way[0], "maxBytesPerBatch": way[1], **figures}
                print(json.dumps(line), flush=True)
    spark.stop()


def _split(columns: str) -> list[str]:
    """At commas outside of brackets and quotes."""
    found, depth, begin = [], 0, 0
    for at, sign in enumerate(columns):
        depth += (sign == "(") - (sign == ")")
        if sign == "," and not depth:
            found.append(columns[begin:at].strip())
            begin = at + 1
    return [*found, columns[begin:].strip()]


if __name__ == "__main__":
    main()
