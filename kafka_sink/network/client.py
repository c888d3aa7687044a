"""All connections to brokers, used by one thread. Other threads may call only ``wakeup``."""

from __future__ import annotations

import logging
import math
import selectors
from collections.abc import Callable, Collection, Iterable, Sequence, Set
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

from kafka_sink.clock import RANDOM, Clock
from kafka_sink.errors import KafkaSinkError
from kafka_sink.kafka_errors import REBOOTSTRAP_REQUIRED, error_of
from kafka_sink.model import Node
from kafka_sink.network import requests
from kafka_sink.network.apis import PUSH_TELEMETRY
from kafka_sink.network.broker_connection import BrokerConnection, security_of
from kafka_sink.network.broker_protocol import ConnectionState, Request
from kafka_sink.network.transport import PlaintextTransport
from kafka_sink.options import SinkOptions
from kafka_sink.options.environment import expanded
from kafka_sink.printable import first_of
from kafka_sink.security.settings import SecuritySettings
from kafka_sink.wakeup import WakeUp

_log = logging.getLogger(__name__)
_RECEIVE_BYTES = 128 * 1024
# Do not ask a broker for metadata that has been silent for this long, if there is another one.
_SUSPICIOUS_MS = 1000.0
# While a broker is being connected, this is the time after which another one may be the better choice.
_RECONSIDER_MS = 100.0
# The longest wait of epoll is an int of milliseconds.
_MAX_WAIT_MS = 3_600_000.0
_MADE = (ConnectionState.READY, ConnectionState.REAUTHENTICATING)


