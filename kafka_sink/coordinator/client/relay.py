"""One connection to the coordinator for all Python workers of an executor.

A thread of one worker accepts the others on a Unix socket. It adds up what they report all the time, and
answers for the coordinator (see group): to that an executor costs what one task does. Messages of other kinds
it passes on, each with its task's number (see message_format). What several tasks send within a few
milliseconds travels in one frame, and so do the coordinator's messages to several tasks.

A relay lives as long as its connection to the coordinator. When that ends, or the worker does, its tasks
connect again, and one of them becomes the next relay. While the coordinator is silent, the relay keeps the
connection and answers no task.

Workers find it in a folder in their SPARK_LOCAL_DIRS, mode 0700. For each coordinator and cluster that has a
lock, which the relay's process holds, and the relay's socket. Their name is an HMAC under the application's
secret, so that another application's relay is never met. The lock is a POSIX record lock: it goes with its
process, however that ends, and a fork does not inherit it.
"""

from __future__ import annotations

import errno
import fcntl
import hmac
import math
import os
import selectors
import socket
import struct
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from kafka_sink.clock import Clock
from kafka_sink.coordinator.transport.address import (
    CoordinatorAddress,
    Rendezvous,
    check_private_folder,
    make_private_folder,
)
from kafka_sink.coordinator.transport.connection import READ_BYTES, Link, stood_still
from kafka_sink.coordinator.transport.group import Group, Groups
from kafka_sink.coordinator.transport.message_format import in_frames, prefixed, split_lines
from kafka_sink.coordinator.transport.session import (
    MAX_HANDSHAKE_BYTES,
    MAX_REQUEST_BYTES,
    FrameReader,
    Message,
    Session,
    parse,
)
from kafka_sink.errors import ProtocolError

# How long a message waits for others to the coordinator.
_GATHER_MS = 5.0
# Larger than what tasks send together; messages that are larger get a frame of their own.
_FRAME_BYTES = 256 * 1024
# Bytes that wait for one worker, or for the coordinator.
_MAX_UNSENT = 16 * 1024 * 1024
_MAX_TASKS = 512
# Bytes of all tasks' messages while the coordinator is silent.
_MAX_HELD = 16 * 1024 * 1024
# Of one task's messages, what the coordinator has not taken yet. One such message and its prefix fit into a
# frame.
_MAX_WAITING = MAX_REQUEST_BYTES - 64
# Without any task the relay ends after this time; a task that says nothing is let go.
_LINGER_MS = 30_000.0
_SILENCE_MS = 110_000.0
_SWEEP_MS = 5_000.0
# A coordinator that does not respond for so long is gone, or cannot be reached.
_GIVE_UP_MS = 30_000.0


class _Outlet:
    """Bytes that a socket, which does not block, has not taken yet."""

    def __init__(self, connected: socket.socket) -> None:
        self.socket = connected
        self._unsent = bytearray()

    @property
    def has_more(self) -> bool:
        return bool(self._unsent)

    def write(self, data: bytes) -> None:
        """Raise OSError, also where the other end does not read."""
        self._unsent += data
        self.flush()
        if len(self._unsent) > _MAX_UNSENT:
            raise ConnectionError("the other end does not read")

    def flush(self) -> None:
        with suppress(BlockingIOError):
            while self._unsent:
                del self._unsent[: self.socket.send(self._unsent)]


class _LocalTask:
    """A worker's connection; it belongs to one of the worker's producers."""

    def __init__(self, number: int, connected: socket.socket, session: Session, now_ms: float) -> None:
        self.number = number
        self.session = session
        self.frames = FrameReader(MAX_HANDSHAKE_BYTES)
        self.outlet = _Outlet(connected)
        self.heard_ms = now_ms
        self.is_admitted = False
        # Whether the coordinator may know the task.
        self.has_spoken = False
        self.lines: list[bytes] = []
        # Bytes that it has sent while the coordinator was silent, or since it last took all that waited.
        self.waiting = 0


