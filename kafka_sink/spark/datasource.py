"""``format("kafka-chunked")``: the data source that Spark calls to plan a write, and its writers.

Spark imports this module for planning and for commits, for a stream in every micro-batch, so it avoids slow
imports.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NoReturn, TypeGuard

from pyspark.sql.datasource import DataSource
from pyspark.sql.pandas.types import from_arrow_schema

from kafka_sink.driver import driver_conf
from kafka_sink.errors import ConfigurationError
from kafka_sink.options import parse
from kafka_sink.spark.short_tracebacks import logged_on_driver, short_tracebacks
from kafka_sink.spark.write import PlannedWrite

# Optional parts of PySpark's data source API: 4.1 and later have all of them, 4.0 most, 3.5 none.
if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.datasource import DataSourceArrowWriter as ArrowWriter
    from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, WriterCommitMessage
    from pyspark.sql.datasource import DataSourceStreamArrowWriter as StreamArrowWriter
    from pyspark.sql.types import StructType
else:
    try:
        from pyspark.sql.datasource import DataSourceArrowWriter as ArrowWriter
    except ImportError:
        ArrowWriter = StreamArrowWriter = object
    else:
        try:
            from pyspark.sql.datasource import DataSourceStreamArrowWriter as StreamArrowWriter
        except ImportError:
            from pyspark.sql.datasource import DataSourceStreamWriter

            class StreamArrowWriter(DataSourceStreamWriter, ArrowWriter):
                """In PySpark 4.0, tasks pass Arrow batches to any ArrowWriter, also if it writes a stream."""


_COMMIT_MODULE = "python_streaming_sink_runner"
_READ = "kafka-chunked cannot read. Use Spark's own source to read: format('kafka') of spark-sql-kafka-0-10"
_SCHEMA = (
    f"{_READ}. To write in SQL, name the columns: CREATE TEMPORARY VIEW orders (key STRING, value STRING) "
    "USING `kafka-chunked` OPTIONS (...), then INSERT INTO orders"
)
# For a table, Spark passes the options of the INSERT only, and not those of CREATE TABLE.
_NO_OPTIONS = (
    "Option 'kafka.bootstrap.servers' must be specified, and there are no options at all: Spark does not "
    "pass those of a table to a data source in Python. In SQL, write INSERT INTO orders WITH "
    "('kafka.bootstrap.servers' = 'host:port', 'topic' = 'orders') SELECT ..., or give them to a temporary "
    "view: CREATE TEMPORARY VIEW orders (key STRING, value STRING) USING `kafka-chunked` OPTIONS (...). In "
    "Python, saveAsTable, writeTo(...).append() and, on Spark 4.1 and later, insertInto pass options"
)


class KafkaChunkedDataSource(DataSource):
    """Writes rows to Kafka. Columns: value, and optionally key, topic, partition, headers and timestamp.

    ``df.write.format("kafka-chunked").mode("append").option("kafka.bootstrap.servers", ...).save()``. Spark
    requires ``.mode("append")``. The options are in docs/options.md.
    """

    @classmethod
    def name(cls) -> str:
        return "kafka-chunked"

    # The checkpoint of a stream, set by ``streamWriter``; "" for batch writes.
    subject = ""

    @logged_on_driver
    def writer(self, schema: StructType | pa.Schema, overwrite: bool) -> BatchWriter:
        """Plan a batch write. Raises ConfigurationError or SchemaError."""
        if overwrite:
            raise ConfigurationError(
                "mode('overwrite') is not supported: Kafka topics only take appends. Use mode('append')."
            )
        if not self.options:
            raise ConfigurationError(_NO_OPTIONS)
        driver_conf.warn_of_shown_secrets(self.options)
        if not _is_of_spark(schema):
            schema = self._of_sail(schema)
        from kafka_sink.spark.planning import plan

        return BatchWriter(plan(self.options, schema))

    @logged_on_driver
    def streamWriter(self, schema: StructType, overwrite: bool) -> StreamWriter:  # noqa: N802 - Spark's signature
        """Plan a micro-batch. In complete mode ``overwrite`` is set; the results are still appended."""
        self.subject = self.options.get("checkpointlocation", "")
        driver_conf.warn_of_shown_secrets(self.options)
        from kafka_sink.spark.planning import plan

        planned = plan(
            self.options,
            schema,
            query=str(self.options.get("checkpointlocation")),
            is_stream_writer=True,
            for_tasks=not _only_commits(),
        )
        return StreamWriter(planned)

    def _of_sail(self, schema: pa.Schema) -> StructType:
        if parse(self.options).options.exactly_once:
            raise ConfigurationError(
                "Option 'delivery.guarantee' = exactly-once needs Spark: Sail does not provide the number of "
                "a task and of its attempt. Use kafka_sink.write_arrow, or at-least-once"
            )
        return from_arrow_schema(schema)

    def schema(self) -> NoReturn:
        raise ConfigurationError(_SCHEMA)

    @logged_on_driver
    def reader(self, schema: StructType) -> DataSourceReader:
        raise ConfigurationError(_READ)

    @logged_on_driver
    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 - Spark's signature
        raise ConfigurationError(_READ)


class _Writer:
    """The methods that both writers share. Spark pickles the writers."""

    def __init__(self, planned: PlannedWrite) -> None:
        self.planned = planned

    @property
    def subject(self) -> str:
        return self.planned.subject

    @short_tracebacks
    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        return self.planned.write(iterator)

    @logged_on_driver
    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int | None = None) -> None:  # noqa: N803 - Spark's name, of a stream
        self.planned.commit(messages, batchId)

    @logged_on_driver
    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int | None = None) -> None:  # noqa: N803 - Spark's name, of a stream
        self.planned.abort(messages, batchId)


class BatchWriter(_Writer, ArrowWriter):
    """The writer that Spark calls for ``df.write``."""


class StreamWriter(_Writer, StreamArrowWriter):
    """The writer that Spark calls for ``df.writeStream``. Spark creates one for every micro-batch."""


def _is_of_spark(schema: StructType | pa.Schema) -> TypeGuard[StructType]:
    """Whether the schema is Spark's. Sail, an engine with Spark's API but no JVM, passes Arrow's."""
    return hasattr(schema, "fields")


def _only_commits() -> bool:
    """Whether this process creates a stream's writer only to call its commit or abort.

    Spark does not pass this to the data source, but it runs a separate Python module for it. If Spark renames
    that module, each commit takes the query over from its own tasks and fails with an error about a takeover.
    """
    return any(_COMMIT_MODULE in argument for argument in sys.argv)
