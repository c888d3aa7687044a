"""Connections to the brokers on one thread: the sender's.

Only ``wakeup`` may be called from elsewhere. It is latched: a byte sits in a socket pair from the first
call until the next poll drains it, so a wake-up between "nothing to do" and "wait" is not lost, and a
thousand of them cost one.
"""

from __future__ import annotations

import logging
import math
import random
import selectors
import socket
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from kafka_sink.errors import BrokerVersionError, KafkaSinkError, ProtocolError
from kafka_sink.model import Node
from kafka_sink.network import produce, requests
from kafka_sink.network.broker_link import BrokerLink, LinkState
from kafka_sink.network.connection import InFlight, OutboundRequest

__all__ = ["NetworkClient", "NetworkEvent", "NetworkSettings", "OutboundRequest"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class NetworkSettings:
    """The options of the same names; times in milliseconds, sizes in bytes (-1: the system's)."""

    bootstrap_servers: tuple[tuple[str, int], ...]
    client_id: str
    max_in_flight: int
    request_timeout_ms: float
    reconnect_backoff_ms: float
    reconnect_backoff_max_ms: float
    connection_setup_timeout_ms: float
    connection_setup_timeout_max_ms: float
    connections_max_idle_ms: float
    send_buffer_bytes: int
    receive_buffer_bytes: int


@dataclass(frozen=True, slots=True)
class ResponseReceived:
    """An answer, decoded; ``response`` is None for a request that expects none and is written."""

    node_id: int
    tag: object
    response: Any
    latency_ms: float


@dataclass(frozen=True, slots=True)
class RequestFailed:
    """No answer will come. ``possibly_sent``: the broker may have acted on the request."""

    node_id: int
    tag: object
    cause: Exception
    possibly_sent: bool


NetworkEvent = ResponseReceived | RequestFailed


class NetworkClient:
    """A pool of links, one per broker; bootstrap addresses have ids below zero."""

    def __init__(self, settings: NetworkSettings, clock_ms: Callable[[], float]) -> None:
        self._settings = settings
        self._clock_ms = clock_ms
        self._selector = selectors.DefaultSelector()
        self._links: dict[int, BrokerLink] = {}
        self._events: list[NetworkEvent] = []
        self._bootstrap = [
            Node(-index - 1, host, port) for index, (host, port) in enumerate(settings.bootstrap_servers)
        ]
        self._known: dict[int, Node] = {}
        self._wake_lock = threading.Lock()  # guards the latch
        self._wake_pending = False
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_reader.setblocking(False)
        self._selector.register(self._wake_reader, selectors.EVENT_READ, None)
        for node in self._bootstrap:
            self._links[node.id] = BrokerLink(node, settings)

    # -- nodes ------------------------------------------------------------------------------------

    def set_nodes(self, nodes: Iterable[Node]) -> None:
        """The brokers of the latest metadata; a link whose address changed is closed and made anew."""
        self._known = {node.id: node for node in nodes}
        for node in self._known.values():
            link = self._links.get(node.id)
            if link is None or (link.node.host, link.node.port) != (node.host, node.port):
                if link is not None:
                    self._drop(link, ConnectionError(f"broker {node.id} moved to {node.host}:{node.port}"))
                self._links[node.id] = BrokerLink(node, self._settings)

    def least_loaded_node(self, now_ms: float) -> int | None:
        """A broker to ask for metadata: a connected one with the fewest requests, else one that may be
        connected now, else one that is being connected; bootstrap addresses when no broker is usable."""
        for candidates in (list(self._known), [node.id for node in self._bootstrap]):
            links = [self._links[node] for node in candidates]
            ready = [link for link in links if link.state is LinkState.READY]
            if ready:
                return min(ready, key=lambda link: link.in_flight).node.id
            startable = [link for link in links if link.may_connect(now_ms)]
            underway = [link for link in links if link.state in (LinkState.CONNECTING, LinkState.HANDSHAKE)]
            if underway:
                return underway[0].node.id
            if startable:
                return random.choice(startable).node.id
        return None

    def ready_for_any(self, node_id: int, now_ms: float) -> bool:
        """Connected, and starts to connect where not; the in-flight window does not matter."""
        link = self._links.get(node_id)
        if link is None:
            return False
        if link.state is LinkState.IDLE and link.may_connect(now_ms):
            self._connect(link, now_ms)
        return link.state is LinkState.READY

    def ready(self, node_id: int, now_ms: float) -> bool:
        """As ready_for_any, with room in the in-flight window and no throttling."""
        link = self._links.get(node_id)
        return (
            self.ready_for_any(node_id, now_ms)
            and link is not None
            and link.in_flight < self._settings.max_in_flight
            and now_ms >= link.throttled_until_ms
        )

    def ready_delay_ms(self, node_id: int, now_ms: float) -> float:
        """Until ``ready`` may change by time alone; infinite where an event must come first."""
        link = self._links.get(node_id)
        if link is None:
            return math.inf
        if link.state is LinkState.IDLE:
            return max(0.0, link.connect_after_ms - now_ms)
        return max(0.0, link.throttled_until_ms - now_ms) or math.inf

    def connect_delay_ms(self, now_ms: float) -> float:
        """Until any broker may be connected to again."""
        idle = (link for link in self._links.values() if link.state is LinkState.IDLE)
        waits = [link.connect_after_ms - now_ms for link in idle]
        return max(0.0, min(waits, default=math.inf))

    def api_version(self, node_id: int, api_key: int, ours: tuple[int, int]) -> int:
        """The newest version both sides speak. Raises BrokerVersionError where there is none."""
        low, high = self._links[node_id].api_versions.get(api_key, (0, -1))
        version = min(high, ours[1])
        if version < max(low, ours[0]):
            raise BrokerVersionError(
                f"broker {self._links[node_id].node} speaks API {api_key} in versions {low} to {high}, "
                f"this sink in {ours[0]} to {ours[1]}; Apache Kafka 2.1 or later is needed"
            )
        return version

    def in_flight(self, node_id: int) -> int:
        """Requests handed over and not answered."""
        link = self._links.get(node_id)
        return 0 if link is None else link.in_flight

    # -- I/O --------------------------------------------------------------------------------------

    def send(self, node_id: int, request: OutboundRequest, now_ms: float) -> None:
        """Hands a request to a ready link and writes what the socket takes at once."""
        link = self._links[node_id]
        link.submit(request, now_ms)
        self._write(link)

    def poll(self, timeout_ms: float, now_ms: float) -> list[NetworkEvent]:
        """Waits up to ``timeout_ms`` for sockets or a wake-up; returns all that happened."""
        timeout = min([timeout_ms, *(link.next_deadline_ms() - now_ms for link in self._links.values())])
        if self._events:
            timeout = 0.0
        for key, mask in self._selector.select(max(timeout, 0.0) / 1000):
            if key.data is None:
                self._drain_wakeups()
                continue
            link: BrokerLink = key.data
            if mask & selectors.EVENT_WRITE:
                self._writable(link)
            if mask & selectors.EVENT_READ and link.socket is not None:
                self._readable(link)
        self._check_deadlines(self._clock_ms())
        events, self._events = self._events, []
        return events

    def wakeup(self) -> None:
        """Ends a poll under way, or the next one at once. Any thread."""
        with self._wake_lock:
            if self._wake_pending:
                return
            self._wake_pending = True
        try:
            self._wake_writer.send(b"\0")
        except OSError:
            _log.debug("wake-up after close")

    def _drain_wakeups(self) -> None:
        # The latch opens before the caller looks at its queues: what is added after this look wakes anew.
        with self._wake_lock:
            self._wake_pending = False
            self._wake_reader.recv(64)

    def _connect(self, link: BrokerLink, now_ms: float) -> None:
        try:
            sock = link.open(now_ms)
        except OSError as error:
            link.failed(now_ms)
            _log.debug("cannot connect to %s: %s", link.node, error)
            return
        self._selector.register(sock, selectors.EVENT_WRITE, link)

    def _writable(self, link: BrokerLink) -> None:
        if link.state is LinkState.CONNECTING:
            error = link.connect_error()
            if error is not None:
                self._drop(link, error)
                return
            link.start_handshake(self._clock_ms())
        self._write(link)

    def _write(self, link: BrokerLink) -> None:
        if link.socket is None:
            return
        try:
            done = link.flush()
        except OSError as error:
            self._drop(link, error)
            return
        for entry in done:
            self._answered(link, entry, None)
        interest = selectors.EVENT_READ | (selectors.EVENT_WRITE if link.wants_write else 0)
        self._selector.modify(link.socket, interest, link)

    def _readable(self, link: BrokerLink) -> None:
        try:
            for entry, body in link.receive():
                self._on_frame(link, entry, body)
        except (OSError, KafkaSinkError) as error:
            self._drop(link, error)

    def _on_frame(self, link: BrokerLink, entry: InFlight, body: memoryview) -> None:
        request = entry.request
        if link.state is LinkState.HANDSHAKE:
            link.on_api_versions(request, body, self._clock_ms())
            self._write(link)
            return
        try:
            if request.api_key == requests.PRODUCE:
                response: Any = produce.decode_produce_response(request.api_version, body)
                throttle = response.throttle_time_ms
            else:
                response = requests.decode(request.api_key, request.api_version, body)
                throttle = getattr(response, "throttle_time_ms", 0) or 0
        except ProtocolError as error:
            # Its place in the queue is gone, so it fails here; the rest fails with the connection.
            self._events.append(RequestFailed(link.node.id, request.tag, error, possibly_sent=True))
            raise
        link.throttle(self._clock_ms() + throttle)
        self._answered(link, entry, response)

    def _answered(self, link: BrokerLink, entry: InFlight, response: Any) -> None:
        latency = self._clock_ms() - entry.sent_at_ms
        self._events.append(ResponseReceived(link.node.id, entry.request.tag, response, latency))

    def _check_deadlines(self, now_ms: float) -> None:
        for link in self._links.values():
            cause = link.overdue(now_ms)
            if cause is not None:
                self._drop(link, cause)

    def _drop(self, link: BrokerLink, cause: Exception) -> None:
        """Closes a link; all its requests fail, told apart by whether a byte of them had left."""
        if link.socket is not None:
            self._selector.unregister(link.socket)
        if link.state is not LinkState.IDLE and not link.idle_close:
            _log.info("connection to %s lost: %s", link.node, cause)
        for entry, possibly_sent in link.close(self._clock_ms()):
            if entry.request.tag is not None:
                self._events.append(RequestFailed(link.node.id, entry.request.tag, cause, possibly_sent))

    def close(self) -> None:
        """Closes every socket at once; requests without an answer stay without one."""
        for link in self._links.values():
            if link.socket is not None:
                self._selector.unregister(link.socket)
            link.close(self._clock_ms())
        self._links.clear()
        self._selector.close()
        self._wake_reader.close()
        self._wake_writer.close()
