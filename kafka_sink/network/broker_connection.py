"""The connection to one broker."""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING

from kafka_sink.clock import ExponentialBackoff
from kafka_sink.model import Node
from kafka_sink.network.apis import common_version
from kafka_sink.network.broker_protocol import BrokerProtocol, CompletedRequest, ConnectionState, Request
from kafka_sink.network.transport import PlaintextTransport, SocketAddress, start_lookup
from kafka_sink.options import SinkOptions
from kafka_sink.security.settings import SecuritySettings

if TYPE_CHECKING:
    import ssl

    from kafka_sink.security.preparation import Prepared, Security
    from kafka_sink.security.sasl import SaslExchange

# For messages: the step at which setting up a connection has failed.
STEPS = {
    ConnectionState.RESOLVING: "looking up its name",
    ConnectionState.PREPARING: "fetching its login or reading TLS files",
    ConnectionState.CONNECTING: "connecting by TCP",
    ConnectionState.HANDSHAKING: "the TLS handshake",
    ConnectionState.NEGOTIATING: "asking for its API versions",
    ConnectionState.AUTHENTICATING: "the SASL login",
}
# The states in which ``BrokerProtocol.phase`` decides what comes next.
_TALKING = (
    ConnectionState.NEGOTIATING,
    ConnectionState.AUTHENTICATING,
    ConnectionState.READY,
    ConnectionState.REAUTHENTICATING,
)
# The part of a session after which to log in again, and a random addition (as in Java, KIP-368).
_SESSION_SHARE, _SESSION_JITTER = 0.85, 0.10
_RENEW_AGAIN_MS = 1000.0
# How long to wait for an address before the next one is also tried (RFC 8305).
_NEXT_ADDRESS_MS = 250.0
_MIN_SESSION_MS = 1000.0


def security_of(settings: SecuritySettings) -> Security | None:
    """The security of connections with these settings. None for plaintext without login, which needs none of
    these modules."""
    if settings.tls is None and settings.sasl is None:
        return None
    from kafka_sink.security.preparation import Security

    return Security(settings)


