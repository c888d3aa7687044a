"""One write of Arrow data: its planning, which checks options, brokers and the topic, and its transaction.

There is no coordinator: what it does for Spark's tasks, one process does without it.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from kafka_sink.breaker.interface import load_breaker
from kafka_sink.clock import ABORTING, COMMITTING, STARTING, TOPIC_RECHECK_S, monotonic_ms
from kafka_sink.coordinator.live.messages import DriverWaiting
from kafka_sink.driver import driver_log
from kafka_sink.driver.topic_preparation import prepare_topic
from kafka_sink.errors import DeliveryError
from kafka_sink.options import SinkOptions, parse, texts
from kafka_sink.options.table import COORDINATOR, SPECS
from kafka_sink.reports import delivery_report

if TYPE_CHECKING:
    import pyarrow as pa

    from kafka_sink.transactions.batch import BatchOutcome
    from kafka_sink.transactions.planning import Clients, PlannedTransactions
    from kafka_sink.transactions.task_attempt import BeginTransaction, TaskAttempt

# In Spark they come with every query. Here they can only be meant for something that is missing.
_OF_SPARK = ("checkpointlocation", "queryname")
_OF_LIVE_VIEW = ("ui_port", "ui_bind_address")

_TASK = _FIRST_ATTEMPT = 0


def checked(given: Mapping[str, Any]) -> tuple[SinkOptions, dict[str, str]]:
    """The options, and the same as texts. Logs their warnings. Raises ConfigurationError."""
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
    """Prepare a write; return its transaction, if it is to be one.

    Raises what ``prepare_topic`` and ``transactions.planning.plan`` raise.
    """
    with DriverWaiting(options, "", STARTING, "a write"):
        _prepare_topics(options)
        if not options.exactly_once:
            return None
        # Imported here because most writes have no transactions.
        from kafka_sink.transactions import planning as transactions

        planned = transactions.plan(options, given, is_streaming=False, for_tasks=True)
        return WriteTransaction(options, planned)


def _about_spark(options: SinkOptions, given: Mapping[str, str]) -> list[str]:
    """Options that only Spark's writes have a use for. They change nothing of what is sent."""
    unused = [
        spec.name
        for spec in SPECS
        if (spec.group == COORDINATOR or spec.attribute in _OF_LIVE_VIEW)
        # Without a coordinator is how it works here.
        and spec.attribute != "coordinator_enabled"
        and getattr(options, spec.attribute) != spec.default
    ]
    warnings = []
    if unused:
        warnings.append(
            f"These options have no effect without Spark, as there is no coordinator: {', '.join(unused)}"
        )
    of_spark = sorted(name for name in given if name.strip().lower() in _OF_SPARK)
    if of_spark:
        warnings.append(f"These options of Spark have no effect without it: {', '.join(of_spark)}")
    return warnings


_lock = threading.Lock()  # guards the one below
_prepared_until_ms: dict[str, float] = {}


def _prepare_topics(options: SinkOptions) -> None:
    """As ``prepare_topic``, but not before each write of a service that writes often: as in a stream, brokers
    are asked again after a minute."""
    # Redacted, secrets are equal: other ones are checked when a connection logs in.
    key = repr(options)
    now_ms = monotonic_ms()
    with _lock:
        for one in [one for one, until_ms in _prepared_until_ms.items() if until_ms <= now_ms]:
            del _prepared_until_ms[one]
        if key in _prepared_until_ms:
            return
    prepare_topic(options)
    with _lock:
        _prepared_until_ms[key] = monotonic_ms() + TOPIC_RECHECK_S * 1000


class WriteTransaction:
    """The transaction of a write: what planning, a task and the driver do in Spark, in one place.

    The write is a batch of one task. All decisions are those of ``transactions/``. Used by one thread at a
    time; ``planned`` is fresh from planning.
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
        """Whether the rows are to be written; not so where their version was written before.

        The transaction begins before the first row. ``columns``: the batch's columns by part of a record.
        """
        attempt = self._begun(columns)
        if not attempt.writes:
            attempt.digest_only(iter((batch,)))
            return False
        for _ in attempt.rows(iter((batch,)), begin):
            pass
        return True

    def require(self, columns: Sequence[int | None]) -> None:
        """Raise DeliveryError for other columns than before, as the rows could not be compared."""
        if self._attempt is not None and columns != self._columns:
            raise DeliveryError(
                "the batches of one write with delivery.guarantee=exactly-once must have the same columns"
            )

    def begin(self, columns: Sequence[int | None], begin: BeginTransaction) -> bool:
        """Begin the transaction, unless it has begun. Return whether rows are to be written."""
        attempt = self._begun(columns)
        if not attempt.writes:
            return False
        attempt.begin(begin)
        return True

    def _begun(self, columns: Sequence[int | None]) -> TaskAttempt:
        if self._attempt is None:
            if self._planned.handover is None or self._planned.batch is None:
                raise DeliveryError("a write that only commits takes no rows")
            from kafka_sink.transactions.task_attempt import OpenTime, TaskAttempt

            client = self._resources.enter_context(self._clients(self._options))
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
                OpenTime(self._options.transaction_timeout_ms),
            )
        return self._attempt

    def commit(self) -> tuple[BatchOutcome, Mapping[str, float]]:
        """Once all rows are acknowledged; returns the task's metrics, too. Raises TransactionError,
        ChangedBatchError, DeliveryError."""
        from kafka_sink.transactions import planning

        attempt = self._begun(())
        with DriverWaiting(self._options, "", COMMITTING, "a write"):
            report = attempt.finish()
            self._resources.close()
            return planning.commit(self._options, self._planned, [report], self._clients), attempt.metrics

    def abort(self, error: BaseException) -> Mapping[str, int]:
        """After a failure, also one of ``commit``. Returns what became of the transactions.

        It logs that, and raises no KafkaSinkError: that must not replace the one that the user gets.
        """
        self._resources.__exit__(type(error), error, None)
        if self._attempt is None:
            return {}
        from kafka_sink.transactions import planning

        with DriverWaiting(self._options, "", ABORTING, "a write"):
            ended, note = planning.abort_or_explain(self._options, self._planned, self._clients)
        # None were open where none had begun.
        if not ended or any(ended.values()):
            driver_log.warn(f"kafka-chunked: the write failed; {note}")
        return ended
