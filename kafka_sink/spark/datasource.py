"""``format("kafka-chunked")``: Spark's planning calls the sink here, and all options are validated here.

Runs on the driver, for a stream again in every micro-batch, so it imports nothing heavy.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, NoReturn

from pyspark.sql.datasource import DataSource

from kafka_sink import application_markers, driver_log
from kafka_sink.admin import prepare_topic
from kafka_sink.breaker.loading import load_breaker
from kafka_sink.coordinator.driver.planning import hand_off
from kafka_sink.errors import ConfigurationError
from kafka_sink.options import parse
from kafka_sink.rows.column_plan import ColumnPlan
from kafka_sink.spark import zipimport_workaround
from kafka_sink.spark.writer import BatchWriter, PlannedWrite, StreamWriter
from kafka_sink.transactions import planning as transactions

if TYPE_CHECKING:
    from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader
    from pyspark.sql.types import StructType

_COMMIT_MODULE = "python_streaming_sink_runner"
_READ = "kafka-chunked only writes. Read with Spark's own source: format('kafka') of spark-sql-kafka-0-10"


class KafkaChunkedDataSource(DataSource):
    """Writes rows with columns value, and optionally key, topic, partition, headers, timestamp, to Kafka.

    ``df.write.format("kafka-chunked").mode("append").option("kafka.bootstrap.servers", ...).save()``; Spark
    itself refuses the write without ``.mode("append")``. Options: docs/options.md.
    """

    @classmethod
    def name(cls) -> str:
        return "kafka-chunked"

    def writer(self, schema: StructType, overwrite: bool) -> BatchWriter:
        """Plan a batch write. Raises ConfigurationError or SchemaError."""
        if overwrite:
            raise ConfigurationError(
                "mode('overwrite') is not supported: Kafka topics can only be added to. Use mode('append')."
            )
        return BatchWriter(self._plan(schema, is_streaming=False))

    def streamWriter(self, schema: StructType, overwrite: bool) -> StreamWriter:  # noqa: ARG002, N802 - Spark's signature
        """Plan a micro-batch. ``overwrite`` is set in complete mode, whose results are appended as well."""
        return StreamWriter(self._plan(schema, is_streaming=True))

    def _plan(self, schema: StructType, *, is_streaming: bool) -> PlannedWrite:
        parsed = parse(self.options)
        if parsed.warnings:
            # For a stream this runs several times in every micro-batch.
            key = "\n".join((str(self.options.get("checkpointlocation")), *parsed.warnings))
            if not is_streaming or application_markers.first_time(key):
                for warning in parsed.warnings:
                    driver_log.warn(f"kafka-chunked: {warning}")
        breaker = load_breaker(parsed.options)
        if breaker is not None:
            breaker.close()
        columns = [(field.name, field.dataType.simpleString()) for field in schema.fields]
        columns_plan = ColumnPlan.of(columns, parsed.options.topic)
        prepare_topic(parsed.options, is_streaming=is_streaming)
        in_transactions = transactions.plan(
            parsed.options, self.options, is_streaming=is_streaming, for_tasks=not _only_commits()
        )
        coordinator = hand_off(parsed.options, is_streaming=is_streaming)
        write = PlannedWrite(parsed.options, columns_plan, coordinator, transactions=in_transactions)
        zipimport_workaround.forget_spark_archives()
        return write

    def schema(self) -> NoReturn:
        raise ConfigurationError(_READ)

    def reader(self, schema: StructType) -> DataSourceReader:  # noqa: ARG002 - DataSource's signature
        raise ConfigurationError(_READ)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: ARG002, N802 - Spark's signature
        raise ConfigurationError(_READ)


def _only_commits() -> bool:
    """Whether this process makes a stream's writer only to call its commit or abort.

    Spark does not say so to a data source, but runs a module of its own for it. If Spark renames that module,
    each commit takes the query over from its own tasks, and fails with an error that says so.
    """
    return any(_COMMIT_MODULE in argument for argument in sys.argv)
