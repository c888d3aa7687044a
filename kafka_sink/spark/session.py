"""``kafka_sink.register`` and ``kafka_sink.tune``: what they do with a Spark session."""

from __future__ import annotations

import zipimport
from weakref import WeakSet

from pyspark.sql import SparkSession

from kafka_sink import spark_application
from kafka_sink.driver import driver_log
from kafka_sink.errors import ConfigurationError

USE_WRITE = "use kafka_sink.write, and kafka_sink.foreach_batch for streams"
# The sessions in which this process has registered the data source.
_REGISTERED: WeakSet[SparkSession] = WeakSet()


def register(spark: SparkSession) -> None:
    """See ``kafka_sink.register``.

    A data source is registered once, and only if it is not installed. Otherwise Spark warns that a data
    source "replaced a previously registered" or "a statically registered data source".
    """
    _require_session(spark)
    if not hasattr(spark, "dataSource"):
        raise ConfigurationError(f"PySpark {spark.version} has no data sources in Python: {USE_WRITE}")
    # Before PySpark 4.0 this module cannot be imported.
    from kafka_sink.spark.datasource import KafkaChunkedDataSource

    if spark not in _REGISTERED and not _is_installed(spark, KafkaChunkedDataSource.name()):
        spark.dataSource.register(KafkaChunkedDataSource)
        _REGISTERED.add(spark)
    # Spark looks for Python data sources only in the active session, and a new thread has none. This is the
    # only public call that sets it (checked on PySpark 4.1.1 and 4.3.0).
    spark.createDataFrame([], "value string")


def _require_session(spark: object) -> None:
    if not hasattr(spark, "conf"):
        raise ConfigurationError(f"the first argument must be a SparkSession, not {type(spark).__name__}")


def _is_installed(spark: SparkSession, name: str) -> bool:
    """Whether Spark itself finds this very package, and not one that is shipped with the job."""
    loader = getattr(__spec__, "loader", None)
    if isinstance(loader, zipimport.zipimporter):
        return False
    try:
        # Spark's own lookup, which runs once per application. Registering the data source would also run it.
        manager = spark._jsparkSession.sessionState().dataSourceManager()
        return bool(manager.dataSourceExists(name))
    except Exception:  # noqa: BLE001 - with Spark Connect no JVM is here; registering is always right
        return False


def tune(spark: SparkSession, row_bytes: int) -> dict[str, str]:
    """See ``kafka_sink.tune``."""
    _require_session(spark)
    made, kept = {}, []
    for name, value in spark_application.arrow_batch_settings(row_bytes).items():
        present = spark.conf.get(name, None)
        if present is None:
            spark.conf.set(name, value)
            made[name] = value
        elif present != value:
            kept.append(f"left {name}={present} (it would be {value})")
    done = [f"set {name}={value}" for name, value in made.items()] + kept
    done += spark_application.arrow_batch_advice(lambda name: spark.conf.get(name, None))
    driver_log.report(f"kafka_sink.tune: {', '.join(done) or 'all was set already'}")
    return made
