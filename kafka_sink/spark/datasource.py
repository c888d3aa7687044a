"""``format("kafka-chunked")``: the data source that Spark's planning calls. It validates all options.

It runs on the driver, for a stream in every micro-batch, so it avoids slow imports.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NoReturn

from pyspark.sql.datasource import DataSource

from kafka_sink import application_markers, driver_log
from kafka_sink.admin import prepare_topic
from kafka_sink.breaker.loading import load_breaker
from kafka_sink.coordinator.process.planning import hand_off
from kafka_sink.errors import ConfigurationError
from kafka_sink.options import SinkOptions, parse
from kafka_sink.rows.column_plan import ColumnPlan, ignored_columns
from kafka_sink.spark import frozen_imports, idle_timeout, shown_secrets, zipimport_workaround
from kafka_sink.spark.short_tracebacks import short_tracebacks
from kafka_sink.spark.writer import BatchWriter, PlannedWrite, StreamWriter

if TYPE_CHECKING:
    from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader
    from pyspark.sql.types import StructType

_COMMIT_MODULE = "python_streaming_sink_runner"
_NAME_LENGTH = 16
_READ = "kafka-chunked cannot read. Use Spark's own source to read: format('kafka') of spark-sql-kafka-0-10"


class KafkaChunkedDataSource(DataSource):
    """Writes rows to Kafka. Columns: value, and optionally key, topic, partition, headers and timestamp.

    ``df.write.format("kafka-chunked").mode("append").option("kafka.bootstrap.servers", ...).save()``. Spark
    itself requires ``.mode("append")``. Options: docs/options.md.
    """

    @classmethod
    def name(cls) -> str:
        return "kafka-chunked"

    @short_tracebacks
    def writer(self, schema: StructType, overwrite: bool) -> BatchWriter:
        """Plan a batch write. Raises ConfigurationError or SchemaError."""
        if overwrite:
            raise ConfigurationError(
                "mode('overwrite') is not supported: Kafka topics only take appends. Use mode('append')."
            )
        return BatchWriter(self._plan(schema, is_streaming=False))

    @short_tracebacks
    def streamWriter(self, schema: StructType, overwrite: bool) -> StreamWriter:  # noqa: N802 - Spark's signature
        """Plan a micro-batch. Complete mode sets ``overwrite``; its results are appended, too."""
        return StreamWriter(self._plan(schema, is_streaming=True))

    def _plan(self, schema: StructType, *, is_streaming: bool) -> PlannedWrite:
        frozen_imports.freeze_when_reused()
        parsed = parse(self.options)
        columns = [(field.name, field.dataType.simpleString()) for field in schema.fields]
        self._warn(
            (*parsed.warnings, *ignored_columns(columns, parsed.options.topic)), is_streaming=is_streaming
        )
        if parsed.options.delivery_report_path:
            from kafka_sink.reports import delivery_report

            delivery_report.check(parsed.options.delivery_report_path)
        idle_timeout.warn_at_planning(parsed.options.delivery_timeout_ms)
        shown_secrets.warn_at_planning(self.options)
        breaker = load_breaker(parsed.options)
        if breaker is not None:
            breaker.close()
        columns_plan = ColumnPlan.of(columns, parsed.options.topic)
        prepare_topic(parsed.options, is_streaming=is_streaming)
        in_transactions = None
        if parsed.options.delivery_guarantee == "exactly-once":
            from kafka_sink.transactions import planning as transactions

            in_transactions = transactions.plan(
                parsed.options, self.options, is_streaming=is_streaming, for_tasks=not _only_commits()
            )
        coordinator = hand_off(parsed.options, is_streaming=is_streaming)
        write = PlannedWrite(
            parsed.options,
            columns_plan,
            coordinator,
            transactions=in_transactions,
            tasks_at_once=_tasks_at_once(parsed.options),
        )
        if is_streaming and (checkpoint := self.options.get("checkpointlocation")):
            write = replace(write, name=_query_name(checkpoint))
        zipimport_workaround.forget_spark_archives()
        return write

    def _warn(self, warnings: Sequence[str], *, is_streaming: bool) -> None:
        # For a stream, planning runs several times in each micro-batch.
        key = "\n".join((str(self.options.get("checkpointlocation")), *warnings))
        if warnings and (not is_streaming or application_markers.first_time(key)):
            for warning in warnings:
                driver_log.warn(f"kafka-chunked: {warning}")

    def schema(self) -> NoReturn:
        raise ConfigurationError(_READ)

    def reader(self, schema: StructType) -> DataSourceReader:
        raise ConfigurationError(_READ)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 - Spark's signature
        raise ConfigurationError(_READ)


def _tasks_at_once(options: SinkOptions) -> int:
    """Only a rate limit depends on it."""
    if not (options.max_rows_per_second or options.max_bytes_per_second):
        return 1
    from kafka_sink.coordinator.process.driver_conf import tasks_at_once

    return tasks_at_once()


def _query_name(checkpoint: str) -> str:
    """A name for the writes of the query with this checkpoint: its tasks and its commits plan separately."""
    return hashlib.sha256(checkpoint.encode()).hexdigest()[:_NAME_LENGTH]


def _only_commits() -> bool:
    """Whether this process creates a stream's writer only to call its commit or abort.

    Spark gives the data source no sign of it, but runs its own Python module. If Spark renames the module,
    each commit takes over the query from its own tasks, and fails with an error about that.
    """
    return any(_COMMIT_MODULE in argument for argument in sys.argv)
