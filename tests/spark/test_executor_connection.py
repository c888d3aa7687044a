"""The watch on the socket to the executor's JVM, and where that socket is found."""

from __future__ import annotations

import errno
import io
import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pyarrow as pa
import pytest

from kafka_sink.errors import ExecutorDisconnectedError
from kafka_sink.spark.executor_connection import Watcher, acknowledged, executor_socket, watched
from kafka_sink.spark.reading import checked_batches, rows_of_spark
from tests.support.forked import in_a_fork

PATIENCE_S = 60
Pair = tuple[socket.socket, socket.socket]


@pytest.fixture(params=["tcp", "unix"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """The JVM's end and the worker's."""
    if request.param == "unix":
        jvm, worker = socket.socketpair(socket.AF_UNIX)
    else:
        with socket.create_server(("127.0.0.1", 0)) as server:
            jvm = socket.create_connection(server.getsockname())
            worker, _ = server.accept()
    with jvm, worker:
        yield jvm, worker


def half_close(jvm: socket.socket) -> None:
    """As BasePythonRunner does where it fails to read the rows it is to pass on."""
    jvm.shutdown(socket.SHUT_WR)


def open_descriptors() -> set[str]:
    return set(os.listdir("/dev/fd"))


def one_batch() -> pa.RecordBatch:
    return pa.record_batch({"value": pa.array(["a"])})


@pytest.mark.parametrize("unread", [b"", b"rows"], ids=["nothing_unread", "rows_unread"])
# Where a response is unread, TCP answers with a reset.
@pytest.mark.parametrize("response", [b"", b"a response"], ids=["", "response_unread"])
@pytest.mark.parametrize("hang_up", [socket.socket.close, half_close])
def test_a_hang_up_is_noticed_at_once_also_behind_unread_rows(
    pair: Pair, hang_up: Callable[[socket.socket], None], response: bytes, unread: bytes
) -> None:
    jvm, worker = pair
    noticed = threading.Event()
    causes: list[Exception] = []

    def note(cause: Exception) -> None:
        causes.append(cause)
        noticed.set()

    worker.sendall(response)
    with watched(worker.fileno(), note) as check:
        jvm.sendall(unread)
        check()
        assert not noticed.is_set()
        hang_up(jvm)
        assert noticed.wait(PATIENCE_S), "the hang-up went unnoticed"
        with pytest.raises(ExecutorDisconnectedError, match="attempt was killed"):
            check()
    assert [type(cause) for cause in causes] == [ExecutorDisconnectedError]


def test_the_watch_ends_with_the_task_and_leaves_nothing_open(pair: Pair) -> None:
    """Catches: a poll that goes on holds the socket, so that the JVM does not see its end."""
    jvm, worker = pair
    causes: list[Exception] = []
    with watched(worker.fileno(), causes.append):
        """Starts the thread, which keeps an epoll."""
    before = open_descriptors()
    with watched(worker.fileno(), causes.append):
        """Does nothing."""
    assert open_descriptors() <= before
    worker.close()
    jvm.settimeout(PATIENCE_S)
    assert jvm.recv(1) == b""
    jvm.close()
    # Another task's executor, which the same thread watches.
    other_jvm, other_worker = socket.socketpair()
    noticed = threading.Event()
    with other_jvm, other_worker, watched(other_worker.fileno(), lambda _: noticed.set()):
        other_jvm.close()
        assert noticed.wait(PATIENCE_S)
    assert causes == [], "what comes after the task is none of its business"


def test_tasks_share_a_thread_and_a_slow_or_silent_executor_has_not_hung_up(pair: Pair) -> None:
    """Catches: on busy processors each task waited milliseconds for its thread to start and to end."""
    jvm, worker = pair
    causes: list[Exception] = []
    with watched(worker.fileno(), causes.append):
        before = watches()
    for _ in range(3):
        with watched(worker.fileno(), causes.append) as check:
            assert watches() == before
            jvm.sendall(b"rows")
            check()
            assert worker.recv(4) == b"rows"
            check()
    assert causes == []


def test_a_watch_that_cannot_end_its_task_serves_the_next_one(caplog: pytest.LogCaptureFixture) -> None:
    """Catches: an error in the call ended the thread, and no later task of the worker noticed a hang-up."""
    for fails in (True, False):
        jvm, worker = socket.socketpair()
        noticed = threading.Event()

        def note(cause: Exception, fails: bool = fails, noticed: threading.Event = noticed) -> None:
            noticed.set()
            if fails:
                raise RuntimeError("a bug") from cause

        with jvm, worker, watched(worker.fileno(), note):
            jvm.close()
            assert noticed.wait(PATIENCE_S)
    assert caplog.text.count("RuntimeError: a bug") == 1


def test_a_watch_that_cannot_start_is_started_by_the_next_task(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches: a process at its limit of threads once noticed no hang-up any more, and kept descriptors."""
    jvm, worker = pair
    watcher, noticed = Watcher(), threading.Event()
    before = open_descriptors()
    no_thread = Mock(side_effect=RuntimeError("can't start new thread"))
    with monkeypatch.context() as limited:
        limited.setattr(threading.Thread, "start", no_thread)
        with pytest.raises(RuntimeError):
            watcher.add(worker.fileno(), lambda _: noticed.set())
    assert open_descriptors() <= before
    watcher.add(worker.fileno(), lambda _: noticed.set())
    jvm.close()
    assert noticed.wait(PATIENCE_S)


def is_open(descriptor: int) -> bool:
    try:
        return bool(os.fstat(descriptor))
    except OSError:
        return False


def watches() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "kafka-chunked-executor-watch"]


@pytest.mark.parametrize("is_busy", [False, True], ids=["idle", "busy"])
def test_a_forked_process_watches_with_a_thread_of_its_own(pair: Pair, *, is_busy: bool) -> None:
    """Catches: no watch, the parent's as well, its epoll left open, or a lock that was held at the fork."""
    jvm, worker = pair
    watcher, of_parent = Watcher(), list[Exception]()
    closed = [descriptor for descriptor in range(256) if not is_open(descriptor)]
    watcher.add(worker.fileno(), of_parent.append)
    (epoll,) = filter(is_open, closed)
    begins, ends = threading.Event(), threading.Event()

    def is_held(_: Exception) -> None:
        begins.set()
        assert ends.wait(PATIENCE_S)

    def watches_anew() -> bool:
        noticed = threading.Event()
        is_kept = is_open(epoll)
        half_close(jvm)
        watcher.add(os.dup(worker.fileno()), lambda _: noticed.set())
        return noticed.wait(PATIENCE_S) and not is_kept and not of_parent

    other_jvm, other_worker = socket.socketpair()
    with other_jvm, other_worker:
        watcher.add(other_worker.fileno(), is_held)
        if is_busy:
            other_jvm.close()
            # It is called with the lock held.
            assert begins.wait(PATIENCE_S)
        assert in_a_fork(watches_anew)
        ends.set()
        other_jvm.close()
        watcher.remove(worker.fileno())


def test_without_a_socket_nothing_is_watched_and_rows_pass_as_they_are() -> None:
    with watched(None, lambda cause: pytest.fail(str(cause))) as check:
        check()
    assert list(acknowledged(iter([1, 2]), None)) == [1, 2]  # type: ignore[list-item]


@pytest.mark.parametrize(("ended", "hangs_up"), [(True, False), (True, True), (False, True)])
def test_rows_end_only_where_spark_said_so(pair: Pair, *, hangs_up: bool, ended: bool) -> None:
    jvm, worker = pair
    sink = jvm.makefile("wb")
    stream = pa.RecordBatchStreamWriter(sink, one_batch().schema)
    stream.write_batch(one_batch())
    if ended:
        stream.close()
    sink.flush()
    if hangs_up:
        sink.close()
        jvm.close()
    with worker.makefile("rb") as source, watched(worker.fileno(), lambda _: None) as check:
        batches = checked_batches(iter(pa.ipc.open_stream(source)), check)
        assert next(batches).num_rows == 1
        if hangs_up:
            with pytest.raises(ExecutorDisconnectedError):
                next(batches)
        else:
            assert next(batches, None) is None


@pytest.mark.parametrize("sent", [0, 1, 100, 200])
def test_a_stream_that_spark_broke_off_is_spark_s_failure(pair: Pair, sent: int) -> None:
    """Catches: "ArrowInvalid: Tried reading schema message" as the last line of a job with a bad CAST."""
    jvm, worker = pair
    whole = pa.BufferOutputStream()
    with pa.RecordBatchStreamWriter(whole, one_batch().schema) as stream:
        stream.write_batch(one_batch())
    jvm.sendall(whole.getvalue()[:sent])
    jvm.close()

    def batches() -> Iterator[pa.RecordBatch]:
        # As PySpark's worker does, it opens the stream when the first batch is asked for.
        with worker.makefile("rb") as source:
            yield from pa.ipc.open_stream(source)

    with pytest.raises(ExecutorDisconnectedError, match="see its error above"):
        list(rows_of_spark(batches()))


def test_rows_are_acknowledged_before_the_kernel_would(pair: Pair) -> None:
    """Catches: the JVM kept the end of the rows back until the rows were acknowledged, 40 ms later."""
    _, worker = pair
    is_tcp = worker.family == socket.AF_INET
    option = socket.IPPROTO_TCP, socket.TCP_QUICKACK
    before = open_descriptors()
    at_first: list[int] = []

    def batches() -> Iterator[pa.RecordBatch]:
        at_first.append(is_tcp and worker.getsockopt(*option))
        yield from (one_batch(), one_batch())

    if is_tcp:
        worker.setsockopt(*option, 0)
    rows = acknowledged(batches(), worker.fileno())
    for _ in "ab":
        if is_tcp:
            worker.setsockopt(*option, 0)
        assert next(rows).num_rows == 1
        assert not is_tcp or worker.getsockopt(*option)
        assert at_first == [is_tcp], "also what comes before the first rows"
    assert next(rows, None) is None
    assert open_descriptors() <= before


def test_a_default_timeout_does_not_change_the_workers_socket(pair: Pair) -> None:
    """Catches: after a user's socket.setdefaulttimeout, PyArrow found the rows cut off."""
    _, worker = pair
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(30)
    try:
        rows = acknowledged(iter([one_batch()]), worker.fileno())
        assert next(rows).num_rows == 1
        assert os.get_blocking(worker.fileno())
        assert in_a_worker(io.BytesIO(), {"PYTHON_WORKER_FACTORY_PORT": "1"}) is None
        assert os.get_blocking(worker.fileno())
        assert next(rows, None) is None
    finally:
        socket.setdefaulttimeout(before)


# -- where the socket is found --------------------------------------------------------------------------


def in_a_worker(infile: object, environ: Mapping[str, str] = os.environ) -> int | None:
    """What a task finds below a function in the place of pyspark.worker.main."""
    source = "def main(infile, outfile):\n    return run()\n"
    names: dict[str, Any] = {"run": lambda: executor_socket(environ)}
    exec(compile(source, "/spark/python/lib/pyspark.zip/pyspark/worker.py", "exec"), names)
    found: int | None = names["main"](infile, None)
    return found


def test_no_socket_is_found_if_proc_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str) -> list[str]:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)

    monkeypatch.setattr(os, "listdir", refuse)
    assert in_a_worker(io.BytesIO(), {"PYTHON_WORKER_FACTORY_PORT": "1"}) is None


def test_a_worker_of_the_daemon_reads_rows_from_its_infile_and_others_from_what_they_connected_to(
    pair: Pair,
) -> None:
    _, worker = pair
    with os.fdopen(os.dup(worker.fileno()), "rb") as infile:
        assert in_a_worker(infile) == infile.fileno()
    with socket.create_server(("127.0.0.1", 0)) as server:
        environ = {"PYTHON_WORKER_FACTORY_PORT": str(server.getsockname()[1])}
        with socket.create_connection(server.getsockname()) as other, other.makefile("rwb") as both_ways:
            assert in_a_worker(both_ways, environ) == other.fileno()


@pytest.mark.usefixtures("in_tmp_path")
def test_a_worker_without_daemon_finds_a_unix_socket() -> None:
    # Its path is relative: that of a Unix socket is short.
    with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as worker:
        server.bind("s")
        server.listen()
        worker.connect("s")
        with worker.makefile("rwb") as infile:
            assert in_a_worker(infile, {"PYTHON_WORKER_FACTORY_SOCK_PATH": "s"}) == worker.fileno()


def test_outside_of_a_worker_there_is_none(tmp_path: Path) -> None:
    assert executor_socket() is None
    with (tmp_path / "rows").open("wb+") as file:
        assert in_a_worker(file) is None
    with io.BytesIO() as infile:
        assert in_a_worker(infile) is None
