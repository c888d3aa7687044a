"""Plans a write of Arrow data (options, brokers and topic are checked) and runs its transaction.

There is no coordinator: one process does what the coordinator does for Spark's tasks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from kafka_sink import spark_application
from kafka_sink.breaker.interface import load_breaker
from kafka_sink.clock import ABORTING, COMMITTING, STARTING, TOPIC_RECHECK_S
from kafka_sink.coordinator.live.messages import DriverWaiting
from kafka_sink.driver import driver_log
from kafka_sink.driver.topic_preparation import prepare_topic
from kafka_sink.errors import DeliveryError
from kafka_sink.options import SinkOptions, parse, texts
from kafka_sink.options.table import COORDINATOR, SPECS
from kafka_sink.reports import delivery_report

if TYPE_CHECKING:
    from kafka_sink.transactions.batch import BatchOutcome
    from kafka_sink.transactions.planning import Clients, PlannedTransactions
    from kafka_sink.transactions.task_attempt import BeginTransaction, TaskAttempt

# Spark adds these to every query, so `_about_spark` warns only here. Users who set them expect an effect.
_OF_SPARK = ("checkpointlocation", "queryname")
_OF_LIVE_VIEW = ("ui_port", "ui_bind_address")

_TASK = _FIRST_ATTEMPT = 0


def checked(given: Mapping[str, Any]) -> tuple[SinkOptions, dict[str, str]]:
    """Return the options, parsed and as texts. Logs their warnings. Raises ConfigurationError."""
    written = texts(given)
    parsed = parse(written)
    options = parsed.options
    for warning in (*parsed.warnings, *_about_spark(options, written)):
        driver_log.warn(f"kafka-chunked: {warning}")
    if options.delivery_report_path:
        delivery_report.check(options.delivery_report_path)
    breaker = load_breaker(options)
    if breaker is not None:
        breaker.close()
    return options, written


def plan(options: SinkOptions, given: Mapping[str, str]) -> WriteTransaction | None:
    """Prepare a write. Return its transaction, or None without one.

    Raises the errors of ``prepare_topic`` and ``transactions.planning.plan``.
    """
    with DriverWaiting(options, "", STARTING, "a write"):
        _prepare_topics(options)
        if not options.exactly_once:
            return None
        from kafka_sink.transactions import planning as transactions

        planned = transactions.plan(options, given, is_streaming=False, for_tasks=True)
        return WriteTransaction(options, planned)


def _about_spark(options: SinkOptions, given: Mapping[str, str]) -> list[str]:
    """Warn of options that are only used in Spark's writes. They do not change what is sent."""
    unused = [
        spec.name
        for spec in SPECS
        if (spec.group == COORDINATOR or spec.attribute in _OF_LIVE_VIEW)
        # A write without Spark never has a coordinator.
        and spec.attribute != "coordinator_enabled"
        and getattr(options, spec.attribute) != spec.default
    ]
    warnings = []
    if unused:
        warnings.append(
            "These options have no effect without Spark, because there is no coordinator: "
            + ", ".join(unused)
        )
    of_spark = sorted(name for name in given if name.strip().lower() in _OF_SPARK)
    if of_spark:
        warnings.append(f"These options have an effect with Spark only: {', '.join(of_spark)}")
    return warnings


def _prepare_topics(options: SinkOptions) -> None:
    """Call ``prepare_topic``, but at most once a minute for the same options, because a service may write
    often."""
    # The key contains the redacted options. Connections check their own login.
    done = f"topics are there without Spark: {options.redacted()}"
    if not spark_application.happened_within(done, TOPIC_RECHECK_S):
        prepare_topic(options)
        spark_application.note(done)


class WriteTransaction:
    """The transaction of a write. It does what planning, a task and the driver do in Spark.

    The write is a batch of one task, and ``transactions/`` makes all decisions. Not thread-safe. ``planned``
    must come from planning unused.
    """

    def __init__(
        self, options: SinkOptions, planned: PlannedTransactions, clients: Clients | None = None
    ) -> None:
        from kafka_sink.transactions import planning

        self._options = options
        self._planned = planned
        self._clients = clients or planning.client_of
        self._resources = ExitStack()
        self._attempt: TaskAttempt | None = None
        self._columns: Sequence[int | None] = ()

    def take(self, batch: pa.RecordBatch, columns: Sequence[int | None], begin: BeginTransaction) -> bool:
        """Return whether the rows must be written. They must not if their version was written before.

        The transaction begins before the first row. ``columns``: the batch's columns by part of a record.
        """
        return self._begun(columns).take(batch, begin)

    def require(self, columns: Sequence[int | None]) -> None:
        """Raise DeliveryError if the columns differ from the earlier ones, because rows could not be
        compared."""
        if self._attempt is not None and columns != self._columns:
            raise DeliveryError(
                "the batches of one write with delivery.guarantee=exactly-once must have the same columns"
            )

    def begin(self, columns: Sequence[int | None], begin: BeginTransaction) -> bool:
        """Begin the transaction, unless it has begun. Return whether rows must be written."""
        attempt = self._begun(columns)
        if not attempt.writes:
            return False
        attempt.begin(begin)
        return True

    def _begun(self, columns: Sequence[int | None]) -> TaskAttempt:
        if self._attempt is None:
            if self._planned.handover is None or self._planned.batch is None:
                raise DeliveryError("a write that only commits takes no rows")
            from kafka_sink.transactions.task_attempt import TaskAttempt

            client = self._resources.enter_context(self._clients(self._options, self._planned.brokers))
            self._columns = columns
            self._attempt = TaskAttempt(
                client,
                self._planned.scope,
                self._planned.handover,
                self._planned.batch,
                _TASK,
                _FIRST_ATTEMPT,
                columns,
                self._options.max_block_ms,
                self._options.transaction_timeout_ms,
            )
        return self._attempt

    def mark(self) -> None:
        """Put the progress marker into the transaction. Raises TransactionError."""
        self._begun(()).mark()

    def commit(self) -> tuple[BatchOutcome, Mapping[str, float]]:
        """Commit after all rows are acknowledged, and also return the task's metrics. Raises
        TransactionError, ChangedBatchError or DeliveryError."""
        from kafka_sink.transactions import planning

        attempt = self._begun(())
        with DriverWaiting(self._options, "", COMMITTING, "a write"):
            report = attempt.finish()
            self._resources.close()
            return planning.commit(self._options, self._planned, [report], self._clients), attempt.metrics

    def abort(self, error: BaseException) -> Mapping[str, int]:
        """End the transaction after a failure, including a failure of ``commit``. Return what happened to it.

        The outcome is logged. No KafkaSinkError is raised, because it would replace the user's error.
        """
        self._resources.__exit__(type(error), error, None)
        if self._attempt is None:
            return {}
        from kafka_sink.transactions import planning

        with DriverWaiting(self._options, "", ABORTING, "a write"):
            ended, note = planning.abort_or_explain(self._options, self._planned, self._clients)
        # If no transaction had begun, none was open.
        if not ended or any(ended.values()):
            driver_log.warn(f"kafka-chunked: the write failed; {note}")
        return ended
