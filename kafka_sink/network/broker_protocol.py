"""One broker connection without its socket: received bytes become responses, and requests become buffers.

Brokers respond in the order of requests, so requests wait in a queue. Any bytes other than the response to
the oldest request are a ProtocolError: the connection is closed, and everything in flight fails. Bytes after
a response, but within its frame, do no harm and are skipped, as in librdkafka, with which brokers are tested.
"""

from __future__ import annotations

import logging
import struct
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

from kafka_sink.errors import BrokerVersionError, ProtocolError
from kafka_sink.kafka_errors import UNSUPPORTED_VERSION, error_of
from kafka_sink.network import requests
from kafka_sink.network.apis import API_VERSIONS, APIS, DECODERS, METADATA, PRODUCE, common_version
from kafka_sink.network.wire import Buffer
from kafka_sink.version import __version__

if TYPE_CHECKING:
    from kafka_sink.network.authentication import Login
    from kafka_sink.security.sasl import SaslExchange

_log = logging.getLogger(__name__)
_LENGTH = struct.Struct(">i")
_SHORTEST_FRAME = 4
# The response of a TLS listener to plaintext starts with this: a record of type alert, version 3.x.
_TLS_ALERT = b"\x15\x03"
_HTTP = b"HTTP"


class ConnectionState(Enum):
    """PREPARING reads TLS files and fetches tokens. HANDSHAKING is TLS, NEGOTIATING is ApiVersions.

    AUTHENTICATING is the SASL login. REAUTHENTICATING is another login with requests still in flight. A
    ``BrokerProtocol`` has the states from NEGOTIATING on.
    """

    IDLE = "idle"
    RESOLVING = "resolving"
    PREPARING = "preparing"
    CONNECTING = "connecting"
    HANDSHAKING = "handshaking"
    NEGOTIATING = "negotiating"
    AUTHENTICATING = "authenticating"
    READY = "ready"
    REAUTHENTICATING = "reauthenticating"


# Called with the response, decoded to the API's own class (``ProduceResponse``, ``MetadataResponse`` ...),
# and the time. The response is None if the request expects none (acks=0) and has been written.
OnResponse = Callable[[Any, float], object]
# Called if no response will arrive, with the cause, whether bytes were sent, and the time.
OnFailure = Callable[[Exception, bool, float], object]


@dataclass(slots=True, eq=False)
class Request:
    """A request. Its body is buffers of bytes; a memoryview of another format would be miscounted.

    The thread that polls calls exactly one of the two callbacks, once. ``timeout_ms`` counts from
    ``written_ms``. ``asked`` is the number of topics, partitions and keys in the body, if there may be many
    of them: a response with far more is a ProtocolError. ``records`` is the number of records in a Produce
    request, because brokers may respond with a text for each of them.
    """

    api_key: int
    api_version: int
    body: Sequence[Buffer]
    timeout_ms: float
    on_response: OnResponse
    on_failure: OnFailure
    expects_response: bool = True
    asked: int = 0
    records: int = 0
    # Set by BrokerProtocol when the request is queued. BrokerConnection sets ``written_ms`` whenever it has
    # written some of the request's bytes. ``begin`` and ``end`` are its place in the outgoing bytes.
    correlation_id: int = -1
    sent_ms: float = 0.0
    written_ms: float = 0.0
    begin: int = 0
    end: int = 0


@dataclass(frozen=True, slots=True)
class CompletedRequest:
    """A request and its response. ``throttle_ms`` is how long nothing more may be sent."""

    request: Request
    response: Any
    throttle_ms: int


