"""A client's connection to the coordinator, for tasks, relays and the driver. Blocks."""

from __future__ import annotations

import math
import os
import selectors
import socket
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from kafka_sink.clock import Clock
from kafka_sink.coordinator.transport.address import CoordinatorAddress, Rendezvous
from kafka_sink.coordinator.transport.message_format import unpacked
from kafka_sink.coordinator.transport.session import (
    MAX_FRAME_BYTES,
    MAX_HANDSHAKE_BYTES,
    FrameReader,
    Session,
    parse,
)
from kafka_sink.errors import ProtocolError

READ_BYTES = 256 * 1024
# A turn of a loop that takes so much longer than its wait: the process did not run, nor read what came.
_STOOD_MS = 500.0
# So often in a row the other end gets all its time again: a process that stands still every second does not
# wait for ever.
MAX_ANEW = 3


def stood_still(began_ms: float, timeout_s: float, now_ms: float) -> bool:
    """Whether a turn of a loop ended far too late. Then nobody else has been silent."""
    return now_ms - began_ms - 1000 * timeout_s > _STOOD_MS


@dataclass(frozen=True, slots=True)
class Received:
    """A reply, or a push where ``last`` is None."""

    kind: str
    body: Mapping[str, Any]
    last: bool | None


class Link:
    """A connected socket after the challenge of both ends, with its session. The socket blocks.

    ``silence_ms`` bounds the challenge. ``is_relay``: several tasks share it. Raises OSError and
    ProtocolError.
    """

    def __init__(
        self,
        connected: socket.socket,
        rendezvous: Rendezvous,
        silence_ms: float,
        clock_ms: Clock,
        *,
        is_relay: bool = False,
    ) -> None:
        self.socket = connected
        self.session = Session(rendezvous.secret, "client")
        self.frames = FrameReader(MAX_HANDSHAKE_BYTES)
        deadline_ms = clock_ms() + silence_ms
        try:
            proof = self.session.reply_to_greeting(self._next_frame(deadline_ms, silence_ms, clock_ms))
            self.socket.sendall(proof)
            self.session.verify_proof(self._next_frame(deadline_ms, silence_ms, clock_ms))
            self.frames.max_bytes = MAX_FRAME_BYTES
            self.socket.sendall(self.session.encode({"cluster": rendezvous.cluster, "relay": is_relay}))
            self.socket.settimeout(silence_ms / 1000)
        except BaseException:
            self.socket.close()
            raise

    def _next_frame(self, deadline_ms: float, silence_ms: float, clock_ms: Clock) -> bytes:
        while (frame := self.frames.next_frame()) is None:
            left_ms = deadline_ms - clock_ms()
            if left_ms <= 0:
                raise ProtocolError(f"no greeting within {silence_ms:.0f} ms")
            self.socket.settimeout(left_ms / 1000)
            data = self.socket.recv(READ_BYTES)
            if not data:
                raise ConnectionError("it closed the connection during the challenge")
            self.frames.feed(data)
        return frame


def connect(address: CoordinatorAddress, silence_ms: float) -> socket.socket:
    """A socket to the coordinator's process. Raises OSError."""
    connected = socket.create_connection((address.host, address.rendezvous.port), timeout=silence_ms / 1000)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connected