class Relay(threading.Thread):
    """``on_end`` is called on the thread when it has ended. Closes ``link`` and ``listening`` then.

    ``groups``: of the kinds of messages that it adds up. ``silence_ms``: a coordinator that has not responded
    for so long is silent.
    """

    def __init__(
        self,
        link: Link,
        listening: socket.socket,
        rendezvous: Rendezvous,
        clock_ms: Clock,
        on_end: Callable[[], None],
        groups: Iterable[Group],
        silence_ms: float,
    ) -> None:
        super().__init__(name="kafka-chunked-relay", daemon=True)
        self._link = link
        self._listening = listening
        self._rendezvous = rendezvous
        self._clock_ms = clock_ms
        self._on_end = on_end
        self._groups = Groups(groups, clock_ms())
        self._silence_ms = silence_ms
        self._is_silent = False
        # What tasks say meanwhile.
        self._held: list[tuple[_LocalTask, bytes]] = []
        # Those of whose messages some may not have been taken.
        self._waiting: set[_LocalTask] = set()
        self._pid = os.getpid()
        self._selector = selectors.DefaultSelector()
        self._upstream = _Outlet(link.socket)
        self._tasks: dict[int, _LocalTask] = {}
        self._count = 0
        self._outgoing: list[bytes] = []
        self._flush_ms = math.inf
        self._touched: dict[int, _LocalTask] = {}
        self._empty_since_ms = self._swept_ms = clock_ms()

    @property
    def is_ours(self) -> bool:
        """Whether the thread runs in this process. A forked process has the object, but no thread."""
        return self._pid == os.getpid() and self.is_alive()

    def run(self) -> None:
        """Run until the coordinator's connection ends, or no task has been there for a while."""
        try:
            with suppress(OSError, ProtocolError):
                self._serve()
        finally:
            for task in self._tasks.values():
                task.outlet.socket.close()
            self._link.socket.close()
            self._listening.close()
            self._selector.close()
            self._on_end()

    def _serve(self) -> None:
        self._listening.setblocking(False)
        self._link.socket.setblocking(False)
        self._selector.register(self._listening, selectors.EVENT_READ)
        self._selector.register(self._link.socket, selectors.EVENT_READ)
        # The challenge may have been followed by messages.
        self._take_from_coordinator(b"")
        now_ms = self._clock_ms()
        while self._tasks or now_ms < self._empty_since_ms + _LINGER_MS:
            timeout_s = self._timeout_s()
            for key, events in self._selector.select(timeout_s):
                if key.fileobj is self._listening:
                    self._accept()
                elif key.fileobj is self._link.socket:
                    self._on_coordinator(events)
                elif key.data.number in self._tasks:
                    self._on_task(key.data, events)
            began_ms, now_ms = now_ms, self._clock_ms()
            if stood_still(began_ms, timeout_s, now_ms):
                self._wait_anew(now_ms, now_ms - began_ms)
            self._look_for_silence(now_ms)
            self._send_to_tasks()
            if self._groups.due_ms(now_ms) <= now_ms:
                self._flush_ms = min(self._flush_ms, now_ms + _GATHER_MS)
            if now_ms >= self._flush_ms:
                self._send_to_coordinator(now_ms)
            if now_ms >= self._swept_ms + _SWEEP_MS:
                self._sweep(now_ms)

    def _wait_anew(self, now_ms: float, turn_ms: float) -> None:
        self._groups.wait_anew(now_ms)
        for task in self._tasks.values():
            task.heard_ms = min(now_ms, task.heard_ms + turn_ms)

    def _timeout_s(self) -> float:
        now_ms = self._clock_ms()
        due_ms = min(
            # What groups have waits for others, too.
            self._flush_ms if self._flush_ms < math.inf else self._groups.due_ms(now_ms),
            self._swept_ms + _SWEEP_MS,
            self._groups.unheard_since_ms() + (_GIVE_UP_MS if self._is_silent else self._silence_ms),
        )
        if not self._tasks:
            due_ms = min(due_ms, self._empty_since_ms + _LINGER_MS)
        return max(0.0, due_ms - now_ms) / 1000

    # -- the coordinator ----------------------------------------------------------------------------

    def _on_coordinator(self, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            self._upstream.flush()
            self._watch(self._upstream, None)
        if events & selectors.EVENT_READ:
            try:
                data = self._link.socket.recv(READ_BYTES)
            except BlockingIOError:
                return
            if not data:
                raise ConnectionError("the coordinator closed the connection")
            self._groups.hear(self._clock_ms())
            self._take_from_coordinator(data)

    def _take_from_coordinator(self, data: bytes) -> None:
        self._link.frames.feed(data)
        while (frame := self._link.frames.next_frame()) is not None:
            for line in split_lines(self._link.session.payload(frame)):
                if not line.tasks:
                    self._take_as_relay(parse(line.message))
                for number in line.tasks:
                    task = self._tasks.get(number)
                    if task is None:
                        continue
                    if line.message:
                        task.lines.append(line.message)
                        self._touched[number] = task
                    else:
                        # It leaves in turn: the coordinator may have taken more of what it said meanwhile.
                        self._drop(task)

    def _take_as_relay(self, message: Message) -> None:
        self._groups.on_coordinator(message, self._clock_ms())
        self._is_silent = False
        held, self._held = self._held, []
        for task, said in held:
            if task.number in self._tasks:
                self._guarded(task, partial(self._take_message, task, said))

    def _look_for_silence(self, now_ms: float) -> None:
        silent_ms = now_ms - self._groups.unheard_since_ms()
        if silent_ms >= _GIVE_UP_MS:
            raise ConnectionError("the coordinator does not respond")
        if silent_ms >= self._silence_ms and not self._is_silent:
            self._is_silent = True
            # They work alone from now on, and come back here: what they say is held until it responds.
            for task in list(self._tasks.values()):
                self._drop(task)

    def _send_to_coordinator(self, now_ms: float) -> None:
        lines, self._outgoing, self._flush_ms = self._outgoing, [], math.inf
        lines += self._groups.messages(now_ms)
        for payload in in_frames(lines, _FRAME_BYTES):
            self._upstream.write(self._link.session.encode_payload(payload))
        self._watch(self._upstream, None)

    def _pass_on(self, task: _LocalTask, message: bytes) -> None:
        self._outgoing.append(prefixed((task.number,), message))
        self._flush_ms = min(self._flush_ms, self._clock_ms() + _GATHER_MS)

    # -- tasks --------------------------------------------------------------------------------------

    def _accept(self) -> None:
        try:
            connected, _ = self._listening.accept()
        except (BlockingIOError, InterruptedError):
            return
        if len(self._tasks) >= _MAX_TASKS or not is_own_user(connected):
            connected.close()
            return
        connected.setblocking(False)
        self._count += 1
        task = _LocalTask(
            self._count, connected, Session(self._rendezvous.secret, "server"), self._clock_ms()
        )
        self._tasks[task.number] = task
        self._selector.register(connected, selectors.EVENT_READ, task)
        try:
            self._write(task, task.session.greeting())
        except OSError:
            self._drop(task)

    def _on_task(self, task: _LocalTask, events: int) -> None:
        def take() -> None:
            if events & selectors.EVENT_WRITE:
                task.outlet.flush()
                self._watch(task.outlet, task)
            if events & selectors.EVENT_READ:
                self._read(task)

        self._guarded(task, take)

    def _guarded(self, task: _LocalTask, act: Callable[[], None]) -> None:
        try:
            act()
        except (OSError, ProtocolError):
            self._drop(task)

    def _read(self, task: _LocalTask) -> None:
        try:
            data = task.outlet.socket.recv(READ_BYTES)
        except BlockingIOError:
            return
        if not data:
            raise ConnectionError("the worker closed the connection")
        task.heard_ms = self._clock_ms()
        task.frames.feed(data)
        while task.number in self._tasks and (frame := task.frames.next_frame()) is not None:
            self._take_from_task(task, frame)

    def _take_from_task(self, task: _LocalTask, frame: bytes) -> None:
        session = task.session
        if not session.established:
            self._write(task, session.reply_to_proof(frame))
            task.frames.max_bytes = _MAX_WAITING
            return
        for line in split_lines(session.payload(frame)):
            if line.tasks:
                raise ProtocolError("a worker's message names a task")
            if task.is_admitted:
                self._take_message(task, line.message)
            elif parse(line.message).get("cluster") == self._rendezvous.cluster:
                task.is_admitted = True
            else:
                raise ProtocolError("a worker must name the relay's cluster first")

    def _take_message(self, task: _LocalTask, said: bytes) -> None:
        if self._is_silent:
            self._count_waiting(task, said)
            self._held.append((task, said))
            if sum(one.waiting for one in self._waiting) > _MAX_HELD:
                raise ProtocolError("tasks send more than the relay holds")
            return
        if not self._groups.on_task(task.number, parse(said), self._clock_ms()):
            self._count_waiting(task, said)
            task.has_spoken = True
            self._pass_on(task, said)

    def _count_waiting(self, task: _LocalTask, said: bytes) -> None:
        # What waits of all tasks together is bounded, too, and beyond that the relay ends.
        if not self._is_silent and not self._upstream.has_more and not self._outgoing:
            for one in self._waiting:
                one.waiting = 0
            self._waiting.clear()
        self._waiting.add(task)
        task.waiting += len(said)
        if task.waiting > _MAX_WAITING:
            raise ProtocolError("a task sends more than the coordinator takes")

    def _send_to_tasks(self) -> None:
        for number, message in self._groups.for_tasks():
            if number in self._tasks:
                self._tasks[number].lines.append(message)
                self._touched[number] = self._tasks[number]
        touched, self._touched = self._touched, {}
        for task in touched.values():
            lines, task.lines = task.lines, []
            if task.number not in self._tasks:
                continue
            try:
                for payload in in_frames(lines, _FRAME_BYTES):
                    self._write(task, task.session.encode_payload(payload))
            except (OSError, ProtocolError):
                self._drop(task)

    def _write(self, task: _LocalTask, data: bytes) -> None:
        task.outlet.write(data)
        self._watch(task.outlet, task)

    def _watch(self, outlet: _Outlet, task: _LocalTask | None) -> None:
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if outlet.has_more else 0)
        if self._selector.get_key(outlet.socket).events != events:
            self._selector.modify(outlet.socket, events, task)

    def _drop(self, task: _LocalTask) -> None:
        if self._tasks.pop(task.number, None) is None:
            return
        self._selector.unregister(task.outlet.socket)
        task.outlet.socket.close()
        self._groups.on_task_left(task.number, self._clock_ms())
        self._waiting.discard(task)
        self._held = [one for one in self._held if one[0] is not task]
        if task.has_spoken:
            self._pass_on(task, b"")
        if not self._tasks:
            self._empty_since_ms = self._clock_ms()

    def _sweep(self, now_ms: float) -> None:
        self._swept_ms = now_ms
        for task in [one for one in self._tasks.values() if now_ms - one.heard_ms > _SILENCE_MS]:
            self._drop(task)


