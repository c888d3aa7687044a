"""kafka-chunked: a Kafka sink for PySpark in pure Python.

Importing this package is cheap: pyspark and the sink itself are imported on first use.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from kafka_sink.version import __version__

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from kafka_sink.arrow.producer import ArrowProducer
    from kafka_sink.reports.delivery_report import WriteResult

__all__ = ["__version__", "foreach_batch", "producer", "producer_metrics", "register", "tune"]
__all__ += ["write", "write_arrow"]


def write_arrow(data: Any, options: Mapping[str, Any]) -> WriteResult:
    """Write Arrow data to Kafka, without Spark: returns when every row is acknowledged.

    ``data``: anything with ``__arrow_c_stream__`` (tables and readers of pyarrow, frames of Polars and
    pandas, relations of DuckDB), a record batch, or an iterable of such things, which is read as rows are
    sent. The columns are those of the Spark sink: value, and optionally key, topic, partition, headers and
    timestamp. ``options``: docs/options.md. docs/arrow.md has examples.

    Calls from several threads are independent of each other. Raises ConfigurationError or SchemaError before
    anything is written; all errors are in ``kafka_sink.errors``. After an error, and after Ctrl-C, a line at
    WARNING says what became of the rows. With delivery.guarantee=exactly-once readers then see none of them.
    """
    from kafka_sink.arrow import producer as arrow

    return arrow.write_arrow(data, options)


def producer(options: Mapping[str, Any]) -> ArrowProducer:
    """For a program that gets its Arrow batches one by one: ``with kafka_sink.producer(options) as p``.

    ``p.send(batch)`` takes what ``write_arrow`` takes, from any thread, and waits while buffer memory is
    exhausted. ``p.flush()`` waits until all rows so far are acknowledged, as the end of the block does;
    after it, ``p.result`` is what was written. An exception within the block ends the write at once. Raises
    ConfigurationError.
    """
    from kafka_sink.arrow.producer import ArrowProducer

    return ArrowProducer(options)


def producer_metrics() -> list[dict[str, float]]:
    """Kafka's producer metrics of each producer in this Python process, for its current or last task.

    In Spark, these processes are the executors' Python workers. docs/metrics.md describes each metric.
    """
    # If no task has run here, the producer module need not be imported.
    loaded = sys.modules.get("kafka_sink.task.producer")
    return [] if loaded is None else loaded.live_metrics()


def register(spark: SparkSession) -> None:
    """Register ``format("kafka-chunked")`` with this session, and make it usable in the calling thread.

    This is needed if Spark cannot find the installed ``pyspark_kafka_chunked`` module, for instance if the
    package was shipped by ``--py-files``. It is also needed once in each thread other than the one that
    created the session. Raises ConfigurationError before PySpark 4.0, which has no data sources in Python.
    """
    from kafka_sink.spark import session

    session.register(spark)


def tune(spark: SparkSession, row_bytes: int) -> dict[str, str]:
    """Set how this session hands rows to Python, for rows of about ``row_bytes`` bytes (key and value).

    Arrow batches then have 4 MB at most, and Spark adds up no bytes of small rows. Both settings are of the
    session, so other Python code in it gets such batches, too. What is set already stays. Returns the
    settings that it made, and logs them; ``spark.conf.unset`` takes them back.
    """
    from kafka_sink.spark import session

    return session.tune(spark, row_bytes)


def write(df: DataFrame, options: Mapping[str, Any]) -> WriteResult:
    """Write the rows of a DataFrame to Kafka, with PySpark 3.5 and later. Returns once all are acknowledged.

    Columns and ``options`` are those of ``format("kafka-chunked")`` (docs/columns.md, docs/options.md). The
    result has the number of rows, the offsets by partition, and how many rows were skipped.

    Raises ConfigurationError or SchemaError for what can be known before, also for DataFrames of streams and
    of Spark Connect, KafkaSinkError where the driver fails to plan or commit, and what Spark raises for a job
    whose tasks fail.
    """
    from kafka_sink.spark import map_in_arrow

    return map_in_arrow.write(df, options)


def foreach_batch(options: Mapping[str, Any]) -> Callable[[DataFrame, int], None]:
    """For ``df.writeStream.foreachBatch``: writes each micro-batch as ``write`` does.

    With ``delivery.guarantee=exactly-once``, ``txnVersion`` is the micro-batch's number, and ``txnAppId`` is
    by default the query's id, which its checkpoint keeps. Raises ConfigurationError for invalid options.
    """
    from kafka_sink.spark import map_in_arrow

    return map_in_arrow.ForeachBatch(options)
