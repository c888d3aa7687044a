"""One broker's socket and its life: idle, connecting, handshake, ready."""

from __future__ import annotations

import errno
import os
import random
import socket
from enum import Enum
from typing import TYPE_CHECKING

from kafka_sink.errors import BrokerVersionError
from kafka_sink.model import Node
from kafka_sink.network import requests
from kafka_sink.network.connection import Connection, InFlight, OutboundRequest
from kafka_sink.version import __version__

if TYPE_CHECKING:
    from kafka_sink.network.client import NetworkSettings

_RECEIVE_BYTES = 256 * 1024
_UNSUPPORTED_VERSION = 35
_JITTER = 0.2


class LinkState(Enum):
    """TLS and SASL will stand between CONNECTING and HANDSHAKE."""

    IDLE = "idle"
    CONNECTING = "connecting"
    HANDSHAKE = "handshake"
    READY = "ready"


class RequestTimeoutError(TimeoutError):
    """A broker did not answer within request.timeout.ms."""


class BrokerLink:
    """A connection with its socket, timeouts and reconnect backoff. Times are milliseconds."""

    def __init__(self, node: Node, settings: NetworkSettings) -> None:
        self.node = node
        self.state = LinkState.IDLE
        self.socket: socket.socket | None = None
        self.api_versions: dict[int, tuple[int, int]] = {}
        self.connect_after_ms = 0.0
        self.throttled_until_ms = 0.0
        self.idle_close = False
        self._settings = settings
        self._connection = Connection(settings.client_id, str(node))
        self._failures = 0
        self._setup_deadline_ms = 0.0
        self._last_used_ms = 0.0
        self._addresses: list[tuple[int, tuple[object, ...]]] = []

    # -- connecting -------------------------------------------------------------------------------

    def may_connect(self, now_ms: float) -> bool:
        """Idle, and no reconnect backoff runs."""
        return self.state is LinkState.IDLE and now_ms >= self.connect_after_ms

    def open(self, now_ms: float) -> socket.socket:
        """Starts to connect to the next of the host's addresses (client.dns.lookup=use_all_dns_ips).

        Raises OSError where the name does not resolve or the system refuses at once. Resolution blocks
        the sender for as long as the system's resolver takes, as in Kafka's Java client.
        """
        if not self._addresses:
            found = socket.getaddrinfo(self.node.host, self.node.port, type=socket.SOCK_STREAM)
            self._addresses = [(family, address) for family, _, _, _, address in found]
        family, address = self._addresses.pop(0)
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._settings.send_buffer_bytes > 0:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, self._settings.send_buffer_bytes)
            if self._settings.receive_buffer_bytes > 0:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self._settings.receive_buffer_bytes)
            code = sock.connect_ex(address)
            if code not in (0, errno.EINPROGRESS):
                raise OSError(code, os.strerror(code))
        except OSError:
            sock.close()
            raise
        self.socket = sock
        self.state = LinkState.CONNECTING
        self._setup_deadline_ms = now_ms + self._grown(
            self._settings.connection_setup_timeout_ms, self._settings.connection_setup_timeout_max_ms
        )
        return sock

    def connect_error(self) -> OSError | None:
        """Why a pending connect failed, None where it succeeded."""
        if self.socket is None:
            return ConnectionError("closed")
        code = self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        return OSError(code, os.strerror(code)) if code else None

    def start_handshake(self, now_ms: float, version: int = requests.API_VERSIONS_VERSIONS[1]) -> None:
        """Asks for the broker's API versions, before anything else."""
        self.state = LinkState.HANDSHAKE
        body = requests.encode_api_versions(version, __version__)
        timeout = self._settings.request_timeout_ms
        self.submit(OutboundRequest(requests.API_VERSIONS, version, [body], True, timeout, None), now_ms)

    def on_api_versions(self, request: OutboundRequest, body: memoryview, now_ms: float) -> None:
        """The handshake's answer. A broker too old for the version says so in version 0's format."""
        if request.api_version and bytes(body[:2]) == _UNSUPPORTED_VERSION.to_bytes(2, "big"):
            self.start_handshake(now_ms, version=0)
            return
        self.api_versions = requests.api_ranges(requests.decode(request.api_key, request.api_version, body))
        if requests.PRODUCE not in self.api_versions:
            raise BrokerVersionError(f"{self.node} does not take Produce requests: is it a controller?")
        self.state = LinkState.READY
        self._failures = 0
        self._addresses = []
        self._last_used_ms = now_ms

    # -- using ------------------------------------------------------------------------------------

    @property
    def in_flight(self) -> int:
        """Requests handed over and not answered."""
        return len(self._connection.in_flight)

    @property
    def wants_write(self) -> bool:
        """Whether bytes wait for the socket."""
        return self._connection.outgoing.pending

    def submit(self, request: OutboundRequest, now_ms: float) -> None:
        """Queues a request."""
        self._last_used_ms = now_ms
        self._connection.submit(request, now_ms)

    def flush(self) -> list[InFlight]:
        """Writes until the socket is full; returns requests that are complete by being written."""
        outgoing = self._connection.outgoing
        while outgoing.pending and self.socket is not None:
            try:
                outgoing.advance(self.socket.sendmsg(outgoing.next_buffers()))
            except (BlockingIOError, InterruptedError):
                break
        return self._connection.written()

    def receive(self) -> list[tuple[InFlight, memoryview]]:
        """Reads what is there. Raises OSError when the peer closed, ProtocolError for garbage."""
        if self.socket is None:
            return []
        try:
            data = self.socket.recv(_RECEIVE_BYTES)
        except (BlockingIOError, InterruptedError):
            return []
        if not data:
            raise ConnectionResetError(f"{self.node} closed the connection")
        return self._connection.receive(data)

    def throttle(self, until_ms: float) -> None:
        """KIP-219: the broker answers at once and asks the client to hold back."""
        self.throttled_until_ms = max(self.throttled_until_ms, until_ms)

    # -- bounds and closing -----------------------------------------------------------------------

    def next_deadline_ms(self) -> float:
        """When ``overdue`` may have something to say."""
        if self.state is LinkState.IDLE:
            return float("inf")
        deadlines = [self._last_used_ms + self._settings.connections_max_idle_ms]
        if self.state is not LinkState.READY:
            deadlines = [self._setup_deadline_ms]
        if self._connection.in_flight:
            oldest = self._connection.in_flight[0]
            deadlines.append(oldest.sent_at_ms + oldest.request.timeout_ms)
        return min(deadlines)

    def overdue(self, now_ms: float) -> Exception | None:
        """Why the connection must be closed now, if it must."""
        if self.state is LinkState.IDLE or now_ms < self.next_deadline_ms():
            return None
        if self._connection.in_flight:
            oldest = self._connection.in_flight[0]
            if now_ms >= oldest.sent_at_ms + oldest.request.timeout_ms:
                return RequestTimeoutError(
                    f"{self.node} did not answer within kafka.request.timeout.ms = "
                    f"{oldest.request.timeout_ms:.0f} ms"
                )
        if self.state is not LinkState.READY:
            return TimeoutError(f"{self.node} was not connected within the connection setup timeout")
        if self._connection.in_flight:
            self._last_used_ms = now_ms
            return None
        self.idle_close = True
        return ConnectionError("idle longer than kafka.connections.max.idle.ms")

    def failed(self, now_ms: float) -> None:
        """A try to connect came to nothing; the next waits longer."""
        self.state = LinkState.IDLE
        wait = self._grown(self._settings.reconnect_backoff_ms, self._settings.reconnect_backoff_max_ms)
        # A host's further addresses are tried at once.
        self.connect_after_ms = now_ms if self._addresses else now_ms + wait
        self._failures += 1

    def _grown(self, base: float, most: float) -> float:
        grown = min(base * 2 ** min(self._failures, 30), max(most, base))
        return grown * random.uniform(1 - _JITTER, 1 + _JITTER)

    def close(self, now_ms: float) -> list[tuple[InFlight, bool]]:
        """Closes the socket; returns the requests that get no answer and whether a byte had left."""
        if self.socket is not None:
            self.socket.close()
            self.socket = None
        lost = [(entry, self._connection.possibly_sent(entry)) for entry in self._connection.in_flight]
        self._connection = Connection(self._settings.client_id, str(self.node))
        if self.idle_close:
            self.idle_close = False
            self.state = LinkState.IDLE
            self.connect_after_ms = now_ms
        elif self.state is not LinkState.IDLE:
            self.failed(now_ms)
        return lost
