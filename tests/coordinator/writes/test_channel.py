"""Attempts end when the driver says that their write is over."""

from __future__ import annotations

import fcntl
import select
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from typing import Any

import pytest
from pyspark.sql.datasource import CaseInsensitiveDict
from pyspark.sql.types import BinaryType, StructField, StructType

from kafka_sink.coordinator.client.client import CoordinatorClient
from kafka_sink.coordinator.process.planning import PlannedCoordinator
from kafka_sink.coordinator.transport.address import CoordinatorAddress, Rendezvous
from kafka_sink.coordinator.transport.connection import CoordinatorConnection, KeptConnection
from kafka_sink.coordinator.transport.handlers import Push, Reply, ServerMessage
from kafka_sink.coordinator.writes import channel as write_channel
from kafka_sink.coordinator.writes.channel import MAX_CAUSE, WriteChannel, end_attempts
from kafka_sink.coordinator.writes.handler import (
    MAX_FAILED,
    MAX_OPEN,
    MAX_OVER,
    MAX_STAGES,
    WriteHandler,
    write_handler,
)
from kafka_sink.errors import ProtocolError, WriteOverError
from kafka_sink.model import WriteTransactions
from kafka_sink.options import parse
from kafka_sink.rows.column_plan import ColumnPlan
from kafka_sink.spark import planning
from kafka_sink.spark.datasource import KafkaChunkedDataSource
from kafka_sink.spark.writer import PlannedWrite
from tests.support.coordinator_harness import SECRET, clock_ms, eventually, serving
from tests.support.forked import in_a_fork


def test_only_tasks_of_a_write_that_is_over_are_notified() -> None:
    handler = WriteHandler()
    assert handler.on_message(1, 7, {"writing": "a"}, 0) == [Reply(1, 7, {})]
    handler.on_message(2, 1, {"writing": "a"}, 0)
    handler.on_message(3, 1, {"writing": "b"}, 0)
    handler.on_message(4, 1, {"writing": "a"}, 0)
    handler.on_message(4, 2, {"writing": "b"}, 0)
    handler.on_disconnect(2, 0)
    assert handler.on_message(9, 1, {"over": "a"}, 0) == [Reply(9, 1, {}), Push(1, {"over": "a"})]


def test_an_attempt_that_begins_after_its_write_is_over_is_notified_at_once() -> None:
    handler = WriteHandler()
    handler.on_message(9, 1, {"over": "a"}, 0)
    assert handler.on_message(1, 1, {"writing": "a"}, 0) == [Reply(1, 1, {"over": "a"})]
    assert handler.on_message(1, 2, {"writing": "a/1"}, 0) == [Reply(1, 2, {})], "the next micro-batch"


def test_the_driver_hears_once_why_the_last_attempt_failed() -> None:
    handler = WriteHandler()
    for cause in ("the first", "the\nlast"):
        assert handler.on_message(1, 1, {"failed": "a", "cause": cause}, 0) == [Reply(1, 1, {})]
    assert handler.on_message(9, 2, {"over": "b"}, 0) == [Reply(9, 2, {})]
    assert handler.on_message(9, 1, {"over": "a"}, 0) == [Reply(9, 1, {"cause": "the last"})]
    assert handler.on_message(9, 3, {"over": "a"}, 0) == [Reply(9, 3, {})]


def test_causes_of_failures_are_kept_within_bounds() -> None:
    """A task decides neither how many nor how long they are."""
    handler = WriteHandler()
    for number in range(MAX_FAILED + 1):
        handler.on_message(1, 1, {"failed": str(number), "cause": "x" * 5000}, 0)
    assert handler.on_message(9, 1, {"over": "0"}, 0) == [Reply(9, 1, {})]
    (reply,) = handler.on_message(9, 1, {"over": "1"}, 0)
    assert len(reply.body["cause"]) == MAX_CAUSE
    for body in ({"failed": "a"}, {"failed": "a", "cause": 1}, {"failed": 1, "cause": "x"}):
        with pytest.raises(ProtocolError):
            handler.on_message(1, 1, body, 0)


