"""The coordinator's sockets on one asyncio loop: accepts, reads frames, dispatches messages, writes replies.

Handlers decide what a message means, and Connections which connections are kept. A connection serves one
task, or all tasks of an executor by way of a relay. To handlers a relay is one more task, which reports for
the others. The server itself bounds a connection's messages in a second and the bytes that wait for one peer.
"""

from __future__ import annotations

import asyncio
import logging
import math
import socket
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from kafka_sink.clock import Clock
from kafka_sink.coordinator.transport.connections import Connections, Dropped, ServerBounds
from kafka_sink.coordinator.transport.handlers import ClusterRegistry, HandlerFactory, Reply, ServerMessage
from kafka_sink.coordinator.transport.loop_watch import LoopWatch
from kafka_sink.coordinator.transport.message_format import Line, prefixed, split_lines
from kafka_sink.coordinator.transport.peer_connection import PeerConnection, encode_message
from kafka_sink.coordinator.transport.session import Message, Session, parse
from kafka_sink.errors import ProtocolError
from kafka_sink.options import SinkOptions

_log = logging.getLogger(__name__)
_MAX_TIMER_MS = 60_000.0
_AFTER_BUG_MS = 1000.0
# Bounds of one turn of the loop: connections to accept, bytes to write, bytes to write to one peer.
_ACCEPT_AT_ONCE = 128
_WRITE_AT_ONCE = 8 * 1024 * 1024
_CHECKS_OF_UNREAD = 16
_PEER_AT_ONCE = 256 * 1024
_DEFAULT_BOUNDS = ServerBounds()


