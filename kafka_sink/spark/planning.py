"""Plans a write: checks the options, the columns and the topic, and finds the coordinator.

This runs on the driver, for a stream in every micro-batch, so it avoids slow imports.
"""

from __future__ import annotations

import hashlib
import inspect
import math
import secrets
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from kafka_sink import spark_application
from kafka_sink.clock import CONNECT_BOUND_MS, STARTING, TOPIC_RECHECK_S
from kafka_sink.cluster.topic_state import MetadataSnapshot
from kafka_sink.coordinator.launcher import plan_coordinator
from kafka_sink.coordinator.live.messages import DriverWaiting
from kafka_sink.coordinator.rendezvous import address_for_driver
from kafka_sink.driver import driver_conf, driver_log
from kafka_sink.options import SinkOptions, parse
from kafka_sink.options.table import DEFAULT_BREAKER
from kafka_sink.reports import delivery_report
from kafka_sink.rows.column_plan import OWN, ColumnPlan, ignored_columns
from kafka_sink.spark import worker
from kafka_sink.spark.write import PlannedWrite

if TYPE_CHECKING:
    import pyarrow as pa

_NAME_LENGTH = 16


def plan(
    raw: Mapping[str, str],
    schema: StructType,
    *,
    query: str | None = None,
    is_stream_writer: bool = False,
    for_tasks: bool = True,
) -> PlannedWrite:
    """Plan a write. Raises ConfigurationError, SchemaError, and the errors of connections to brokers.

    ``schema`` is the DataFrame's. ``query`` is set for micro-batches, which are planned again and again: a
    text that identifies the query within its application. ``is_stream_writer`` means that Spark itself
    commits each micro-batch, and plans it a second time for that. ``for_tasks`` is False then.
    """
    worker.freeze_when_reused()
    parsed = parse(raw)
    options, is_repeated = parsed.options, query is not None
    columns = [(field.name, field.dataType.simpleString()) for field in schema.fields]
    ignored = ignored_columns(_of_sink(schema.names, options), options.topic)
    _warn((*parsed.warnings, *ignored), query)
    _check(options)
    encoding = None
    if options.has_format:
        from kafka_sink.formats import planning as formats

        encoding = formats.plan(options, columns, partial(_arrow_schema, schema), query)
        options = options.without_registry()
    columns_plan = ColumnPlan.of(columns if encoding is None else encoding.columns, options.topic)
    # Jobs also pass checkpointLocation to batch writes, among options that they share.
    subject = raw.get("checkpointlocation", "") if is_stream_writer else ""
    name = secrets.token_hex(_NAME_LENGTH // 2)
    if subject:
        # The tasks of a query and its commits plan separately, and must find the same name.
        name = hashlib.sha256(subject.encode()).hexdigest()[:_NAME_LENGTH]
    label = "a micro-batch" if is_repeated else "a write"
    in_transactions = None
    waiting = name if is_stream_writer else query or name
    with DriverWaiting(options, waiting, STARTING, label, address_for_driver):
        snapshot = looked_up(options, is_repeated=is_repeated)
        if options.exactly_once:
            from kafka_sink.transactions import planning as transactions

            in_transactions = transactions.plan(
                options, raw, is_streaming=is_stream_writer, for_tasks=for_tasks, is_repeated=is_repeated
            )
    coordinator = plan_coordinator(options, snapshot)
    write = PlannedWrite(
        options,
        columns_plan,
        coordinator,
        name=name,
        transactions=in_transactions,
        tasks_at_once=_tasks_at_once(options),
        subject=subject,
        encoding=encoding,
        is_streaming=is_stream_writer,
    )
    worker.forget_spark_archives()
    return write


def looked_up(
    options: SinkOptions, *, is_repeated: bool, connect_bound_ms: float = CONNECT_BOUND_MS
) -> MetadataSnapshot | None:
    """Call ``prepare_topic``, unless a stream has done so recently; then return None.

    A stream that was connected before waits for connections for up to max.block.ms, because brokers may be
    restarting. Raises the errors of ``prepare_topic``.
    """
    # The key contains the redacted security options, so that another login is checked at once.
    done = f"topics are there: {options.redacted()}"
    if is_repeated and spark_application.happened_within(done, TOPIC_RECHECK_S):
        return None
    from kafka_sink.driver.topic_preparation import prepare_topic

    keep = None
    if options.exactly_once:
        from kafka_sink.transactions import planning as transactions

        # The connections also serve to take over transactional ids.
        keep = partial(transactions.keep_connections, options)
    was_connected = is_repeated and spark_application.happened_within(done, math.inf)
    connect_bound_ms = options.max_block_ms if was_connected else connect_bound_ms
    snapshot = prepare_topic(options, connect_bound_ms=connect_bound_ms, keep=keep)
    spark_application.note(done)
    return snapshot


def _of_sink(names: list[str], options: SinkOptions) -> list[str]:
    """The columns that are not fields of an encoded value."""
    if options.value_format == "bytes" or "value" in names:
        return names
    return [name for name in names if name in OWN]


def _warn(warnings: Sequence[str], query: str | None) -> None:
    """Log the warnings. For a query, which is planned again and again, they are logged once."""
    if warnings and (query is None or spark_application.first_time("\n".join((query, *warnings)))):
        for warning in warnings:
            driver_log.warn(f"kafka-chunked: {warning}")


def _check(options: SinkOptions) -> None:
    """Check settings that would fail only in tasks, or would hide the cause of a failure there."""
    if options.delivery_report_path:
        delivery_report.check(options.delivery_report_path)
    driver_conf.warn_of_idle_timeout(options.delivery_timeout_ms)
    if options.breaker.class_path not in (None, DEFAULT_BREAKER):
        from kafka_sink.breaker.interface import load_breaker

        breaker = load_breaker(options)
        if breaker is not None:
            breaker.close()


def _arrow_schema(schema: StructType) -> pa.Schema:
    # PySpark 4.3 requires the time zone of timestamps; older versions use UTC.
    asks = "timezone" in inspect.signature(to_arrow_schema).parameters
    return to_arrow_schema(schema, timezone="UTC") if asks else to_arrow_schema(schema)


def _tasks_at_once(options: SinkOptions) -> int:
    """How many tasks may run at the same time. Only a rate limit needs this number."""
    if not (options.max_rows_per_second or options.max_bytes_per_second):
        return 1
    return driver_conf.tasks_of(driver_conf.conf_of_driver() or {})
