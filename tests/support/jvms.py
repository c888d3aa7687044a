"""The options that the tests' JVMs are started with, so that they cost little.

``python -m tests.support.jvms`` keeps the classes that Spark loads, for these jars and this Java. A run of
all tests starts some twenty of Spark's JVMs. If they map these classes, and do not read and verify each, a
small job costs 7 s of processor time, not 12.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pyspark

from local_kafka.jars import find_java
from local_kafka.start_cache import StartCache

# Options of every JVM. Most live for seconds: the second compiler, and a collector with threads of its own,
# cost more than they save.
OPTIONS = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
# Options that bin/spark-submit also gives to a driver's JVM.
SPARK_VARIABLE = "SPARK_SUBMIT_OPTS"
_JOB = """
from pyspark.sql import SparkSession
spark = (
    SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
    .config("spark.ui.showConsoleProgress", "false").config("spark.driver.host", "127.0.0.1").getOrCreate()
)
rows = spark.range(0, 100, 1, 2).selectExpr("cast(id AS string) AS value", "id % 7 AS key")
rows.mapInArrow(lambda batches: batches, "value string, key long").groupBy("key").count().collect()
spark.createDataFrame([("a", 1)], "a string, b int").selectExpr("struct(*) AS both").collect()
spark.stop()
"""


def of_spark() -> str:
    """The options for ``SPARK_VARIABLE``; empty if no classes are kept."""
    return " ".join(_kept().flags_to_read_classes())


def keep() -> None:
    """Unless they are kept already, or cannot be."""
    kept = _kept()
    with tempfile.TemporaryDirectory() as folder:
        writing = kept.flags_to_write_classes(Path(folder))
        if not writing:
            return
        print("Keeping the classes that Spark loads, for quicker starts ...", flush=True)
        environ = {"JAVA_TOOL_OPTIONS": OPTIONS, **os.environ, "PYSPARK_PYTHON": sys.executable}
        environ[SPARK_VARIABLE] = " ".join(writing)
        # If something is wrong with this Spark, the tests will report it.
        subprocess.run(
            [sys.executable, "-c", _JOB], env=environ, cwd=folder, capture_output=True, timeout=600
        )
        kept.keep_classes(Path(folder))


def _kept() -> StartCache:
    return StartCache.of(find_java(), Path(pyspark.__file__).parent / "jars")


if __name__ == "__main__":
    keep()