class CoordinatorServer:
    """Serves clusters that were added, each known by its key. All methods belong to the loop's thread.

    ``watch``: of the loop that it runs on. ``factories``: a handler's factory by kind of message. ``look``:
    called when a peer names an unknown cluster: planning may have announced it in the pipe by now.
    ``forgotten``: called with the key of a cluster that had to make room.
    """

    def __init__(
        self,
        secret: bytes,
        factories: Mapping[str, HandlerFactory],
        clock_ms: Clock,
        bounds: ServerBounds = _DEFAULT_BOUNDS,
        look: Callable[[], None] = lambda: None,
        forgotten: Callable[[str], None] = lambda key: None,
        watch: LoopWatch | None = None,
    ) -> None:
        self._watch = watch or LoopWatch(clock_ms)
        self._secret = secret
        self._clock_ms = clock_ms
        self._bounds = bounds
        self._look = look
        self._clusters = ClusterRegistry(
            factories, self._wake, forgotten, max_clusters=bounds.clusters, idle_ms=bounds.cluster_idle_ms
        )
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._listening: socket.socket | None = None
        self._is_out_of_files = False
        self._connections = Connections(bounds, self._on_removed)
        # The number of the last connection or task.
        self._count = 0
        # The tasks that have sent a message: their connections, and their numbers there.
        self._tasks: dict[int, tuple[PeerConnection, int | None]] = {}
        # How many of them are relays, which speak for all of their tasks.
        self._groups = 0
        # Peers with something to write, in turn.
        self._to_write: deque[PeerConnection] = deque()
        self._writing = False
        # Bytes enqueued since unread bytes were last counted, which is too slow to do for each message.
        self._grown_bytes = 0
        self._opening: set[asyncio.Task[object]] = set()

    @property
    def connections(self) -> int:
        return len(self._connections)

    def state(self) -> Mapping[str, Any]:
        """For metrics: how late the loop is, tasks, and connections by kind."""
        return {
            **self._watch.state(),
            "tasks": len(self._tasks) - self._groups,
            "connections": dict(self._connections.of_kind),
        }

    def add_cluster(self, key: str, options: SinkOptions) -> None:
        """Serve another cluster. Beyond the bound, one without tasks makes room. A known one stays."""
        if not self._clusters.add(key, options, self._clock_ms()):
            _log.warning("more than %d clusters with tasks: one is not served", self._bounds.clusters)

    def _wake(self, key: str) -> None:
        """Any thread."""
        if self._loop is None:
            return
        try:
            self._loop.call_soon_threadsafe(self._on_time, key)
        except RuntimeError:
            pass  # the loop has ended, and nobody needs the news

    async def start(self, listening: socket.socket) -> None:
        """Begin to accept."""
        self._loop = asyncio.get_running_loop()
        listening.setblocking(False)
        self._listening = listening
        self._loop.add_reader(listening.fileno(), self._accept)
        self._sweep_later()

    def close(self) -> None:
        if self._listening is not None and self._loop is not None:
            self._loop.remove_reader(self._listening.fileno())
            self._is_out_of_files = False
        for task in self._opening:
            task.cancel()
        self._connections.close()
        for timer in self._timers.values():
            timer.cancel()
        self._clusters.close()

    # -- connections --------------------------------------------------------------------------------

    def _accept(self) -> None:
        assert self._listening is not None
        assert self._loop is not None
        for _ in range(_ACCEPT_AT_ONCE):
            try:
                sock, address = self._listening.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                # Most likely out of file descriptors. The socket stays readable, so the loop would spin; the
                # next sweep accepts again.
                _log.warning("a connection could not be accepted: %s", error)
                self._loop.remove_reader(self._listening.fileno())
                self._is_out_of_files = True
                return
            source = str(address[0])
            why = self._connections.drop_reason(source)
            if why is not None:
                self._connections.log.note(why, source)
                sock.close()
            else:
                self._open(sock, source)

    def _open(self, sock: socket.socket, source: str) -> None:
        assert self._loop is not None
        sock.setblocking(False)
        self._count += 1
        peer = PeerConnection(self._count, source, Session(self._secret, "server"), self, self._clock_ms())
        peer.allowance = self._bounds.messages_per_s
        self._connections.add(peer)
        task: asyncio.Task[object] = self._loop.create_task(
            self._loop.connect_accepted_socket(lambda: peer, sock)
        )
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    def on_opened(self, peer: PeerConnection) -> None:
        if peer.is_gone:
            peer.transport.abort()
        else:
            peer.transport.write(peer.session.greeting())

    def on_closed(self, peer: PeerConnection) -> None:
        self._connections.remove(peer)

    def _on_removed(self, peer: PeerConnection) -> None:
        if peer.cluster is None:
            return
        for task in list(peer.tasks):
            self._leave(peer, task)
        self._clusters.leave(peer.cluster, self._clock_ms())

    def _leave(self, peer: PeerConnection, task: int | None) -> None:
        number = peer.tasks.pop(task, None)
        self._groups -= number is not None and task is None and peer.is_relay
        cluster = None if peer.cluster is None else self._clusters.running(peer.cluster)
        if number is not None:
            del self._tasks[number]
            if cluster is not None:
                cluster.on_disconnect(number, self._clock_ms())

    # -- bytes --------------------------------------------------------------------------------------

    def on_bytes(self, peer: PeerConnection, data: bytes) -> None:
        if peer.is_gone:
            return
        peer.frames.feed(data)
        peer.heard_ms = self._clock_ms()
        self._handle(peer)

    def _handle(self, peer: PeerConnection) -> None:
        """Handle all complete frames, as far as the rate allows, and the others a moment later."""
        try:
            while not peer.is_gone and (not peer.frames.has_frame or self._may_speak(peer)):
                frame = peer.frames.next_frame()
                if frame is None:
                    break
                self._take(peer, frame)
            self._connections.note_unfinished(peer, self._clock_ms())
        except ProtocolError as error:
            _log.debug("connection %d ended: %s", peer.number, error)
            self._connections.drop(
                peer, Dropped.NONSENSE if peer.session.established else Dropped.WRONG_PROOF
            )

    def _may_speak(self, peer: PeerConnection) -> bool:
        """A token bucket that holds one second's messages."""
        rate, now_ms = self._bounds.messages_per_s * max(1, len(peer.tasks)), self._clock_ms()
        peer.allowance = min(rate, peer.allowance + rate * (now_ms - peer.allowed_ms) / 1000)
        peer.allowed_ms = now_ms
        if peer.allowance >= 1:
            return True
        if not peer.is_paused:
            assert self._loop is not None
            self._connections.log.note(Dropped.HELD_BACK, peer.source)
            peer.is_paused = True
            peer.transport.pause_reading()
            self._loop.call_later(max(1.0, 0.1 * rate) / rate, self._resume, peer)
        return False

    def _resume(self, peer: PeerConnection) -> None:
        if not peer.is_gone:
            peer.is_paused = False
            peer.transport.resume_reading()
            self._handle(peer)

    def _take(self, peer: PeerConnection, frame: bytes) -> None:
        peer.begun_ms = math.inf
        session = peer.session
        if not session.established:
            peer.transport.write(session.reply_to_proof(frame))
            peer.frames.max_bytes = self._bounds.request_bytes
            self._connections.proved(peer)
            return
        outgoing: list[tuple[str, ServerMessage]] = []
        lines = 0
        try:
            for line in split_lines(session.payload(frame)):
                if peer.is_gone:
                    break
                peer.allowance -= 1
                lines += 1
                if peer.cluster is None:
                    self._greet(peer, parse(line.message))
                else:
                    outgoing += self._take_line(peer, peer.cluster, line)
        finally:
            self._send(outgoing)
            self._watch.handled(lines, self._clock_ms())
            if outgoing and peer.cluster is not None:
                self._arm(peer.cluster)

    # -- messages -----------------------------------------------------------------------------------

    def _greet(self, peer: PeerConnection, message: Message) -> None:
        key = message.get("cluster")
        if not isinstance(key, str):
            raise ProtocolError("a peer must name its cluster first")
        if key not in self._clusters:
            self._look()
        if not self._clusters.enter(key):
            raise ProtocolError("a peer named a cluster that is not served")
        peer.cluster, peer.is_relay = key, message.get("relay") is True

    def _take_line(self, peer: PeerConnection, key: str, line: Line) -> Sequence[tuple[str, ServerMessage]]:
        if not line.tasks:
            return self._dispatch(peer, key, None, line.message)
        (task, *others) = line.tasks
        if others:
            raise ProtocolError("a message of several tasks")
        if not line.message:
            self._leave(peer, task)
            return ()
        try:
            return self._dispatch(peer, key, task, line.message)
        except ProtocolError as error:
            # The other tasks of a relay keep their connection.
            _log.debug("task %d of connection %d ended: %s", task, peer.number, error)
            self._connections.log.note(Dropped.NONSENSE, peer.source)
            self._leave(peer, task)
            self._enqueue(peer, prefixed((task,), b""), b"")
            return ()

    def _dispatch(
        self, peer: PeerConnection, key: str, task: int | None, line: bytes
    ) -> Sequence[tuple[str, ServerMessage]]:
        message = parse(line)
        request, kind = message.get("id"), message.get("kind")
        if not isinstance(request, int) or not isinstance(kind, str):
            raise ProtocolError("a message without number or kind")
        cluster = self._clusters.running(key)
        if cluster is None:
            raise ProtocolError("a message for a cluster that is not running")
        number = peer.tasks.get(task)
        if number is None:
            number = self._enter(peer, task)
        return cluster.on_message(kind, number, request, message.get("body"), self._clock_ms())

    def _enter(self, peer: PeerConnection, task: int | None) -> int:
        bounds = self._bounds
        if len(peer.tasks) >= bounds.tasks_of_one or len(self._tasks) >= bounds.tasks:
            raise ProtocolError("too many tasks")
        number = peer.number
        if task is not None:
            self._count += 1
            number = self._count
        peer.tasks[task] = number
        self._groups += task is None and peer.is_relay
        self._tasks[number] = peer, task
        return number

    def _on_time(self, key: str) -> None:
        cluster = self._clusters.running(key)
        if cluster is None:
            self._timers.pop(key, None)
            return
        try:
            self._send(cluster.on_time(self._clock_ms()))
        except Exception:  # noqa: BLE001 - a bug in one kind must not end or occupy the others
            _log.exception("a handler failed")
            self._arm(key, at_least_ms=_AFTER_BUG_MS)
            return
        self._arm(key)

    def _arm(self, key: str, at_least_ms: float = 0.0) -> None:
        cluster = self._clusters.running(key)
        if cluster is None:
            return
        delay_ms = min(cluster.next_change_ms(self._clock_ms()), _MAX_TIMER_MS)
        delay_ms = max(delay_ms, at_least_ms)
        timer, loop = self._timers.get(key), asyncio.get_running_loop()
        when = loop.time() + delay_ms / 1000
        if timer is not None:
            # One that comes sooner than needed sets the next: cheaper than a new timer for each message.
            if not timer.cancelled() and loop.time() < timer.when() <= when and not at_least_ms:
                return
            timer.cancel()
        self._timers[key] = loop.call_at(when, self._on_time, key)

    def _send(self, outgoing: Iterable[tuple[str, ServerMessage]]) -> None:
        # Consecutive pushes of one body: a connection gets one line for all its tasks.
        same: tuple[bytes, bytes] | None = None
        receivers: dict[PeerConnection, list[int]] = {}
        pushed: Mapping[str, Any] | None = None
        for kind, one in outgoing:
            found = self._tasks.get(one.task)
            if found is None:
                continue
            peer, task = found
            is_reply = isinstance(one, Reply)
            if one.body is pushed and same is not None and task is not None and not is_reply:
                # To the next of thousands of tasks.
                receivers.setdefault(peer, []).append(task)
                continue
            head: Message = {"kind": kind}
            if isinstance(one, Reply):
                head |= {"id": one.request, "last": one.last}
            start, shared = encode_message(head, one.body)
            if same is not None and (same[0] != start or same[1] is not shared):
                self._push(receivers, *same)
                same = None
            if task is None:
                self._enqueue(peer, start, shared)
            elif is_reply or not shared:
                self._enqueue(peer, prefixed((task,), start), shared)
            else:
                same, pushed = (start, shared), one.body
                receivers.setdefault(peer, []).append(task)
        if same is not None:
            self._push(receivers, *same)
        self._write()

    def _push(self, receivers: dict[PeerConnection, list[int]], start: bytes, shared: bytes) -> None:
        for peer, tasks in receivers.items():
            self._enqueue(peer, prefixed(tasks, start), shared)
        receivers.clear()

    def _enqueue(self, peer: PeerConnection, start: bytes, shared: bytes) -> None:
        if peer.is_gone:
            return
        was_behind = peer.is_behind
        self._grown_bytes += peer.enqueue(start, shared)
        if not was_behind and peer.is_behind:
            self._to_write.append(peer)
        if peer.unread > self._bounds.unread_bytes:
            self._connections.drop(peer, Dropped.UNREAD)

    def on_writable(self, peer: PeerConnection) -> None:
        if not peer.is_gone and peer.is_behind:
            self._to_write.append(peer)
            self._write()

    def _write(self) -> None:
        """Write to peers in turn, and a bounded amount at once, so that others are read in between."""
        if self._writing:
            return
        left = _WRITE_AT_ONCE
        while self._to_write and left > 0:
            peer = self._to_write.popleft()
            if peer.is_gone:
                continue
            try:
                left -= peer.flush(min(left, _PEER_AT_ONCE))
            except ProtocolError:
                _log.exception("a message that is too large")
                self._connections.remove(peer)
                continue
            if peer.is_behind:
                self._to_write.append(peer)
            if peer.unread:
                self._connections.note_unread(peer)
        if self._grown_bytes >= self._bounds.unread_bytes_of_all // _CHECKS_OF_UNREAD:
            self._grown_bytes = 0
            self._connections.bound_unread()
        if self._to_write and self._loop is not None:
            self._writing = True
            self._loop.call_soon(self._write_on)

    def _write_on(self) -> None:
        self._writing = False
        self._write()

    # -- sweep --------------------------------------------------------------------------------------

    def _sweep_later(self) -> None:
        asyncio.get_running_loop().call_later(self._bounds.sweep_ms / 1000, self._sweep)

    def _sweep(self) -> None:
        now_ms = self._clock_ms()
        self._connections.sweep(now_ms, self._watch.stood_ms(now_ms))
        for line in (self._connections.log.line(now_ms), self._watch.line(now_ms)):
            if line is not None:
                _log.warning("%s; connections: %s", line, self._connections.described())
        for key in self._clusters.stop_idle(now_ms):
            timer = self._timers.pop(key, None)
            if timer is not None:
                timer.cancel()
        if self._is_out_of_files and self._listening is not None and self._loop is not None:
            self._is_out_of_files = False
            self._loop.add_reader(self._listening.fileno(), self._accept)
        self._sweep_later()
