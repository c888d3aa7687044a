"""One connection of the server: bytes in, messages out in pieces that its peer can take. No policy."""

from __future__ import annotations

import asyncio
import json
import math
from collections import ChainMap, deque
from collections.abc import Mapping
from typing import Any, Protocol

from kafka_sink.coordinator.server.handlers import SharedBody
from kafka_sink.coordinator.wire.session import MAX_HANDSHAKE_BYTES, FrameReader, Session

# What the transport may hold; the rest waits in the queue, where bodies are shared with other connections.
_PIECE_BYTES = 64 * 1024


class Owner(Protocol):
    """The server, as a connection sees it."""

    def on_opened(self, peer: PeerConnection) -> None: ...
    def on_bytes(self, peer: PeerConnection, data: bytes) -> None: ...
    def on_writable(self, peer: PeerConnection) -> None: ...
    def on_closed(self, peer: PeerConnection) -> None: ...


class PeerConnection(asyncio.Protocol):
    """``source`` is the peer's address without port. Times are monotonic milliseconds, sizes bytes."""

    def __init__(self, number: int, source: str, session: Session, owner: Owner, now_ms: float) -> None:
        self.number = number
        self.source = source
        self.session = session
        self.frames = FrameReader(MAX_HANDSHAKE_BYTES)
        self.cluster: str | None = None
        self.opened_ms = self.heard_ms = now_ms
        # Since when a frame has been unfinished, and bytes unread.
        self.begun_ms = self.unread_since_ms = math.inf
        # Messages that may still be handled at once, at this time.
        self.allowance = 1.0
        self.is_paused = False
        self.allowed_ms = now_ms
        self.unfinished = 0
        self.is_gone = False
        self._owner = owner
        self._transport: asyncio.Transport | None = None
        self._is_writable = True
        self._queue: deque[tuple[bytes, bytes]] = deque()
        self._pieces: deque[memoryview] = deque()
        self._queued = self._held = self._own_pieces = 0

    # -- asyncio ------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio.Protocol."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.set_write_buffer_limits(high=_PIECE_BYTES)
        self._owner.on_opened(self)

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        self._owner.on_bytes(self, data)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio.Protocol's signature
        """See asyncio.Protocol."""
        self._owner.on_closed(self)

    def pause_writing(self) -> None:
        """See asyncio.Protocol."""
        self._is_writable = False

    def resume_writing(self) -> None:
        """See asyncio.Protocol."""
        self._is_writable = True
        self._owner.on_writable(self)

    @property
    def transport(self) -> asyncio.Transport:
        """Once the loop has made it, as it has when bytes have come."""
        assert self._transport is not None
        return self._transport

    # -- what goes out ------------------------------------------------------------------------------

    @property
    def unread(self) -> int:
        """Bytes that wait until the peer takes them."""
        return self._queued + self._buffered

    @property
    def held(self) -> int:
        """Bytes of memory that wait for this peer alone."""
        return self._held + self._own_pieces + self._buffered

    @property
    def _buffered(self) -> int:
        return 0 if self._transport is None or self.is_gone else self._transport.get_write_buffer_size()

    @property
    def is_behind(self) -> bool:
        """Whether something waits in the queue and could be written now."""
        is_open = self._is_writable and self._transport is not None and not self._transport.is_closing()
        return is_open and bool(self._queue or self._pieces)

    def enqueue(self, head: Mapping[str, Any], body: Mapping[str, Any]) -> int:
        """A message; ``flush`` sends it. ``head`` is all but the body. Returns how many bytes it takes."""
        start, shared = encode_message(head, body)
        self._queue.append((start, shared))
        self._queued += len(start) + len(shared)
        self._held += len(start)
        return len(start)

    def flush(self, most: int) -> int:
        """Writes up to ``most`` bytes and a piece, as long as the peer takes them; returns how many."""
        written = 0
        while self.is_behind and written < most:
            if not self._pieces:
                self._encode_next()
            piece = self._pieces.popleft()
            if len(piece) > _PIECE_BYTES:
                self._pieces.appendleft(piece[_PIECE_BYTES:])
                piece = piece[:_PIECE_BYTES]
            self._queued -= len(piece)
            # What is this peer's alone comes first.
            self._own_pieces = max(0, self._own_pieces - len(piece))
            written += len(piece)
            self.transport.write(piece)
        return written

    def _encode_next(self) -> None:
        """Frames are numbered, so their tags are made in the order in which they are sent."""
        start, shared = self._queue.popleft()
        self._held -= len(start)
        head, rest = self.session.encode_parts(start, shared)
        self._queued += len(head) - len(start)
        self._own_pieces = len(head)
        if len(head) + len(rest) <= _PIECE_BYTES:
            self._pieces.append(memoryview(head + rest))  # one call to the system
        else:
            self._pieces.extend(memoryview(part) for part in (head, rest) if part)

    def abort(self) -> None:
        """Ends it at once; nothing more is read or written."""
        self.is_gone = True
        self._queue.clear()
        self._pieces.clear()
        self._queued = self._held = self._own_pieces = 0
        if self._transport is not None:
            self._transport.abort()


def encode_message(head: Mapping[str, Any], body: Mapping[str, Any]) -> tuple[bytes, bytes]:
    """The JSON of a message in two parts, of which the second is the same object for all that share it."""
    shared = body if isinstance(body, SharedBody) else None
    facts: Mapping[str, Any] = {}
    if isinstance(body, ChainMap) and isinstance(body.maps[-1], SharedBody):
        facts, shared = body.maps[0], body.maps[-1]
    if shared is None:
        return _dump({**head, "body": body}), b""
    start = _dump(head)[:-1] + b',"body":' + _dump(facts)[:-1]
    return start + (b"," if facts and shared else b""), shared.tail


def _dump(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()
