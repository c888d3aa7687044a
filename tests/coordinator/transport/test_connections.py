"""What a coordinator says of connections that it dropped: enough to see an attack, never a flood of lines."""

from __future__ import annotations

import asyncio
import gc
from typing import cast
from unittest.mock import Mock, create_autospec

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


def peer_of(number: int, now_ms: float) -> PeerConnection:
    return PeerConnection(number, "192.0.2.1", Session(b"x" * 32, "server"), cast(Owner, Mock()), now_ms)


def opened(connections: Connections) -> tuple[PeerConnection, Mock]:
    """A peer that has proved itself, and its transport."""
    peer, transport = peer_of(1, 0.0), create_autospec(asyncio.Transport, instance=True)
    connections.add(peer)
    connections.proved(peer)
    transport.is_closing.return_value = False
    transport.get_write_buffer_size.return_value = 0
    peer.connection_made(transport)
    return peer, transport


BOUNDS = ServerBounds(challenge_ms=5_000, frame_ms=5_000, silence_ms=120_000)


@pytest.mark.parametrize("silent_in", ["challenge", "frame", "reading", "all"])
def test_time_in_which_the_server_stood_still_is_no_silence_of_a_peer(silent_in: str) -> None:
    """Catches: executors lost their connection after a stall of the coordinator, which had not read what they
    had sent."""
    connections = Connections(BOUNDS, lambda _: None)
    bound_ms, stood_ms = BOUNDS.frame_ms, 0.0
    if silent_in == "challenge":
        connections.add(peer_of(1, 0.0))
    else:
        peer, transport = opened(connections)
        if silent_in == "frame":
            peer.frames.feed(b"\0\0\1\0")
            connections.note_unfinished(peer, 0.0)
        elif silent_in == "reading":
            transport.get_write_buffer_size.return_value = 10
        else:
            bound_ms = BOUNDS.silence_ms
    connections.sweep(0.0)
    now_ms = bound_ms - 1.0
    for _ in range(3):
        # Stopped, and in long turns.
        stood_ms += 2 * bound_ms
        now_ms += 2 * bound_ms
        connections.sweep(now_ms, stood_ms)
        assert len(connections) == 1
    connections.sweep(now_ms + 2.0, stood_ms)
    assert len(connections) == 0


def test_a_peer_that_waits_for_its_turn_is_not_taken_for_one_that_does_not_read() -> None:
    """Catches: while thousands of topics went to all hosts, those whose turn came last were dropped."""
    connections = Connections(BOUNDS, lambda _: None)
    peer, _ = opened(connections)
    peer.enqueue(b"x" * 100, b"")
    for now_ms in (0.0, 4_000.0, 8_000.0):
        connections.sweep(now_ms)
        assert len(connections) == 1
    peer.pause_writing()
    for now_ms in (9_000.0, 14_000.0, 15_000.0):
        connections.sweep(now_ms)
    assert len(connections) == 0


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
            peer = peer_of(1_000 * second + number, 0.0)
            connections.add(peer)
            connections.remove(peer)
        connections.sweep(1_000.0 * second)
    assert len(collections) == 2