def test_what_is_over_is_remembered_within_a_bound() -> None:
    handler = WriteHandler()
    for number in range(MAX_OVER + 1):
        handler.on_message(9, number, {"over": str(number)}, 0)
    assert handler.on_message(1, 1, {"writing": "0"}, 0) == [Reply(1, 1, {})]
    assert handler.on_message(1, 2, {"writing": "1"}, 0) == [Reply(1, 2, {"over": "1"})]


def test_a_name_that_comes_again_is_not_remembered() -> None:
    """Catches: a restarted query could not write its micro-batch again, as the abort had ended it."""
    handler = WriteHandler()
    handler.on_message(1, 1, {"writing": "query/5"}, 0)
    replies = handler.on_message(9, 1, {"over": "query/5", "again": True}, 0)
    assert replies == [Reply(9, 1, {}), Push(1, {"over": "query/5"})]
    assert handler.on_message(2, 1, {"writing": "query/5"}, 0) == [Reply(2, 1, {})]


class _Jobs:
    def __init__(self) -> None:
        self.ends: dict[int, Callable[[int], None]] = {}
        self.failures: dict[int, Callable[[int], None]] = {}

    def watch(self, stage: int, on_end: Callable[[int], None]) -> None:
        self.ends[stage] = on_end

    def watch_execution(self, stage: int, execution: int, on_failure: Callable[[int], None]) -> None:
        self.failures[stage] = on_failure

    def unwatch(self, stage: int) -> None:
        self.ends.pop(stage, None)
        self.failures.pop(stage, None)


def test_the_job_of_a_write_that_is_over_is_not_looked_for() -> None:
    """Catches: the coordinator asked Spark's UI three times a second for every micro-batch of the last
    minute."""
    jobs = _Jobs()
    handler = WriteHandler(jobs)
    handler.on_message(1, 1, {"writing": "query/5", "stage": 7}, 0)
    handler.on_message(2, 1, {"writing": "query/5", "stage": 7}, 0)
    handler.on_message(3, 1, {"writing": "b", "stage": 8}, 0)
    handler.on_message(9, 1, {"over": "query/5", "again": True}, 0)
    assert list(jobs.ends) == [8]


def test_the_job_of_a_write_is_not_looked_for_once_its_tasks_write_for_another() -> None:
    """Catches: with two streams, a stage was looked for after its micro-batch, as its tasks had moved on."""
    jobs = _Jobs()
    handler = WriteHandler(jobs)
    handler.on_message(1, 1, {"writing": "query/5", "stage": 7}, 0)
    handler.on_message(2, 1, {"writing": "query/5", "stage": 7}, 0)
    handler.on_message(1, 2, {"writing": "other/1", "stage": 8}, 0)
    handler.on_disconnect(2, 0)
    handler.on_message(9, 1, {"over": "query/5", "again": True}, 0)
    assert list(jobs.ends) == [8]


def test_writes_whose_end_nobody_reports_do_not_add_up() -> None:
    """The watch on a stage ends by itself; the handler forgets the first write that it belongs to."""
    jobs = _Jobs()
    handler = WriteHandler(jobs)
    for number in range(MAX_OVER + 1):
        handler.on_message(1, number, {"writing": f"w-{number}", "stage": number}, 0)
    for name in ("w-0", "w-1"):
        handler.on_message(9, 1, {"over": name}, 0)
    assert 0 in jobs.ends
    assert 1 not in jobs.ends


def test_a_task_that_names_ever_more_stages_has_so_many_watched() -> None:
    jobs = _Jobs()
    handler = WriteHandler(jobs)
    for number in range(MAX_STAGES + 5):
        assert handler.on_message(1, number, {"writing": "w", "stage": number}, 0) == [Reply(1, number, {})]
    assert len(jobs.ends) == MAX_STAGES
    handler.on_message(9, 1, {"over": "w"}, 0)
    assert not jobs.ends


