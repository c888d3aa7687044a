"""A write without Spark on the scripted cluster: what is taken, when it goes, what is left of a failure."""

from __future__ import annotations

import contextlib
import gc
import logging
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from functools import partial
from itertools import count, takewhile
from types import FrameType, SimpleNamespace
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pytest

import kafka_sink
import kafka_sink.arrow.producer
from kafka_sink.arrow.producer import ArrowProducer
from kafka_sink.arrow.write import WriteTransaction
from kafka_sink.clock import MEMORY, WAIT_LISTENER
from kafka_sink.errors import (
    BufferExhaustedError,
    ConfigurationError,
    DeliveryError,
    InvalidRowError,
    ProducerClosedError,
    SchemaError,
)
from kafka_sink.model import TopicPartition
from kafka_sink.options import parse
from kafka_sink.reports.delivery_report import WriteResult
from kafka_sink.task.producer import LIVE_PRODUCERS
from kafka_sink.transactions.batch import TaskHandover
from kafka_sink.transactions.decision import BatchIdentity
from kafka_sink.transactions.operations import ProducerEpoch, Scope
from kafka_sink.transactions.planning import PlannedTransactions
from tests.support.fake_broker import METADATA, PRODUCE, FakeCluster
from tests.support.fake_replies import error
from tests.support.forked import in_a_fork
from tests.support.scripted_cluster import TOPIC, rows, sender_threads, task_options, written
from tests.support.sink_time import slow_until
from tests.support.waiting import until

MESSAGE_TOO_LARGE, TOPIC_AUTHORIZATION_FAILED = 10, 29
DEAD_LETTERS = "dead-letters"
DAY_MS = 86_400_000


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    with FakeCluster({TOPIC: 2, DEAD_LETTERS: 1}) as running:
        yield running


def options(cluster: FakeCluster, extra: dict[str, str] | None = None, **changes: object) -> dict[str, str]:
    return {**task_options(cluster, **changes), "log.summary": "false", **(extra or {})}


TOLERANT = {"errors.tolerance": "all", "errors.deadletterqueue.topic.name": DEAD_LETTERS}


def producer(cluster: FakeCluster, extra: dict[str, str] | None = None, **changes: object) -> ArrowProducer:
    return kafka_sink.producer(options(cluster, extra, **changes))


def write(cluster: FakeCluster, data: Any, extra: dict[str, str] | None = None) -> WriteResult:
    return kafka_sink.write_arrow(data, options(cluster, extra))


def attendants() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "kafka-chunked-linger"]


def test_a_write_returns_rows_and_offsets(cluster: FakeCluster) -> None:
    table = pa.Table.from_batches([rows(0, 5), rows(5, 3, partition=1), rows(8, 2)])
    result = write(cluster, table)
    assert (result.rows, result.skipped, result.dead_letters, result.already_written) == (10, 0, 0, False)
    assert result.offsets == {TopicPartition(TOPIC, 0): ((0, 6),), TopicPartition(TOPIC, 1): ((0, 2),)}
    assert written(cluster) == [0, 1, 2, 3, 4, 8, 9]
    assert written(cluster, 1) == [5, 6, 7]
    assert write(cluster, rows(0, 0)).rows == write(cluster, []).rows == 0


def test_columns_are_checked_before_any_broker_is_asked_and_leave_the_write_as_it_was(
    cluster: FakeCluster,
) -> None:
    with pytest.raises(SchemaError, match="'value' not found"):
        write(cluster, pa.table({"a": [1]}))
    assert cluster.received(METADATA) == []
    with producer(cluster) as writing:
        writing.send(rows(0, 3))
        with pytest.raises(SchemaError):
            writing.send(pa.table({"a": [1]}))
        writing.send(rows(3, 3))
    assert written(cluster) == [0, 1, 2, 3, 4, 5]


def test_batches_of_other_columns_follow_each_other_in_order(cluster: FakeCluster) -> None:
    with producer(cluster, linger_ms=20) as writing:
        writing.send(rows(0, 2))
        writing.send(rows(2, 2).append_column("key", pa.array([b"a", b"b"])))
        views = rows(0, 0).schema.set(0, pa.field("value", pa.string_view()))
        writing.send(pa.table(rows(4, 2).to_pydict(), views))
        writing.send(rows(6, 2))
    assert written(cluster) == [0, 1, 2, 3, 4, 5, 6, 7]