class BrokerProtocol:
    """The protocol state of one connection. Times are passed in as milliseconds.

    Pass received bytes to ``receive``, then call ``next_response`` until it returns None. Pass requests to
    ``submit``, and write the content of ``send_buffer``. After a ProtocolError, call only ``take_in_flight``.
    ``trailing`` are the APIs for which a warning about trailing bytes was already logged.
    """

    def __init__(
        self,
        client_id: str,
        name: str,
        request_timeout_ms: float,
        exchange: SaslExchange | None = None,
        trailing: set[int] | None = None,
    ) -> None:
        self.send_buffer = SendBuffer()
        self.phase = ConnectionState.NEGOTIATING
        # The broker's versions by API key. Empty until the connection is ready.
        self.api_versions: dict[int, tuple[int, int]] = {}
        self.produce_version = -1
        # The session length of the last login in milliseconds; 0 if the session does not end.
        self.session_ms = 0
        self._exchange = exchange
        self._login: Login | None = None
        # The feature levels that the cluster has finalized.
        self.features: dict[str, int] = {}
        self._client_id = client_id
        self._name = name
        self._request_timeout_ms = request_timeout_ms
        self._trailing = set() if trailing is None else trailing
        # Oldest first. A request without a response is complete once it is written.
        self.in_flight: deque[Request] = deque()
        self._next_correlation = 0
        self._received = bytearray()

    def start(self, now_ms: float, version: int = APIS[API_VERSIONS].versions[1]) -> None:
        """Request the broker's API versions, before anything else."""
        body = requests.encode_api_versions(version, __version__)
        self._ask(API_VERSIONS, version, body, partial(self._on_versions, version), now_ms)

    def _ask(self, api: int, version: int, body: Buffer, on_response: OnResponse, now_ms: float) -> None:
        """Queue a request of the connection itself. Its end is not reported to the caller."""
        self.submit(Request(api, version, [body], self._request_timeout_ms, on_response, _unheard), now_ms)

    def submit(self, request: Request, now_ms: float) -> None:
        """Queue a request. Raises ValueError, changing nothing, if the connection is not ready for it."""
        if self.phase is not ConnectionState.READY and request.on_failure is not _unheard:
            raise ValueError(f"{self._name} is not ready for requests")
        correlation = self._next_correlation
        header = requests.encode_header(request.api_key, request.api_version, correlation, self._client_id)
        self._next_correlation = (correlation + 1) & 0x7FFFFFFF
        size = len(header) + sum(map(len, request.body))
        begin = self.send_buffer.queued_bytes
        buffers: list[Buffer] = [_LENGTH.pack(size) + header, *request.body]
        self.send_buffer.add(buffers)
        request.correlation_id, request.sent_ms, request.written_ms = correlation, now_ms, now_ms
        request.begin, request.end = begin, begin + _LENGTH.size + size
        self.in_flight.append(request)

    def take_written(self) -> list[Request]:
        """Remove and return the requests without a response whose bytes have all been written."""
        written = self.send_buffer.written_bytes
        done = [
            request for request in self.in_flight if not request.expects_response and request.end <= written
        ]
        for request in done:
            self.in_flight.remove(request)
        return done

    def receive(self, data: bytes | bytearray | memoryview) -> None:
        """Accept received bytes, in pieces of any size."""
        self._received += data

    def next_response(self, now_ms: float) -> CompletedRequest | None:
        """Return the next complete response; None if bytes are missing.

        Responses to the connection's own requests are handled here and not returned. Raises ProtocolError for
        bytes that no broker sends, BrokerVersionError if the broker does not support Produce, and
        AuthenticationError if the login fails. A request whose response cannot be read stays in flight, so
        that ``take_in_flight`` reports it.
        """
        while self._received:
            request = next((queued for queued in self.in_flight if queued.expects_response), None)
            if request is None or request.end > self.send_buffer.written_bytes:
                raise ProtocolError(f"{self._name} sent bytes without a request")
            payload = self._next_payload(request)
            if payload is None:
                return None
            try:
                asked, on_trailing = request.asked + request.records, partial(self._on_trailing, request)
                response = DECODERS[request.api_key](request.api_version, payload, asked, on_trailing)
            except ProtocolError as error:
                raise ProtocolError(f"{self._name}: {error}") from error
            self.in_flight.remove(request)
            if request.on_failure is _unheard:
                request.on_response(response, now_ms)
                continue
            throttled = request.api_version >= APIS[request.api_key].first_client_throttled
            return CompletedRequest(request, response, max(0, response.throttle_time_ms) if throttled else 0)
        return None

    def _on_trailing(self, request: Request, problem: str) -> None:
        if request.api_key not in self._trailing:
            self._trailing.add(request.api_key)
            _log.warning("%s: %s; they are skipped, here and from now on", self._name, problem)

    def _next_payload(self, due: Request) -> bytes | None:
        """The response to this request; None if bytes are missing."""
        received = self._received
        if len(received) < _LENGTH.size:
            return None
        (size,) = _LENGTH.unpack_from(received)
        max_size = APIS[due.api_key].largest_response(due.end - due.begin, due.asked, due.records)
        if not _SHORTEST_FRAME <= size <= max_size:
            if bytes(received[:2]) == _TLS_ALERT:
                raise ProtocolError(
                    f"{self._name} expects TLS: set kafka.security.protocol=SSL or SASL_SSL, or use the "
                    "port of a plaintext listener"
                )
            if bytes(received[: len(_HTTP)]) == _HTTP:
                raise ProtocolError(
                    f"{self._name} is an HTTP server, and not a Kafka broker: use the port of a broker's "
                    "listener (kafka.bootstrap.servers)"
                )
            raise ProtocolError(
                f"{self._name} sent a response of {size} bytes, but {_SHORTEST_FRAME} to {max_size} are "
                "valid: it is not a Kafka broker, or it expects TLS"
            )
        head = bytes(received[_LENGTH.size : 2 * _LENGTH.size])
        # Check the correlation id as soon as it has arrived, before the rest of an invalid frame.
        if len(head) == _LENGTH.size and head != _LENGTH.pack(due.correlation_id):
            (got,) = _LENGTH.unpack(head)
            raise ProtocolError(
                f"{self._name} sent correlation id {got}, but {due.correlation_id} was expected"
            )
        end = _LENGTH.size + size
        if len(received) < end:
            return None
        with memoryview(received) as view:
            payload = bytes(view[_LENGTH.size : end])
        del received[:end]
        return payload

    def _on_versions(self, version: int, response: requests.ApiVersionsResponse, now_ms: float) -> None:
        if response.error_code == UNSUPPORTED_VERSION and version > 0:
            # A broker that does not support the version responds in version 0, which every broker supports.
            self.start(now_ms, version=0)
            return
        if response.error_code:
            raise ProtocolError(f"{self._name} failed ApiVersions: {error_of(response.error_code).label}")
        if PRODUCE not in response.ranges:
            raise BrokerVersionError(f"{self._name} does not take Produce requests: is it a controller?")
        common_version(self._name, METADATA, response.ranges)
        self.produce_version = common_version(self._name, PRODUCE, response.ranges)
        self.api_versions = response.ranges
        self.features = response.features
        if self._exchange is None:
            self.phase = ConnectionState.READY
            return
        self.phase = ConnectionState.AUTHENTICATING
        self._begin_login(self._exchange, now_ms)

    def log_in_again(self, exchange: SaslExchange, now_ms: float) -> None:
        """Begin a login after all requests in flight. Raises ValueError if the connection is not ready."""
        if self.phase is not ConnectionState.READY:
            raise ValueError(f"{self._name} is not ready for another login")
        self.phase = ConnectionState.REAUTHENTICATING
        self._begin_login(exchange, now_ms)

    def _begin_login(self, exchange: SaslExchange, now_ms: float) -> None:
        from kafka_sink.network.authentication import Login

        self._login = Login(exchange, self._name, self.api_versions)
        self._ask(*self._login.begin(), self._on_login_response, now_ms)

    def _on_login_response(self, response: Any, now_ms: float) -> None:
        assert self._login is not None
        following = self._login.on_response(response)
        if following is None:
            self.session_ms = self._login.session_ms
            self._exchange = self._login = None
            self.phase = ConnectionState.READY
            return
        self._ask(*following, self._on_login_response, now_ms)

    def take_in_flight(self) -> list[tuple[Request, bool]]:
        """Remove and return the caller's requests in flight, in order, each with whether bytes of it were
        written. A broker acts on complete requests only, so that is on the safe side."""
        lost = list(self.in_flight)
        self.in_flight.clear()
        written = self.send_buffer.written_bytes
        return [(request, request.begin < written) for request in lost if request.on_failure is not _unheard]


