"""A micro-batch engine in Python processes, as Spark runs a query: quick to start, and to kill at any moment.

The driver plans, hands tasks to worker processes, collects their reports, commits, and writes a commit log
of its own, in that order. Sink code is the real one from planning to commit; Spark is left out, which
tests/spark/test_exactly_once.py has.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow as pa

from kafka_sink.errors import IncompleteBatchError, KafkaSinkError
from kafka_sink.options import SinkOptions, parse
from kafka_sink.rows.column_plan import ColumnPlan
from kafka_sink.task.producer_cache import task_producer
from kafka_sink.transactions import planning
from kafka_sink.transactions.batch import TaskRole
from kafka_sink.transactions.client import TransactionClient
from kafka_sink.transactions.decision import BatchIdentity
from kafka_sink.transactions.operations import EndTransaction, Operation
from kafka_sink.transactions.task_attempt import TaskAttempt

DONE, FAILED, INCOMPLETE, OTHER_DRIVER = 0, 1, 3, 4
_QUERY = "query"
_MAX_FAILURES = 4
_ROWS_A_BATCH = 100
# Keys of a batch. A task has whole keys, in any number of tasks, as a row's key belongs to the row.
_KEYS = 12


@dataclass(frozen=True)
class Settings:
    """One run of the query, in batches of so many rows. ``die_before_commit`` kills the driver before it
    commits the so-manyth transaction."""

    bootstrap_servers: str
    topic: str
    checkpoint: str
    batches: int
    rows: int
    tasks: int
    seed: int
    die_before_commit: int = 0
    pause_ms: float = 5.0
    options: dict[str, str] = field(default_factory=dict)

    def sink_options(self) -> SinkOptions:
        raw = {
            "kafka.bootstrap.servers": self.bootstrap_servers,
            "topic": self.topic,
            "delivery.guarantee": "exactly-once",
            "kafka.request.timeout.ms": "5000",
            "kafka.delivery.timeout.ms": "60000",
            **self.options,
        }
        return parse(raw).options

    @property
    def commits(self) -> Path:
        return Path(self.checkpoint) / "commits"


def committed(settings: Settings) -> int:
    """The first batch that the commit log does not have."""
    numbers = [int(path.name) for path in settings.commits.iterdir() if path.name.isdigit()]
    return max(numbers, default=-1) + 1


def rows_of(settings: Settings, number: int) -> range:
    """The rows of a batch."""
    return range(number * settings.rows, (number + 1) * settings.rows)


def key_of(settings: Settings, row: int) -> int:
    """A row's key, in which rows stand one behind the other."""
    place = row % settings.rows
    return next(key for key in reversed(range(_KEYS)) if settings.rows * key // _KEYS <= place)


# -- the driver -----------------------------------------------------------------------------------


def drive(settings: Settings) -> int:
    """Runs batches until all are done; returns the exit code."""
    options = settings.sink_options()
    chance = random.Random(settings.seed)
    # All drivers share the notes of commits, as queries of one application do, so some notes are out of date.
    notes = Path(settings.checkpoint) / "local"
    notes.mkdir(exist_ok=True)
    os.environ["SPARK_LOCAL_DIRS"] = str(notes)
    if settings.die_before_commit:
        die_before_commit(settings.die_before_commit)
    pool = Workers(settings)
    try:
        while (number := committed(settings)) < settings.batches:
            _batch(settings, options, pool, number, chance)
    except FileExistsError:
        return OTHER_DRIVER
    except (KafkaSinkError, TaskFailedError) as error:
        print(f"    driver: {error}", file=sys.stderr, flush=True)
        # Tasks report that, too, where another batch is not complete.
        name = IncompleteBatchError.__name__
        return INCOMPLETE if isinstance(error, IncompleteBatchError) or name in str(error) else FAILED
    return DONE


def _batch(
    settings: Settings, options: SinkOptions, pool: Workers, number: int, chance: random.Random
) -> None:
    raw = {"checkpointlocation": settings.checkpoint}
    rows = rows_of(settings, number)
    planned = planning.plan(options, raw, is_streaming=True, for_tasks=True, is_repeated=True)
    assert planned is not None
    try:
        reports = pool.run(planned, number, rows, chance)
        planning.commit(options, planned, reports)
    except Exception:
        with suppress(KafkaSinkError):
            planning.abort(options, planned)
        raise
    pause(chance, 0.05)
    # As Spark's log, it refuses what another driver has written.
    part = settings.commits / f".{number}.{os.getpid()}"
    part.write_text(json.dumps({"rows": len(rows)}))
    os.link(part, settings.commits / str(number))


def pause(chance: random.Random, at_most_s: float) -> None:
    """A drawn time, so that faults find everything at any step."""
    time.sleep(chance.random() * at_most_s)


def die_before_commit(count: int) -> None:
    """This process commits one by one, and dies, as by kill -9, before the ``count``th task's transaction."""
    begin_step, await_step = TransactionClient.begin_step, TransactionClient.await_step
    left = count

    def dying(self: TransactionClient, operations: tuple[Operation, ...]) -> list[Any]:
        nonlocal left
        if not any(_commits_a_task(one) for one in operations):
            return begin_step(self, operations)
        answers: list[Any] = []
        for operation in operations:
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            answers += (answer := begin_step(self, (operation,)))
            await_step(self, answer)
        return answers

    mock.patch.object(TransactionClient, "begin_step", dying).start()


def _commits_a_task(operation: Operation) -> bool:
    return (
        isinstance(operation, EndTransaction) and operation.commit and "-task-" in operation.transactional_id
    )


class TaskFailedError(Exception):
    """A task failed as often as Spark lets one."""


@dataclass(eq=False)
class Worker:
    """A worker process and the task that it runs."""

    pid: int
    pipe: Connection
    task: tuple[int, int] | None = None


class Workers:
    """Processes that run tasks. They outlive their driver until they find out, as executors do."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._idle: list[Worker] = []
        self._busy: list[Worker] = []
        self._rows = range(0)
        self._last_failure = ""

    def _take(self) -> Worker:
        if self._idle:
            return self._idle.pop()
        ours, theirs = Pipe()
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            ours.close()
            for other in self._busy:
                other.pipe.close()
            os._exit(_work(self._settings, theirs))
        theirs.close()
        return Worker(pid, ours)

    def run(self, planned: Any, number: int, rows: range, chance: random.Random) -> list[Any]:
        """Every task's report; attempts that lose go on in the background."""
        self._rows = rows
        reports: dict[int, Any] = {}
        attempts = dict.fromkeys(range(self._settings.tasks), 0)
        for task in attempts:
            self._start(planned, number, task, attempts)
        while len(reports) < self._settings.tasks:
            ready = wait([worker.pipe for worker in self._busy], timeout=0.2)
            for worker in [one for one in self._busy if one.pipe in ready]:
                self._take_result(worker, planned, number, attempts, reports)
            undone = [task for task in attempts if task not in reports]
            if undone and chance.random() < 0.04:
                self._start(planned, number, chance.choice(undone), attempts)
        return [reports[task] for task in sorted(reports)]

    def _start(self, planned: Any, number: int, task: int, attempts: dict[int, int]) -> None:
        if attempts[task] > _MAX_FAILURES:
            raise TaskFailedError(f"task {task} of batch {number}: {self._last_failure}")
        worker = self._take()
        worker.task = (number, task)
        worker.pipe.send((planned, number, self._rows, task, attempts[task]))
        attempts[task] += 1
        self._busy.append(worker)

    def _take_result(
        self, worker: Worker, planned: Any, number: int, attempts: dict[int, int], reports: dict[int, Any]
    ) -> None:
        self._busy.remove(worker)
        assert worker.task is not None
        batch, task = worker.task
        try:
            report = worker.pipe.recv()
        except (EOFError, OSError):
            os.waitpid(worker.pid, 0)
            report = "the worker died"
        else:
            self._idle.append(worker)
        if batch != number:
            return
        if isinstance(report, str):
            self._last_failure = report
            if task not in reports:
                self._start(planned, number, task, attempts)
        else:
            reports.setdefault(task, report)


# -- a worker -------------------------------------------------------------------------------------


def _work(settings: Settings, pipe: Connection) -> int:
    options = settings.sink_options()
    while True:
        try:
            planned, number, rows, task, attempt = pipe.recv()
        except (EOFError, OSError):
            return 0
        try:
            report = _task(settings, options, planned, number, rows, task, attempt)
        except Exception as error:  # noqa: BLE001 - a task may fail in any way
            report = f"{type(error).__name__}: {error}"
        try:
            pipe.send(report)
        except OSError:
            return 0


def _task(
    settings: Settings, options: SinkOptions, planned: Any, number: int, rows: range, task: int, attempt: int
) -> Any:
    plan = ColumnPlan.of([("key", "binary"), ("value", "binary")], settings.topic)
    batches = _rows(settings, number, rows, task)
    with planning.client_of(options) as client:
        identity, bound_ms = BatchIdentity.of_query(_QUERY, number), options.max_block_ms
        ours = TaskAttempt(
            client, planned.scope, planned.handover, identity, task, attempt, plan.parts, bound_ms
        )
        if ours.role is not TaskRole.WRITE:
            for one in batches:
                ours.take(one)
            return ours.finish()
        try:
            with task_producer(options, plan) as producer:
                for one in batches:
                    ours.take(one, producer.begin_transaction)
                    producer.send(one)
                producer.finish(ours.mark)
            return ours.finish()
        except BaseException:
            ours.abort()
            raise


def _rows(settings: Settings, number: int, rows: range, task: int) -> Iterator[pa.RecordBatch]:
    """A contiguous part of the batch's rows for each task, a little at a time."""
    chance = random.Random(f"{settings.seed} {number} {task} {os.getpid()} {time.monotonic_ns()}")
    for key in range(*(_KEYS * at // settings.tasks for at in (task, task + 1))):
        first, last = (len(rows) * at // _KEYS for at in (key, key + 1))
        for start in range(first, last, _ROWS_A_BATCH):
            values = [b"%d" % row for row in rows[start : min(last, start + _ROWS_A_BATCH)]]
            pause(chance, settings.pause_ms / 1000)
            keys = [b"%d" % key] * len(values)
            yield pa.record_batch(
                {"key": pa.array(keys, pa.binary()), "value": pa.array(values, pa.binary())}
            )
