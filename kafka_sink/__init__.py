"""kafka-chunked: a Kafka sink for PySpark in pure Python, ``format("kafka-chunked")``.

Importing this package is cheap: pyspark and the sink itself are loaded on first use only.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from kafka_sink.version import __version__

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["__version__", "producer_metrics", "register"]


def producer_metrics() -> list[dict[str, float]]:
    """Kafka's producer metrics of each producer in this Python process, of its present or last task.

    In Spark these are the worker processes of the executors; docs/metrics.md tells what each metric means.
    """
    # Where no task has run, there is nothing to load for it.
    producer = sys.modules.get("kafka_sink.producer")
    return [] if producer is None else producer.LIVE_PRODUCERS.metrics()


def register(spark: SparkSession) -> None:
    """Make ``format("kafka-chunked")`` known to this session, and usable in the calling thread.

    Only needed where Spark cannot find the installed ``pyspark_kafka_chunked`` module by itself, for instance
    when the package came to the driver by ``--py-files``, and once in each thread other than the one that
    made the session.
    """
    from kafka_sink.spark.datasource import KafkaChunkedDataSource

    spark.dataSource.register(KafkaChunkedDataSource)
    # Spark looks for Python data sources in the active session only, and a thread has none: it gets one by
    # this, and by nothing else that is public (checked on PySpark 4.1.1 and 4.3.0).
    spark.createDataFrame([], "value string")
