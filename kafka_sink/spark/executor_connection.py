"""The socket between a worker and its executor's JVM, watched for its end.

Spark ends an attempt (killed, superseded by a speculative copy, of a cancelled job or a stopped query) by
closing this socket. PyArrow reads that as the end of the rows, as an Arrow stream may end with or without its
end marker. While a task runs, the JVM closes the socket, or shuts its own direction down, only where the
attempt has failed: BasePythonRunner's Writer calls ``shutdownOutput`` in its exception handlers alone, and a
worker that is used again keeps its socket (Spark 4.1.1 and 4.3.0, TCP and Unix domain). So a hang-up before
``write`` returns means that nobody wants the rows any more.
"""

from __future__ import annotations

import os
import select
import socket
import stat
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

from kafka_sink.errors import ExecutorDisconnectedError

# POLLRDHUP is Linux's: the peer closed or half-closed, whether or not bytes wait to be read. The other two
# are reported without being asked for, except on macOS.
_HANG_UP = getattr(select, "POLLRDHUP", 0) | getattr(select, "POLLHUP", 0) | getattr(select, "POLLERR", 0)
_WORKER_FILE = "pyspark/worker.py"


class Check(Protocol):
    """Raises ExecutorDisconnectedError once the JVM has hung up."""

    def __call__(self) -> None: ...


@contextmanager
def watched(descriptor: int | None, on_hang_up: Callable[[Exception], None]) -> Iterator[Check]:
    """Calls ``on_hang_up`` once, from another thread, when the peer of this socket hangs up within the block.

    Gives a function that raises ExecutorDisconnectedError where the peer has hung up by now; ``on_hang_up``
    gets the same error. ``None`` stands for no socket: then nothing is watched.
    """
    if descriptor is None or not hasattr(select, "poll"):
        yield lambda: None
        return
    watch = _Watch(descriptor, on_hang_up)
    try:
        yield watch.check
    finally:
        watch.close()


class _Watch:
    """A thread in a poll without timeout: it costs nothing until something happens."""

    def __init__(self, descriptor: int, on_hang_up: Callable[[Exception], None]) -> None:
        # A number of its own: the worker's could be closed, and be given to another file, under the poll.
        self._descriptor = os.dup(descriptor)
        self._on_hang_up = on_hang_up
        self._stop_reader, self._stop_writer = os.pipe()
        self._thread = threading.Thread(target=self._run, name="kafka-chunked-executor-watch", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        poller = select.poll()
        poller.register(self._descriptor, _HANG_UP)
        poller.register(self._stop_reader, select.POLLIN)
        while True:
            reported = dict(poller.poll())
            if self._stop_reader in reported:
                return
            if self._descriptor in reported:
                self._on_hang_up(_disconnected())
                return

    def check(self) -> None:
        """See watched."""
        if _has_hung_up(self._descriptor):
            raise _disconnected()

    def close(self) -> None:
        os.close(self._stop_writer)
        self._thread.join()
        os.close(self._stop_reader)
        os.close(self._descriptor)


def _disconnected() -> ExecutorDisconnectedError:
    return ExecutorDisconnectedError(
        "Spark's executor closed its connection to this task: the attempt was killed, or the executor ended"
    )


def _has_hung_up(descriptor: int) -> bool:
    poller = select.poll()
    poller.register(descriptor, _HANG_UP)
    return bool(poller.poll(0))


def executor_socket() -> int | None:
    """The descriptor of the socket that this thread's task gets its rows from; None outside Spark's workers.

    PySpark has no public name for it. A worker of the daemon has it as ``infile`` in the frame of
    ``pyspark.worker.main``; that of a worker without daemon is a pair without descriptor, but its environment
    says where it connected to.
    """
    infile = _infile_of_worker()
    if infile is None:
        return None
    try:
        descriptor = infile.fileno()  # type: ignore[attr-defined]
    except (AttributeError, OSError, ValueError):
        return _connected_to_factory()
    return descriptor if _is_socket(descriptor) else None


def _infile_of_worker() -> object | None:
    frame = sys._getframe()
    while frame is not None:
        code = frame.f_code
        if code.co_name == "main" and code.co_filename.replace(os.sep, "/").endswith(_WORKER_FILE):
            found: object | None = frame.f_locals.get("infile")
            return found
        if frame.f_back is None:
            break
        frame = frame.f_back
    return None


def _connected_to_factory() -> int | None:
    """The open socket whose peer is the one that PythonWorkerFactory named in the environment."""
    path = os.environ.get("PYTHON_WORKER_FACTORY_SOCK_PATH")
    port = os.environ.get("PYTHON_WORKER_FACTORY_PORT")
    for entry in Path("/dev/fd").iterdir():
        descriptor = int(entry.name)
        with suppress(OSError):
            if not _is_socket(descriptor):
                continue
            with socket.socket(fileno=os.dup(descriptor)) as found:
                peer = found.getpeername()
            if peer == path or (isinstance(peer, tuple) and str(peer[1]) == port):
                return descriptor
    return None


def _is_socket(descriptor: int) -> bool:
    return stat.S_ISSOCK(os.fstat(descriptor).st_mode)
