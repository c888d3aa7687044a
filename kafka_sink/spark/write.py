"""A write: tasks send Spark's Arrow batches as larger tables, and the driver commits or aborts.

Batch and streaming writes share this implementation. The two classes that Spark calls only adapt its
signatures. Spark may pickle a planned write at any time, so it contains no socket, thread or lock.
"""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from pyspark import TaskContext

from kafka_sink import spark_application
from kafka_sink.clock import ABORTING, COMMITTING
from kafka_sink.cluster.topic_state import MetadataSnapshot
from kafka_sink.coordinator.address import CoordinatorAddress, PlannedCoordinator, without_brackets
from kafka_sink.coordinator.live.messages import DriverWaiting, TaskIdentity, about_job
from kafka_sink.driver import driver_log
from kafka_sink.errors import DeliveryError, ExecutorDisconnectedError, WriteOverError
from kafka_sink.model import TaskResult
from kafka_sink.options import SinkOptions
from kafka_sink.printable import printable
from kafka_sink.reports import write_report
from kafka_sink.reports.delivery_report import EndedWrite
from kafka_sink.rows.column_plan import ColumnPlan
from kafka_sink.spark import worker
from kafka_sink.spark.reading import SPARK_FAILED, checked_batches, rows_of_spark, send_tables
from kafka_sink.spark.short_tracebacks import log_failure, message_of

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.datasource import WriterCommitMessage

    from kafka_sink.dead_letters.rejected_rows import RejectedRows
    from kafka_sink.formats.schemas import RowEncoding
    from kafka_sink.task.producer import Producer
    from kafka_sink.transactions.batch import AttemptReport
    from kafka_sink.transactions.decision import BatchIdentity
    from kafka_sink.transactions.planning import PlannedTransactions
    from kafka_sink.transactions.task_attempt import TaskAttempt
else:
    try:
        from pyspark.sql.datasource import WriterCommitMessage
    except ImportError:
        # Spark 3.5 does not call a data source, so it does not require its own message class.
        WriterCommitMessage = object

# The local properties that Spark sets for the tasks of a micro-batch.
_BATCH_ID = "streaming.sql.batchId"
QUERY_ID = "sql.streaming.queryId"
# The local property that Spark sets for all tasks of a write. In foreachBatch it is that of the inner write.
_DESCRIPTION = "spark.job.description"
# Spark calls ``abort`` shortly after a failed commit, so the note of an older failure does not count.
_COMMIT_FAILED_S = 60.0
# ``abort`` logs this if it knows no cause: Spark passes none, and does not report a cancelled job.
_NO_CAUSE = f"No task reported an error of the sink. The job was stopped, or {SPARK_FAILED}"


@dataclass(frozen=True)
class TaskCommitted(WriterCommitMessage):
    """A task's commit message: brokers have acknowledged all rows of the task.

    ``report`` is about the open transaction that contains the rows, if there is one. ``query`` is the query's
    id, which Spark does not pass to a commit. ``write`` is the write's name in reports, which without the
    option checkpointLocation is another one in the commit. ``task`` is Spark's taskAttemptId.
    """

    result: TaskResult
    report: AttemptReport | None = None
    query: str = ""
    write: str = ""
    task: int = -1


