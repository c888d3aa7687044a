"""The connections between tasks and the coordinator: TLS 1.3, frames, and bounds of what peers may cost.

    client -> server   TLS handshake with the server name ``name``; the client accepts only one certificate
    client -> server   a frame with the version and the token
    both directions    frames of messages

A frame is four bytes of length and a message. The process creates its key and certificate when it starts.
Their fingerprint, the token and the name travel with the plan. So a task talks to no other process, and a
client that does not have the name costs no handshake.

The server reads and writes through ``ssl.MemoryBIO`` and not through the transports for brokers: it accepts
connections, and must bound the work that a peer causes at once. Clients use blocking sockets.
"""

from __future__ import annotations

import hashlib
import hmac
import math
import secrets
import socket
import ssl
import struct
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from random import Random
from typing import Any

from kafka_sink.clock import RANDOM
from kafka_sink.coordinator.address import CoordinatorAddress
from kafka_sink.coordinator.schema import MAX_MESSAGE_BYTES, Message, decode, encode
from kafka_sink.errors import ProtocolError

VERSION = 8
TOKEN_BYTES = 32
_PROOF_BYTES = 1 + TOKEN_BYTES
_LENGTH = struct.Struct(">I")
# The approximate memory of a message besides its bytes.
_OBJECT_BYTES = 100
_READ_BYTES = 16 * 1024
# OpenSSL keeps a buffer as large as the largest piece for each connection.
_PIECE_BYTES = 8 * 1024
# The bytes of TLS's own messages, such as key updates, that a peer may send without any data.
_MAX_WITHOUT_DATA = 64 * 1024


@dataclass(frozen=True, slots=True)
class ServerIdentity:
    """The server's key and tokens, and what peers must have to connect."""

    context: ssl.SSLContext = field(repr=False)
    fingerprint: bytes
    name: str = field(repr=False)
    token: bytes = field(repr=False)
    # It never leaves the driver's host: see ``Message.is_of_driver``.
    driver_token: bytes = field(repr=False)

    def address(self, host: str, port: int) -> CoordinatorAddress:
        """The address for tasks. The identity itself has no host and port."""
        return CoordinatorAddress(host, port, self.fingerprint, self.name, self.token)


def new_identity() -> ServerIdentity:
    """Create a key of P-256, its certificate, and tokens. The key never leaves the process's memory."""
    from kafka_sink.security.key_material import new_key
    from kafka_sink.security.tls_context import load_key

    key, certificate = new_key("kafka-chunked")
    name = f"{secrets.token_hex(16)}.invalid"
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = 0
    load_key(context, key, "")

    def check_name(_: object, given: str | None, __: object) -> int | None:
        # This is called before any costly step of the handshake.
        return None if given == name else ssl.ALERT_DESCRIPTION_UNRECOGNIZED_NAME

    context.sni_callback = check_name
    fingerprint = hashlib.sha256(certificate).digest()
    tokens = secrets.token_bytes(TOKEN_BYTES), secrets.token_bytes(TOKEN_BYTES)
    return ServerIdentity(context, fingerprint, name, *tokens)


def framed(message: Message) -> bytes:
    """The frame of a message. Raises ProtocolError for one that is too large."""
    return framed_bytes(encode(message))


def framed_bytes(data: bytes) -> bytes:
    """The bytes with their frame's length before them."""
    return _LENGTH.pack(len(data)) + data


class FrameReader:
    """Splits a stream of bytes into messages. ``max_bytes`` bounds the next one; callers may raise it."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._received = bytearray()

    @property
    def buffered(self) -> int:
        """Bytes received that ``next_message`` has not returned yet."""
        return len(self._received)

    def feed(self, data: bytes | memoryview) -> None:
        self._received += data

    @property
    def end(self) -> int:
        """Where the next message ends, or 0 while it is incomplete. Raises ProtocolError for a large one."""
        if len(self._received) < _LENGTH.size:
            return 0
        (length,) = _LENGTH.unpack_from(self._received)
        if not 1 <= length <= self.max_bytes:
            raise ProtocolError(f"a frame has {length:,} bytes, and at most {self.max_bytes:,} are allowed")
        end = _LENGTH.size + int(length)
        return end if len(self._received) >= end else 0

    def next_message(self) -> bytes | None:
        """The next message's bytes, or None while it is incomplete. Raises ProtocolError like ``end``."""
        end = self.end
        if not end:
            return None
        message = bytes(self._received[_LENGTH.size : end])
        del self._received[:end]
        return message