class NetworkClient:
    """The connections, one for each broker. Bootstrap addresses have negative ids.

    ``clock_ms`` is monotonic, and is read when waiting has made the caller's ``now_ms`` out of date.
    ``random`` returns values in [0, 1) for jitter. ``poll`` calls the callbacks of requests, and these:

    - ``on_connected(node_id, setup_ms, now_ms)``: API versions are known, and requests may be sent.
      ``setup_ms`` is the time since connecting began.
    - ``on_disconnected(node_id, cause, was_used, now_ms)``: a connection or an attempt to connect has ended.
      ``was_used`` means that requests were in flight. Closing an idle connection is not reported.
    - ``on_responded(node_id, request, response, now_ms)``: a request has its response. None by default.

    Raises the ConfigurationError of SecuritySettings.from_options.
    """

    def __init__(
        self, options: SinkOptions, clock_ms: Clock, random: Callable[[], float] = RANDOM.random
    ) -> None:
        self.on_connected: Callable[[int, float, float], object] = _ignore
        self.on_disconnected: Callable[[int, Exception, bool, float], object] = _ignore
        self.on_responded: Callable[[int, Request, Any, float], object] | None = None
        # Brokers log this name, and some brokers choose leaders according to the zone in it.
        self.client_id = expanded("kafka.client.id", options.client_id)
        self._options = replace(options, client_id=self.client_id)
        self._security = security_of(SecuritySettings.from_options(options))
        # Whether the bootstrap addresses are used again if no known broker can be reached (KIP-899).
        self._rebootstraps = options.metadata_recovery_strategy == "rebootstrap"
        self._clock_ms = clock_ms
        self._random = random
        self._selector = selectors.DefaultSelector()
        # The events since the last poll, as functions to be called with the time.
        self._happened: list[Callable[[float], object]] = []
        # Brokers that are only asked for metadata if there is no other.
        self.avoided: Collection[int] = ()
        self._receive_buffer = memoryview(bytearray(_RECEIVE_BYTES))
        self._closed = False
        # Whether the last poll has received a wake-up.
        self.woken = False
        self._wake_up = WakeUp()
        self._selector.register(self._wake_up, selectors.EVENT_READ, None)
        # The connections to the brokers in the latest metadata.
        self._known: list[BrokerConnection] = []
        self.bootstrap = [
            self._new_connection(Node(-number, host, port))
            for number, (host, port) in enumerate(options.bootstrap_servers, 1)
        ]
        self.connections = {connection.node.id: connection for connection in self.bootstrap}

    def _new_connection(self, node: Node) -> BrokerConnection:
        return BrokerConnection(node, self._options, self._random, self.wakeup, self._security)

    def check_security(self) -> None:
        """Read the TLS files now, if there are any. Raises ConfigurationError."""
        if self._security is not None:
            self._security.check()

    def set_addresses(self, nodes: Iterable[Node]) -> None:
        """Set the brokers of the latest metadata. A connection to a broker that has moved is made again, and
        one to a broker that is no longer listed is closed when nothing is in flight on it."""
        known = list(nodes)
        for node in known:
            connection = self.connections.get(node.id)
            here = (node.host, node.port)
            if connection is None and self._adopt(node):
                continue
            if connection is None or (connection.node.host, connection.node.port) != here:
                if connection is not None and connection.state is not ConnectionState.IDLE:
                    moved = f"broker {node.id} moved to {node.host}:{node.port}"
                    self._drop(connection, ConnectionError(moved))
                self.connections[node.id] = self._new_connection(node)
        self._known = [self.connections[node.id] for node in known]
        ids = {node.id for node in known}
        for node_id, connection in list(self.connections.items()):
            if node_id >= 0 and node_id not in ids and not connection.in_flight:
                self._discard(connection)
                del self.connections[node_id]

    def _adopt(self, node: Node) -> bool:
        """Make the connection to a bootstrap address the broker's, if that is also the broker's own address.

        The bootstrap address gets a new connection, which is opened if it is needed again. If the broker
        takes client metrics (KIP-714), the connection stays apart: a broker handles the requests of a
        connection one after the other, so a metrics receiver that hangs would hold up rows.
        """
        for index, connection in enumerate(self.bootstrap):
            at = connection.node
            if (
                (at.host, at.port) == (node.host, node.port)
                and connection.state is ConnectionState.READY
                and PUSH_TELEMETRY not in connection.protocol.api_versions
            ):
                self.bootstrap[index] = self.connections[at.id] = self._new_connection(at)
                connection.node = node
                self.connections[node.id] = connection
                self._happened.append(partial(self.on_connected, node.id, connection.setup_ms))
                return True
        return False

    def rebootstrap(self) -> None:
        """Close all connections, forget the brokers and resolve the bootstrap addresses again (KIP-1102)."""
        self._known = []
        for connection in list(self.connections.values()):
            if connection.state is not ConnectionState.IDLE:
                given_up = f"{connection.node} is given up for the bootstrap addresses"
                self._drop(connection, ConnectionError(given_up))
            if connection.node.id >= 0:
                del self.connections[connection.node.id]

    def least_loaded(self, now_ms: float, *, known_only: bool = False) -> BrokerConnection | None:
        """The connection on which to ask for metadata. None while all wait for their backoff.

        The first choice is the connected broker with the fewest requests in flight; silent and throttling
        brokers come last. Otherwise it is one that is being connected or, if that takes long, that may be
        connected now. If no known broker is usable, it is a bootstrap address (unless ``known_only``).
        """
        for connections in self._candidates(known_only=known_only):
            ready = [connection for connection in connections if connection.state is ConnectionState.READY]
            if ready:
                return min(ready, key=lambda connection: self._load(connection, now_ms))
            startable = [connection for connection in connections if connection.may_connect(now_ms)]
            begun = [connection for connection in connections if connection.state is not ConnectionState.IDLE]
            lively = [
                connection for connection in begun if now_ms - connection.connecting_since_ms < _SUSPICIOUS_MS
            ]
            if lively:
                return lively[0]
            if startable:
                return startable[int(self._random() * len(startable))]
            if begun:
                return begun[0]
        return None

    def connection_to_ask(
        self, now_ms: float, *, known_only: bool = False
    ) -> tuple[BrokerConnection | None, float]:
        """A connection that accepts a request now; else None, and the milliseconds until there may be one.
        With ``known_only`` it is a broker of the latest metadata, and never a bootstrap address."""
        connection = self.least_loaded(now_ms, known_only=known_only)
        if connection is None:
            others = chain.from_iterable(self._candidates(known_only=known_only))
            idle_until_ms = [one.connect_after_ms for one in others if one.state is ConnectionState.IDLE]
            return None, max(0.0, min(idle_until_ms, default=math.inf) - now_ms)
        if not self.is_ready(connection, now_ms):
            return None, _RECONSIDER_MS
        throttled_ms = connection.throttled_until_ms - now_ms
        return (None, throttled_ms) if throttled_ms > 0 else (connection, 0.0)

    def _candidates(self, *, known_only: bool) -> tuple[Sequence[BrokerConnection], ...]:
        """Where metadata may be requested: at known brokers, then at bootstrap addresses if allowed."""
        stand_in = not known_only and (self._rebootstraps or not self._known)
        others = [connection for connection in self._known if connection.node.id not in self.avoided]
        return others or self._known, self.bootstrap if stand_in else []

    def _load(self, connection: BrokerConnection, now_ms: float) -> tuple[bool, bool, int]:
        silent = connection.waiting_ms(now_ms) > _SUSPICIOUS_MS
        return silent, now_ms < connection.throttled_until_ms, connection.in_flight

    def is_ready(self, connection: BrokerConnection, now_ms: float) -> bool:
        """Whether the connection is ready, regardless of requests in flight. If not, start to connect."""
        if connection.may_connect(now_ms):
            self._advance(connection, lambda: connection.open(now_ms), now_ms)
        return connection.is_ready

    def connected_with(self, api_keys: Set[int], now_ms: float) -> BrokerConnection | None:
        """The least busy broker that supports these APIs and accepts a request now, or None."""
        ready = [
            connection
            for connection in self.connections.values()
            if connection.accepts(now_ms) and api_keys <= connection.protocol.api_versions.keys()
        ]
        return min(ready, key=lambda connection: self._load(connection, now_ms)) if ready else None

    def connection_errors(self) -> dict[Node, Exception]:
        """The last error of each broker that could not be connected, for messages."""
        errors = {one.node: one.last_error for one in list(self.connections.values())}
        return {node: error for node, error in errors.items() if error is not None}

    def describe_brokers(self) -> str:
        """The known brokers or else the bootstrap addresses, with their last errors. For any thread."""
        errors = {(at.host, at.port): f" ({error})" for at, error in self.connection_errors().items()}
        nodes = [connection.node for connection in self._known] or [
            Node(-1, *at) for at in self._options.bootstrap_servers
        ]
        return first_of([f"{at.host}:{at.port}{errors.get((at.host, at.port), '')}" for at in nodes])

    def send(self, connection: BrokerConnection, request: Request, now_ms: float) -> None:
        """Submit a request to a ready connection, and write what the stream accepts. Raises ValueError, and
        changes nothing, if the connection is not ready. A broken stream is reported by the next poll."""
        self._advance(connection, lambda: connection.protocol.submit(request, now_ms), now_ms)

    def poll(self, timeout_ms: float, now_ms: float) -> int:
        """Wait for sockets, deadlines or a wake-up, then call back. Returns the number of events."""
        self.woken = False
        deadline, awaits_thread = math.inf, False
        for connection in self.connections.values():
            deadline = min(deadline, connection.next_deadline_ms())
            # Another thread looks up its name, or prepares its login.
            awaits_thread |= connection.state is ConnectionState.RESOLVING
            awaits_thread |= connection.preparation is not None
        end_ms = now_ms + max(0.0, min(timeout_ms, deadline - now_ms, _MAX_WAIT_MS))
        writes_only = True
        while writes_only:
            wait = 0.0 if self._happened else max(0.0, end_ms - now_ms)
            ready = self._selector.select(wait / 1000)
            # A large request needs several writes, and none changes what the caller looks at.
            writes_only = bool(ready)
            for key, mask in ready:
                connection = key.data
                if connection is None:
                    self._wake_up.clear()
                    self.woken, writes_only = True, False
                else:
                    writes_only &= mask == selectors.EVENT_WRITE
                    writes_only &= connection.state is ConnectionState.READY
                    at_ms = self._clock_ms()
                    serve = partial(self._serve, connection, key.fileobj, mask, at_ms)
                    self._advance(connection, serve, at_ms)
            now_ms = self._clock_ms()
            writes_only &= not self._happened and now_ms < end_ms
        if awaits_thread or now_ms >= deadline:
            for connection in list(self.connections.values()):
                self._check(connection, now_ms)
        happened, self._happened = self._happened, []
        called = 0
        try:
            for call in happened:
                called += 1
                call(self._clock_ms())
        finally:
            # If a call raised, the next poll makes the calls after it.
            self._happened[:0] = happened[called:]
        return called

    def wakeup(self) -> None:
        """End the current poll, or the next one at once. Any thread may call it, even after ``close``."""
        self._wake_up.wake()

    def _check(self, connection: BrokerConnection, now_ms: float) -> None:
        """Handle deadlines that have passed, and lookups that another thread has finished."""
        if connection.state is ConnectionState.RESOLVING:
            self._advance(connection, lambda: connection.on_resolved(now_ms), now_ms)
        if connection.state is ConnectionState.PREPARING:
            self._advance(connection, lambda: connection.on_prepared(now_ms), now_ms)
        if connection.next_address_is_due(now_ms):
            self._advance(connection, lambda: connection.try_next_address(now_ms), now_ms)
        if connection.login_is_due(now_ms):
            self._advance(connection, lambda: connection.renew_login(now_ms), now_ms)
        if connection.idle_too_long(now_ms):
            self._discard(connection)
            return
        cause = connection.overdue(now_ms)
        if cause is not None:
            self._drop(connection, cause)

    def _advance(self, connection: BrokerConnection, step: Callable[[], None], now_ms: float) -> None:
        """Do one step of a connection, and write what it has to write. An error ends only this connection."""
        try:
            step()
            for request in connection.flush(now_ms):
                self._happened.append(partial(request.on_response, None))
        except (OSError, KafkaSinkError) as error:
            self._drop(connection, error)
            return
        transport = connection.transport
        if transport is None:
            for attempt in connection.attempts:
                if attempt.fileno() not in self._selector.get_map():
                    self._selector.register(attempt, selectors.EVENT_WRITE, connection)
                    connection.watched_events = selectors.EVENT_WRITE
            return
        waiting, events = connection.protocol.send_buffer, selectors.EVENT_READ
        if transport.held_bytes or waiting.written_bytes < waiting.queued_bytes:
            events |= selectors.EVENT_WRITE
        # Each update is a system call.
        if connection.watched_events != events:
            self._selector.modify(transport, events, connection)
        connection.watched_events = events

    def _serve(self, connection: BrokerConnection, stream: Any, mask: int, now_ms: float) -> None:
        """Continue to connect, or read what has arrived on this stream of the connection."""
        if stream in connection.attempts:
            for unused in connection.on_connected(stream, now_ms):
                self._unwatch(unused)
                unused.close()
        if mask & selectors.EVENT_WRITE:
            connection.shake_hands(now_ms)
        while mask & selectors.EVENT_READ and connection.receive(self._receive_buffer, now_ms):
            was_made = connection.state in _MADE
            completed = connection.next_response(now_ms)
            if not was_made and connection.state in _MADE:
                connection.setup_ms = now_ms - connection.connecting_since_ms
                self._happened.append(partial(self.on_connected, connection.node.id, connection.setup_ms))
            while completed is not None:
                request, response = completed.request, completed.response
                if isinstance(response, requests.MetadataResponse) and response.error_code:
                    self._fail_metadata(connection, request, response.error_code)
                else:
                    if self.on_responded is not None:
                        self.on_responded(connection.node.id, request, response, now_ms)
                    self._happened.append(partial(request.on_response, response))
                completed = connection.next_response(now_ms)
            if connection.transport is None or not connection.transport.buffered:
                break

    def _fail_metadata(self, connection: BrokerConnection, request: Request, error_code: int) -> None:
        if error_code == REBOOTSTRAP_REQUIRED and self._rebootstraps:
            self._known = []
        cause = KafkaSinkError(f"{connection.node} failed Metadata: {error_of(error_code).label}")
        self._happened.append(partial(request.on_failure, cause, True))

    def _discard(self, connection: BrokerConnection) -> None:
        """Close a connection without requests in flight. This is not a failure, so there is no backoff."""
        self._unwatch(*connection.transports)
        connection.close(self._clock_ms(), None)

    def _drop(self, connection: BrokerConnection, cause: Exception) -> None:
        """Close a broken connection. Its requests fail, each with whether a byte of it was written."""
        node_id = connection.node.id
        _log.log(
            logging.INFO if connection.state is ConnectionState.READY else logging.DEBUG,
            "connection to %s lost (%s): %s",
            connection.node,
            connection.state.value,
            cause,
        )
        self._unwatch(*connection.transports)
        lost = connection.close(self._clock_ms(), cause)
        for request, possibly_sent in lost:
            self._happened.append(partial(request.on_failure, cause, possibly_sent))
        self._happened.append(partial(self.on_disconnected, node_id, cause, bool(lost)))

    def _unwatch(self, *transports: PlaintextTransport) -> None:
        for transport in transports:
            # A transport has no descriptor if Ctrl-C has interrupted its connection's close.
            if transport.fileno() >= 0 and transport.fileno() in self._selector.get_map():
                self._selector.unregister(transport)

    def close(self, *, abort: bool = False) -> None:
        """Close every socket at once, without waiting. Requests in flight get no response. The system still
        sends the bytes that it has accepted. ``abort`` drops these as well."""
        if self._closed:
            return
        self._closed = True
        for connection in self.connections.values():
            if abort:
                self._unwatch(*connection.transports)
                connection.abort()
            self._discard(connection)
        self.connections.clear()
        self._known.clear()
        self._selector.close()
        self._wake_up.close()


def _ignore(*_: object) -> None:
    """The default callback, which does nothing."""