def test_rows_go_after_linger_though_nothing_is_sent_any_more(cluster: FakeCluster) -> None:
    """Catches: rows of a quiet service wait for its next batch."""
    with producer(cluster, linger_ms=5) as writing:
        writing.send(rows(0, 3))
        until(lambda: writing.acknowledged == 3, "the rows are acknowledged")
        writing.send(rows(3, 1))
        until(lambda: writing.acknowledged == 4, "the row behind them is acknowledged")
    until(lambda: not attendants(), "its thread has ended")


def test_flush_waits_for_acknowledgements_and_rows_linger_again_behind_it(cluster: FakeCluster) -> None:
    with producer(cluster, linger_ms=DAY_MS, delivery_timeout_ms=2 * DAY_MS) as writing:
        writing.send(rows(0, 3))
        writing.flush()
        assert writing.acknowledged == 3
        writing.send(rows(3, 2))
        writing.flush()
        assert len(cluster.received(PRODUCE)) == 2
        assert writing.result is None
    assert writing.result is not None
    assert writing.result.rows == writing.acknowledged == 5


def test_threads_share_a_producer_and_their_calls_are_independent(cluster: FakeCluster) -> None:
    with producer(cluster, linger_ms=5) as writing, ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: writing.send(rows(number * 10, 10)), range(100)))
        given = options(cluster)
        calls = pool.map(lambda n: kafka_sink.write_arrow(rows(n * 100, 100, partition=1), given), range(8))
        assert [result.rows for result in calls] == [100] * 8
    found = written(cluster)
    assert sorted(found) == list(range(1000))
    # A batch stays together.
    assert all(found[at : at + 10] == list(range(found[at], found[at] + 10)) for at in range(0, 1000, 10))
    assert sorted(written(cluster, 1)) == list(range(800))


def test_send_waits_for_memory_and_says_which_option_bounds_that(cluster: FakeCluster) -> None:
    """Backpressure: brokers that take nothing stop the program that sends."""

    def endless() -> Iterator[pa.RecordBatch]:
        yield rows(0, 10)
        cluster.freeze(0)
        while True:
            yield rows(10, 100)

    small = options(cluster, buffer_memory=100_000, batch_size=10_000, max_block_ms=300)

    def waits() -> bool:
        return any(one.activity.current[0] == MEMORY for one in list(LIVE_PRODUCERS.values()))

    with slow_until(waits), pytest.raises(BufferExhaustedError, match=r"max\.block\.ms"):
        kafka_sink.write_arrow(endless(), small)
    cluster.thaw(0)
    assert sender_threads() == []


def test_a_row_that_is_refused_fails_the_write_and_all_further_calls(
    cluster: FakeCluster, caplog: pytest.LogCaptureFixture
) -> None:
    """The program goes on as if nothing had been: the end of the block tells it again."""
    rejected = pytest.raises(InvalidRowError, match="'partition' is negative")
    with rejected, producer(cluster) as writing:
        writing.send(rows(0, 3))
        writing.flush()
        for data in (pa.record_batch({"value": ["a"], "partition": [-7]}), rows(3, 1)):
            with suppress(InvalidRowError):
                writing.send(data)
                writing.flush()
    assert "of 3 rows 3 are acknowledged" in caplog.text
    assert written(cluster) == [0, 1, 2]
    assert sender_threads() == []


def indexed(place: int) -> pa.DictionaryArray:
    """One text. A dictionary of one has no index but 0."""
    kind, index = pa.dictionary(pa.int32(), pa.string()), pa.py_buffer(place.to_bytes(4, "little"))
    return pa.DictionaryArray.from_buffers(kind, 1, [None, index], pa.array(["0"]))


