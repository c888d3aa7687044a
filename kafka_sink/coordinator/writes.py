"""Ends attempts that outlive their write: the coordinator notifies tasks that the write is over.

The driver reports each write that commits or aborts, before ``save()`` or ``query.stop()`` returns. Some
attempts may still run then: superseded speculative copies, tasks of a cancelled job, and tasks of executors
that lost the driver. Nothing will use their rows, and their executor may take seconds to end them.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from typing import Annotated, ClassVar

from msgspec import Meta

from kafka_sink import spark_application
from kafka_sink.coordinator.address import CoordinatorAddress
from kafka_sink.coordinator.client import ask, tell
from kafka_sink.coordinator.schema import Channel, Message, Name, Outbox, Service, ServiceScope, receives
from kafka_sink.errors import KafkaSinkError, WriteOverError
from kafka_sink.printable import printable

# Characters of a failure's cause, and how many failed writes are kept until the driver reports their end.
MAX_CAUSE, MAX_FAILED = 2000, 100
# How many finished writes are remembered. An attempt of an older write is not ended.
MAX_OVER = 10_000
# The time for connecting and for the answer. The coordinator runs on the driver's host.
_DRIVER_TIMEOUT_MS = 500.0
# How long micro-batches do not wait again for a coordinator that did not answer: it may be frozen.
_SILENT, _SILENT_S = "the coordinator did not answer that a write ends", 10.0

_Cause = Annotated[str, Meta(max_length=MAX_CAUSE)]


class Writing(Message, frozen=True):
    """From a task: it writes for this write."""

    write: Name


class AttemptFailed(Message, frozen=True):
    """From a task: why its attempt has failed."""

    write: Name
    cause: _Cause


class WriteEnding(Message, frozen=True):
    """From the driver: the write is being committed or aborted.

    ``again``: a later write may have this name, so it is not remembered.
    """

    is_of_driver: ClassVar[bool] = True

    write: Name
    again: bool


class WriteCause(Message, frozen=True):
    """To the driver: why the last attempt of the write failed, if one has reported its failure."""

    cause: _Cause


class WriteOver(Message, frozen=True):
    """To a task: end the attempt, because this write is over."""

    write: Name


class WriteService(Service):
    """Connects tasks with the driver's reports about their write. ``on_failed`` gets failures' causes."""

    scope = ServiceScope.APPLICATION

    def __init__(self, out: Outbox, on_failed: Callable[[str, str], None]) -> None:
        super().__init__(out)
        self._on_failed = on_failed
        # The write of each task, and the tasks of each write.
        self._writing: dict[int, str] = {}
        self._tasks: dict[str, dict[int, None]] = {}
        self._over: OrderedDict[str, None] = OrderedDict()
        # Why the last failed attempt of each write failed.
        self._causes: OrderedDict[str, str] = OrderedDict()

    @receives(Writing)
    def on_writing(self, peer: int, message: Writing, now_ms: float) -> None:
        self.on_gone(peer, now_ms)
        self._writing[peer] = message.write
        self._tasks.setdefault(message.write, {})[peer] = None
        if message.write in self._over:
            self.out.send(peer, WriteOver(message.write))

    def on_gone(self, peer: int, now_ms: float) -> None:
        write = self._writing.pop(peer, None)
        if write is not None:
            del self._tasks[write][peer]
            if not self._tasks[write]:
                del self._tasks[write]

    @receives(AttemptFailed)
    def on_attempt_failed(self, peer: int, message: AttemptFailed, now_ms: float) -> None:
        cause = printable(message.cause, MAX_CAUSE)
        self._on_failed(message.write, cause)
        self._causes[message.write] = cause
        self._causes.move_to_end(message.write)
        if len(self._causes) > MAX_FAILED:
            self._causes.popitem(last=False)

    @receives(WriteEnding)
    def on_write_ending(self, peer: int, message: WriteEnding, now_ms: float) -> None:
        if not message.again:
            self._over[message.write] = None
            if len(self._over) > MAX_OVER:
                self._over.popitem(last=False)
        self.out.broadcast(list(self._tasks.get(message.write, ())), WriteOver(message.write))
        self.out.send(peer, WriteCause(self._causes.pop(message.write, "")))


class WriteChannel(Channel):
    """Calls ``abort``, on the client's thread, when the current write is over."""

    scope = ServiceScope.APPLICATION

    def __init__(self, abort: Callable[[Exception], None]) -> None:
        super().__init__()
        self._abort = abort
        # Guards the next two. The client's thread calls ``abort`` under it, so that ``end`` waits for that
        # call: otherwise a late ``abort`` could end the next task.
        self._lock = threading.Lock()
        self._writing: Writing | None = None
        self._unsent: Writing | None = None

    def begin(self, name: str | None) -> None:
        """A task of the write with this name starts. None: the write has no name."""
        with self._lock:
            self._writing = self._unsent = None if name is None else Writing(name)
        self.wake()

    def end(self) -> None:
        """The task has ended. ``abort`` is not called any more."""
        with self._lock:
            self._writing = self._unsent = None

    def next_message(self, now_ms: float) -> Writing | None:
        with self._lock:
            unsent, self._unsent = self._unsent, None
            return unsent

    @receives(WriteOver)
    def on_write_over(self, message: WriteOver, now_ms: float) -> None:
        with self._lock:
            # A late message may be about the previous task.
            if self._writing == Writing(message.write):
                why = "Spark committed or aborted this write while the attempt still ran"
                self._abort(WriteOverError(why))

    def on_connected(self, now_ms: float) -> None:
        with self._lock:
            self._unsent = self._writing


def report_failure(address: CoordinatorAddress, name: str, cause: str) -> None:
    """Report from a task that its attempt has failed. Raises nothing."""
    with suppress(OSError, KafkaSinkError):
        tell(address, AttemptFailed(name, printable(cause, MAX_CAUSE)), _DRIVER_TIMEOUT_MS)


def end_attempts(address: CoordinatorAddress, name: str, *, again: bool = False) -> str:
    """End the attempts of this write that still run, and wait until the coordinator has notified them.

    The driver calls it. ``again``: see ``WriteEnding``. Raises nothing. Returns the last attempt's cause.
    """
    if again and spark_application.happened_within(_SILENT, _SILENT_S):
        return ""
    with suppress(OSError, KafkaSinkError):
        try:
            return ask(address, WriteEnding(name, again), WriteCause, _DRIVER_TIMEOUT_MS).cause
        except TimeoutError:
            spark_application.note(_SILENT)
    return ""