def _unheard(cause: Exception, possibly_sent: bool, now_ms: float) -> None:
    """The ``on_failure`` of the connection's own requests. Does nothing."""


# IOV_MAX on Linux: one sendmsg accepts no more buffers.
MAX_BUFFERS_PER_SEND = 1024


class SendBuffer:
    """A stream of buffers, and the position up to which it is written, which may be within a buffer.

    ``queued_bytes`` and ``written_bytes`` count from the beginning of the stream. A written buffer is let go
    of at once, because its chunk is returned to the pool after the response.
    """

    def __init__(self) -> None:
        self.queued_bytes = 0
        self.written_bytes = 0
        self._buffers: deque[Buffer] = deque()

    def add(self, buffers: Sequence[Buffer]) -> None:
        self._buffers += buffers
        self.queued_bytes += sum(map(len, buffers))

    def next_buffers(self) -> list[Buffer]:
        """The buffers for one send; empty if everything is written."""
        return list(islice(self._buffers, MAX_BUFFERS_PER_SEND))

    def advance(self, sent: int) -> None:
        self.written_bytes += sent
        buffers = self._buffers
        while buffers and sent >= len(buffers[0]):
            sent -= len(buffers.popleft())
        if sent:
            buffers[0] = memoryview(buffers[0])[sent:]