def sources_that_fail(place: int) -> Iterator[tuple[Any, type[Exception]]]:
    """Data in three pieces, of which the one at ``place`` cannot be taken, and the error."""
    wrong = pa.record_batch({"value": [1]})
    for bad, error_class in ((wrong, SchemaError), (7, SchemaError)):
        pieces: list[Any] = [rows(0, 1)] * 3
        pieces[place] = bad
        yield pieces, error_class
        yield (piece for piece in pieces), error_class

    def source() -> Iterator[pa.RecordBatch]:
        for number in range(3):
            if number == place:
                raise KeyError("of the program")
            yield rows(0, 1)

    yield source(), KeyError
    # Arrow's streams have errors of their own.
    yield pa.RecordBatchReader.from_batches(rows(0, 0).schema, source()), Exception
    columns = [indexed(7 if number == place else 0) for number in range(3)]
    yield pa.Table.from_batches([pa.record_batch({"value": column}) for column in columns]), InvalidRowError
    partitions = np.zeros(3, dtype=np.int32)
    partitions[place] = -7
    if place:
        batches = pa.table({"value": ["0", "1", "2"], "partition": partitions}).to_batches(max_chunksize=1)
        yield pa.Table.from_batches(batches), InvalidRowError


class RecordedTransaction:
    """What becomes of a write's transaction, without brokers that have any."""

    def __init__(self) -> None:
        self.ends: list[str] = []

    def require(self, columns: Any) -> None: ...

    def take(self, *_: object) -> bool:
        return True

    def mark(self) -> None: ...

    def commit(self) -> tuple[Any, dict[str, float]]:
        self.ends.append("committed")
        return SimpleNamespace(outcome="committed", note="", transactions={}), {}

    def abort(self, error: BaseException) -> dict[str, Any]:
        self.ends.append("aborted")
        return {}


@pytest.mark.parametrize("is_exactly_once", [False, True])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_send_that_fails_after_it_took_rows_fails_the_block(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch, place: int, *, is_exactly_once: bool
) -> None:
    """Catches: a program that repairs a row and sends again, and so writes the rows before it twice."""
    for data, error_class in sources_that_fail(place):
        transaction = RecordedTransaction()
        if is_exactly_once:
            monkeypatch.setattr(kafka_sink.arrow.producer, "plan", lambda *_, found=transaction: found)
        outcome = pytest.raises(error_class) if place else nullcontext()
        with outcome as failed, producer(cluster) as writing:
            with pytest.raises(error_class) as first:
                writing.send(data)
            calls: list[Callable[[], None]] = [partial(writing.send, rows(0, 3)), writing.flush]
            for call in calls:
                if not place:
                    call()
                    continue
                with pytest.raises(error_class) as again:
                    call()
                assert again.value is first.value
        if place:
            assert failed is not None
            assert failed.value is first.value
            assert writing.result is None
        else:
            assert writing.result is not None
            assert writing.result.rows == 3
        assert transaction.ends == (["aborted" if place else "committed"] if is_exactly_once else [])


def test_a_failed_write_gives_back_what_it_read_at_once(cluster: FakeCluster) -> None:
    """Catches: a connection of DuckDB that refuses queries until the garbage collector runs."""
    query = "SELECT i::VARCHAR AS value, -7 AS partition FROM range(300_000) t(i)"
    for columns in (query, query.replace("::VARCHAR", "")):
        connection = duckdb.connect()
        relation = connection.sql(columns)
        gc.disable()
        try:
            with pytest.raises(ValueError, match=r"negative|unsupported type") as failed:
                write(cluster, relation)
            assert connection.execute("SELECT 1").fetchall() == [(1,)]
            error = weakref.ref(failed.value)
            del failed
            assert error() is None
        finally:
            gc.enable()


def test_a_delivery_that_fails_is_told_to_a_program_that_sends_no_more(cluster: FakeCluster) -> None:
    failed = pytest.raises(DeliveryError, match=r"AUTHORIZATION.*\[1 rows acknowledged, 1 failed")
    with failed, producer(cluster) as writing:
        writing.send(rows(0, 1))
        writing.flush()
        cluster.script(PRODUCE, error(TOPIC_AUTHORIZATION_FAILED))
        writing.send(rows(1, 1))
        until(lambda: len(cluster.received(PRODUCE)) == 2, "it is rejected")


def test_an_exception_of_the_program_ends_the_write_at_once(
    cluster: FakeCluster, caplog: pytest.LogCaptureFixture
) -> None:
    """Be it in the block or in an iterator."""

    def source() -> Iterator[pa.RecordBatch]:
        yield rows(3, 4)
        raise KeyError

    waits: dict[str, Any] = {"linger_ms": DAY_MS, "delivery_timeout_ms": 2 * DAY_MS}
    failed = pytest.raises(KeyError)
    with failed, producer(cluster, **waits) as writing:
        writing.send(rows(0, 3))
        writing.flush()
        for batch in source():
            writing.send(batch)
    assert written(cluster) == [0, 1, 2]
    assert (
        "the write has failed (KeyError). Sending has stopped: of 7 rows 3 are acknowledged, 0 were sent and "
        "have no response, 0 are skipped, and 4 are dropped"
    ) in caplog.text
    with pytest.raises(KeyError):
        write(cluster, source())
    assert sender_threads() == []
    until(lambda: not attendants(), "its thread has ended")
    assert not LIVE_PRODUCERS


