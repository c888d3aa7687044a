"""What the network client is given, options and requests, and the events that it returns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kafka_sink.security.settings import SecuritySettings

if TYPE_CHECKING:
    from kafka_sink.options import SinkOptions

Buffer = bytes | memoryview


@dataclass(slots=True)
class OutboundRequest:
    """A request's body as buffers of bytes (a memoryview of another format would be miscounted).

    ``timeout_ms`` counts from ``NetworkClient.send``. ``tag`` is the caller's own and comes back in events.
    ``asked``: how many topics, partitions and keys the body names, where these may be many: a response that
    has far more is a ProtocolError.
    """

    api_key: int
    api_version: int
    body: Sequence[Buffer]
    expects_response: bool
    timeout_ms: float
    tag: object
    asked: int = 0


@dataclass(frozen=True, slots=True)
class ResponseReceived:
    """A response, decoded to the API's own class (``ProduceResponse``, ``MetadataResponse`` ...).

    ``response`` is None where the request expects no response (acks=0) and has been written. ``latency_ms``
    counts from ``NetworkClient.send``.
    """

    node_id: int
    tag: object
    response: Any
    latency_ms: float


@dataclass(frozen=True, slots=True)
class RequestFailed:
    """No response will come. ``possibly_sent``: bytes were sent, so the broker may have acted on them."""

    node_id: int
    tag: object
    cause: Exception
    possibly_sent: bool


@dataclass(frozen=True, slots=True)
class NodeConnected:
    """A broker's API versions are known, and requests may be sent. ``setup_ms``: since connecting began."""

    node_id: int
    setup_ms: float


@dataclass(frozen=True, slots=True)
class NodeDisconnected:
    """A connection, or an attempt to connect, ended. Closing an idle connection is not reported."""

    node_id: int
    cause: Exception


NetworkEvent = ResponseReceived | RequestFailed | NodeConnected | NodeDisconnected


@dataclass(frozen=True, slots=True)
class NetworkSettings:
    """The options of the same names; times in milliseconds, sizes in bytes (-1: the system's).

    ``connections_max_idle_ms`` below zero means never. ``rebootstrap``: whether the bootstrap addresses are
    used again when no known broker can be reached (metadata.recovery.strategy, KIP-899).
    """

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
    canonical_bootstrap: bool = False
    rebootstrap: bool = True
    security: SecuritySettings = field(default_factory=SecuritySettings)

    @classmethod
    def from_options(cls, options: SinkOptions) -> NetworkSettings:
        """Taken as they are, but for an empty client.id, which gets this package's name.

        Raises ConfigurationError as SecuritySettings.from_options.
        """
        return cls(
            bootstrap_servers=tuple(options.bootstrap_servers),
            client_id=options.client_id or "kafka-chunked",
            max_in_flight=options.max_in_flight_requests_per_connection,
            request_timeout_ms=options.request_timeout_ms,
            reconnect_backoff_ms=options.reconnect_backoff_ms,
            reconnect_backoff_max_ms=options.reconnect_backoff_max_ms,
            connection_setup_timeout_ms=options.socket_connection_setup_timeout_ms,
            connection_setup_timeout_max_ms=options.socket_connection_setup_timeout_max_ms,
            connections_max_idle_ms=options.connections_max_idle_ms,
            send_buffer_bytes=options.send_buffer_bytes,
            receive_buffer_bytes=options.receive_buffer_bytes,
            rebootstrap=options.metadata_recovery_strategy == "rebootstrap",
            canonical_bootstrap=options.client_dns_lookup == "resolve_canonical_bootstrap_servers_only",
            security=SecuritySettings.from_options(options),
        )