def test_tasks_of_a_job_that_spark_ended_are_notified_before_the_driver_calls_abort() -> None:
    """Catches: tasks of a cancelled job wrote for seconds, until the driver had started a Python process
    for abort, or the executor's JVM had ended them."""
    jobs, woken = _Jobs(), []
    handler = WriteHandler(jobs, lambda: woken.append(True))
    handler.on_message(1, 1, {"writing": "a", "stage": 7}, 0)
    handler.on_message(2, 1, {"writing": "b", "stage": 8}, 0)
    assert handler.on_time(0) == ()
    jobs.ends[7](7)
    assert woken
    assert handler.on_time(0) == [Push(1, {"over": "a", "stage": 7})]
    late = {"writing": "a", "stage": 7}
    assert handler.on_message(3, 1, late, 0) == [Reply(3, 1, {"over": "a", "stage": 7})]
    assert handler.on_message(3, 1, {"writing": "a", "stage": 9}, 0) == [Reply(3, 1, {})]


_TRANSACTIONS = WriteTransactions(5, "prefix", "t", 2, 4000, 3)
_WRITES_IN_TRANSACTIONS = {"writing": "q/0", "stage": 7, "transactions": asdict(_TRANSACTIONS)}


def test_transactions_of_a_write_that_failed_without_a_word_from_the_driver_are_ended_once() -> None:
    """Catches: query.stop() in the first micro-batch left transactions open until the next run."""
    jobs, ended, woken = _Jobs(), list[WriteTransactions](), list[bool]()
    handler = WriteHandler(jobs, lambda: woken.append(True), ended.append)
    handler.on_message(1, 1, _WRITES_IN_TRANSACTIONS, 0)
    handler.on_message(2, 1, _WRITES_IN_TRANSACTIONS, 0)
    jobs.ends[7](7)
    handler.on_time(0)
    assert ended == [], "the job has ended, and the driver may be about to commit"
    failure = jobs.failures[7]
    failure(7)
    assert ended == [], "that is the server's thread's to do"
    assert len(woken) == 2
    assert handler.on_time(0) == [Push(peer, {"over": "q/0", "stage": 7}) for peer in (1, 2)]
    assert ended == [_TRANSACTIONS]
    failure(7)
    handler.on_message(3, 1, _WRITES_IN_TRANSACTIONS, 0)
    handler.on_time(0)
    assert ended == [_TRANSACTIONS]


@pytest.mark.parametrize("is_failure_known", [False, True])
def test_transactions_whose_end_the_driver_has_reported_are_its_business(is_failure_known: bool) -> None:
    jobs, ended = _Jobs(), list[WriteTransactions]()
    handler = WriteHandler(jobs, end=ended.append)
    handler.on_message(1, 1, _WRITES_IN_TRANSACTIONS, 0)
    failure = jobs.failures[7]
    if is_failure_known:
        failure(7)
    handler.on_message(9, 1, {"over": "q/0", "again": True}, 0)
    assert not jobs.failures
    failure(7)
    handler.on_time(0)
    assert ended == []


def test_writes_in_transactions_that_never_end_do_not_add_up() -> None:
    jobs = _Jobs()
    handler = WriteHandler(jobs)
    for number in range(MAX_OPEN + 1):
        body = {**_WRITES_IN_TRANSACTIONS, "writing": f"w-{number}", "stage": number}
        handler.on_message(1, number, body, 0)
    assert len(jobs.failures) == MAX_OPEN


