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

    from kafka_sink.reports.written import Written

__all__ = ["__version__", "foreach_batch", "producer_metrics", "register", "write"]


def producer_metrics() -> list[dict[str, float]]:
    """Kafka's producer metrics of each producer in this Python process, for its current or last task.

    In Spark, these processes are the executors' Python workers. docs/metrics.md describes each metric.
    """
    # If no task has run here, the producer module need not be imported.
    producer = sys.modules.get("kafka_sink.task.producer")
    return [] if producer is None else producer.LIVE_PRODUCERS.metrics()


def register(spark: SparkSession) -> None:
    """Register ``format("kafka-chunked")`` with this session, and make it usable in the calling thread.

    This is needed if Spark cannot find the installed ``pyspark_kafka_chunked`` module, for instance if the
    package was shipped by ``--py-files``. It is also needed once in each thread other than the one that
    created the session.
    """
    from kafka_sink.spark import registration

    registration.register(spark)


def write(df: DataFrame, options: Mapping[str, Any]) -> Written:
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

    return map_in_arrow.foreach_batch(options)