class Connection:
    """A client's blocking connection, for tasks and the driver.

    ``silence_ms`` bounds connecting, and each wait for the peer within a message. Close it after an error.
    """

    def __init__(self, address: CoordinatorAddress, silence_ms: float) -> None:
        with socket.create_connection((address.host, address.port), timeout=silence_ms / 1000) as connected:
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            # If a connection is reset, wrap_socket would leak its descriptor. This fails before.
            connected.getpeername()
            # wrap_socket takes over the descriptor.
            self.socket = _client_context().wrap_socket(connected, server_hostname=address.name)
        try:
            shown = self.socket.getpeercert(binary_form=True) or b""
            # TLS 1.3 has proved that the peer has the certificate's key.
            if not hmac.compare_digest(hashlib.sha256(shown).digest(), address.fingerprint):
                raise ProtocolError("its certificate is not the coordinator's: another process has this port")
            self.socket.sendall(framed_bytes(bytes((VERSION,)) + address.token))
        except BaseException:
            self.socket.close()
            raise
        self._frames = FrameReader(MAX_MESSAGE_BYTES)

    def send(self, message: Message) -> None:
        try:
            self.socket.sendall(framed(message))
        except ssl.SSLEOFError as error:
            raise ConnectionError("it closed the connection") from error

    def receive(self) -> list[Message]:
        """Wait for bytes. Returns the messages that are complete, perhaps none."""
        data = self.socket.recv(_READ_BYTES)
        if not data:
            raise ConnectionError("it closed the connection")
        self._frames.feed(data)
        while self.socket.pending():
            self._frames.feed(self.socket.recv(_READ_BYTES))
        messages: list[Message] = []
        while (message := self._frames.next_message()) is not None:
            messages.append(decode(message))
        return messages


def _client_context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # No authority has signed the certificate. Its fingerprint is compared instead.
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


class Peer:
    """One connection of the server. It receives bytes, and sends messages as fast as the peer reads.

    ``source`` is the peer's address without its port. Times are monotonic milliseconds, sizes are bytes.
    """

    __slots__ = (
        "_at", "_incoming", "_outgoing", "_queue", "_queued", "_rest", "_tls", "_without_data",
        "begun_ms", "due_ms", "fd", "frames", "heard_ms", "is_authenticated",
        "is_driver", "is_gone", "joined", "number", "socket", "source", "unfinished", "unread_since_ms",
        "waits_since_ms",
    )  # fmt: skip

    def __init__(self, number: int, source: str, connected: socket.socket, now_ms: float) -> None:
        self.number = number
        self.source = source
        self.is_authenticated = self.is_driver = self.is_gone = False
        # The instances of services that the peer has joined, by class.
        self.joined: dict[Any, Any] = {}
        self.frames = FrameReader(_PROOF_BYTES)
        # When the incomplete message began (the first one: the connection), and when data last arrived.
        self.begun_ms = self.heard_ms = now_ms
        # Since when the system has accepted no more data for the peer, because the peer does not read.
        self.unread_since_ms = math.inf
        self.waits_since_ms = math.inf
        # When its messages so far would have arrived at the allowed rate.
        self.due_ms = -math.inf
        self.unfinished = 0
        self.socket = connected
        # asyncio is given this and not the socket, whose addresses its KeyErrors would look up.
        self.fd = connected.fileno()
        self._tls: ssl.SSLObject | None = None
        self._without_data = 0
        # The messages, and for each whether peers share it. Then how many bytes of the first one are
        # encrypted, and how many bytes of all are not. An empty deque would take 600 bytes.
        self._queue: list[tuple[bytes, bool]] = []
        self._at = self._queued = 0
        self._rest = memoryview(b"")

    @property
    def has_begun(self) -> bool:
        """Whether the TLS handshake, which costs a signature, has begun."""
        return self._tls is not None

    @property
    def is_waiting(self) -> bool:
        """Whether the server makes the peer wait, before it reads or handles more of its messages."""
        return self.waits_since_ms < math.inf

    def receive(self, context: ssl.SSLContext) -> None:
        """Read the bytes that have arrived, up to a bound, and decrypt them.

        Raises OSError at the end of the stream, and for TLS errors; ProtocolError for TLS without data.
        """
        try:
            data = self.socket.recv(_READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        if not data:
            raise ConnectionError("it closed the connection")
        if self._tls is None:
            if self._has_left():
                raise ConnectionError("it closed the connection before its turn")
            # Create these only now, so that a silent connection costs no more than a socket.
            self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
            self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=True)
        self._incoming.write(data)
        self._without_data += len(data)
        try:
            self._decrypt(self._tls)
        except ssl.SSLWantReadError:
            pass  # the rest of a record has not come
        finally:
            # Send parts of the handshake, replies to key updates, and alerts.
            self._flush_tls()
        if self._without_data > _MAX_WITHOUT_DATA:
            raise ProtocolError("too many TLS messages without data")

    def _has_left(self) -> bool:
        """Whether the peer has disconnected before its TLS handshake. With thousands of simultaneous connects
        some peers give up while queued, and must not cost a handshake."""
        try:
            return not self.socket.recv(1, socket.MSG_PEEK)
        except (BlockingIOError, InterruptedError):
            return False

    def _decrypt(self, tls: ssl.SSLObject) -> None:
        while True:
            # The first call also does the handshake.
            piece = tls.read(_READ_BYTES)
            if not piece:
                raise ConnectionError("it closed the connection")
            self._without_data = 0
            self.frames.feed(piece)

    @property
    def unread(self) -> int:
        """Bytes that the peer has not read yet."""
        return self._queued + len(self._rest)

    @property
    def own_bytes(self) -> int:
        """Bytes of memory that this peer alone occupies."""
        own = sum(_OBJECT_BYTES + len(data) for data, shared in self._queue if not shared)
        return own + len(self._rest)

    def enqueue(self, data: bytes, *, shared: bool) -> None:
        """Queue the frame of a message, which other peers may share."""
        self._queue.append((data, shared))
        self._queued += len(data)

    def flush(self, most: int) -> int:
        """Write while the peer reads fast enough, up to ``most`` bytes. Returns their number. Raises OSError.

        Messages are encrypted here and not before, so that peers can share one copy.
        """
        written = 0
        while self._flush_tls() and self._queue and written < most:
            assert self._tls is not None
            data, _ = self._queue[0]
            piece = memoryview(data)[self._at : self._at + _PIECE_BYTES]
            self._tls.write(piece)
            written += len(piece)
            self._at += len(piece)
            self._queued -= len(piece)
            if self._at == len(data):
                del self._queue[0]
                self._at = 0
        return written

    def _flush_tls(self) -> bool:
        """Write the bytes that TLS has ready. Returns whether the system accepted all of them."""
        while self._rest or (self._tls is not None and self._outgoing.pending):
            if not self._rest:
                self._rest = memoryview(self._outgoing.read())
            try:
                sent = self.socket.send(self._rest)
            except (BlockingIOError, InterruptedError):
                return False
            self._rest = self._rest[sent:]
        return True

    def close(self) -> None:
        """Close the connection at once, without reading or writing more."""
        self.is_gone = True
        self._queue.clear()
        self._queued = 0
        self._rest = memoryview(b"")
        self.socket.close()


