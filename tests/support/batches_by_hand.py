"""A job with exactly-once guarantee on a real broker, its driver's and tasks' steps called by hand."""

from __future__ import annotations

from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa

from kafka_sink.clock import wall_ms
from kafka_sink.options import SinkOptions
from kafka_sink.rows.column_plan import ColumnPlan
from kafka_sink.task.producer_cache import task_producer
from kafka_sink.transactions import batch, driver, task_attempt
from kafka_sink.transactions.batch import AttemptReport, TaskHandover
from kafka_sink.transactions.client import TransactionClient
from kafka_sink.transactions.decision import BatchIdentity, next_decision
from kafka_sink.transactions.operations import EndTransaction, ListOpen, Scope, TransactionSteps
from kafka_sink.transactions.task_attempt import TaskAttempt
from tests.support.topics import read_to_end
from tests.support.waiting import until

PARTITIONS = 2
_PATIENCE_MS = 60_000.0


@dataclass
class Job:
    """A topic and a prefix of their own, and the steps of a driver by hand."""

    options: SinkOptions
    client: TransactionClient
    scope: Scope
    clients: ExitStack

    @property
    def servers(self) -> str:
        return ",".join(f"{host}:{port}" for host, port in self.options.bootstrap_servers)

    def run(self, steps: TransactionSteps[Any]) -> Any:
        return self.client.run(steps, _PATIENCE_MS)

    def take_over(self) -> TaskHandover:
        return TaskHandover.of(self.scope, self.run(driver.take_over(self.scope, wall_ms)), wall_ms())

    def attempt(self, handover: TaskHandover, number: int, index: int, slot: int = 0) -> TaskAttempt:
        identity = BatchIdentity("query", number)
        # An attempt has its client for itself, because it sends ahead what it waits for later.
        client = self.clients.enter_context(closing(TransactionClient(self.options)))
        return TaskAttempt(client, self.scope, handover, identity, index, slot, [0], _PATIENCE_MS)

    def write(
        self, handover: TaskHandover, number: int, index: int, rows: list[str], slot: int = 0
    ) -> AttemptReport:
        attempt = self.attempt(handover, number, index, slot)
        batches = iter([pa.record_batch({"value": pa.array([row.encode() for row in rows], pa.binary())})])
        plan = ColumnPlan.of([("value", "binary")], self.scope.topic)
        with task_producer(self.options, plan) as producer:
            # Also a batch that was written before is written: tests look at what becomes of it.
            attempt.begin(producer.begin_transaction)
            for one in batches:
                attempt.take(one, producer.begin_transaction)
                producer.send(one)
            producer.finish(attempt.mark)
        return attempt.finish()

    def commit(self, *reports: AttemptReport) -> Any:
        return self.run(batch.commit(reports))

    def record_only(self, handover: TaskHandover, *reports: AttemptReport) -> None:
        """The steps of a driver that dies before its decision counts."""

        def steps() -> TransactionSteps[None]:
            parts = [report.part for report in reports if report.part is not None]
            run = reports[0].run
            decision = next_decision(self.scope, run.handover.last, run.batch, len(reports), parts)
            timed = replace(decision, began_ms=min(report.began_ms for report in reports))
            yield from driver.record(self.scope, handover.driver_epoch, timed)

        self.run(steps())

    def decide_only(self, handover: TaskHandover, *reports: AttemptReport) -> None:
        """The steps of a driver that dies between its decision and the end of the first transaction."""

        def steps() -> TransactionSteps[None]:
            yield (EndTransaction(self.scope.driver_id, handover.driver_epoch, commit=True),)

        self.record_only(handover, *reports)
        self.run(steps())

    def decided(self, number: int, tasks: int) -> list[AttemptReport]:
        """A batch with one row per task, whose driver dies right after its decision."""
        handover = self.take_over()
        reports = [self.write(handover, number, index, [f"{number}-{index}"]) for index in range(tasks)]
        self.decide_only(handover, *reports)
        return reports

    def lose(self, report: AttemptReport) -> None:
        """The end of a task's transaction, as by a broker's timeout."""
        assert report.part is not None
        self.run(task_attempt.abort_steps(report.part.id_in(self.scope), report.part.producer))

    def digested(self, handover: TaskHandover, number: int, index: int, *rows: bytes) -> AttemptReport:
        """A task that writes nothing, as its rows were written before."""
        attempt = self.attempt(handover, number, index)
        assert not attempt.take(pa.record_batch({"value": pa.array(rows, pa.binary())}))
        return attempt.finish()

    def open(self) -> list[str]:
        def steps() -> TransactionSteps[list[str]]:
            (names,) = yield (ListOpen(self.scope.prefix),)
            return list(names)

        found: list[str] = self.run(steps())
        return found

    def read(self) -> list[str]:
        """The rows that readers of committed rows see now."""
        return sorted(value.decode() for value in read_to_end(self.servers, self.scope.topic))

    def await_end(self) -> None:
        """Wait until the open transactions have timed out; brokers look for such transactions every 10 s."""
        until(lambda: not self.open(), "the end of all transactions", 90, 0.2)

    def await_rows(self, expected: list[str]) -> None:
        until(lambda: self.read() == expected, self.read, poll_s=0.05)
