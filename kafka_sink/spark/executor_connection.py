"""The worker's socket to the executor's JVM: detects that the JVM has closed it, and acknowledges rows at
once.

Spark closes this socket to end an attempt that was killed, was superseded by a speculative copy, or belongs
to a cancelled job or a stopped query. PyArrow takes this for the end of the rows, because an Arrow stream may
end without an end marker.

While a task runs, the JVM closes the socket or shuts down its direction only if the attempt has failed.
BasePythonRunner's Writer calls ``shutdownOutput`` only in its exception handlers, and a reused worker keeps
its socket (Spark 4.1.1 and 4.3.0, TCP and Unix domain). So if the JVM hangs up before ``write`` returns, the
rows are no longer wanted.

Spark does not disable Nagle's algorithm. The JVM therefore sends the end of the rows, a few bytes, only when
the rows before it have been acknowledged, and a kernel that expects a response soon delays its
acknowledgement by 40 ms.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import stat
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from types import FrameType
from typing import IO

import pyarrow as pa

from kafka_sink.errors import ExecutorDisconnectedError

_log = logging.getLogger(__name__)
# POLLRDHUP is reported if the peer has closed or half-closed the socket, even if there are bytes left to
# read. The kernel reports the other two in any case.
_HANG_UP = select.POLLRDHUP | select.POLLHUP | select.POLLERR
_WORKER_FILE = "pyspark/worker.py"


@contextmanager
def watched(descriptor: int | None, on_hang_up: Callable[[Exception], None]) -> Iterator[Callable[[], None]]:
    """Call ``on_hang_up`` once, on another thread, if the peer of this socket hangs up within the block.

    Yields a function that raises ExecutorDisconnectedError if the peer has hung up. ``on_hang_up`` gets the
    same error. If ``descriptor`` is None, nothing is watched.
    """
    if descriptor is None:
        yield lambda: None
        return
    # Watch a duplicate: the worker could close its descriptor meanwhile, and the number could be reused.
    duplicate = os.dup(descriptor)

    def check() -> None:
        if _has_hung_up(duplicate):
            raise _disconnected()

    with ExitStack() as ends:
        ends.callback(os.close, duplicate)
        WATCHER.add(duplicate, on_hang_up)
        ends.callback(WATCHER.remove, duplicate)
        yield check


def acknowledged(batches: Iterator[pa.RecordBatch], descriptor: int | None) -> Iterator[pa.RecordBatch]:
    """Yield the batches, and make the kernel acknowledge at once what the JVM has sent on this socket."""
    if descriptor is None:
        yield from batches
        return
    with _duplicate(descriptor) as connection:
        _acknowledge(connection)
        for batch in batches:
            # The option must be set again for each batch, because the kernel may reset it at any time.
            _acknowledge(connection)
            yield batch


def _duplicate(descriptor: int) -> socket.socket:
    """A socket object for the worker's socket. Closing the object leaves the worker's own descriptor open."""
    is_blocking = os.get_blocking(descriptor)
    connection = socket.socket(fileno=os.dup(descriptor))
    # After socket.setdefaulttimeout, creating the object makes the socket non-blocking for both descriptors.
    os.set_blocking(descriptor, is_blocking)
    return connection


def _acknowledge(connection: socket.socket) -> None:
    # A Unix domain socket refuses the option and does not need it.
    with suppress(OSError):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)


class Watcher:
    """A thread that waits for hang-ups with epoll, and uses no CPU time until one.

    It is kept from task to task: on a busy CPU, starting and ending a thread for each task took milliseconds.
    """

    def __init__(self) -> None:
        # Guards everything below. Tasks add and remove descriptors, and the thread reads them. The thread
        # also holds the lock while it calls ``on_hang_up``. Without this, ``remove`` could return while the
        # call is still running.
        self._lock = threading.Lock()
        self._watched: dict[int, Callable[[Exception], None]] = {}
        # None before the thread is started.
        self._epoll: select.epoll | None = None
        # The handler can never be unregistered, but the watcher exists as long as the process anyway.
        os.register_at_fork(after_in_child=self._after_fork)

    def _after_fork(self) -> None:
        """Reset a forked child, where the thread does not exist. The thread may have held the lock."""
        self._lock = threading.Lock()
        self._watched.clear()
        epoll, self._epoll = self._epoll, None
        if epoll is not None:
            epoll.close()

    def add(self, descriptor: int, on_hang_up: Callable[[Exception], None]) -> None:
        """Watch the descriptor until ``remove`` is called.

        Raises OSError or RuntimeError, and watches nothing, if no descriptor or no thread is left.
        """
        with self._lock:
            if self._epoll is None:
                self._epoll = self._start()
            self._epoll.register(descriptor, select.EPOLLRDHUP)
            self._watched[descriptor] = on_hang_up

    def remove(self, descriptor: int) -> None:
        """End the watch, and wait for a call that is already running."""
        with self._lock:
            self._forget(descriptor)

    def _forget(self, descriptor: int) -> Callable[[Exception], None] | None:
        """Return the call of a descriptor that was watched until now. The caller holds the lock."""
        on_hang_up = self._watched.pop(descriptor, None)
        if on_hang_up is not None and self._epoll is not None:
            # The kernel has already removed a descriptor that was closed.
            with suppress(OSError):
                self._epoll.unregister(descriptor)
        return on_hang_up

    def _start(self) -> select.epoll:
        epoll = select.epoll()
        thread = threading.Thread(
            target=self._run, args=(epoll,), name="kafka-chunked-executor-watch", daemon=True
        )
        try:
            thread.start()
        except BaseException:
            epoll.close()
            raise
        return epoll

    def _run(self, epoll: select.epoll) -> None:
        while True:
            for descriptor, _ in epoll.poll():
                self._check(descriptor)

    def _check(self, descriptor: int) -> None:
        with self._lock:
            # Since epoll returned, the descriptor may have been removed and closed, and its number reused.
            if descriptor not in self._watched or not _has_hung_up(descriptor):
                return
            on_hang_up = self._forget(descriptor)
            try:
                if on_hang_up is not None:
                    on_hang_up(_disconnected())
            except Exception:  # noqa: BLE001 - a bug there must not end the watch of later tasks
                _log.exception("a task could not be ended after its executor had hung up")


WATCHER = Watcher()


def _disconnected() -> ExecutorDisconnectedError:
    return ExecutorDisconnectedError(
        "Spark's executor closed its connection to this task: the attempt was killed, or the executor ended"
    )


def _has_hung_up(descriptor: int) -> bool:
    poller = select.poll()
    poller.register(descriptor, _HANG_UP)
    return bool(poller.poll(0))


def executor_socket(environ: Mapping[str, str] = os.environ) -> int | None:
    """The descriptor of the socket from which this thread's task reads its rows. None outside Spark's
    workers.

    PySpark has no public API for it. In a worker that the daemon has forked, it is ``infile`` in the frame of
    ``pyspark.worker.main``. In a worker without the daemon, ``infile`` has no descriptor, but the environment
    contains the address to which the worker has connected.
    """
    infile = _infile_of_worker()
    if infile is None:
        return None
    try:
        descriptor = infile.fileno()
    except (AttributeError, OSError, ValueError):
        return _connected_to_factory(environ)
    return descriptor if _is_socket(descriptor) else None


def _infile_of_worker() -> IO[bytes] | None:
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        code = frame.f_code
        if code.co_name == "main" and code.co_filename.endswith(_WORKER_FILE):
            infile: IO[bytes] | None = frame.f_locals.get("infile")
            return infile
        frame = frame.f_back
    return None


def _connected_to_factory(environ: Mapping[str, str]) -> int | None:
    """The open socket whose peer has the address that PythonWorkerFactory put into the environment."""
    path = environ.get("PYTHON_WORKER_FACTORY_SOCK_PATH")
    port = environ.get("PYTHON_WORKER_FACTORY_PORT")
    descriptors: list[int] = []
    with suppress(OSError):
        descriptors += map(int, os.listdir("/proc/self/fd"))
    for descriptor in descriptors:
        with suppress(OSError):
            if not _is_socket(descriptor):
                continue
            with _duplicate(descriptor) as connection:
                peer = connection.getpeername()
            if peer == path or (isinstance(peer, tuple) and str(peer[1]) == port):
                return descriptor
    return None


def _is_socket(descriptor: int) -> bool:
    return stat.S_ISSOCK(os.fstat(descriptor).st_mode)
