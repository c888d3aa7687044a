"""The task's loop that reads Spark's batches and sends tables, without Spark."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator

import pyarrow as pa
import pytest

from kafka_sink.errors import DeliveryError
from kafka_sink.rows.column_plan import ColumnPlan
from kafka_sink.rows.rebatching import ROW_BYTES, TARGET_TABLE_BYTES
from kafka_sink.spark.reading import Late, TimedReader, send_tables
from tests.support.table_sink import FakeProducer, batch

PLAN = ColumnPlan(value=1, topic="t")


def feeder_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "kafka-chunked-reader"]


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    yield
    for thread in feeder_threads():
        thread.join(5)
    assert feeder_threads() == []


def test_rows_arrive_in_order_without_unread_columns() -> None:
    producer, without = FakeProducer(), FakeProducer()
    largest = send_tables(iter([batch("a", "b"), batch(), batch("c")]), producer, PLAN, linger_ms=1e9)
    assert producer.values == ["a", "b", "c"]
    assert largest == 2 * ROW_BYTES + len("ab")
    assert [unit.schema.names for unit in producer.units] == [["value"], ["value"]]
    send_tables(iter([]), without, PLAN, linger_ms=20)
    assert without.units == []


def test_held_rows_go_while_spark_has_no_next_batch() -> None:
    producer = FakeProducer()

    def slow() -> Iterator[pa.RecordBatch]:
        yield batch("first")
        producer.came.clear()
        yield batch("a")
        # Spark's iterator blocks here; only once the row is out does it go on.
        assert producer.came.wait(30), "the row waited for the next batch"
        yield batch("b")

    send_tables(slow(), producer, PLAN, linger_ms=5)
    assert producer.values == ["first", "a", "b"]
    assert len(producer.units) == 3


@pytest.mark.parametrize(
    "batches", [[batch("a")], [batch(), batch("a")], [batch("x" * TARGET_TABLE_BYTES)] * 3]
)
def test_a_micro_batch_of_one_batch_and_large_ones_are_read_by_the_task_alone(
    batches: list[pa.RecordBatch],
) -> None:
    """Catches: each task of a stream started a thread to wait for a second batch."""
    producer = FakeProducer()
    readers = set()

    def read() -> Iterator[pa.RecordBatch]:
        for one in batches:
            readers.add(threading.current_thread())
            yield one
        readers.add(threading.current_thread())
        assert len(producer.units) == sum(one.num_rows for one in batches)

    send_tables(read(), producer, PLAN, linger_ms=1e9)
    assert readers == {threading.current_thread()}


@pytest.mark.parametrize("before", [[], [batch("a")], [batch("x" * TARGET_TABLE_BYTES)]])
def test_iterator_error_surfaces_in_the_task(before: list[pa.RecordBatch]) -> None:
    def broken() -> Iterator[pa.RecordBatch]:
        yield from before
        raise EOFError("the JVM is gone")

    with pytest.raises(EOFError, match="the JVM is gone"):
        send_tables(broken(), FakeProducer(), PLAN, linger_ms=1e9)


def test_a_failing_producer_ends_the_loop_and_the_thread() -> None:
    class Failing(FakeProducer):
        def send(self, unit: pa.Table) -> int:
            raise DeliveryError("no")

    with pytest.raises(DeliveryError):
        # The first batch is held, so the thread reads the second, at which sending begins and fails.
        send_tables(
            iter([batch("a"), batch("x" * TARGET_TABLE_BYTES), batch("b")]), Failing(), PLAN, linger_ms=1e9
        )


def test_feeder_reads_only_when_asked_and_keeps_a_late_batch_for_the_next_call() -> None:
    gate, read = threading.Event(), list[str]()

    def batches() -> Iterator[pa.RecordBatch]:
        gate.wait(30)
        for value in ("late", "next"):
            read.append(value)
            yield batch(value)

    feeder = TimedReader(batches())
    assert feeder.read(0) is Late.LATE
    assert feeder.read(-5) is Late.LATE
    gate.set()
    found = feeder.read(math.inf)
    assert isinstance(found, pa.RecordBatch)
    assert found.column(1).to_pylist() == read == ["late"]
    assert feeder.read(60_000) is not None
    assert feeder.read(60_000) is None


def test_closing_does_not_wait_for_a_read_that_hangs() -> None:
    gate = threading.Event()

    def batches() -> Iterator[pa.RecordBatch]:
        gate.wait(30)
        yield batch("never looked at")

    feeder = TimedReader(batches())
    assert feeder.read(0) is Late.LATE
    started = time.monotonic()
    feeder.close()
    assert time.monotonic() - started < 20
    assert all(thread.daemon for thread in feeder_threads())
    gate.set()
