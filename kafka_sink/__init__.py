"""kafka-chunked: a Kafka sink for PySpark in pure Python, ``format("kafka-chunked")``.

Importing this package is cheap: pyspark and the sink itself are loaded on first use only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kafka_sink.version import __version__

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["__version__", "register"]


def register(spark: SparkSession) -> None:
    """Make ``format("kafka-chunked")`` known to this session.

    Only needed where Spark cannot find the installed ``pyspark_kafka_chunked`` module by itself, for instance
    when the package came to the driver by ``--py-files``.
    """
    from kafka_sink.datasource import KafkaChunkedDataSource

    spark.dataSource.register(KafkaChunkedDataSource)
