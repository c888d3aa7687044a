"""kafka-chunked: a Kafka sink for PySpark in pure Python.

Importing this package is cheap: pyspark and the sink itself are imported on first use.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from kafka_sink.errors import ConfigurationError
from kafka_sink.version import __version__

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from kafka_sink.arrow.producer import ArrowProducer
    from kafka_sink.reports.delivery_report import WriteResult

__all__ = ["__version__", "foreach_batch", "producer", "producer_metrics", "register", "tune"]
__all__ += ["write", "write_arrow"]


def write_arrow(data: Any, options: Mapping[str, Any]) -> WriteResult:
    """Write Arrow data to Kafka without Spark, and return when brokers have acknowledged every row.

    Calls from several threads are independent of each other. After an error or Ctrl-C, a line at WARNING
    reports what became of the rows. With ``delivery.guarantee=exactly-once``, consumers that read committed
    data then see none of them.

    Args:
        data: An object with ``__arrow_c_stream__`` (a table or reader of pyarrow, a frame of Polars or
            pandas, a relation of DuckDB), a record batch, or an iterable of such objects, which is read while
            rows are sent. The columns are those of the Spark sink (docs/columns.md): ``value``, and
            optionally ``key``, ``topic``, ``partition``, ``headers`` and ``timestamp``.
        options: The options of docs/options.md, by name.

    Returns:
        The number of rows, and the offsets of each partition.

    Raises:
        ConfigurationError: An option is invalid. Nothing was written.
        SchemaError: A column is missing or has an unsupported type. No row with it was written.
        KafkaSinkError: The write failed. All errors of the package are in ``kafka_sink.errors``.

    Examples:
        >>> table = pyarrow.table({"key": ["a", "b"], "value": ["1", "2"]})
        >>> options = {"kafka.bootstrap.servers": "localhost:9092", "topic": "orders"}
        >>> kafka_sink.write_arrow(table, options).rows
        2
    """
    from kafka_sink.arrow import producer as arrow

    return arrow.write_arrow(data, options)


def producer(options: Mapping[str, Any]) -> ArrowProducer:
    """Return a producer for a program that gets its Arrow data piece by piece.

    The producer writes within a ``with`` block. ``send(data)`` takes what ``write_arrow`` takes, from any
    thread, and waits while buffer memory is exhausted. ``flush()`` waits until all rows so far are
    acknowledged, and so does the end of the block. After the block, ``result`` is the ``WriteResult``. An
    exception within the block ends the write at once.

    Args:
        options: The options of docs/options.md, by name.

    Returns:
        A producer for one ``with`` block.

    Raises:
        ConfigurationError: An option is invalid.

    Examples:
        >>> with kafka_sink.producer(options) as producer:
        ...     for batch in batches:
        ...         producer.send(batch)
        >>> producer.result.rows
        2
    """
    from kafka_sink.arrow.producer import ArrowProducer

    return ArrowProducer(options)


def producer_metrics() -> list[dict[str, float]]:
    """Return Kafka's producer metrics of each producer in this Python process, for its current or last task.

    In Spark, producers run in the executors' Python workers, so call this function in a task. docs/metrics.md
    describes each metric.

    Returns:
        One dictionary per producer, with the metrics by name; an empty list if no task has run here.

    Examples:
        >>> [metrics["record-send-total"] for metrics in kafka_sink.producer_metrics()]
        [336776.0]
    """
    # If no task has run here, the producer module need not be imported.
    loaded = sys.modules.get("kafka_sink.task.producer")
    return [] if loaded is None else loaded.live_metrics()


def register(spark: SparkSession) -> None:
    """Register ``format("kafka-chunked")`` with this session, and make it usable in the calling thread.

    This is needed if Spark cannot find the installed ``pyspark_kafka_chunked`` module, for example because
    the package was shipped with ``--py-files``. It is also needed once in each thread other than the one that
    created the session.

    Args:
        spark: The session.

    Raises:
        ConfigurationError: PySpark is older than 4.0, which has no data sources in Python.

    Examples:
        >>> kafka_sink.register(spark)
        >>> df.write.format("kafka-chunked").options(**options).mode("append").save()
    """
    from kafka_sink.spark import session

    session.register(spark)


def tune(spark: SparkSession, row_bytes: int) -> dict[str, str]:
    """Set how this session hands rows to Python, for rows of about ``row_bytes`` bytes.

    Arrow batches then have at most 4 MB, and Spark does not add up the bytes of small rows. The settings
    belong to the session, so other Python code in it, such as UDFs, also gets such batches. A setting that
    already has a value keeps it. ``spark.conf.unset`` reverts a setting.

    Args:
        spark: The session.
        row_bytes: The average size of a row's key and value.

    Returns:
        The settings that were made, by name. They are also logged.

    Raises:
        ValueError: ``row_bytes`` is not a number, or less than 1.

    Examples:
        >>> kafka_sink.tune(spark, row_bytes=1000)
        {'spark.sql.execution.arrow.maxRecordsPerBatch': '4000'}
    """
    from kafka_sink.spark import session

    return session.tune(spark, row_bytes)


def write(df: DataFrame, options: Mapping[str, Any]) -> WriteResult:
    """Write the rows of a DataFrame to Kafka, and return when brokers have acknowledged all of them.

    It needs PySpark 3.5 or later, and the driver's own Python: a client of Spark Connect cannot use it.

    Args:
        df: A DataFrame of a batch, not of a stream. Its columns are those of ``format("kafka-chunked")``
            (docs/columns.md).
        options: The options of docs/options.md, by name.

    Returns:
        The number of rows, the offsets of each partition, and how many rows were skipped.

    Raises:
        ConfigurationError: An option or the kind of DataFrame is invalid. Nothing was written.
        SchemaError: A column is missing or has an unsupported type. Nothing was written.
        KafkaSinkError: The driver failed to plan or to commit the write.
        Exception: Spark's own error for a job whose tasks fail.

    Examples:
        >>> options = {"kafka.bootstrap.servers": "localhost:9092", "topic": "orders"}
        >>> kafka_sink.write(df, options).rows
        336776
    """
    from kafka_sink.spark import map_in_arrow

    return map_in_arrow.write(df, options)


def foreach_batch(options: Mapping[str, Any], *micro_batch: object) -> Callable[[DataFrame, int], None]:
    """Return a function for ``df.writeStream.foreachBatch`` that writes each micro-batch as ``write`` does.

    With ``delivery.guarantee=exactly-once``, ``txnVersion`` is the micro-batch's number, and ``txnAppId``
    defaults to the query's id, which the query's checkpoint keeps.

    Args:
        options: The options of docs/options.md, by name.
        micro_batch: Leave it out. Spark passes it if it was given this function itself, which is an error.

    Returns:
        A function of a DataFrame and the micro-batch's number.

    Raises:
        ConfigurationError: An option is invalid.

    Examples:
        >>> query = df.writeStream.foreachBatch(kafka_sink.foreach_batch(options)).start()
    """
    from kafka_sink.spark import map_in_arrow

    if micro_batch:
        raise ConfigurationError(
            "foreachBatch needs what kafka_sink.foreach_batch returns, not the function itself: write "
            ".foreachBatch(kafka_sink.foreach_batch(options))"
        )
    return map_in_arrow.ForeachBatch(options)