class CoordinatorConnection:
    """One task's connection after its challenge. Raises OSError and ProtocolError; close it then.

    ``silence_ms`` bounds the challenge, and then the wait for each reply. ``connected``: a socket to a relay;
    without one it connects to the coordinator itself. ``challenge_ms`` bounds a relay's challenge instead.
    """

    def __init__(
        self,
        address: CoordinatorAddress,
        silence_ms: float,
        clock_ms: Clock,
        connected: socket.socket | None = None,
        challenge_ms: float | None = None,
    ) -> None:
        self._silence_ms = silence_ms
        self._asked: dict[int, float] = {}
        self._count = 0
        self._anew_left = MAX_ANEW
        self.is_relayed = connected is not None
        started_ms = clock_ms()
        if connected is None:
            connected = connect(address, silence_ms)
            challenge_ms = silence_ms - (clock_ms() - started_ms)
        link = Link(connected, address.rendezvous, challenge_ms or silence_ms, clock_ms)
        self.socket, self._session, self._frames = link.socket, link.session, link.frames
        self.socket.settimeout(silence_ms / 1000)

    @property
    def is_idle(self) -> bool:
        return not self._asked

    @property
    def silent_at_ms(self) -> float:
        """When the oldest message has waited too long."""
        return min(self._asked.values(), default=math.inf)

    def wait_anew(self, now_ms: float) -> None:
        """This process stood still: the other end has all its time again."""
        if self._anew_left:
            self._anew_left -= 1
            self._asked = dict.fromkeys(self._asked, now_ms + self._silence_ms)

    def send(self, kind: str, body: Mapping[str, Any], now_ms: float) -> None:
        self._count += 1
        self._asked[self._count] = now_ms + self._silence_ms
        self.socket.sendall(self._session.encode({"id": self._count, "kind": kind, "body": body}))

    def receive(self, now_ms: float) -> list[Received]:
        """Wait for bytes; return the messages that are complete, perhaps none."""
        data = self.socket.recv(READ_BYTES)
        if not data:
            raise ConnectionError("it closed the connection")
        self._anew_left = MAX_ANEW
        self._frames.feed(data)
        found: list[Received] = []
        while (frame := self._frames.next_frame()) is not None:
            lines = self._session.payload(frame).split(b"\n")
            found.extend(self._receive(parse(line), now_ms) for line in lines)
        return found

    def _receive(self, message: Mapping[str, Any], now_ms: float) -> Received:
        request, last = message.get("id"), message.get("last")
        kind, body = message.get("kind"), message.get("body")
        if not isinstance(kind, str) or not isinstance(body, dict):
            raise ProtocolError("a message without kind or body")
        body = unpacked(body)
        if request is None:
            return Received(kind, body, None)
        if not isinstance(request, int) or not isinstance(last, bool):
            raise ProtocolError("a reply without number or end mark")
        if request not in self._asked:
            raise ProtocolError("a reply to an unknown message")
        if last:
            del self._asked[request]
        else:
            self._asked[request] = now_ms + self._silence_ms
        return Received(kind, body, last)

    def close(self) -> None:
        self.socket.close()


class KeptConnection:
    """At most one connection, to the coordinator that was used last. Any thread; a fork has another.

    For the driver: Spark reuses the process that commits a stream's micro-batches, and a new connection took
    3 ms of each commit. Batch writes connect by themselves, once a job.

    ``silence_ms`` bounds connecting, and how long a reply may be missing before another connection is made.
    """

    def __init__(self, silence_ms: float, clock_ms: Clock) -> None:
        self._silence_ms = silence_ms
        self._clock_ms = clock_ms
        self._lock = threading.Lock()  # guards the next one
        self._kept: tuple[CoordinatorAddress, CoordinatorConnection] | None = None
        # For the life of the process, as are the instances.
        os.register_at_fork(after_in_child=self._after_fork)

    def send(self, address: CoordinatorAddress, kind: str, body: Mapping[str, Any]) -> None:
        """Send a message without waiting for its reply. Raises OSError and ProtocolError."""
        with self._lock:
            connection = self._usable(address) or CoordinatorConnection(
                address, self._silence_ms, self._clock_ms
            )
            self._kept = address, connection
            try:
                connection.send(kind, body, self._clock_ms())
            except OSError:
                self._close()
                raise

    def close(self) -> None:
        with self._lock:
            self._close()

    def _after_fork(self) -> None:
        """In the child: another thread may have held the lock, and the replies are the parent's."""
        self._lock = threading.Lock()
        self._close()

    def _usable(self, address: CoordinatorAddress) -> CoordinatorConnection | None:
        """The kept connection, after the replies that have come, unless the coordinator has left it."""
        if self._kept is None:
            return None
        kept_address, connection = self._kept
        if kept_address == address:
            with suppress(OSError, ProtocolError):
                _receive_all(connection, self._clock_ms)
                if self._clock_ms() < connection.silent_at_ms:
                    return connection
        self._close()
        return None

    def _close(self) -> None:
        if self._kept is not None:
            self._kept[1].close()
        self._kept = None


def _receive_all(connection: CoordinatorConnection, clock_ms: Clock) -> None:
    """The replies that have come."""
    # Not select.select, which takes no descriptor above 1,023.
    with selectors.DefaultSelector() as selector:
        selector.register(connection.socket, selectors.EVENT_READ)
        while selector.select(0):
            connection.receive(clock_ms())
