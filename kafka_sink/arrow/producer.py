"""Writes Arrow batches as they arrive, from any thread. A ``with`` block is one write.

A block corresponds to a Spark job: it ends when every row is acknowledged, and with exactly-once it is one
transaction. Its rows go through ``task/producer.py`` like a task's, without Spark and without a coordinator.

Data is anything with Arrow's PyCapsule interface (``__arrow_c_stream__`` of tables, frames and readers,
``__arrow_c_array__`` of single batches), or an iterable of such objects.
"""

from __future__ import annotations

import atexit
import math
import os
import secrets
import threading
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from types import TracebackType
from typing import Any

import pyarrow as pa

from kafka_sink.arrow.columns import ArrowColumns, EncodedColumns, check_early, columns_of
from kafka_sink.arrow.write import WriteTransaction, checked, plan
from kafka_sink.clock import monotonic_ms
from kafka_sink.coordinator.address import PlannedCoordinator
from kafka_sink.coordinator.live.messages import TaskIdentity
from kafka_sink.dead_letters.rejected_rows import RejectedRows
from kafka_sink.driver import driver_log
from kafka_sink.errors import DeliveryError, ProducerClosedError, SchemaError
from kafka_sink.model import TaskResult
from kafka_sink.options import SinkOptions
from kafka_sink.records.extension_types import POLARS_OBJECT
from kafka_sink.reports import write_report
from kafka_sink.reports.delivery_report import EndedWrite, WriteResult
from kafka_sink.rows.column_plan import ColumnPlan
from kafka_sink.rows.rebatching import Rebatcher
from kafka_sink.task.producer import Producer
from kafka_sink.task.producer_cache import PRODUCERS

Batches = Generator[pa.RecordBatch, None, None]


def record_batches(data: Any) -> tuple[pa.Schema | None, Batches]:
    """Return the schema, if it is known before the first batch is read, and the batches, which must be
    closed.

    Raises SchemaError if ``data`` is not Arrow data. The iterator raises it for an item, and the errors of
    ``data``.
    """
    if isinstance(data, pa.RecordBatch):
        return data.schema, (batch for batch in (data,))
    if hasattr(data, "__arrow_c_stream__"):
        try:
            reader = pa.RecordBatchReader.from_stream(data)
        except pa.ArrowException as error:
            raise _unreadable(data, error) from None
        return _with_objects(data, reader)
    if hasattr(data, "__arrow_c_array__"):
        try:
            return record_batches(pa.record_batch(data))
        except pa.ArrowException as error:
            raise _unreadable(data, error) from None
    # Iterating over a frame without Arrow's interface would return columns or rows.
    # Polars warns if a LazyFrame is asked for its columns.
    is_frame = hasattr(data, "collect_schema") or hasattr(data, "columns")
    if isinstance(data, Iterable) and not isinstance(data, str | bytes | dict) and not is_frame:
        return None, _batches_of_each(data)
    raise _unfit(data)


def _with_objects(data: Any, reader: pa.RecordBatchReader) -> tuple[pa.Schema, Batches]:
    """Return the reader's batches, in which columns of Python objects have the type POLARS_OBJECT.

    Polars exports the objects' addresses. Arrow's schema does not distinguish them from other bytes.
    """
    schema: pa.Schema = reader.schema
    places = [
        place
        for place, field in enumerate(schema)
        if field.type == POLARS_OBJECT.storage_type and _has_objects(data, field.name)
    ]
    for place in places:
        schema = schema.set(place, schema.field(place).with_type(POLARS_OBJECT))
    return schema, _read(reader, schema, places)


def _read(reader: pa.RecordBatchReader, schema: pa.Schema, objects: Sequence[int]) -> Batches:
    """Read the batches. ``objects`` contains the positions of the columns that get the type POLARS_OBJECT."""
    try:
        for batch in reader:
            if objects:
                arrays = batch.columns
                for place in objects:
                    arrays[place] = pa.ExtensionArray.from_storage(POLARS_OBJECT, arrays[place])
                batch = pa.RecordBatch.from_arrays(arrays, schema=schema)
            yield batch
    finally:
        # A DuckDB connection accepts no other query before this.
        reader.close()


def _has_objects(data: Any, name: str) -> bool:
    schema = getattr(data, "schema", None)
    if isinstance(schema, Mapping):
        return str(schema.get(name)) == "Object"
    # Polars has no other type of fixed-size bytes. The batches of a LazyFrame have no schema.
    return type(data).__module__.partition(".")[0] == "polars"


def _batches_of_each(items: Iterable[Any]) -> Batches:
    for item in items:
        if not hasattr(item, "__arrow_c_stream__") and not hasattr(item, "__arrow_c_array__"):
            raise _unfit(item)
        yield from record_batches(item)[1]