@dataclass(frozen=True)
class PlannedWrite:
    """A planned write. It can be pickled. ``write`` runs in tasks, ``commit`` and ``abort`` on the driver."""

    options: SinkOptions
    plan: ColumnPlan
    coordinator: PlannedCoordinator = field(default_factory=PlannedCoordinator)
    planned_at_s: float = field(default_factory=time.time)
    # The name is the same in tasks and commit, even for a stream, whose commit is planned separately.
    name: str = field(default_factory=lambda: secrets.token_hex(8))
    transactions: PlannedTransactions | None = None
    # How many tasks may run at the same time. Only planned if there is a rate limit.
    tasks_at_once: int = 1
    # The checkpoint of a stream, which log lines about failures contain; "" for a batch write.
    subject: str = ""
    # Within foreach_batch: the number of the micro-batch, which Spark does not pass to the inner write.
    micro_batch: int | None = None
    # If it is set, ``plan`` is the plan for encoded batches.
    encoding: RowEncoding | None = None
    # True for ``df.writeStream``: Spark passes the micro-batch to its tasks, and commits it.
    is_streaming: bool = False

    # -- in tasks ----------------------------------------------------------------------------------------

    def write(self, batches: Iterator[pa.RecordBatch]) -> TaskCommitted:
        """Send all rows, and return when all are acknowledged. Raises KafkaSinkError."""
        try:
            with driver_log.task_lines():
                return self._write(rows_of_spark(batches))
        except (ExecutorDisconnectedError, WriteOverError):
            # This error is a consequence of the write's end, never its cause.
            raise
        except Exception as error:
            self._report_failure(error)
            raise

    def _write(self, batches: Iterator[pa.RecordBatch]) -> TaskCommitted:
        worker.freeze_when_reused()
        if self.transactions is None:
            written = TaskCommitted(self._send(batches))
        else:
            written = self._write_in_transaction(batches, self.transactions)
        worker.forget_spark_archives()
        context = TaskContext.get()
        if context is None:
            return written
        name = self._name_in_task()
        return replace(written, query=micro_batch_of(context)[0], write=name, task=context.taskAttemptId())

    def _report_failure(self, error: Exception) -> None:
        """Report the failure to the coordinator, because Spark passes no cause to the driver's ``abort``.

        Thousands of tasks may fail at once, so on each host one attempt per attempt number reports.
        """
        context, address = TaskContext.get(), self._coordinator()
        if context is None or address is None:
            return
        name, attempt = self._name_in_task(), context.attemptNumber()
        if not spark_application.first_time(f"failed: {name}, stage {context.stageId()}, attempt {attempt}"):
            return
        from kafka_sink.coordinator.writes import report_failure

        where = f"task {context.partitionId()} on {socket.gethostname()}"
        report_failure(address, name, f"{where}: {message_of(error)}")

    def _send(self, batches: Iterator[pa.RecordBatch], attempt: TaskAttempt | None = None) -> TaskResult:
        # Imported here because the driver imports this module for every commit and needs none of these.
        with worker.explained():
            from kafka_sink.spark.executor_connection import acknowledged, executor_socket, watched
            from kafka_sink.task.producer_cache import task_producer

        executor = executor_socket()
        with (
            task_producer(
                self.options,
                self.plan.narrowed(),
                self._coordinator(),
                self._snapshot(),
                task=self._task(),
                tasks_at_once=self.tasks_at_once,
                again=self._is_run_again(),
            ) as producer,
            watched(executor, producer.abort) as check_executor,
            worker.memory_kept(),
        ):
            rows = checked_batches(acknowledged(batches, executor), check_executor)
            rows = self._encoded(rows, producer, attempt)
            if attempt is not None:
                rows = (batch for batch in rows if attempt.take(batch, producer.begin_transaction))
            largest = send_tables(rows, producer, self.plan, self.options.linger_ms, producer.activity)
            result = producer.finish(None if attempt is None else attempt.mark)
            return replace(result, arrow_batch_bytes_max=largest)

    def _encoded(
        self, batches: Iterator[pa.RecordBatch], producer: Producer | None, attempt: TaskAttempt | None
    ) -> Iterator[pa.RecordBatch]:
        """With formats, turn the batches into batches whose keys and values are bytes.

        Rows that do not fit their schema become dead letters if these are allowed, or raise InvalidRowError.
        """
        if self.encoding is None:
            return batches

        def reject(rows: RejectedRows) -> None:
            if attempt is not None and producer is not None:
                attempt.begin(producer.begin_transaction)
            if producer is not None:
                producer.reject(rows)

        from kafka_sink.formats.row_encoder import encoded

        takes_dead_letters = self.options.errors_tolerance == "all"
        return encoded(self.encoding, batches, self.plan, reject if takes_dead_letters else None)

    def _write_in_transaction(
        self, batches: Iterator[pa.RecordBatch], planned: PlannedTransactions
    ) -> TaskCommitted:
        """Like ``write``, but the rows stay in an open transaction."""
        from kafka_sink.transactions import planning as transactions
        from kafka_sink.transactions.task_attempt import TaskAttempt

        context = TaskContext.get()
        if context is None or planned.handover is None:
            raise DeliveryError("a write with delivery.guarantee=exactly-once must run in a Spark task")
        # The brokers that planning has found may be the reason why an earlier attempt failed.
        brokers = None if self._is_run_again() else planned.brokers
        with transactions.client_of(self.options, brokers) as client:
            attempt = TaskAttempt(
                client,
                planned.scope,
                planned.handover,
                planned.batch or _micro_batch(context),
                context.partitionId(),
                context.attemptNumber(),
                self.plan.parts,
                self.options.max_block_ms,
                self.options.transaction_timeout_ms,
                # In foreachBatch, the version of an application may be the number of a micro-batch.
                in_query=planned.batch is not None
                and context.getLocalProperty(_BATCH_ID) == str(planned.batch.number),
            )
            if not attempt.writes:
                for batch in self._encoded(batches, None, None):
                    attempt.take(batch)
                return TaskCommitted(TaskResult(), attempt.finish())
            try:
                result = self._send(batches, attempt)
                report = attempt.finish()
                measured = replace(result, metrics={**result.metrics, **attempt.metrics})
                return TaskCommitted(measured, report)
            except BaseException:
                attempt.abort()
                raise

    def _coordinator(self) -> CoordinatorAddress | None:
        """The coordinator's address. The driver's host is known in tasks, but not at planning."""
        context, address = TaskContext.get(), self.coordinator.address
        if context is None or address is None:
            return None
        host = address.host or context.getLocalProperty("spark.driver.host")
        return None if host is None else replace(address, host=without_brackets(host))

    def _name_in_task(self) -> str:
        # Only for streams: a batch write in foreachBatch also has the property.
        context = TaskContext.get() if self.is_streaming else None
        return self._name_of(None if context is None else context.getLocalProperty(_BATCH_ID))

    def _name_of(self, batch_id: int | str | None) -> str:
        """The name with the micro-batch, because a reused plan must not end tasks of the next micro-batch."""
        return self.name if batch_id is None else f"{self.name}/{batch_id}"

    def _task(self) -> TaskIdentity:
        context = TaskContext.get()
        if context is None:
            return TaskIdentity(self._name_in_task(), 0, -1)
        query, batch = micro_batch_of(context)
        about = None
        # Only the live view shows the job, so only one task reports it, and only if there is a live view.
        has_view = self.coordinator.address is not None and self.coordinator.address.has_view
        if has_view and context.partitionId() == 0:
            name = job_name(context.getLocalProperty(_DESCRIPTION) or "")
            about = about_job(name, self.options.shown())
        return TaskIdentity(
            self._name_in_task(),
            context.taskAttemptId(),
            context.partitionId(),
            context.attemptNumber(),
            socket.gethostname(),
            query,
            batch,
            context.getLocalProperty("spark.app.name") or "",
            about,
        )

    def _snapshot(self) -> MetadataSnapshot | None:
        """The metadata snapshot of planning, with its age according to the wall clocks of both hosts.

        Wrong clocks do no harm, because brokers' responses correct the snapshot. A retried task gets None:
        the snapshot may be the reason why the first attempt failed, as after a topic was recreated.
        """
        snapshot = None if self._is_run_again() else self.coordinator.snapshot
        return None if snapshot is None else snapshot.aged(max(0.0, (time.time() - self.planned_at_s) * 1000))

    def _is_run_again(self) -> bool:
        context = TaskContext.get()
        return context is not None and context.attemptNumber() > 0

    # -- on the driver -----------------------------------------------------------------------------------

    def commit(
        self, messages: Sequence[WriterCommitMessage | None], batch_id: int | None = None
    ) -> EndedWrite:
        """Log a summary. Raises DeliveryError if a task did not report."""
        try:
            return self._commit(messages, batch_id)
        except Exception as error:
            # Spark calls ``abort`` next, in another process, which reads this note.
            spark_application.note(self._failed_commit(batch_id), message_of(error))
            raise

    def _failed_commit(self, batch_id: int | None) -> str:
        return f"failed commit: {self._name_of(batch_id)}"

    def _commit(self, messages: Sequence[WriterCommitMessage | None], batch_id: int | None) -> EndedWrite:
        self._end_attempts(batch_id)
        missing = sum(not isinstance(reported, TaskCommitted) for reported in messages)
        if missing:
            problem = (
                f"{missing} of {len(messages)} tasks did not report what they wrote, so their rows cannot be "
                "counted as written. Trigger.Continuous is not supported, because Spark does not run the "
                "tasks of a Python sink in it. Use Trigger.ProcessingTime or Trigger.AvailableNow."
            )
            raise DeliveryError(problem)
        outcome, note, in_transactions = "committed", "", dict[str, int]()
        if self.transactions is not None:
            from kafka_sink.transactions import planning as transactions

            reports = [message.report for message in messages if isinstance(message, TaskCommitted)]
            with self._waits_shown(COMMITTING, batch_id):
                committed = transactions.commit(
                    self.options, self.transactions, [report for report in reports if report is not None]
                )
            outcome, note, in_transactions = committed.outcome, committed.note, committed.transactions
        ended = self._ended(outcome, messages, batch_id, in_transactions, note)
        write_report.report(self.options, self.coordinator, ended)
        worker.forget_spark_archives()
        return ended

    def abort(
        self,
        messages: Sequence[WriterCommitMessage | None],
        batch_id: int | None = None,
        *,
        has_all: bool = True,
    ) -> None:
        """Log why a job failed and what it has written. Kafka keeps those rows, unless transactions are open.

        ``messages`` has one entry for each task, unless ``has_all`` is False.
        """
        cause = self._end_attempts(batch_id)
        cause = spark_application.noted_within(self._failed_commit(batch_id), _COMMIT_FAILED_S, str) or cause
        in_transactions, note = dict[str, int](), ""
        if self.transactions is not None:
            from kafka_sink.transactions import planning as transactions

            with self._waits_shown(ABORTING, batch_id):
                # An error here must not replace the one that Spark already has, so it is only explained.
                in_transactions, note = transactions.abort_or_explain(self.options, self.transactions)
        ended = self._ended("aborted", messages, batch_id, in_transactions, note)
        ended = replace(ended, cause=cause, tasks=ended.tasks if has_all else None)
        write_report.report(self.options, self.coordinator, ended)
        if cause:
            log_failure(f"{write_report.aborted(ended)}: {cause}")
        else:
            driver_log.warn(f"{write_report.aborted(ended)}. {_NO_CAUSE}")

    def _end_attempts(self, batch_id: int | None) -> str:
        """End attempts that still run. Returns why the write failed, if a task has reported it."""
        address = self._running_coordinator()
        if address is None:
            return ""
        from kafka_sink.coordinator.writes import end_attempts

        # A restarted query may write the same micro-batch again, under the same name.
        return end_attempts(address, self._name_of(batch_id), again=batch_id is not None)

    def _ended(
        self,
        outcome: str,
        messages: Sequence[WriterCommitMessage | None],
        batch_id: int | None,
        in_transactions: Mapping[str, int],
        note: str,
    ) -> EndedWrite:
        tasks = [message for message in messages if isinstance(message, TaskCommitted)]
        query = next((message.query for message in tasks if message.query), "")
        # If no task has finished, the query's id is not known.
        write = next((message.write for message in tasks if message.write), self._name_of(batch_id))
        results = [message.result for message in tasks]
        last = max((message.task for message in tasks), default=-1)
        batch = self.micro_batch if batch_id is None else batch_id
        schemas = () if self.encoding is None else tuple(map(str, self.encoding.parts))
        return EndedWrite(
            write, outcome, query, batch, len(messages), results, in_transactions, note, last, schemas
        )

    def _waits_shown(self, step: str, batch_id: int | None) -> DriverWaiting:
        batch = self.micro_batch if batch_id is None else batch_id
        label = "a write" if batch is None else f"micro-batch {batch}"
        return DriverWaiting(self.options, self.name, step, label, self._running_coordinator)

    def _running_coordinator(self) -> CoordinatorAddress | None:
        from kafka_sink.coordinator.rendezvous import address_for_driver

        return None if self.coordinator.address is None else address_for_driver()


def micro_batch_of(context: TaskContext) -> tuple[str, int]:
    """The query's id and the number of the micro-batch; "" and -1 outside a micro-batch."""
    query, batch = context.getLocalProperty(QUERY_ID), context.getLocalProperty(_BATCH_ID)
    return (query, int(batch)) if query and batch and batch.isdigit() else ("", -1)


def job_name(description: str) -> str:
    """The name that users know: that of a query, or the description that they gave to their job.

    Spark describes a query in lines: name, id, runId, batch. The name is missing if the query has none.
    """
    first = description.strip().partition("\n")[0].strip()
    return "" if first.startswith("id = ") else printable(first)


def _micro_batch(context: TaskContext) -> BatchIdentity:
    """The task's query and micro-batch. Raises DeliveryError if Spark does not provide them."""
    from kafka_sink.transactions.decision import BatchIdentity

    query, number = micro_batch_of(context)
    if not query:
        raise DeliveryError("Spark does not provide the task's query and micro-batch")
    return BatchIdentity.of_query(query, number)