def test_the_tasks_and_the_commits_of_a_query_use_one_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: Spark plans a stream again to commit it, so the commit named a write that no task had."""
    monkeypatch.setattr(planning, "prepare_topic", lambda options, is_streaming: None)
    options = {"kafka.bootstrap.servers": "h:1", "topic": "t", "coordinator.enabled": "false"}
    schema = StructType([StructField("value", BinaryType())])

    def planned(**more: str) -> PlannedWrite:
        source = KafkaChunkedDataSource(CaseInsensitiveDict(options | more))
        return source.streamWriter(schema, overwrite=False).planned

    assert planned(checkpointLocation="/c").name == planned(checkpointLocation="/c").name
    assert planned(checkpointLocation="/c").name != planned(checkpointLocation="/d").name
    assert planned().name != planned().name, "two queries without this option are not mixed up"


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"writing": 3},
        {"over": None},
        {"over": ""},
        {"writing": "x" * 201},
        {"writing": "a", "stage": "7"},
        {"writing": "a", "transactions": 5},
        {"writing": "a", "transactions": {}},
        {"writing": "a", "transactions": {**asdict(_TRANSACTIONS), "partitions": 0}},
        {"writing": "a", "transactions": {**asdict(_TRANSACTIONS), "epoch": "3"}},
    ],
)
def test_what_makes_no_sense_is_refused(body: dict[str, object]) -> None:
    with pytest.raises(ProtocolError):
        WriteHandler().on_message(1, 1, body, 0)


class Noting(WriteHandler):
    """Notes who says what. One that ``is_silent`` replies to nobody."""

    def __init__(self, *, is_silent: bool = False) -> None:
        super().__init__()
        self.is_silent = is_silent
        self.heard: list[tuple[int, Mapping[str, Any]]] = []

    def on_message(
        self, peer: int, request: int, body: Mapping[str, Any], now_ms: float
    ) -> Sequence[ServerMessage]:
        replies = super().on_message(peer, request, body, now_ms)
        self.heard.append((peer, body))
        return () if self.is_silent else replies

    @property
    def peers(self) -> set[int]:
        return {peer for peer, _ in self.heard}


def connection_of(kept: KeptConnection) -> CoordinatorConnection:
    assert kept._kept is not None
    return kept._kept[1]


def test_a_task_at_work_is_ended_by_the_commit_on_the_driver() -> None:
    causes: list[Exception] = []
    handler = Noting()
    with serving(factories={"writes": lambda options, wake: handler}) as server:
        channel = WriteChannel(causes.append)
        client = CoordinatorClient(server.address, [channel], clock_ms)
        client.start()
        client.resume()
        options = parse({"kafka.bootstrap.servers": "h:1", "topic": "t", "log.summary": "false"}).options
        other, mine = (
            PlannedWrite(
                options, ColumnPlan(value=0, topic="t"), PlannedCoordinator(driver_address=server.address)
            )
            for _ in range(2)
        )
        channel.begin(mine._name_in_task())
        eventually(lambda: handler.heard)
        other.commit([])
        mine.commit([])
        eventually(lambda: causes)
        assert isinstance(causes[0], WriteOverError)
        channel.end()
        client.close()
        client.join(30)


def test_a_task_that_has_ended_is_left_alone() -> None:
    causes: list[Exception] = []
    channel = WriteChannel(causes.append)
    channel.begin("a", 7)
    assert channel.next_message(0) == {"writing": "a", "stage": 7}
    assert channel.next_message(0) is None
    channel.on_push({"over": "b"}, 0)
    channel.end()
    channel.on_push({"over": "a"}, 0)
    assert causes == []
    channel.on_connected(0)
    assert channel.next_message(0) is None
    channel.begin("c")
    channel.next_message(0)
    channel.on_connected(0)
    assert channel.next_message(0) == {"writing": "c"}, "a new coordinator gets it, too"


def test_the_late_end_of_a_stage_does_not_end_the_task_that_runs_its_micro_batch_again() -> None:
    causes: list[Exception] = []
    channel = WriteChannel(causes.append)
    channel.begin("query/5", 8)
    channel.on_push({"over": "query/5", "stage": 7}, 0)
    channel.on_reply({"over": "query/5", "stage": 7}, True, 0)
    assert causes == []
    channel.on_push({"over": "query/5", "stage": 8}, 0)
    channel.on_push({"over": "query/5"}, 0)
    assert len(causes) == 2


def test_a_driver_without_coordinator_goes_on() -> None:
    end_attempts(CoordinatorAddress("127.0.0.1", Rendezvous(1, "key", SECRET)), "a")


def test_commits_of_a_stream_share_a_connection_and_do_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: each micro-batch connected to commit and waited for the reply, which took 3 ms."""
    kept = KeptConnection(20_000.0, clock_ms)
    monkeypatch.setattr(write_channel, "_KEPT", kept)
    committed = threading.Event()
    were_committed: list[bool] = []

    class Waiting(Noting):
        def on_message(
            self, peer: int, request: int, body: Mapping[str, Any], now_ms: float
        ) -> Sequence[ServerMessage]:
            were_committed.append(committed.wait(30))
            return super().on_message(peer, request, body, now_ms)

    handler = Waiting()
    with serving(factories={"writes": lambda options, wake: handler}) as server:
        for name in ("q/1", "q/2"):
            end_attempts(server.address, name, again=True, is_urgent=False)
        committed.set()
        eventually(lambda: len(handler.heard) == 2)
        assert all(were_committed), "nobody waits for a reply"
        assert [body["over"] for _, body in handler.heard] == ["q/1", "q/2"]
        assert len(handler.peers) == 1, "one connection"
        assert server.connections() == 1
        connection_of(kept).socket.shutdown(socket.SHUT_RDWR)
        eventually(lambda: not server.connections())
        end_attempts(server.address, "q/3", again=True, is_urgent=False)
        eventually(lambda: len(handler.heard) == 3)
    kept.close()


