"""kafka-chunked: a Kafka sink for PySpark in pure Python, ``format("kafka-chunked")``.

Importing this package is cheap: pyspark and the sink itself are imported on first use.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from kafka_sink.version import __version__

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["__version__", "producer_metrics", "register"]


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
