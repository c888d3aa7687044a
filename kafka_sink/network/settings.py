"""The options that the network layer reads."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kafka_sink.security.settings import SecuritySettings

if TYPE_CHECKING:
    from kafka_sink.options import SinkOptions


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
