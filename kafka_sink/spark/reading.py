"""Reads the Arrow batches that Spark passes to a task, and sends them as larger tables."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from enum import Enum
from queue import Empty, SimpleQueue
from threading import TIMEOUT_MAX, Thread
from typing import TYPE_CHECKING, Protocol

from kafka_sink.clock import ROWS, TaskActivity, monotonic_ms
from kafka_sink.errors import ExecutorDisconnectedError
from kafka_sink.rows.column_plan import ColumnPlan

if TYPE_CHECKING:
    import pyarrow as pa

SPARK_FAILED = "Spark failed while computing the rows; see its error above"
# How often a task that waits for rows writes dead letters, as long as rows may still be rejected.
_DEAD_LETTERS_MS = 100.0


class Sends(Protocol):
    """The part of a producer that accepts rows."""

    def send(self, table: pa.Table) -> int: ...

    def write_dead_letters(self) -> bool: ...


def rows_of_spark(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield the batches. Raises ExecutorDisconnectedError if Spark has broken off its stream of rows.

    Spark does so if an expression, a UDF or a source of the user fails. Arrow's own error would hide that.
    """
    from pyarrow import ArrowInvalid

    try:
        yield from batches
    except (ArrowInvalid, OSError) as error:
        raise ExecutorDisconnectedError(SPARK_FAILED) from error


def checked_batches(
    batches: Iterator[pa.RecordBatch], check_executor: Callable[[], None]
) -> Iterator[pa.RecordBatch]:
    """Yield the batches, then raise for a hang-up, which PyArrow takes for the end of the rows."""
    yield from batches
    check_executor()


def send_tables(
    batches: Iterator[pa.RecordBatch],
    producer: Sends,
    plan: ColumnPlan,
    linger_ms: float,
    activity: TaskActivity | None = None,
) -> int:
    """Pass the rows of all batches to the producer, in order, as tables of about 2 MiB.

    Returns the size of the largest batch, counting keys, values and headers.

    ``plan`` describes the batches as Spark sends them. The tables contain only the columns that the plan
    uses. Rows wait for at most ``linger_ms``, even if Spark sends no further batch. The first batch does not
    wait: a micro-batch usually consists of one batch, and waiting for another one takes a thread.
    """
    from kafka_sink.rows.rebatching import Rebatcher

    used = list(plan.used)
    builder = Rebatcher(plan.narrowed().sized, linger_ms=linger_ms)
    reader = TimedReader(batches)
    activity = TaskActivity(monotonic_ms) if activity is None else activity
    is_first = True
    try:
        while True:
            # Wake up in time: rejected rows would otherwise expire while Spark computes the next batch.
            longest_ms = _DEAD_LETTERS_MS if producer.write_dead_letters() else math.inf
            with activity.waiting(ROWS):
                batch = reader.read(min(longest_ms, builder.deadline_ms() - monotonic_ms()))
            if batch is None:
                break
            if isinstance(batch, Late):
                tables = builder.take(monotonic_ms())
            else:
                narrow = batch if batch.num_columns == len(used) else batch.select(used)
                tables = builder.offer(narrow, monotonic_ms())
                if is_first:
                    tables += builder.finish()
                    is_first = not tables
            for table in tables:
                builder.adapt(producer.send(table))
        for table in builder.finish():
            producer.send(table)
        return builder.batch_bytes_max
    finally:
        reader.close()


class Late(Enum):
    """The result of a read if no batch arrived in time."""

    LATE = "late"


class TimedReader:
    """Reads an iterator with a timeout, on its own thread.

    Without a timeout, the caller's thread reads, which saves switching threads. The two threads never read at
    the same time: the caller reads only if it has no unanswered request to the thread. The thread does not
    read ahead, because a batch may have 64 MiB. It is a daemon, so that it cannot keep the process alive. It
    ends with the iterator, or after ``close`` when the current read returns.
    """

    def __init__(self, batches: Iterator[pa.RecordBatch]) -> None:
        self._batches = batches
        self._asks: SimpleQueue[bool] = SimpleQueue()
        self._reads: SimpleQueue[tuple[pa.RecordBatch | None, BaseException | None]] = SimpleQueue()
        self._thread: Thread | None = None
        self._is_asked = False

    def read(self, timeout_ms: float) -> pa.RecordBatch | Late | None:
        """Return the next batch, None at the end, or LATE after ``timeout_ms``.

        After LATE the read continues, and a later call returns its batch. Raises the errors of the iterator.
        """
        if not self._is_asked:
            if timeout_ms == math.inf:
                return next(self._batches, None)
            self._ask()
        try:
            batch, failure = self._reads.get(timeout=min(max(0.0, timeout_ms / 1000), TIMEOUT_MAX))
        except Empty:
            return Late.LATE
        self._is_asked = False
        if failure is not None:
            raise failure
        return batch

    def close(self) -> None:
        """Ask the thread to end."""
        self._asks.put(False)

    def _ask(self) -> None:
        if self._thread is None:
            self._thread = Thread(target=self._serve, name="kafka-chunked-reader", daemon=True)
            self._thread.start()
        self._is_asked = True
        self._asks.put(True)

    def _serve(self) -> None:
        while self._asks.get():
            try:
                batch = next(self._batches, None)
            except BaseException as failure:  # noqa: BLE001 - raised again on the task's thread
                self._reads.put((None, failure))
                return
            self._reads.put((batch, None))
            if batch is None:
                return
