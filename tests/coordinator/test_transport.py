"""Frames, the certificate, and the bounds of connections: without a server."""

from __future__ import annotations

import socket
import ssl
import struct
import threading
from collections.abc import Iterator
from dataclasses import replace
from random import Random

import pytest

from kafka_sink.coordinator.transport import (
    TOKEN_BYTES,
    Connection,
    Connections,
    Dropped,
    FrameReader,
    Peer,
    ServerBounds,
    framed_bytes,
    new_identity,
)
from kafka_sink.errors import ProtocolError
from tests.support.coordinator_harness import address_at, identity


def test_a_message_comes_out_whole_however_its_bytes_come() -> None:
    for size in (1, 65_536, 200_000):
        data = bytes(range(256)) * (size // 256 + 1)
        stream = framed_bytes(data[:size]) + framed_bytes(b"next")
        for step in (1 if size < 70_000 else 4_099, 16_384, len(stream)):
            reader, found = FrameReader(2**21), []
            for at in range(0, len(stream), step):
                reader.feed(stream[at : at + step])
                while (message := reader.next_message()) is not None:
                    found.append(message)
            assert found == [data[:size], b"next"]
            assert reader.buffered == 0


def test_a_frame_outside_the_bounds_is_refused_by_its_length() -> None:
    for length in (0, 101, 2**32 - 1):
        reader = FrameReader(100)
        reader.feed(struct.pack(">I", length))
        with pytest.raises(ProtocolError, match="a frame has"):
            reader.next_message()


def test_an_identity_is_new_each_time_and_hidden() -> None:
    one, other = new_identity(), new_identity()
    assert one.fingerprint != other.fingerprint
    assert len(one.token) == TOKEN_BYTES
    assert one.token != other.token
    for secret in (one.token.hex(), repr(one.token), one.name):
        assert secret not in repr(one)


@pytest.fixture
def foreign() -> Iterator[int]:
    """The port of a process that does TLS as the coordinator does and knows the name, with a certificate of
    its own."""
    other = replace(new_identity(), name=identity().name)
    other.context.sni_callback = None  # type: ignore[assignment]
    listening = socket.create_server(("127.0.0.1", 0))
    heard: list[bytes] = []

    def serve() -> None:
        sock, _ = listening.accept()
        with sock:
            try:
                with other.context.wrap_socket(sock, server_side=True) as tls:
                    heard.append(tls.recv(1000))
            except OSError:
                pass

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield listening.getsockname()[1]
    thread.join(10)
    listening.close()
    # No token for who is not the coordinator.
    assert heard in ([], [b""])


def test_a_client_tells_its_token_to_no_other_certificate(foreign: int) -> None:
    with pytest.raises(ProtocolError, match="certificate is not the coordinator's"):
        Connection(address_at(foreign, identity()), 5_000)


class _Client:
    """TLS over a pair of sockets with a peer of the server; it has said its first message."""

    def __init__(self, name: str = "") -> None:
        left, self.socket = socket.socketpair()
        left.setblocking(False)
        self.socket.settimeout(60)
        self.peer = Peer(1, "x", left, 0.0)
        # It believes any certificate.
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        self.incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.tls = context.wrap_bio(self.incoming, outgoing, server_hostname=name or identity().name)
        with pytest.raises(ssl.SSLWantReadError):
            self.tls.do_handshake()
        self.hello = outgoing.read()

    def __enter__(self) -> _Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.peer.close()
        self.socket.close()


def test_only_who_knows_the_name_gets_a_handshake() -> None:
    """Catches: a port scanner, or a flood, that costs a signature for each connection."""
    with _Client("wrong.invalid") as stranger:
        stranger.socket.sendall(stranger.hello)
        with pytest.raises(ssl.SSLError):
            stranger.peer.receive(identity().context)
        stranger.incoming.write(stranger.socket.recv(10_000))
        with pytest.raises(ssl.SSLError, match=r"(?i)unrecognized.name"):
            stranger.tls.do_handshake()


def test_peers_that_gave_up_before_their_turn_cost_no_handshake() -> None:
    """Catches: a server that works through thousands who have gone while those who are there give up."""
    with _Client() as gone:
        gone.socket.sendall(gone.hello)
        gone.socket.close()
        with pytest.raises(ConnectionError, match="before its turn"):
            gone.peer.receive(identity().context)
        assert not gone.peer.has_begun


def test_messages_of_tls_without_data_are_bounded() -> None:
    """A peer that only sends what TLS itself answers would keep the loop busy for ever."""
    with _Client() as one:
        # A first message of 128 KiB in records of 16 KiB.
        header, hello = b"\x16\x03\x01\x40\x00", b"\x01\x01\xff\xff".ljust(16_384, b"\0")
        one.socket.sendall((header + hello + (header + bytes(16_384)) * 3)[: 64 * 1024])
        for _ in range(4):
            one.peer.receive(identity().context)
        one.socket.sendall(b"\0")
        with pytest.raises(ProtocolError, match="TLS messages without data"):
            one.peer.receive(identity().context)


# -- which connections are kept ---------------------------------------------------------------------------


class _Peers:
    def __init__(self) -> None:
        self.removed: list[int] = []
        bounds = ServerBounds(unauthenticated=3, unfinished_bytes=1_000, unread_bytes_of_all=1_000)
        self.connections = Connections(bounds, lambda peer: self.removed.append(peer.number), Random(5))
        self.count = 0

    def add(self, source: str = "one", *, authenticated: bool = False) -> Peer:
        self.count += 1
        peer = Peer(self.count, source, socket.socket(), 0.0)
        self.connections.add(peer)
        if authenticated:
            self.connections.on_authenticated(peer)
        return peer


@pytest.fixture
def peers() -> Iterator[_Peers]:
    made = _Peers()
    yield made
    made.connections.close()


def test_a_flood_makes_room_for_others_by_its_own(peers: _Peers) -> None:
    for _ in range(3):
        peers.add("flood")
    other = peers.add("other")
    for _ in range(20):
        peers.add("flood")
    assert not other.is_gone
    assert len(peers.removed) == 21
    assert len(peers.connections.peers) == 3


def test_a_random_connection_of_the_address_is_dropped(peers: _Peers) -> None:
    """Catches: the oldest goes, which may be a task that has just connected."""
    for _ in range(23):
        peers.add("same")
    assert peers.removed != sorted(peers.removed)


def test_authenticated_peers_are_never_evicted(peers: _Peers) -> None:
    tasks = [peers.add(authenticated=True) for _ in range(10)]
    for _ in range(10):
        peers.add()
    assert not any(one.is_gone for one in tasks)
    assert peers.connections.authenticated == 10


def test_times_of_peers_are_bounded(peers: _Peers) -> None:
    silent, half, idle, well = (peers.add(authenticated=number > 0) for number in range(4))
    half.frames.feed(b"\0\0")
    peers.connections.count_unfinished(half, 2_000.0)
    for one in (half, well):
        one.heard_ms = 119_000
    peers.connections.drop_late(10_000.0)
    assert not peers.removed
    peers.connections.drop_late(10_001.0)
    assert peers.removed == [silent.number]
    peers.connections.drop_late(12_001.0)
    assert peers.removed == [silent.number, half.number]
    peers.connections.drop_late(120_001.0)
    assert peers.removed == [silent.number, half.number, idle.number]
    assert not well.is_gone


def test_unfinished_messages_are_bounded_over_all_peers(peers: _Peers) -> None:
    one, other = peers.add(authenticated=True), peers.add(authenticated=True)
    one.frames.feed(bytes(600))
    peers.connections.count_unfinished(one, 0.0)
    other.frames.feed(bytes(600))
    with pytest.raises(ProtocolError, match="unfinished messages of all peers"):
        peers.connections.count_unfinished(other, 0.0)
    peers.connections.drop(other, Dropped.NONSENSE)
    peers.connections.count_unfinished(one, 0.0)


def test_unread_bytes_of_all_peers_are_bounded_and_shared_messages_count_once(peers: _Peers) -> None:
    shared = bytes(10_000)
    tasks = [peers.add(authenticated=True) for _ in range(4)]
    for number, one in enumerate(tasks):
        one.enqueue(shared, shared=True)
        one.enqueue(bytes(100 + number), shared=False)
    peers.connections.bound_unread()
    assert not peers.removed
    tasks[1].enqueue(bytes(500), shared=False)
    peers.connections.bound_unread()
    assert peers.removed == [tasks[1].number]
    assert tasks[1].own_bytes == 0


def test_dropped_connections_are_logged_once_a_minute(peers: _Peers) -> None:
    for source in ("a", "a", "b"):
        peer = peers.add(source)
        # Each message to a peer that does not read drops it, and it is one connection.
        for _ in range(2):
            peers.connections.drop(peer, Dropped.NOT_AUTHENTICATED)
    line = peers.connections.log_line(0.0)
    assert line is not None
    assert "3 used a wrong token" in line
    assert "the last from b" in line
    peers.connections.drop(peers.add("c"), Dropped.STALLED)
    assert peers.connections.log_line(59_999.0) is None
    assert "1 did not complete" in (peers.connections.log_line(60_000.0) or "")