FOLDER = "kafka-chunked-relay"
_BACKLOG = 128
# sockaddr_un has room for 108 bytes on Linux, for 104 on macOS, the final zero included.
_MAX_PATH = 103
_CREDENTIALS = struct.Struct("3i")


class RelayFolder:
    """The lock and the socket of one coordinator's relay. Methods raise OSError."""

    def __init__(self, folder: Path, address: CoordinatorAddress) -> None:
        self.folder = folder
        rendezvous = address.rendezvous
        text = f"relay {address.host} {rendezvous.port} {rendezvous.cluster}"
        self.name = hmac.digest(rendezvous.secret, text.encode(), "sha256").hex()[:24]

    @classmethod
    def of(cls, address: CoordinatorAddress) -> RelayFolder | None:
        """The folder in the first writable one of SPARK_LOCAL_DIRS. None where there is none to trust."""
        for parent in filter(None, os.environ.get("SPARK_LOCAL_DIRS", "").split(",")):
            folder = Path(parent) / FOLDER
            try:
                make_private_folder(folder)
            except OSError:
                continue
            return cls(folder, address)
        return None

    @property
    def lock_path(self) -> Path:
        return self.folder / f"{self.name}.lock"

    def try_lock(self) -> int | None:
        """Take the lock: a descriptor to close in the end; None if another process holds it.

        Raises OSError where the file system has no locks.
        A process must not call this while it holds the lock: closing any descriptor of the file releases it.
        """
        handle = os.open(self.lock_path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(handle)
            if error.errno in (errno.EAGAIN, errno.EACCES):
                return None
            raise
        return handle

    def listen(self) -> socket.socket:
        """A socket for the workers. Only under the lock."""
        with self._path() as path:
            # Of a relay that was killed.
            Path(path).unlink(missing_ok=True)
            listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                listening.bind(path)
                listening.listen(_BACKLOG)
            except BaseException:
                listening.close()
                raise
        return listening

    def connect(self, timeout_ms: float) -> socket.socket:
        """A socket to the relay."""
        check_private_folder(self.folder)
        connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connected.settimeout(timeout_ms / 1000)
        try:
            with self._path() as path:
                connected.connect(path)
        except BaseException:
            connected.close()
            raise
        return connected

    @contextmanager
    def _path(self) -> Iterator[str]:
        """The socket's path. Spark's local folders may be too deep; Linux has a short way there."""
        path = f"{self.folder}/{self.name}.sock"
        if len(os.fsencode(path)) <= _MAX_PATH or sys.platform != "linux":
            yield path
            return
        handle = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            yield f"/proc/self/fd/{handle}/{self.name}.sock"
        finally:
            os.close(handle)


def is_own_user(connected: socket.socket) -> bool:
    """Whether the process at the other end runs as this user, where the system says so."""
    option = getattr(socket, "SO_PEERCRED", None)
    if option is None:
        return True
    _, user, _ = _CREDENTIALS.unpack(connected.getsockopt(socket.SOL_SOCKET, option, _CREDENTIALS.size))
    return bool(user == os.getuid())