@pytest.mark.parametrize("is_busy", [False, True], ids=["idle", "busy"])
def test_a_forked_process_has_a_connection_of_its_own(*, is_busy: bool) -> None:
    """Catches: a child read the parent's replies, or waited for ever for a lock held at the fork."""
    with serving(factories={"writes": write_handler}) as server:
        kept = KeptConnection(20_000.0, clock_ms)
        kept.send(server.address, "writes", {"over": "q/1", "again": True})
        connection = connection_of(kept)
        assert select.select([connection.socket], [], [], 30)[0], "a reply"

        def sends() -> bool:
            kept.send(server.address, "writes", {"over": "q/2", "again": True})
            return connection_of(kept) is not connection

        with kept._lock if is_busy else nullcontext():
            assert in_a_fork(sends)
        assert select.select([connection.socket], [], [], 0)[0], "the reply was taken"
        kept.close()


@pytest.mark.skipif(not hasattr(select, "poll"), reason="this system has select only")
def test_commits_work_with_more_descriptors_than_select_takes() -> None:
    """Catches: ``select`` raised ValueError for a descriptor above 1,023, and the micro-batch failed."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2_000:
        pytest.skip(f"a process may open only {hard} files here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2_000), hard))
    try:
        with serving(factories={"writes": write_handler}) as server:
            kept = KeptConnection(20_000.0, clock_ms)
            kept.send(server.address, "writes", {"over": "q/1", "again": True})
            connection = connection_of(kept)
            high = fcntl.fcntl(connection.socket, fcntl.F_DUPFD, 1_100)
            connection.socket.close()
            connection.socket = socket.socket(fileno=high)
            connection.socket.settimeout(20)
            kept.send(server.address, "writes", {"over": "q/2", "again": True})
            assert connection_of(kept) is connection
            kept.close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_stream_whose_coordinator_is_gone_commits() -> None:
    with serving(factories={"writes": write_handler}) as server:
        address = server.address
        kept = KeptConnection(20_000.0, clock_ms)
        kept.send(address, "writes", {"over": "q/1", "again": True})
    for _ in "ab":
        with pytest.raises(ConnectionRefusedError):
            kept.send(address, "writes", {"over": "q/2", "again": True})


def test_a_commit_goes_to_the_coordinator_that_the_stream_was_planned_with() -> None:
    """Catches: a second application's commits in the coordinator of the first."""
    with (
        serving(factories={"writes": write_handler}) as first,
        serving(factories={"writes": write_handler}) as second,
    ):
        kept = KeptConnection(20_000.0, clock_ms)
        for server in (first, second):
            kept.send(server.address, "writes", {"over": "q/1", "again": True})
            eventually(lambda server=server: server.connections() == 1)
        eventually(lambda: first.connections() == 0)
        kept.close()


def test_a_coordinator_that_has_been_silent_is_connected_to_anew() -> None:
    """Catches: commits sent for ever to a host that is gone, whose connection nobody has closed."""
    now = [0.0]
    handler = Noting(is_silent=True)
    with serving(factories={"writes": lambda options, wake: handler}) as server:
        kept = KeptConnection(20_000.0, lambda: now[0])
        for number, now_ms in enumerate((0.0, 19_999.0, 20_000.0), 1):
            now[0] = now_ms
            kept.send(server.address, "writes", {"over": f"q/{number}", "again": True})
            eventually(lambda number=number: len(handler.heard) == number)
        assert [peer == handler.heard[0][0] for peer, _ in handler.heard] == [True, True, False]
        kept.close()
