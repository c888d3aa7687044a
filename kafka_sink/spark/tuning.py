"""``kafka_sink.tune``: a session's settings with which Spark hands rows to Python at less cost."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kafka_sink.driver import driver_log
from kafka_sink.reports.summary import rows_of_good_batch
from kafka_sink.rows.rebatching import LARGE_ROW_BYTES

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_ROWS = "spark.sql.execution.arrow.maxRecordsPerBatch"
# Spark's default, with which small rows are as fast as they get.
_MOST_ROWS = 10_000
# Spark 4.1 and later add up the bytes of each row, unless there is no limit.
_BYTES = "spark.sql.execution.arrow.maxBytesPerBatch"
_NO_LIMIT = str(2**31 - 1)


def tune(spark: SparkSession, row_bytes: int) -> dict[str, str]:
    """As ``kafka_sink.tune``."""
    if row_bytes < 1:
        raise ValueError(f"row_bytes is {row_bytes}; give the bytes that a row has on average")
    wanted = {_ROWS: str(min(_MOST_ROWS, rows_of_good_batch(row_bytes)))}
    if row_bytes < LARGE_ROW_BYTES:
        # Of larger rows the sum costs little, and the limit holds where some are much larger.
        wanted[_BYTES] = _NO_LIMIT
    made, kept = {}, []
    for name, value in wanted.items():
        present = spark.conf.get(name, None)
        if present is None:
            spark.conf.set(name, value)
            made[name] = value
        elif present != value:
            kept.append(f"left {name}={present} (it would be {value})")
    done = [f"set {name}={value}" for name, value in made.items()] + kept
    driver_log.report(f"kafka_sink.tune: {', '.join(done) or 'all was set already'}")
    return made
