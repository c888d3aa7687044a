"""One broker connection without its socket: bytes in, answers out; requests in, buffers out.

Kafka answers in order, so requests wait in a queue; anything else than the answer to the oldest one is a
ProtocolError, after which the connection must be closed.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from kafka_sink.errors import ProtocolError
from kafka_sink.network import requests

# The largest Metadata answers are some MiB; nothing near this is sane.
MAX_FRAME_BYTES = 100 * 1024 * 1024
# IOV_MAX on Linux; one sendmsg takes no more buffers.
MAX_BUFFERS_PER_SEND = 1024
_LENGTH = struct.Struct(">i")

Buffer = bytes | memoryview


@dataclass(slots=True)
class OutboundRequest:
    """A request's body as buffers; ``timeout_ms`` counts from when it is handed over."""

    api_key: int
    api_version: int
    body: Sequence[Buffer]
    expects_response: bool
    timeout_ms: float
    tag: object


@dataclass(slots=True)
class InFlight:
    """A request handed to a connection. ``end`` is its last byte's place in the outgoing stream."""

    request: OutboundRequest
    correlation_id: int
    sent_at_ms: float
    begin: int
    end: int


@dataclass(slots=True)
class Outgoing:
    """Buffers still to be written; ``offset`` bytes of the first are gone."""

    buffers: list[Buffer] = field(default_factory=list)
    index: int = 0
    offset: int = 0
    queued_bytes: int = 0
    written_bytes: int = 0

    def add(self, buffers: Sequence[Buffer]) -> None:
        """Queues more."""
        if self.index and self.index == len(self.buffers):
            self.buffers.clear()
            self.index = 0
        self.buffers += buffers
        self.queued_bytes += sum(map(len, buffers))

    @property
    def pending(self) -> bool:
        """Whether anything is left."""
        return self.written_bytes < self.queued_bytes

    def next_buffers(self) -> list[Buffer]:
        """What one sendmsg may take now."""
        part = self.buffers[self.index : self.index + MAX_BUFFERS_PER_SEND]
        if self.offset:
            part[0] = memoryview(part[0])[self.offset :]
        return part

    def advance(self, sent: int) -> None:
        """``sent`` bytes are written; resumes in mid-buffer."""
        self.written_bytes += sent
        left = sent + self.offset
        index = self.index
        buffers = self.buffers
        while index < len(buffers) and left >= len(buffers[index]):
            left -= len(buffers[index])
            # The chunk may go back to the pool once its answer is in; no view of it must linger.
            buffers[index] = b""
            index += 1
        self.index = index
        self.offset = left


class Connection:
    """Protocol state of one connection. Raises ProtocolError on what no broker sends."""

    def __init__(self, client_id: str, name: str) -> None:
        self.outgoing = Outgoing()
        self.in_flight: deque[InFlight] = deque()
        self._client_id = client_id
        self._name = name
        self._next_correlation = 0
        self._buffer = bytearray()

    def submit(self, request: OutboundRequest, now_ms: float) -> InFlight:
        """Queues a request's bytes. One that expects no answer is done once written."""
        correlation = self._next_correlation
        self._next_correlation = (correlation + 1) & 0x7FFFFFFF
        header = requests.encode_header(request.api_key, request.api_version, correlation, self._client_id)
        size = len(header) + sum(map(len, request.body))
        begin = self.outgoing.queued_bytes
        self.outgoing.add([_LENGTH.pack(size) + header, *request.body])
        entry = InFlight(request, correlation, now_ms, begin, begin + size + 4)
        self.in_flight.append(entry)
        return entry

    def written(self) -> list[InFlight]:
        """Requests without an answer whose bytes are all written: they are complete."""
        done = []
        while (
            self.in_flight
            and not self.in_flight[0].request.expects_response
            and self.in_flight[0].end <= self.outgoing.written_bytes
        ):
            done.append(self.in_flight.popleft())
        return done

    def receive(self, data: bytes) -> list[tuple[InFlight, memoryview]]:
        """Takes received bytes in pieces of any size; returns the answers they complete, bodies only."""
        self._buffer += data
        answers = []
        at = 0
        while len(self._buffer) - at >= 4:
            (size,) = _LENGTH.unpack_from(self._buffer, at)
            if not 4 <= size <= MAX_FRAME_BYTES:
                raise ProtocolError(
                    f"{self._name} sent a frame length of {size} bytes: not a Kafka broker, a TLS port, "
                    "or a broken connection"
                )
            if len(self._buffer) - at - 4 < size:
                break
            payload = memoryview(bytes(self._buffer[at + 4 : at + 4 + size]))
            at += 4 + size
            answers.append(self._match(payload))
        del self._buffer[:at]
        return answers

    def _match(self, payload: memoryview) -> tuple[InFlight, memoryview]:
        (correlation,) = _LENGTH.unpack_from(payload)
        if not self.in_flight:
            raise ProtocolError(f"{self._name} answered (id {correlation}) where nothing was asked")
        entry = self.in_flight[0]
        if correlation != entry.correlation_id:
            raise ProtocolError(
                f"{self._name} answered correlation id {correlation} where {entry.correlation_id} is due"
            )
        self.in_flight.popleft()
        request = entry.request
        size = requests.response_header_size(request.api_key, request.api_version, payload)
        return entry, payload[size:]

    def possibly_sent(self, entry: InFlight) -> bool:
        """Whether any byte of the request has left: only then may the broker have acted on it."""
        return self.outgoing.written_bytes > entry.begin
