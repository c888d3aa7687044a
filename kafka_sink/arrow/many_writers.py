"""What a write by tasks of Ray or Daft shares: its options, its columns, and the report when all have ended.

Each task is a write of its own, in a process that knows nothing of the others. Options that need one that
knows them all are errors.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pyarrow as pa

from kafka_sink.arrow.columns import check_early
from kafka_sink.arrow.planning import checked
from kafka_sink.arrow.producer import ArrowProducer
from kafka_sink.coordinator.address import PlannedCoordinator
from kafka_sink.driver.topics import prepare_topic
from kafka_sink.errors import ConfigurationError, DeliveryError
from kafka_sink.model import TaskResult
from kafka_sink.options import texts
from kafka_sink.reports import write_reports
from kafka_sink.reports.delivery_report import EndedWrite, Written
from kafka_sink.secret import HiddenValues

# Only the driver reports.
_NOT_FOR_TASKS = ("log.summary", "log.summary.format", "delivery.report.path")


class ManyWriters:
    """Picklable: it goes to the tasks. Raises ConfigurationError. ``engine``: its name in errors."""

    def __init__(self, options: Mapping[str, Any], engine: str) -> None:
        self.options, given = checked(options)
        if self.options.exactly_once:
            raise ConfigurationError(
                f"delivery.guarantee=exactly-once is not supported in {engine}, which does not tell a task's "
                "attempts apart. Use Spark, or kafka_sink.write_arrow in one process"
            )
        if self.options.max_rows_per_second or self.options.max_bytes_per_second:
            raise ConfigurationError(
                f"max.rows.per.second and max.bytes.per.second are not supported in {engine}, whose tasks "
                "have no coordinator to share a limit. Use Spark, or the brokers' quotas for kafka.client.id"
            )
        # A task's error must not show what a log of the engine would keep.
        self._of_tasks = HiddenValues(
            (name, text) for name, text in texts(given).items() if name.strip().lower() not in _NOT_FOR_TASKS
        )
        self._name = secrets.token_hex(8)

    def start(self, schema: pa.Schema | None = None) -> None:
        """On the driver, before tasks. Raises SchemaError, and what ``prepare_topic`` raises."""
        if schema is not None:
            check_early(schema, self.options)
        prepare_topic(self.options)

    def write(self, tables: Iterable[Any]) -> TaskResult:
        """In a task: returns when all rows are acknowledged."""
        with ArrowProducer({**self._of_tasks, "log.summary": "false"}) as producer:
            for table in tables:
                producer.send(table)
        if producer.task_result is None:
            raise DeliveryError("the write has ended without a result")
        return producer.task_result

    def end(self, results: Sequence[TaskResult]) -> Written:
        """On the driver, when all tasks have ended: the summary and the delivery report."""
        ended = EndedWrite(self._name, "committed", "", None, len(results), results)
        if results:
            write_reports.report(self.options, PlannedCoordinator(), ended)
        return Written.of(results, self.options)
