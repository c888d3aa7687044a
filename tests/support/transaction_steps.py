"""Runs the protocol's steps on the model of Kafka, one by one; a process may die before any operation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from kafka_sink.errors import TransactionError
from kafka_sink.transactions import batch as batches
from kafka_sink.transactions import driver, task_attempt
from kafka_sink.transactions.batch import AttemptReport, BatchRun, TaskHandover, TaskRole
from kafka_sink.transactions.decision import BatchIdentity, Part, RowsDigest
from kafka_sink.transactions.operations import EndTransaction, Operation, Scope, TransactionSteps
from tests.support.transactions_of_kafka import Kafka, NotYet, Produce

SCOPE = Scope("q", "t", 2)
PROTOCOLS = (1, 2)


def through(
    steps: TransactionSteps[Any], ask: Callable[[tuple[Operation, ...]], TransactionSteps[Any]]
) -> TransactionSteps[Any]:
    """The steps, of which ``ask`` yields the operations that are wanted and returns the answers."""
    answers: Any = None
    while True:
        try:
            wanted = steps.send(answers)
        except StopIteration as stop:
            return stop.value
        answers = yield from ask(wanted)


class Died(Exception):
    """The process did, before an operation."""


class Cluster:
    """Runs steps to their end, markers without delay."""

    def __init__(self, protocol: int = 2) -> None:
        self.kafka = Kafka(protocol=protocol)
        # False: markers are written only when something waits for them.
        self.writes_markers_at_once = True

    def run(self, steps: TransactionSteps[Any], die_before: Callable[[Operation], bool] | None = None) -> Any:
        answers: Any = None
        while True:
            try:
                wanted = steps.send(answers)
            except StopIteration as stop:
                return stop.value
            answers = tuple(self.answer(one, die_before) for one in wanted)

    def answer(self, operation: Operation, die_before: Callable[[Operation], bool] | None) -> Any:
        if die_before is not None and die_before(operation):
            raise Died
        while True:
            try:
                answer = self.kafka.execute(operation)
            except NotYet:
                self.settle()
                for name in self.kafka.late_offsets():
                    self.kafka.tell_offsets(name)
                continue
            if self.writes_markers_at_once:
                self.settle()
            return answer

    def settle(self) -> None:
        for name in self.kafka.pending_markers():
            self.kafka.write_markers(name)

    def plan(self, scope: Scope = SCOPE) -> TaskHandover:
        return TaskHandover.of(scope, self.take_over(scope), self.kafka.now_ms)

    def write(
        self,
        handover: TaskHandover,
        number: int,
        index: int,
        *rows: int,
        attempt: int = 0,
        scope: Scope = SCOPE,
        app: str | None = None,
        query: str = "one",
    ) -> AttemptReport:
        """One attempt of a task, with these rows; it belongs to a query's batch or an application's job."""
        batch = BatchIdentity.of_query(query, number)
        if app is not None:
            batch = BatchIdentity.of_application(app, scope.topic, number)
        digest = digest_of(*rows)
        role = handover.role(batch, index)
        if role is not TaskRole.WRITE:
            return AttemptReport(BatchRun(batch, scope, handover), index, role, digest, None)
        began_ms = self.kafka.now_ms
        slot, producer = self.run(task_attempt.begin_steps(scope, handover.driver_epoch, index, attempt))
        produce = Produce(scope.task_id(index, slot), producer, tuple((number, row) for row in rows))
        if not self.kafka.execute(produce):
            raise TransactionError("fenced")
        part = Part(index, slot, producer, digest)
        self.run(task_attempt.mark_steps(scope, handover.driver_epoch, batch, part))
        return AttemptReport(BatchRun(batch, scope, handover), index, role, digest, part, began_ms)

    def wrote(self, number: int = 0, tasks: int = 2) -> tuple[TaskHandover, list[AttemptReport]]:
        """A batch of a row a task, before its commit."""
        run = self.plan()
        return run, [self.write(run, number, index, index) for index in range(tasks)]

    def decided(self, *lost: int, number: int = 0) -> list[AttemptReport]:
        """A batch of two tasks whose driver dies after the decision; these transactions time out."""
        _, reports = self.wrote(number)
        self.dies(*reports, before=ends_task(min(lost)))
        for index in lost:
            self.kafka.time_out(SCOPE.task_id(index, 0))
        return reports

    def take_over(self, scope: Scope = SCOPE) -> Any:
        return self.run(driver.take_over(scope, lambda: self.kafka.now_ms))

    def abort(self, run: TaskHandover, die_before: Callable[[Operation], bool] | None = None) -> Any:
        return self.run(driver.abort(SCOPE, run.driver_epoch, lambda: 0), die_before)

    def dies(self, *reports: AttemptReport, before: Callable[[Operation], bool]) -> None:
        """A commit whose process does before this operation."""
        with pytest.raises(Died):
            self.commit(*reports, die_before=before)

    def commit(self, *reports: AttemptReport, die_before: Callable[[Operation], bool] | None = None) -> Any:
        return self.run(batches.commit(reports), die_before)


def digest_of(*rows: int) -> RowsDigest:
    return RowsDigest(len(rows), len(rows), hash(rows) & 0xFFFF)


def ends_task(index: int) -> Callable[[Operation], bool]:
    """Whether an operation commits this task's transaction."""

    def ends(one: Operation) -> bool:
        return isinstance(one, EndTransaction) and one.transactional_id.startswith(f"q-task-{index}-")

    return ends


def ends_driver(one: Operation) -> bool:
    return isinstance(one, EndTransaction) and one.transactional_id == SCOPE.driver_id


def reports_of(cluster: Cluster, batch: BatchIdentity) -> list[AttemptReport]:
    """The reports of two tasks that have written after one planning."""
    _, reports = cluster.wrote()
    return [replace(one, run=replace(one.run, batch=batch)) for one in reports]