class BrokerConnection:
    """A connection with its stream, timeouts and reconnect backoff. Times are milliseconds.

    ``random`` returns values in [0, 1) for jitter. ``notify`` ends the poll, and any thread may call it.
    ``plaintext`` creates a stream without TLS.
    """

    def __init__(
        self,
        node: Node,
        options: SinkOptions,
        random: Callable[[], float],
        notify: Callable[[], None],
        security: Security | None = None,
        plaintext: Callable[[SocketAddress], PlaintextTransport] = PlaintextTransport,
    ) -> None:
        self.node = node
        self.state = ConnectionState.IDLE
        self.transport: PlaintextTransport | None = None
        # Streams to the addresses that are being tried. The first to connect becomes `transport`.
        self.attempts: dict[PlaintextTransport, SocketAddress] = {}
        # The selector's events for the transport. NetworkClient sets them.
        self.watched_events = 0
        self.connect_after_ms = 0.0
        self.connecting_since_ms = 0.0
        # How long it took until requests could be sent. NetworkClient sets it.
        self.setup_ms = 0.0
        self.throttled_until_ms = 0.0
        self.last_error: Exception | None = None
        self.failed_step = ""
        self._options = options
        self._random = random
        self._reconnect_backoff = ExponentialBackoff(
            options.reconnect_backoff_ms, options.reconnect_backoff_max_ms, random
        )
        self._setup_timeout = ExponentialBackoff(
            options.socket_connection_setup_timeout_ms, options.socket_connection_setup_timeout_max_ms, random
        )
        self._notify = notify
        self._plaintext = plaintext
        self._security = security
        self._settings = SecuritySettings() if security is None else security.settings
        # The login or TLS context that another thread prepares.
        self.preparation: Future[Prepared] | None = None
        # The APIs for which a warning about trailing bytes was already logged.
        self._trailing: set[int] = set()
        # A new object for each attempt to connect.
        self.protocol = self._new_protocol(None)
        self._renew_at_ms = math.inf
        self._session_end_ms = math.inf
        self._heard_since_ready = False
        self._lookup: Future[list[SocketAddress]] | None = None
        # The host's addresses that were not tried since the last lookup.
        self._addresses: list[SocketAddress] = []
        self._next_address_ms = math.inf
        self._context: ssl.SSLContext | None = None
        self._failures = 0
        self._setup_deadline_ms = math.inf
        self._last_used_ms = 0.0

    def _new_protocol(self, exchange: SaslExchange | None) -> BrokerProtocol:
        name, timeout = self._options.client_id or "kafka-chunked", self._options.request_timeout_ms
        return BrokerProtocol(name, str(self.node), timeout, exchange, self._trailing)

    def may_connect(self, now_ms: float) -> bool:
        """Whether the connection is idle and its reconnect backoff has passed."""
        return self.state is ConnectionState.IDLE and now_ms >= self.connect_after_ms

    def open(self, now_ms: float) -> None:
        """Start to connect to the host's next address. If none is left, the host is resolved first. Raises
        OSError if the system refuses at once."""
        self.connecting_since_ms = now_ms
        # It grows with each failure (KIP-601) and, other than in Kafka's client, includes ApiVersions.
        self._setup_deadline_ms = now_ms + self._setup_timeout.delay_ms(self._failures + 1)
        if self._addresses:
            self._prepare(now_ms)
            return
        self.state = ConnectionState.RESOLVING
        if self._lookup is None:
            self._lookup = start_lookup(self.node.host, self.node.port, self._notify)
        self.on_resolved(now_ms)

    def on_resolved(self, now_ms: float) -> None:
        lookup = self._lookup
        if self.state is ConnectionState.RESOLVING and lookup is not None and lookup.done():
            self._lookup = None
            self._addresses = list(lookup.result())
            self._prepare(now_ms)

    def _prepare(self, now_ms: float) -> None:
        if self._security is None:
            self.try_next_address(now_ms)
            return
        self.state = ConnectionState.PREPARING
        if self.preparation is None or self.preparation.done():
            # Prepare again, because the result of an earlier attempt may be out of date.
            self.preparation = self._security.begin(self.node.host, self._notify)
        self.on_prepared(now_ms)

    def on_prepared(self, now_ms: float) -> None:
        """Continue when TLS context and credentials are available. Raises the error if that failed."""
        preparation = self.preparation
        if self.state is ConnectionState.PREPARING and preparation is not None and preparation.done():
            self.preparation = None
            self._context, exchange = preparation.result()
            self.protocol = self._new_protocol(exchange)
            self.try_next_address(now_ms)

    def next_address_is_due(self, now_ms: float) -> bool:
        return bool(self.attempts and self._addresses) and now_ms >= self._next_address_ms

    def try_next_address(self, now_ms: float) -> None:
        """Connect to the next address, while earlier ones may still respond. Otherwise an address that drops
        packets would use up the whole setup timeout. Raises OSError if the system refuses at once and no
        other address is being tried."""
        address = self._addresses.pop(0)
        self._next_address_ms = now_ms + _NEXT_ADDRESS_MS
        try:
            self.attempts[self._new_transport(address)] = address
        except OSError:
            if not self.attempts:
                raise
        self.state = ConnectionState.CONNECTING

    def _new_transport(self, address: SocketAddress) -> PlaintextTransport:
        if self._context is None:
            return self._plaintext(address)
        from kafka_sink.network.tls_transport import TlsTransport

        suites = self._options.ssl_cipher_suites
        return TlsTransport(address, self._context, self.node.host, str(self.node), suites)

    def on_connected(self, attempt: PlaintextTransport, now_ms: float) -> list[PlaintextTransport]:
        """Called when the socket of an address is writable: use it, or others if connecting has failed.
        Returns the streams that are no longer needed. Raises OSError if no other address is being tried."""
        try:
            attempt.on_connected()
        except OSError:
            if len(self.attempts) == 1:
                raise
            del self.attempts[attempt]
            if self._addresses:
                self.try_next_address(now_ms)
            return [attempt]
        del self.attempts[attempt]
        unused, self.attempts = self.attempts, {}
        # These addresses are tried again if the one that responded turns out not to be a usable broker.
        self._addresses += unused.values()
        self.transport = attempt
        self.state = ConnectionState.HANDSHAKING
        return list(unused)

    def shake_hands(self, now_ms: float) -> None:
        """Continue the TLS handshake, if it is not complete. Raises the stream's errors."""
        if self.state is not ConnectionState.HANDSHAKING or self.transport is None:
            return
        if self.transport.handshake():
            self.state = ConnectionState.NEGOTIATING
            self.protocol.start(now_ms)

    @property
    def is_ready(self) -> bool:
        """Whether requests may be sent, because the exchanges at the start of a connection are complete."""
        return self.state is ConnectionState.READY

    @property
    def is_gone(self) -> bool:
        """Whether the last attempt to connect failed."""
        return self.state is not ConnectionState.READY and self.last_error is not None

    def accepts(self, now_ms: float) -> bool:
        """Whether it is ready, its in-flight window has room, and the broker does not throttle (KIP-219)."""
        return (
            self.state is ConnectionState.READY
            and len(self.protocol.in_flight) < self._options.max_in_flight_requests_per_connection
            and now_ms >= self.throttled_until_ms
        )

    def ready_delay_ms(self, now_ms: float) -> float:
        """Milliseconds until ``accepts`` may change by time alone; infinity if an event is needed first."""
        if self.state is ConnectionState.IDLE:
            return max(0.0, self.connect_after_ms - now_ms)
        return max(0.0, self.throttled_until_ms - now_ms) or math.inf

    def api_version(self, api_key: int, ours: tuple[int, int] | None = None) -> int:
        """The version from ``apis.common_version`` for this broker."""
        return common_version(f"broker {self.node}", api_key, self.protocol.api_versions, ours)

    def newest_version(self, api_key: int) -> int:
        """The newest version of an API that the broker supports; -1 if it does not support the API."""
        return self.protocol.api_versions.get(api_key, (0, -1))[1]

    @property
    def in_flight(self) -> int:
        return len(self.protocol.in_flight)

    def waiting_ms(self, now_ms: float) -> float:
        """How long the oldest request has been in flight, or 0 if no request is."""
        in_flight = self.protocol.in_flight
        return now_ms - in_flight[0].written_ms if in_flight else 0.0

    def flush(self, now_ms: float) -> list[Request]:
        """Write as much as the stream accepts. Returns requests without a response that are written. The age
        of a request starts again whenever some of its bytes are written, because a slow link takes long for a
        large one."""
        transport, send_buffer = self.transport, self.protocol.send_buffer
        if transport is None:
            return []
        gone = send_buffer.written_bytes - transport.held_bytes
        if transport.held_bytes and self.state in _TALKING:
            transport.flush()
        while buffers := send_buffer.next_buffers():
            sent = transport.send(buffers)
            send_buffer.advance(sent)
            if sent < sum(map(len, buffers)):
                break  # the stream is full
        if send_buffer.written_bytes - transport.held_bytes > gone:
            for request in self.protocol.in_flight:
                if request.end > gone:
                    request.written_ms = now_ms
        if self._options.acks != 0:
            return []
        done = self.protocol.take_written()
        if done:
            self._last_used_ms = max(self._last_used_ms, now_ms)
        return done

    def receive(self, buffer: memoryview, now_ms: float) -> bool:
        """Read once. False if nothing is available. Raises ConnectionResetError at the end of the stream."""
        self.shake_hands(now_ms)
        if self.transport is None or self.state not in _TALKING:
            return False
        count = self.transport.receive_into(buffer)
        if count is None:
            return False
        if count == 0:
            raise ConnectionResetError(f"{self.node} closed the connection{self._closed_because()}")
        self.protocol.receive(buffer[:count])
        return True

    def next_response(self, now_ms: float) -> CompletedRequest | None:
        """Return what BrokerProtocol.next_response returns. The connection may become ready by it."""
        completed = self.protocol.next_response(now_ms)
        state = self.protocol.phase
        if state is not self.state and self.state in _TALKING:
            self.state = state
            if state is ConnectionState.READY:
                self._became_ready(now_ms)
        if completed is not None:
            self._heard_since_ready = True
            self._last_used_ms = now_ms
            if completed.throttle_ms:
                self.throttled_until_ms = max(self.throttled_until_ms, now_ms + completed.throttle_ms)
        return completed

    def _became_ready(self, now_ms: float) -> None:
        session = self.protocol.session_ms
        if 0 < session < _MIN_SESSION_MS:
            # This is a failure, so the next login waits for the backoff. Else logins would never end.
            raise ConnectionError(
                f"{self.node} grants sessions of {session} ms, and {_MIN_SESSION_MS:.0f} ms are needed: "
                "check its connections.max.reauth.ms, and the lifetime of the credentials"
            )
        self._failures = 0
        self._addresses = []
        self.last_error = None
        self._last_used_ms = now_ms
        # The session of a renewed login may have no end, although the previous one had.
        self._renew_at_ms = self._session_end_ms = math.inf
        if session:
            share = _SESSION_SHARE + _SESSION_JITTER * self._random()
            self._renew_at_ms = now_ms + session * share
            self._session_end_ms = now_ms + session

    def _closed_because(self) -> str:
        """A hint why a broker may have closed the connection without an error."""
        tls, sasl = self._settings.tls, self._settings.sasl
        if self.state is ConnectionState.NEGOTIATING:
            if tls is None:
                return (
                    "; unless it is restarting, it may expect TLS (kafka.security.protocol=SSL or SASL_SSL)"
                )
            return "; unless it is restarting, it may need a client certificate (kafka.ssl.keystore.location)"
        if self.state is ConnectionState.AUTHENTICATING:
            return " during the login; see its log"
        if sasl is None and not self._heard_since_ready and self.in_flight:
            protocol = "SASL_PLAINTEXT" if tls is None else "SASL_SSL"
            return f"; unless it is restarting, it may need a login (kafka.security.protocol={protocol})"
        return ""

    def login_is_due(self, now_ms: float) -> bool:
        """Whether ``renew_login`` may have something to do."""
        return self.state is ConnectionState.READY and now_ms >= self._renew_at_ms

    def renew_login(self, now_ms: float) -> None:
        """Log in again before the session ends (KIP-368). If that fails, the session is used to its end."""
        if not self.login_is_due(now_ms) or self._security is None:
            return
        if self.preparation is None:
            self.preparation = self._security.begin(self.node.host, self._notify)
        if not self.preparation.done():
            return
        preparation, self.preparation = self.preparation, None
        exchange = None if preparation.exception() else preparation.result()[1]
        if exchange is None:
            self._renew_at_ms = now_ms + _RENEW_AGAIN_MS
            return
        self._renew_at_ms = math.inf
        self.protocol.log_in_again(exchange, now_ms)
        self.state = ConnectionState.REAUTHENTICATING

    def next_deadline_ms(self) -> float:
        state = self.state
        if state is ConnectionState.IDLE:
            return math.inf
        in_flight = self.protocol.in_flight
        respond_by = in_flight[0].written_ms + in_flight[0].timeout_ms if in_flight else math.inf
        if state is ConnectionState.REAUTHENTICATING:
            return respond_by
        if state is not ConnectionState.READY:
            next_address_ms = self._next_address_ms if self.attempts and self._addresses else math.inf
            return min(respond_by, self._setup_deadline_ms, next_address_ms)
        login_by = self._session_end_ms if self.preparation is not None else self._renew_at_ms
        login_by = min(login_by, self._session_end_ms)
        if in_flight:
            return min(respond_by, login_by)
        idle = self._options.connections_max_idle_ms
        return min(login_by, math.inf if idle < 0 else self._last_used_ms + idle)

    def overdue(self, now_ms: float) -> Exception | None:
        """The timeout for which the connection must be closed now, if any. Idle connections have none."""
        if self.state is ConnectionState.IDLE or now_ms < self.next_deadline_ms():
            return None
        if self.state is ConnectionState.CONNECTING and now_ms < self._setup_deadline_ms:
            return None
        if self.state in STEPS:
            waited = now_ms - self.connecting_since_ms
            return TimeoutError(
                f"{self.node} was not ready {waited:.0f} ms after connecting began: {self.step} did not "
                f"complete{self.silence_hint} (kafka.socket.connection.setup.timeout.ms sets this bound)"
            )
        if now_ms >= self._session_end_ms and self.state is ConnectionState.READY:
            return ConnectionError(f"the login at {self.node} expired before it could be renewed")
        in_flight = self.protocol.in_flight
        if not in_flight or now_ms < in_flight[0].written_ms + in_flight[0].timeout_ms:
            return None
        return TimeoutError(
            f"{self.node} did not respond within kafka.request.timeout.ms = {in_flight[0].timeout_ms:.0f} ms"
        )

    @property
    def silence_hint(self) -> str:
        """A hint why the other side, which has accepted the connection, may be silent; "" before that."""
        if self.state is ConnectionState.HANDSHAKING:
            return ": the port may belong to a listener without TLS, or to another service"
        if self.state is ConnectionState.NEGOTIATING:
            tls = "" if self._settings.tls else " may expect TLS (kafka.security.protocol), or"
            return f": the port{tls} may belong to another service, such as an HTTP server"
        return ""

    @property
    def step(self) -> str:
        """The current step of setting up the connection, for messages; empty once it is ready."""
        return STEPS.get(self.state, "")

    def idle_too_long(self, now_ms: float) -> bool:
        ready_and_quiet = self.state is ConnectionState.READY and not self.protocol.in_flight
        idle = self._options.connections_max_idle_ms
        return ready_and_quiet and idle >= 0 and now_ms >= self._last_used_ms + idle

    @property
    def transports(self) -> list[PlaintextTransport]:
        return [*self.attempts] if self.transport is None else [self.transport]

    def first_tries_end_ms(self, each_ms: float) -> float:
        """When each address of the host has had this long or has failed; infinity if one is untried."""
        if self._failures:
            return -math.inf
        return math.inf if self._addresses else self.connecting_since_ms + each_ms

    def abort(self) -> None:
        """Close the stream and drop bytes that the system has not sent yet, when a producer is closed."""
        if self.transport is not None:
            self.transport.abort()
            self.transport = None

    def close(self, now_ms: float, cause: Exception | None) -> list[tuple[Request, bool]]:
        """Close the stream. Returns the requests in flight, each with whether any byte of it was written.
        After a failure (``cause``) the next attempt waits, unless the host has further addresses to try."""
        for transport in self.transports:
            transport.close()
        self.transport = None
        self.attempts.clear()
        lost = self.protocol.take_in_flight()
        self.protocol = self._new_protocol(None)
        self._renew_at_ms = self._session_end_ms = math.inf
        self._heard_since_ready = False
        if cause is not None:
            self.last_error, self.failed_step = cause, self.step
            self.connect_after_ms = now_ms
            if not self._addresses:
                self._failures += 1
                self.connect_after_ms += self._reconnect_backoff.delay_ms(self._failures)
        self.state = ConnectionState.IDLE
        return lost