class Dropped(Enum):
    """Why a peer was dropped. The text completes a log line that begins with a number of connections."""

    NOT_AUTHENTICATED = "used a wrong token, or have another version of the package"
    TOO_LATE = "did not authenticate in time"
    MADE_ROOM = "had not authenticated, and were dropped in favour of new ones"
    NONSENSE = "sent an invalid message"
    HELD_BACK = "sent more messages than allowed, and were slowed down"
    STALLED = "did not complete a message in time"
    UNREAD = "did not read the data sent to them"


# How often the dropped connections are logged, in one line.
_LOG_MS = 60_000.0


@dataclass(frozen=True, slots=True)
class ServerBounds:
    """Counts, bytes and milliseconds.

    ``connections``: authenticated connections. ``reserved``: further ones, for the driver alone.
    ``messages_per_s`` and ``burst``: for each peer; a long message counts as several. ``messages_at_once``
    and ``iteration_ms``: for all peers in one iteration of the loop. ``greeting_ms``: the time in one
    iteration for first messages, each of which costs a signature. ``frame_ms``: the time from connecting to
    the token, not counting the wait for a turn; also the time for the rest of a message, and for a peer to
    read some of the data that waits for it. ``unread_bytes_of_all`` does not count messages to many peers,
    which share one copy. ``instances``: of services for groups. ``sweep_ms``: how often times are checked.
    """

    connections: int = 20_000
    reserved: int = 64
    unauthenticated: int = 8_192
    messages_per_s: float = 50.0
    burst: float = 500.0
    messages_at_once: int = 500
    iteration_ms: float = 20.0
    greeting_ms: float = 10.0
    unfinished_bytes: int = 32 * 1024 * 1024
    unread_bytes: int = 1024 * 1024
    unread_bytes_of_all: int = 32 * 1024 * 1024
    frame_ms: float = 10_000.0
    silence_ms: float = 120_000.0
    instances: int = 500
    sweep_ms: float = 1000.0


