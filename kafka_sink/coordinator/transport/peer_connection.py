"""One connection of the server: receives bytes, and sends messages as fast as the peer reads. No policy."""

from __future__ import annotations

import asyncio
import math
from collections import ChainMap, deque
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from kafka_sink.coordinator.transport.handlers import SharedBody
from kafka_sink.coordinator.transport.session import (
    MAX_HANDSHAKE_BYTES,
    OVERHEAD_BYTES,
    FrameReader,
    Session,
    dump,
)

# Bytes that the transport may buffer. More waits in the queue, where connections share message bodies.
_PIECE_BYTES = 64 * 1024
# Messages below this size are joined in one frame.
_SMALL_BYTES = 4096


class Owner(Protocol):
    """The callbacks of the server."""

    def on_opened(self, peer: PeerConnection) -> None: ...
    def on_bytes(self, peer: PeerConnection, data: bytes) -> None: ...
    def on_writable(self, peer: PeerConnection) -> None: ...
    def on_closed(self, peer: PeerConnection) -> None: ...


class PeerConnection(asyncio.Protocol):
    """``source`` is the peer's address without port. Times are monotonic milliseconds, sizes are bytes."""

    def __init__(self, number: int, source: str, session: Session, owner: Owner, now_ms: float) -> None:
        self.number = number
        self.source = source
        self.session = session
        self.frames = FrameReader(MAX_HANDSHAKE_BYTES)
        self.cluster: str | None = None
        self.is_relay = False
        # The tasks that have sent a message, by their numbers on this connection. None: its only task, or the
        # relay itself; their messages carry no number.
        self.tasks: dict[int | None, int] = {}
        self.opened_ms = self.heard_ms = now_ms
        # When the incomplete frame began, and since when the peer has left bytes unread.
        self.begun_ms = self.unread_since_ms = math.inf
        # The messages that the rate limit still admits at once, as of ``allowed_ms``.
        self.allowance = 1.0
        self.is_paused = False
        self.allowed_ms = now_ms
        self.unfinished = 0
        self.is_gone = False
        # Among the connections of its address without proof.
        self.place = 0
        self._owner = owner
        self._transport: asyncio.Transport | None = None
        self._is_writable = True
        self._queue: deque[tuple[bytes, bytes]] = deque()
        # The rest of the frame that is being written, encrypted piece by piece, and its bytes.
        self._pieces: Iterator[bytes] = iter(())
        self._left_of_frame = 0
        self._queued = self._held = self._own_pieces = 0
        self._enqueued = 0
        # How many bytes the peer had taken at the last sweep.
        self.taken_before = 0

    # -- asyncio ------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.set_write_buffer_limits(high=_PIECE_BYTES)
        self._owner.on_opened(self)

    def data_received(self, data: bytes) -> None:
        self._owner.on_bytes(self, data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._owner.on_closed(self)

    def pause_writing(self) -> None:
        self._is_writable = False

    def resume_writing(self) -> None:
        self._is_writable = True
        self._owner.on_writable(self)

    @property
    def transport(self) -> asyncio.Transport:
        """The transport. It exists as soon as bytes have been received."""
        assert self._transport is not None
        return self._transport

    def forgive(self, stood_ms: float) -> None:
        """The server has stood still for so long."""
        self.opened_ms += stood_ms
        self.heard_ms += stood_ms
        self.begun_ms += stood_ms
        self.unread_since_ms += stood_ms

    # -- sending ------------------------------------------------------------------------------------

    @property
    def unread(self) -> int:
        """Bytes that the peer has not read yet."""
        return self._queued + self._buffered

    @property
    def taken(self) -> int:
        """How many bytes the system has taken for the peer so far."""
        return self._enqueued - self.unread

    @property
    def held(self) -> int:
        """Bytes of memory held for this peer alone."""
        return self._held + self._own_pieces + self._buffered

    @property
    def _buffered(self) -> int:
        return 0 if self._transport is None or self.is_gone else self._transport.get_write_buffer_size()

    @property
    def is_behind(self) -> bool:
        """Whether the queue holds bytes that can be written now."""
        is_open = self._is_writable and self._transport is not None and not self._transport.is_closing()
        return is_open and bool(self._queue or self._left_of_frame)

    def enqueue(self, start: bytes, shared: bytes) -> int:
        """Queue a line in two parts, of which connections share the second. Returns the first's size."""
        self._queue.append((start, shared))
        self._queued += len(start) + len(shared)
        self._enqueued += len(start) + len(shared)
        self._held += len(start)
        return len(start)

    def flush(self, max_bytes: int) -> int:
        """Write while the peer keeps up, until ``max_bytes`` are reached, which the last piece may exceed.
        Returns the number of bytes written."""
        written = 0
        while self.is_behind and written < max_bytes:
            if not self._left_of_frame:
                self._encode_next()
            piece = next(self._pieces)
            self._left_of_frame -= len(piece)
            self._queued -= len(piece)
            # The part that is not shared is sent first.
            self._own_pieces = max(0, self._own_pieces - len(piece))
            written += len(piece)
            self.transport.write(piece)
        return written

    def _encode_next(self) -> None:
        """Encode a frame only when it is sent: until then peers share it, and from then on each has its own.

        Small messages that wait together share one.
        """
        start, shared = self._queue.popleft()
        size, own = len(start) + len(shared), len(start)
        if size < _SMALL_BYTES:
            lines = [start + shared]
            while self._queue and size < _PIECE_BYTES // 2:
                start, shared = self._queue[0]
                if len(start) + len(shared) >= _SMALL_BYTES:
                    break
                self._queue.popleft()
                lines.append(start + shared)
                size += len(start) + len(shared)
                own += len(start)
            start, shared = b"\n".join(lines), b""
        self._held -= own
        self._pieces = self.session.encode_in_pieces(start, shared, _PIECE_BYTES)
        self._left_of_frame = len(start) + len(shared) + OVERHEAD_BYTES
        self._queued += self._left_of_frame - size
        self._enqueued += self._left_of_frame - size
        self._own_pieces = len(start) + OVERHEAD_BYTES

    def abort(self) -> None:
        """Close the connection at once, without reading or writing more."""
        self.is_gone = True
        self._queue.clear()
        self._pieces = iter(())
        self._queued = self._held = self._own_pieces = self._left_of_frame = 0
        if self._transport is not None:
            self._transport.abort()


def encode_message(head: Mapping[str, Any], body: Mapping[str, Any]) -> tuple[bytes, bytes]:
    """The JSON of a message in two parts. The second part is one object for all peers that share it."""
    shared = body if isinstance(body, SharedBody) else None
    facts: Mapping[str, Any] = {}
    if isinstance(body, ChainMap) and isinstance(body.maps[-1], SharedBody):
        facts, shared = body.maps[0], body.maps[-1]
    if shared is None:
        return dump({**head, "body": body}), b""
    start = dump(head)[:-1] + b',"body":' + dump(facts)[:-1]
    return start + (b"," if facts and shared else b""), shared.tail