def _unreadable(data: Any, error: pa.ArrowException) -> SchemaError:
    """The error for data that Arrow cannot read. For a frame it lists the columns whose types Arrow lacks,
    such as Polars' Int128."""
    problem = "; ".join(map(str, error.args))
    if not hasattr(data, "columns"):
        return _unfit(data, f": {problem}")
    schema, unreadable = getattr(data, "schema", None), []
    for name, kind in schema.items() if isinstance(schema, Mapping) and hasattr(data, "select") else ():
        try:
            pa.RecordBatchReader.from_stream(data.select(name).head(0))
        except pa.ArrowException:
            unreadable.append(f"column '{name}' has the type {kind}, which pyarrow does not have")
    return SchemaError(
        f"the frame has a column that Arrow cannot read: {'; '.join(unreadable) or problem}. Drop it or cast "
        "it, for example to text"
    )


def _unfit(data: Any, why: str = "") -> SchemaError:
    kind = f"{type(data).__module__}.{type(data).__qualname__}"
    remedy = ""
    if hasattr(data, "collect"):
        remedy = " Collect it first, or write its batches, as with collect_batches() of Polars."
    elif "DuckDBPyConnection" in kind:
        remedy = " Give the relation that sql(query) returns, instead of the connection from execute(query)."
    elif isinstance(data, dict):
        remedy = " pyarrow.Table.from_pylist(rows) makes a table of a list of dicts, one for each row."
    elif hasattr(data, "itertuples"):
        remedy = " Use pandas 2.2 or newer, or pyarrow.Table.from_pandas(frame)."
    return SchemaError(
        f"{kind} is not Arrow data{why}. Give a table, frame or reader with __arrow_c_stream__ (pyarrow, "
        f"Polars, DuckDB, pandas 2.2), a record batch, or an iterable of these.{remedy}"
    )


# While nothing is sent, the producer checks for rejected rows this often, so that none of them expires.
_DEAD_LETTERS_MS = 100.0
# The columns of this many schemas are kept. Schemas may alternate, for example by topic, and computing their
# columns again would ask the registry each time.
_SCHEMAS = 16
# Close the connections of idle producers before the interpreter ends their threads.
atexit.register(PRODUCERS.close)


