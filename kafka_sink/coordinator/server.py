"""The coordinator's sockets: who may speak, how much and how long. What is said is the handlers' matter.

One asyncio loop. Bounds: connections, of which those that have proved nothing are the first to go; the bytes
of one frame and of all unfinished ones; the time for the challenge, for the rest of a frame that has begun,
and for a peer to read what it is sent.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from kafka_sink.coordinator.connection_log import ConnectionLog, Dropped
from kafka_sink.coordinator.handlers import HandlerFactory, Outgoing, Reply
from kafka_sink.coordinator.messages import MOST_HANDSHAKE_BYTES, FrameReader, Message, Session
from kafka_sink.coordinator.served_clusters import ServedClusters
from kafka_sink.errors import ProtocolError
from kafka_sink.options import SinkOptions

_log = logging.getLogger(__name__)
_READ_BYTES = 64 * 1024
_LONGEST_TIMER_MS = 60_000.0
_AFTER_BUG_MS = 1000.0


@dataclass(frozen=True, slots=True)
class ServerBounds:
    """Counts, bytes and milliseconds. ``silence_ms``: a connection without any frame for so long is closed;
    ``frame_ms``: for the rest of a frame once it has begun, and for a peer to take what waits for it;
    ``cluster_idle_ms``: a cluster without any connection for so long gives its threads and memory back."""

    connections: int = 1024
    unproved: int = 64
    request_bytes: int = 2 * 1024 * 1024
    unfinished_bytes: int = 64 * 1024 * 1024
    unread_bytes: int = 16 * 1024 * 1024
    unread_bytes_of_all: int = 256 * 1024 * 1024
    clusters: int = 64
    cluster_idle_ms: float = 600_000.0
    challenge_ms: float = 2000.0
    frame_ms: float = 5000.0
    silence_ms: float = 120_000.0


class _Peer:
    """One connection."""

    def __init__(
        self, number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: bytes
    ) -> None:
        self.number = number
        self.reader = reader
        self.writer = writer
        self.session = Session(secret, "server")
        self.frames = FrameReader(MOST_HANDSHAKE_BYTES)
        self.cluster: str | None = None
        self.source = str((writer.get_extra_info("peername") or ("unknown",))[0])
        self.unfinished = 0
        self.unread_since_ms: float | None = None

    @property
    def unread(self) -> int:
        """Bytes that wait until the peer takes them."""
        return self.writer.transport.get_write_buffer_size()

    def abort(self) -> None:
        self.writer.transport.abort()


class CoordinatorServer:
    """Serves clusters that were added, each known by its key. All methods belong to the loop's thread.

    ``factories``: kinds of messages. ``look``: called when a peer names an unknown cluster, which may have
    been announced but not read yet. ``forgotten``: called with the key of a cluster that had to make room.
    """

    def __init__(
        self,
        secret: bytes,
        factories: Mapping[str, HandlerFactory],
        clock_ms: Callable[[], float],
        bounds: ServerBounds = ServerBounds(),
        look: Callable[[], None] = lambda: None,
        forgotten: Callable[[str], None] = lambda key: None,
    ) -> None:
        self._secret = secret
        self._clock_ms = clock_ms
        self._bounds = bounds
        self._look = look
        self._clusters = ServedClusters(
            factories, self._wake, forgotten, most=bounds.clusters, idle_ms=bounds.cluster_idle_ms
        )
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._peers: dict[int, _Peer] = {}
        self._count = 0
        self._unfinished = 0
        # Peers that had bytes to read when they were last told something.
        self._behind: set[_Peer] = set()
        self._log = ConnectionLog()
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def connections(self) -> int:
        """How many there are now."""
        return len(self._peers)

    def add_cluster(self, key: str, options: SinkOptions) -> None:
        """Serve another cluster; one that is known stays as it is. Too many: one without tasks makes room."""
        if not self._clusters.add(key, options, self._clock_ms()):
            _log.warning("more than %d clusters with tasks: one is not served", self._bounds.clusters)

    def _wake(self, key: str) -> None:
        """Any thread."""
        if self._loop is None:
            return
        try:
            self._loop.call_soon_threadsafe(self._on_time, key)
        except RuntimeError:
            pass  # the loop has ended, and with it whoever would want to know

    async def start(self, listening: socket.socket) -> None:
        """Begin to accept."""
        self._loop = asyncio.get_running_loop()
        self._server = await asyncio.start_server(
            self._accept, sock=listening, limit=_READ_BYTES, backlog=self._bounds.connections
        )
        self._sweep_later()

    def close(self) -> None:
        """End all connections and handlers."""
        if self._server is not None:
            self._server.close()
        for peer in list(self._peers.values()):
            peer.abort()
        for task in self._tasks:
            task.cancel()
        for timer in self._timers.values():
            timer.cancel()
        self._clusters.close()

    # -- connections --------------------------------------------------------------------------------

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._count += 1
        peer = _Peer(self._count, reader, writer, self._secret)
        self._make_room()
        if len(self._peers) >= self._bounds.connections:
            self._log.note(Dropped.FULL, peer.source)
            peer.abort()
            return
        self._peers[peer.number] = peer
        task = asyncio.current_task()
        if task is not None:
            self._tasks.add(task)
        try:
            await self._converse(peer)
        except (TimeoutError, asyncio.TimeoutError):
            # Later on it has only been silent for long, as the worker of an idle application is.
            if not peer.session.established:
                self._log.note(Dropped.NO_PROOF, peer.source)
        except (OSError, EOFError):
            pass  # the peer has gone
        except ProtocolError as error:
            _log.debug("connection %d ended: %s", peer.number, error)
            self._log.note(Dropped.NONSENSE if peer.session.established else Dropped.WRONG_PROOF, peer.source)
        except asyncio.CancelledError:
            pass  # the server closes
        finally:
            if task is not None:
                self._tasks.discard(task)
            self._forget(peer)

    def _make_room(self) -> None:
        """Of those that have proved nothing the oldest goes: who knows the secret proves it at once."""
        unproved = [peer for peer in self._peers.values() if not peer.session.established]
        full = len(self._peers) >= self._bounds.connections
        if unproved and (full or len(unproved) >= self._bounds.unproved):
            self._drop(unproved[0], Dropped.MADE_ROOM)

    def _drop(self, peer: _Peer, why: Dropped) -> None:
        self._log.note(why, peer.source)
        self._forget(peer)

    def _forget(self, peer: _Peer) -> None:
        peer.abort()
        self._behind.discard(peer)
        if self._peers.pop(peer.number, None) is None:
            return
        self._unfinished -= peer.unfinished
        if peer.cluster is None:
            return
        cluster, now_ms = self._clusters.at_work(peer.cluster), self._clock_ms()
        self._clusters.leave(peer.cluster, now_ms)
        if cluster is not None:
            cluster.on_disconnect(peer.number, now_ms)

    async def _converse(self, peer: _Peer) -> None:
        session = peer.session
        peer.writer.write(session.greeting())
        frame = await asyncio.wait_for(self._frame(peer), self._bounds.challenge_ms / 1000)
        peer.writer.write(session.answer_proof(frame))
        peer.frames.most = self._bounds.request_bytes
        while True:
            frame = await self._frame(peer)
            if peer.number not in self._peers:
                return  # it had to go, while this lay in its buffer: nobody would say that it has gone
            message = session.decode(frame)
            if peer.cluster is None:
                self._greet(peer, message)
            else:
                self._dispatch(peer, peer.cluster, message)

    async def _frame(self, peer: _Peer) -> bytes:
        begun_ms: float | None = None
        while (frame := peer.frames.next_frame()) is None:
            begun_ms = begun_ms or (self._clock_ms() if peer.unfinished else None)
            left_ms = self._bounds.silence_ms
            if begun_ms is not None:
                left_ms = max(0.0, begun_ms + self._bounds.frame_ms - self._clock_ms())
            data = await asyncio.wait_for(peer.reader.read(_READ_BYTES), left_ms / 1000)
            if not data:
                raise EOFError("the peer has closed")
            peer.frames.feed(data)
            self._hold(peer, peer.unfinished + len(data))
        self._hold(peer, peer.frames.held)
        return frame

    def _hold(self, peer: _Peer, unfinished: int) -> None:
        self._unfinished += unfinished - peer.unfinished
        peer.unfinished = unfinished
        if self._unfinished > self._bounds.unfinished_bytes:
            raise ProtocolError("too many unfinished frames")

    # -- messages -----------------------------------------------------------------------------------

    def _greet(self, peer: _Peer, message: Message) -> None:
        key = message.get("cluster")
        if not isinstance(key, str):
            raise ProtocolError("a peer must name its cluster first")
        if key not in self._clusters:
            self._look()
        if not self._clusters.enter(key):
            raise ProtocolError("a peer named a cluster that is not served")
        peer.cluster = key

    def _dispatch(self, peer: _Peer, key: str, message: Message) -> None:
        request, kind = message.get("id"), message.get("kind")
        if not isinstance(request, int) or not isinstance(kind, str):
            raise ProtocolError("a message without number or kind")
        cluster = self._clusters.at_work(key)
        if cluster is None:
            raise ProtocolError("a message for a cluster that is at rest")
        self._send(cluster.on_message(kind, peer.number, request, message.get("body"), self._clock_ms()))
        self._arm(key)

    def _on_time(self, key: str) -> None:
        cluster = self._clusters.at_work(key)
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
        cluster = self._clusters.at_work(key)
        if cluster is None:
            return
        delay_ms = min(cluster.next_change_ms(self._clock_ms()), _LONGEST_TIMER_MS)
        delay_ms = max(delay_ms, at_least_ms)
        timer = self._timers.get(key)
        if timer is not None:
            timer.cancel()
        loop = asyncio.get_running_loop()
        self._timers[key] = loop.call_later(delay_ms / 1000, self._on_time, key)

    def _send(self, outgoing: Iterable[tuple[str, Outgoing]]) -> None:
        for kind, one in outgoing:
            peer = self._peers.get(one.peer)
            if peer is None or peer.writer.is_closing():
                continue
            message: Message = {"kind": kind, "body": one.body}
            if isinstance(one, Reply):
                message |= {"id": one.request, "last": one.last}
            peer.writer.write(peer.session.encode(message))
            if peer.unread > self._bounds.unread_bytes:
                self._drop(peer, Dropped.UNREAD)
            elif peer.unread:
                self._behind.add(peer)
                self._bound_unread()

    def _bound_unread(self) -> None:
        """Of all that peers have not read, too: who has most of it goes first, and asks brokers itself."""
        self._behind = {peer for peer in self._behind if peer.unread}
        while sum(peer.unread for peer in self._behind) > self._bounds.unread_bytes_of_all:
            self._drop(max(self._behind, key=lambda peer: peer.unread), Dropped.UNREAD)

    # -- peers that do not read, clusters that nobody uses ------------------------------------------

    def _sweep_later(self) -> None:
        asyncio.get_running_loop().call_later(1.0, self._sweep)

    def _sweep(self) -> None:
        now_ms = self._clock_ms()
        for peer in list(self._peers.values()):
            if not peer.unread:
                peer.unread_since_ms = None
            elif peer.unread_since_ms is None:
                peer.unread_since_ms = now_ms
            elif now_ms - peer.unread_since_ms > self._bounds.frame_ms:
                self._drop(peer, Dropped.UNREAD)
        line = self._log.line(now_ms)
        if line is not None:
            _log.warning("%s", line)
        for key in self._clusters.rest_idle(now_ms):
            timer = self._timers.pop(key, None)
            if timer is not None:
                timer.cancel()
        self._sweep_later()
