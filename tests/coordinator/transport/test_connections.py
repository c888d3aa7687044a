"""What a coordinator says of connections that it dropped: enough to see an attack, never a flood of lines."""

from __future__ import annotations

import gc
from typing import cast

import pytest

from kafka_sink.coordinator.transport.connections import ConnectionLog, Connections, Dropped, ServerBounds
from kafka_sink.coordinator.transport.peer_connection import Owner, PeerConnection
from kafka_sink.coordinator.transport.session import Session


def test_the_first_is_logged_at_once_and_later_ones_once_a_minute() -> None:
    log = ConnectionLog()
    assert log.line(0.0) is None
    log.note(Dropped.WRONG_PROOF, "192.0.2.1")
    first = log.line(1.0)
    assert first is not None
    assert "1 did not prove that they know the secret (most from 192.0.2.1)" in first
    lines = []
    for second in range(180):
        for number in range(1000):
            log.note(Dropped.MADE_ROOM if number else Dropped.FULL, f"198.51.100.{number % 2}")
        lines.append(log.line(second * 1000.0))
    logged = [line for line in lines if line]
    assert len(logged) == 2
    assert "61938 had not proved that they know the secret" in logged[0]
    assert "62 were dropped" in logged[0]
    assert "192.0.2.1" not in logged[0]


def test_a_flood_from_many_addresses_is_counted_in_bounded_memory() -> None:
    log = ConnectionLog()
    for number in range(100_000):
        log.note(Dropped.NO_PROOF, f"address {number}")
    assert len(log._sources) == 1000
    line = log.line(0.0)
    assert line is not None
    assert "100000 did not prove in time that they know the secret" in line
    assert len(line) < 300


def test_what_ended_connections_leave_behind_is_freed_once_they_are_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Catches: a flood of 8,000 connections a second would leave 25 MiB of garbage a second, because the
    coordinator's process hardly collects garbage otherwise."""
    collections: list[int] = []
    monkeypatch.setattr(gc, "collect", lambda: collections.append(1))
    connections = Connections(ServerBounds(), lambda _: None)
    for second in range(4):
        for number in range(1_000):
            session = Session(b"x" * 32, "server")
            peer = PeerConnection(1_000 * second + number, "192.0.2.1", session, cast(Owner, None), 0.0)
            connections.add(peer)
            connections.remove(peer)
        connections.sweep(1_000.0 * second)
    assert len(collections) == 2
