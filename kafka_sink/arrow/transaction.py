"""The transaction of a write of Arrow data: what planning, a task and the driver do in Spark, in one place.

The write is a batch of one task. All decisions are those of ``transactions/``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack

import pyarrow as pa

from kafka_sink.driver import driver_log
from kafka_sink.errors import DeliveryError, KafkaSinkError
from kafka_sink.model import EndedTransactions
from kafka_sink.options import SinkOptions
from kafka_sink.transactions import planning
from kafka_sink.transactions.attempt import OpenTime, TaskAttempt, WritesInTransaction
from kafka_sink.transactions.batch import BatchOutcome, Duty, described
from kafka_sink.transactions.planning import PlannedTransactions

_TASK = _FIRST_ATTEMPT = 0


class WriteTransaction:
    """Used by one thread at a time. ``planned`` is fresh from planning."""

    def __init__(self, options: SinkOptions, planned: PlannedTransactions) -> None:
        self._options = options
        self._planned = planned
        self._resources = ExitStack()
        self._attempt: TaskAttempt | None = None
        self._columns: Sequence[int | None] = ()

    def take(self, batch: pa.RecordBatch, columns: Sequence[int | None], writes: WritesInTransaction) -> bool:
        """Whether the rows are to be written; not so where their version was written before.

        The transaction begins before the first row. ``columns``: the batch's columns by part of a record.
        Raises DeliveryError for other columns than before, as the rows could not be compared.
        """
        attempt = self._begun(columns)
        if columns != self._columns:
            raise DeliveryError(
                "the batches of one write with delivery.guarantee=exactly-once must have the same columns"
            )
        if attempt.duty is not Duty.WRITE:
            attempt.drain(iter((batch,)))
            return False
        for _ in attempt.rows(iter((batch,)), writes):
            pass
        return True

    def begin(self, columns: Sequence[int | None], writes: WritesInTransaction) -> bool:
        """Begin the transaction, unless it has begun. Return whether rows are to be written."""
        attempt = self._begun(columns)
        if attempt.duty is not Duty.WRITE:
            return False
        attempt.begin(writes)
        return True

    def _begun(self, columns: Sequence[int | None]) -> TaskAttempt:
        if self._attempt is None:
            if self._planned.handover is None or self._planned.batch is None:
                raise DeliveryError("a write that only commits takes no rows")
            client = self._resources.enter_context(planning.client_of(self._options))
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
        attempt = self._begun(())
        report = attempt.finish()
        self._resources.close()
        return planning.commit(self._options, self._planned, [report]), attempt.metrics

    def abort(self, error: BaseException) -> Mapping[str, EndedTransactions]:
        """After a failure, also one of ``commit``. Returns what became of the transactions.

        It logs that, and raises no KafkaSinkError: that must not replace the one that the user gets.
        """
        self._resources.__exit__(type(error), error, None)
        if self._attempt is None:
            return {}
        try:
            ended = planning.abort(self._options, self._planned)
        except KafkaSinkError as problem:
            driver_log.warn(
                f"kafka-chunked: the write failed, and its open transaction could not be aborted: {problem}. "
                "The next write under its name aborts it, or brokers do so after "
                "kafka.transaction.timeout.ms. Until then, consumers with isolation.level=read_committed wait"
            )
            return {}
        texts = [described(ended.transactions["aborted"], "aborted")] if ended.aborted else []
        if ended.committed:
            texts.append(described(ended.transactions["committed"], "committed, as the write was decided"))
        if texts:
            driver_log.warn(f"kafka-chunked: the write failed; {'; '.join(texts)}")
        return ended.transactions