class Connections:
    """Decides which connections of the server are kept, using bounds of number, bytes and time.

    ``on_removed`` is called once for each connection that ends. Times are monotonic milliseconds.
    """

    def __init__(
        self, bounds: ServerBounds, on_removed: Callable[[Peer], None], random: Random = RANDOM
    ) -> None:
        self._bounds = bounds
        self._on_removed = on_removed
        self._random = random
        self.peers: dict[int, Peer] = {}
        # The number of authenticated connections, and the others by address.
        self.authenticated = 0
        self._unauthenticated: dict[str, dict[int, Peer]] = {}
        self._unfinished = 0
        # The number of dropped connections since the last log line and a recent address, for each reason.
        self._dropped: Counter[Dropped] = Counter()
        self._sources: dict[Dropped, str] = {}
        self._logged_ms = -math.inf

    def add(self, peer: Peer) -> None:
        """Add a new connection.

        This must be cheap, because a flood passes through it. At the bound, a connection that has not
        authenticated is dropped: a random one of the address with the most of them. So a flood hits itself,
        and a task at the same address is unlikely to be hit in the moment that its handshake takes.
        """
        if len(self.peers) - self.authenticated >= self._bounds.unauthenticated:
            most = max(self._unauthenticated.values(), key=len)
            self.drop(most[self._random.choice(list(most))], Dropped.MADE_ROOM)
        self.peers[peer.number] = peer
        self._unauthenticated.setdefault(peer.source, {})[peer.number] = peer

    def on_authenticated(self, peer: Peer) -> None:
        """The peer has sent the token."""
        self._forget_unauthenticated(peer)
        self.authenticated += 1
        peer.is_authenticated = True
        peer.begun_ms = math.inf
        peer.frames.max_bytes = MAX_MESSAGE_BYTES

    def _forget_unauthenticated(self, peer: Peer) -> None:
        of_source = self._unauthenticated[peer.source]
        del of_source[peer.number]
        if not of_source:
            del self._unauthenticated[peer.source]

    def drop(self, peer: Peer, why: Dropped) -> None:
        if not peer.is_gone:
            self.count_dropped(peer, why)
            self.remove(peer)

    def count_dropped(self, peer: Peer, why: Dropped) -> None:
        self._dropped[why] += 1
        self._sources[why] = peer.source

    def log_line(self, now_ms: float) -> str | None:
        """The line to log now, if any. The first drop is logged at once, later ones together."""
        if not self._dropped or now_ms < self._logged_ms + _LOG_MS:
            return None
        self._logged_ms = now_ms
        reasons = (
            f"{count} {why.value} (the last from {self._sources[why]})"
            for why, count in self._dropped.most_common()
        )
        line = f"connections dropped or slowed down in the last minute: {'; '.join(reasons)}"
        self._dropped.clear()
        return line

    def remove(self, peer: Peer) -> None:
        """End a connection. Does nothing if it has ended already."""
        if self.peers.pop(peer.number, None) is None:
            return
        if peer.is_authenticated:
            self.authenticated -= 1
        else:
            self._forget_unauthenticated(peer)
        self._unfinished -= peer.unfinished
        self._on_removed(peer)
        peer.close()

    def close(self) -> None:
        for peer in list(self.peers.values()):
            self.remove(peer)

    def count_unfinished(self, peer: Peer, now_ms: float) -> None:
        """Count the bytes of an incomplete message. Raises ProtocolError beyond the bound of all peers."""
        buffered = 0 if peer.is_gone else peer.frames.buffered
        self._unfinished += buffered - peer.unfinished
        peer.unfinished = buffered
        if peer.is_authenticated:
            peer.begun_ms = min(peer.begun_ms, now_ms) if buffered and not peer.is_waiting else math.inf
        if self._unfinished > self._bounds.unfinished_bytes:
            raise ProtocolError("the unfinished messages of all peers are too large")

    def bound_unread(self) -> None:
        """Drop the peers with the most unread bytes until the rest is within the bound."""
        behind = [(peer.own_bytes, peer.number) for peer in self.peers.values() if peer.unread]
        in_all = sum(own_bytes for own_bytes, _ in behind)
        for own_bytes, number in sorted(behind, reverse=True):
            if in_all <= self._bounds.unread_bytes_of_all:
                return
            in_all -= own_bytes
            self.drop(self.peers[number], Dropped.UNREAD)

    def drop_late(self, now_ms: float) -> None:
        """Drop the connections that have exceeded a time bound."""
        bounds = self._bounds
        for peer in list(self.peers.values()):
            # Time that a peer waits for its turn does not count against it.
            if not peer.is_waiting and now_ms - peer.begun_ms > bounds.frame_ms:
                self.drop(peer, Dropped.STALLED if peer.is_authenticated else Dropped.TOO_LATE)
            elif not peer.is_waiting and now_ms - peer.heard_ms > bounds.silence_ms:
                self.remove(peer)  # idle between tasks; it reconnects when it has a message
            elif now_ms - peer.unread_since_ms > bounds.frame_ms:
                self.drop(peer, Dropped.UNREAD)