def test_dead_letters_are_written_while_the_program_sends_nothing(cluster: FakeCluster) -> None:
    """Catches: dead letters wait for the next batch, longer than kafka.delivery.timeout.ms."""
    with producer(cluster, TOLERANT) as writing:
        writing.send(rows(0, 1))
        writing.flush()
        # Refused alone, so it is the row that is too large.
        cluster.script(PRODUCE, error(MESSAGE_TOO_LARGE))
        writing.send(rows(1, 1))
        until(lambda: cluster.batches(DEAD_LETTERS, 0), "the dead letter is written")
        writing.send(rows(2, 1))
    result = writing.result
    assert result is not None
    assert (result.rows, result.skipped, result.dead_letters) == (2, 1, 1)
    assert result.skip_reasons == {"RecordTooLargeError": 1}
    assert written(cluster) == [0, 2]


def test_a_row_that_is_refused_becomes_a_dead_letter(cluster: FakeCluster) -> None:
    data = pa.table({"value": ["<0>", "<1>", "<2>"], "partition": [0, -1, 0]})
    result = write(cluster, data, TOLERANT)
    assert (result.rows, result.skipped, result.dead_letters) == (2, 1, 1)
    assert TopicPartition(DEAD_LETTERS, 0) in result.offsets
    assert result.skip_reasons == {"InvalidRowError": 1}
    dropped = write(cluster, data, {"errors.tolerance": "all"})
    assert (dropped.rows, dropped.skipped, dropped.dead_letters) == (2, 1, 0)


def test_a_producer_serves_one_block(cluster: FakeCluster) -> None:
    writing = producer(cluster)
    for _ in range(2):
        with pytest.raises(ProducerClosedError, match="outside of its 'with' block"):
            writing.send(rows(0, 1))
        if writing.result is None:
            with writing:
                """Nothing is sent."""
    with pytest.raises(ProducerClosedError, match="one block"), writing:
        pass


def test_the_next_write_takes_the_same_connections(cluster: FakeCluster) -> None:
    """And does not look the topic up again."""
    write(cluster, rows(0, 1))
    asked = len(cluster.received(METADATA))
    for number in range(1, 5):
        write(cluster, rows(number, 1))
    assert len(cluster.received(METADATA)) == asked
    assert len(sender_threads()) == 1
    assert written(cluster) == [0, 1, 2, 3, 4]


def test_a_rate_limit_holds_for_the_write_and_needs_no_coordinator(
    cluster: FakeCluster, caplog: pytest.LogCaptureFixture
) -> None:
    assert write(cluster, rows(0, 300), {"max.rows.per.second": "1000"}).rows == 300
    assert "coordinator" not in caplog.text


def test_options_are_checked_at_once_and_may_be_numbers_and_booleans() -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"topic": ["t"]}, "Option 'topic' must be a text, a number, True or False, not list$"),
        ({"kafka.bootstrap.servers": ["a:1", "b:2"]}, "not list; join its items with commas$"),
        ({"kafka.acks": "some"}, r"Option 'kafka\.acks'"),
        ({"kafka.lingers.ms": 7}, "Unknown option 'kafka.lingers.ms'"),
    ]
    for given, words in wrong:
        with pytest.raises(ConfigurationError, match=words):
            kafka_sink.producer({"kafka.bootstrap.servers": "h:1", **given})
    with pytest.raises(ConfigurationError, match=r"options must be a mapping .*, not NoneType"):
        kafka_sink.producer(None)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"not int: use kafka_sink\.foreach_batch"):
        kafka_sink.producer(7)  # type: ignore[arg-type]  # foreachBatch(kafka_sink.write) gives a number
    numbers = {"kafka.bootstrap.servers": "h:1", "kafka.linger.ms": 7, "topic.create": True, "topic": "t"}
    found = kafka_sink.producer(numbers).options
    assert (found.linger_ms, found.topic_create) == (7, True)


