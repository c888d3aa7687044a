"""From options to what the network layer needs of them."""

from __future__ import annotations

import dataclasses

from kafka_sink.network.events import NetworkSettings
from kafka_sink.options import parse

REQUIRED = {"kafka.bootstrap.servers": "a:1,[::1]:2"}


def settings(**options: str) -> NetworkSettings:
    """Names with underscores for dots."""
    given = {f"kafka.{name.replace('_', '.')}": value for name, value in options.items()}
    return NetworkSettings.from_options(parse({**REQUIRED, **given}).options)


def test_every_option_arrives() -> None:
    given = settings(
        client_id="me",
        enable_idempotence="false",
        max_in_flight_requests_per_connection="3",
        request_timeout_ms="4000",
        reconnect_backoff_ms="5",
        reconnect_backoff_max_ms="6",
        socket_connection_setup_timeout_ms="7",
        socket_connection_setup_timeout_max_ms="8",
        connections_max_idle_ms="9",
        send_buffer_bytes="10",
        receive_buffer_bytes="11",
        client_dns_lookup="resolve_canonical_bootstrap_servers_only",
        metadata_recovery_strategy="none",
    )
    assert dataclasses.astuple(given)[:-1] == (
        (("a", 1), ("::1", 2)), "me", 3, 4000, 5, 6, 7, 8, 9, 10, 11, True, False,
    )  # fmt: skip


def test_defaults_are_those_of_the_options() -> None:
    given = settings()
    assert given.client_id == "kafka-chunked"
    assert given.max_in_flight == 5
    assert not given.canonical_bootstrap
    assert given.rebootstrap
