"""``kafka_sink.register``: makes the data source known to a session without a warning of Spark's."""

from __future__ import annotations

import zipimport
from typing import TYPE_CHECKING
from weakref import WeakSet

from kafka_sink.spark.datasource import KafkaChunkedDataSource

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# Sessions in which this process has registered it.
_REGISTERED: WeakSet[SparkSession] = WeakSet()


def register(spark: SparkSession) -> None:
    """As ``kafka_sink.register``.

    Spark warns that a data source "replaced a previously registered" or "a statically registered data source"
    if it is registered twice, or if Spark has found it installed.
    """
    if spark not in _REGISTERED and not _is_installed(spark):
        spark.dataSource.register(KafkaChunkedDataSource)
        _REGISTERED.add(spark)
    # Spark looks for Python data sources only in the active session, and a new thread has none. This is the
    # only public call that sets it (checked on PySpark 4.1.1 and 4.3.0).
    spark.createDataFrame([], "value string")


def _is_installed(spark: SparkSession) -> bool:
    """Whether Spark finds this very package by itself. One that is shipped with the job must win over it."""
    loader = getattr(__spec__, "loader", None)
    if isinstance(loader, zipimport.zipimporter):
        return False
    try:
        # Spark's own lookup. Registering would run it as well, and it runs once in an application.
        manager = spark._jsparkSession.sessionState().dataSourceManager()
        return bool(manager.dataSourceExists(KafkaChunkedDataSource.name()))
    except Exception:  # noqa: BLE001 - with Spark Connect no JVM is here; registering is always right
        return False