def test_options_of_spark_are_named_with_the_reason(caplog: pytest.LogCaptureFixture) -> None:
    given = {"kafka.bootstrap.servers": "h:1", "coordinator.enabled": "false"}
    no_effect = "no effect without Spark, because there is no coordinator: coordinator.port, ui.port"
    with caplog.at_level(logging.WARNING):
        kafka_sink.producer(given)
        assert caplog.text == ""
        kafka_sink.producer({**given, "ui.port": "0", "coordinator.port": "7", "checkpointLocation": "/c"})
    assert no_effect in caplog.text
    assert "These options have an effect with Spark only: checkpointLocation" in caplog.text


def test_a_fork_leaves_the_write_to_its_process(cluster: FakeCluster) -> None:
    """Catches: a child that ends, and with it aborts its parent's write."""

    def in_child() -> bool:
        with suppress(ProducerClosedError):
            writing.send(rows(2, 1))
            return False
        writing.__exit__(SystemExit, SystemExit(), None)
        return True

    with producer(cluster) as writing:
        writing.send(rows(0, 2))
        writing.flush()
        assert in_a_fork(in_child)
        writing.send(rows(2, 3))
    assert written(cluster) == [0, 1, 2, 3, 4]


def test_ctrl_c_at_any_call_ends_the_block(cluster: FakeCluster) -> None:
    """Catches: an interrupt between the producer's lock and the block in it, which stays locked."""
    files = {contextlib.__file__, kafka_sink.arrow.producer.__file__}

    def interrupted(at: int) -> bool:
        """Whether sending has so many calls and returns in these files, at the last of which Ctrl-C comes."""
        seen = 0

        def trace(frame: FrameType, event: str, _: object) -> Any:
            nonlocal seen
            code = frame.f_code
            if code.co_name == "__exit__" and code.co_filename == kafka_sink.arrow.producer.__file__:
                sys.settrace(None)
                return None
            # What a generator expression raises when it is destroyed is only printed.
            is_counted = event in ("call", "return") and code.co_filename in files
            seen += is_counted and code.co_name != "<genexpr>"
            if seen == at:
                sys.settrace(None)
                raise KeyboardInterrupt
            return trace

        # What an interrupt has left is not to be destroyed while this one counts. All of it is young, and the
        # objects of all tests before take 0.1 s to search.
        gc.collect(1)
        try:
            with producer(cluster) as writing:
                sys.settrace(trace)
                writing.send(rows(0, 1))
                writing.flush()
        except KeyboardInterrupt:
            return True
        return False

    ended: list[int] = []
    # Not the main thread, so that the test fails where a block does not end.
    thread = threading.Thread(target=lambda: ended.extend(takewhile(interrupted, count(1))), daemon=True)
    gc.disable()
    try:
        thread.start()
        thread.join(240)
    finally:
        gc.enable()
    assert not thread.is_alive(), f"no end after an interrupt at call or return {len(ended) + 1}"
    assert len(ended) > 40


def test_an_abort_that_waits_for_brokers_or_fails_says_so(caplog: pytest.LogCaptureFixture) -> None:
    """Catches: a minute of silence while a frozen broker is to abort the transaction."""
    heard: list[object] = []

    def run(*_: object, **__: object) -> tuple[int, ProducerEpoch] | None:
        heard.append(WAIT_LISTENER.get())
        if len(heard) == 2:
            raise DeliveryError("no broker")
        return (0, ProducerEpoch(2, 0)) if len(heard) == 1 else None

    client: Any = SimpleNamespace(run=run, start=lambda *_: None, protocol=2)
    batch = BatchIdentity.of_application("loads", "t", 1)
    planned = PlannedTransactions(Scope("p", "t", 1), batch, TaskHandover(ProducerEpoch(1, 0)))
    given = parse({"kafka.bootstrap.servers": "a:1"}).options
    write = WriteTransaction(given, planned, lambda *_: nullcontext(client))
    assert write.begin((), lambda *_: None)
    assert write.abort(KeyError()) == {}
    assert len(set(heard)) == 2
    assert "the write failed; its open transactions could not be aborted: no broker" in caplog.text
    write.abort(KeyError())
    assert len(caplog.messages) == 1, "there was nothing to abort"