class ArrowProducer:
    """The producer that ``kafka_sink.producer`` returns. It writes within one ``with`` block.

    Several threads may call its methods within the block.

    Attributes:
        options: The parsed options.
        result: The ``WriteResult`` after the block; None before its end, and if the write has failed.

    Examples:
        >>> with kafka_sink.producer(options) as producer:
        ...     for batch in batches:
        ...         producer.send(batch)
        ...     producer.flush()
        ...     print(producer.acknowledged)
        2
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.options: SinkOptions
        self.options, self._texts = checked(options)
        self._process = os.getpid()
        self.result: WriteResult | None = None
        # Guards everything below, which the user's threads and the attendant change. It is held for one
        # batch at a time. Without it, a batch could be sent in the middle of another thread's batch or after
        # the block.
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        # The write's name in reports; "" until it has begun.
        self._name = ""
        self._producer: Producer | None = None
        self._transaction: WriteTransaction | None = None
        self._failure: BaseException | None = None
        # Its attribute `took_rows`: whether this thread's present `send` has taken rows.
        self._sending = threading.local()
        # The columns of recently used schemas, the most recent first.
        self._columns: tuple[ArrowColumns | EncodedColumns, ...] = ()
        self._schemas: dict[str, None] = {}
        self._warned: set[str] = set()
        # Rows wait here for more rows, for at most kafka.linger.ms. `_plan` describes their columns.
        self._rebatcher = Rebatcher((), linger_ms=0)
        self._held_schema: pa.Schema | None = None
        self._plan: ColumnPlan | None = None
        self._attendant: threading.Thread | None = None
        self._attendant_sleeps = False

    # -- what users call ----------------------------------------------------------------------------

    def __enter__(self) -> ArrowProducer:
        if self._name:
            raise ProducerClosedError("a producer serves only one block: call kafka_sink.producer again")
        self._transaction = plan(self.options, self._texts)
        self._name = secrets.token_hex(8)
        producer = PRODUCERS.take(self.options.for_tasks())
        try:
            producer.begin(task=TaskIdentity(self._name, 0))
        except BaseException:
            producer.close(abort=True)
            raise
        self._producer = producer
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if os.getpid() != self._process:
            # The write belongs to the parent process, where it continues.
            return
        try:
            if error is None:
                self._finish()
        except BaseException as failure:
            self._abort(failure)
            raise
        if error is not None:
            self._abort(error)

    def send(self, data: Any) -> None:
        """Take all rows of ``data``, and return before they are acknowledged.

        Rows are sent after kafka.linger.ms, or when a batch is full. If buffer memory is exhausted, the call
        waits for at most kafka.max.block.ms. If it raises after it has taken a row, the write has failed, and
        each later call raises the same error. If it has taken none, the write is unchanged and may go on.

        Args:
            data: Anything that ``kafka_sink.write_arrow`` accepts, including a single record batch.

        Raises:
            SchemaError: A column cannot be written.
            InvalidRowError: The data is damaged, or a row's content cannot be sent.
            KafkaSinkError: The rows cannot be sent, or earlier rows have failed.
            Exception: An error that ``data`` itself raises.
        """
        outer, self._sending.took_rows = getattr(self._sending, "took_rows", False), False
        try:
            schema, batches = record_batches(data)
            with closing(batches):
                if schema is not None:
                    self._columns_of(schema)
                for batch in batches:
                    columns = self._columns_of(batch.schema)
                    for converted in columns.converted(batch):
                        self._take(columns.plan, converted)
        except BaseException as failure:
            if self._sending.took_rows:
                # A repeated call would write these rows twice. A failure of the producer itself was recorded
                # before.
                self._failure = self._failure or failure
            raise
        finally:
            # While one `send` reads a generator, the generator may call `send` itself.
            self._sending.took_rows |= outer

    def flush(self) -> None:
        """Wait until all rows so far are acknowledged.

        The wait ends, because kafka.delivery.timeout.ms limits each batch. In a transaction, consumers see
        the rows only after the block.

        Raises:
            DeliveryError: A row has failed. The message contains the first cause.
        """
        with self._own_lock(), self._turn() as producer:
            self._send_held(producer)
            producer.flush()

    @property
    def acknowledged(self) -> int:
        """The number of rows that brokers have acknowledged so far, or with kafka.acks=0 the number of rows
        sent."""
        producer, result = self._producer, self.result
        if result is not None:
            return result.rows + result.unconfirmed
        return 0 if producer is None else producer.acknowledged

    # -- rows ---------------------------------------------------------------------------------------

    def _own_lock(self) -> threading.Lock:
        """Return the lock for a ``with`` statement. If a context manager acquired it, Ctrl-C could come
        between acquiring it and the block."""
        if os.getpid() != self._process:
            # A fork does not copy threads, but it may copy a lock that one of them holds.
            raise ProducerClosedError("the producer belongs to the parent process: make one after the fork")
        return self._lock

    @contextmanager
    def _turn(self) -> Iterator[Producer]:
        """Return the producer to one thread. An error inside fails the write, because part of a batch may be
        taken."""
        if self._failure is not None:
            raise self._failure_again()
        if self._producer is None:
            raise ProducerClosedError("the producer is used outside of its 'with' block")
        try:
            yield self._producer
        except BaseException as failure:
            self._failure = failure
            raise

    def _failure_again(self) -> Exception:
        if isinstance(self._failure, Exception):
            return self._failure
        error = DeliveryError(f"the write was interrupted before ({type(self._failure).__name__})")
        error.__cause__ = self._failure
        return error

    def _columns_of(self, schema: pa.Schema) -> ArrowColumns | EncodedColumns:
        known = self._columns
        columns = next((kept for kept in known if kept.schema.equals(schema)), None)
        if columns is None:
            columns = columns_of(schema, self.options, self._reject)
            if isinstance(columns, EncodedColumns):
                self._schemas |= dict.fromkeys(columns.schemas)
            for warning in columns.warnings:
                if warning not in self._warned:
                    self._warned.add(warning)
                    driver_log.warn(f"kafka-chunked: {warning}")
        if not known or columns is not known[0]:
            # Another thread may do this at the same time. At worst, the registry is asked again for one
            # schema.
            self._columns = (columns, *(kept for kept in known if kept is not columns))[:_SCHEMAS]
        return columns

    def _reject(self, rows: RejectedRows, plan: ColumnPlan) -> None:
        """Hand rows that do not fit their schema to the producer."""
        with self._own_lock(), self._turn() as producer:
            self._sending.took_rows = True
            if self._transaction is None or self._transaction.begin(plan.parts, producer.begin_transaction):
                producer.reject(rows)

    def _take(self, plan: ColumnPlan, batch: pa.RecordBatch) -> None:
        transaction = self._transaction
        with self._own_lock():
            if transaction is not None and self._failure is None:
                transaction.require(plan.parts)
            with self._turn() as producer:
                self._sending.took_rows |= batch.num_rows > 0
                if transaction and not transaction.take(batch, plan.parts, producer.begin_transaction):
                    return
                if self._held_schema is None or not batch.schema.equals(self._held_schema):
                    self._send_held(producer)
                    self._rebatcher = Rebatcher(plan.sized, linger_ms=self.options.linger_ms)
                    self._held_schema, self._plan = batch.schema, plan
                for table in self._rebatcher.offer(batch, monotonic_ms()):
                    self._send(producer, table)
                self._attend()

    def _send_held(self, producer: Producer) -> None:
        """Send the rows that wait for more rows."""
        for table in self._rebatcher.finish():
            self._send(producer, table)

    def _send(self, producer: Producer, table: pa.Table) -> None:
        if self._plan is not None:
            self._rebatcher.adapt(producer.send(table, plan=self._plan))

    # -- between calls ------------------------------------------------------------------------------

    def _attend(self) -> None:
        """Let the attendant send rows that wait, even if the user sends nothing more."""
        if self._rebatcher.is_empty and self.options.errors_deadletterqueue_topic_name is None:
            return
        if self._attendant is None:
            self._attendant = threading.Thread(
                target=self._see_to_rows, name="kafka-chunked-linger", daemon=True
            )
            self._attendant.start()
        elif self._attendant_sleeps:
            self._changed.notify()

    def _see_to_rows(self) -> None:
        """Run the attendant. The user's next call raises its failure."""
        with self._lock:
            while self._producer is not None and self._failure is None:
                try:
                    wait_ms = self._see_to_rows_once(self._producer)
                except BaseException as failure:  # noqa: BLE001 - raised again in the user's thread
                    self._failure = failure
                    return
                self._attendant_sleeps = wait_ms == math.inf
                self._changed.wait(None if self._attendant_sleeps else wait_ms / 1000)

    def _see_to_rows_once(self, producer: Producer) -> float:
        """Send the rows that are due. Return the time in milliseconds until this is needed again."""
        for table in self._rebatcher.take(monotonic_ms()):
            self._send(producer, table)
        dead_letters_ms = _DEAD_LETTERS_MS if producer.write_dead_letters() else math.inf
        return min(dead_letters_ms, max(0.0, self._rebatcher.deadline_ms() - monotonic_ms()))

    # -- the end ------------------------------------------------------------------------------------

    def _finish(self) -> None:
        note, outcome, in_transactions = "", "committed", dict[str, int]()
        with self._own_lock(), self._turn() as producer:
            self._send_held(producer)
            result = producer.finish(None if self._transaction is None else self._transaction.mark)
            if self._transaction is not None:
                committed, metrics = self._transaction.commit()
                result = replace(result, metrics={**result.metrics, **metrics})
                outcome, note, in_transactions = committed.outcome, committed.note, committed.transactions
            self._producer = None
            self._changed.notify()
        PRODUCERS.put_back(producer)
        self.result = WriteResult.of([result], self.options, already_written=outcome == "skipped")
        self._report(outcome, [result], in_transactions, note)

    def _abort(self, error: BaseException) -> None:
        """Stop sending at once, end the transaction and report what happened to the rows."""
        producer = self._producer
        if producer is None:
            return
        # This must not wait for the lock: another thread may hold it while it waits for brokers.
        _stop(producer, error, self._rebatcher.gathered_rows)
        with self._lock:
            # Do not keep the error itself. Its traceback refers to this producer, and this cycle would keep
            # the user's data alive until the garbage collector runs.
            self._failure = ProducerClosedError(f"the block has ended, with {type(error).__name__}")
            self._producer = None
            self._changed.notify()
        # This must come before the transaction ends: nothing may be written after its end.
        producer.close(abort=True)
        ended = {} if self._transaction is None else self._transaction.abort(error)
        self._report("aborted", [], ended)

    def _report(
        self,
        outcome: str,
        results: list[TaskResult],
        in_transactions: Mapping[str, int],
        note: str = "",
    ) -> None:
        schemas = tuple(self._schemas)
        ended = EndedWrite(self._name, outcome, "", None, 1, results, in_transactions, note, schemas=schemas)
        write_report.report(self.options, PlannedCoordinator(), ended)


def _stop(producer: Producer, error: BaseException, unsent: int) -> None:
    """End the waits of all threads. Log what happened to the rows, unless the error says it."""
    if not producer.rows + unsent:
        return
    try:
        producer.check()
    except DeliveryError:
        return
    producer.abort(DeliveryError(f"the write has failed ({type(error).__name__})"), unsent)


def write_arrow(data: Any, options: Mapping[str, Any]) -> WriteResult:
    """See ``kafka_sink.write_arrow``."""
    producer = ArrowProducer(options)
    schema, batches = record_batches(data)
    with closing(batches):
        if schema is not None:
            # Check this before any broker is asked. With a format, the registry is asked when rows arrive.
            check_early(schema, producer.options)
        with producer:
            producer.send(batches)
            producer.flush()
    assert producer.result is not None
    return producer.result
