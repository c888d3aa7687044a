"""The plain socket: its options, scatter-gather, and that it never blocks."""

from __future__ import annotations

import os
import select
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future

import pytest

from kafka_sink.network.transport import PlaintextTransport, SocketAddress, start_lookup


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    """On loopback; takes connections when asked to."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def place(server: socket.socket) -> SocketAddress:
    """Where it listens."""
    return socket.AF_INET, server.getsockname()


@pytest.fixture
def pair(listener: socket.socket) -> Iterator[tuple[PlaintextTransport, socket.socket]]:
    """A connected transport and the other end."""
    transport = PlaintextTransport(place(listener))
    peer, _ = listener.accept()
    assert select.select([], [transport], [], 10)[1]
    transport.on_connected()
    yield transport, peer
    transport.close()
    peer.close()


def test_options_of_the_socket(listener: socket.socket) -> None:
    transport = PlaintextTransport(place(listener))
    assert not os.get_blocking(transport.fileno())
    with socket.socket(fileno=os.dup(transport.fileno())) as same:
        assert same.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    transport.close()


def test_a_refused_connect_raises(listener: socket.socket) -> None:
    address = place(listener)
    listener.close()
    transport = PlaintextTransport(address)
    assert select.select([], [transport], [], 10)[1]
    with pytest.raises(ConnectionRefusedError):
        transport.on_connected()
    transport.close()


def test_many_buffers_arrive_in_order_and_a_full_socket_does_not_block(
    pair: tuple[PlaintextTransport, socket.socket],
) -> None:
    transport, peer = pair
    parts = [memoryview(bytes([i % 256]) * 3) for i in range(1024)]
    assert transport.send(parts) == 3072
    received = b""
    while len(received) < 3072:
        received += peer.recv(4096)
    assert received == b"".join(parts)
    piece = memoryview(bytes(1 << 20))
    while sent := transport.send([piece]):
        pass
    assert sent == 0


def test_reading(pair: tuple[PlaintextTransport, socket.socket]) -> None:
    transport, peer = pair
    assert transport.handshake()
    assert not transport.held_bytes
    assert not transport.buffered
    buffer = memoryview(bytearray(10))
    assert transport.receive_into(buffer) is None
    peer.sendall(b"abc")
    assert select.select([transport], [], [], 10)[0]
    assert transport.receive_into(buffer) == 3
    assert bytes(buffer[:3]) == b"abc"
    peer.close()
    assert select.select([transport], [], [], 10)[0]
    assert transport.receive_into(buffer) == 0


def test_an_address_of_no_family_leaves_no_socket_behind() -> None:
    with pytest.raises(socket.gaierror):
        PlaintextTransport((socket.AF_INET, ("256.256.256.256", 1)))


# -- names ---------------------------------------------------------------------------------------------


def finished(host: str) -> Future[list[SocketAddress]]:
    """Waits for it, and for the call."""
    done = threading.Event()
    lookup = start_lookup(host, 9092, done.set)
    assert done.wait(60)
    assert lookup.done()
    return lookup


def test_a_numeric_address_is_done_at_once_without_a_thread() -> None:
    for host, family in (("127.0.0.1", socket.AF_INET), ("::1", socket.AF_INET6)):
        lookup = start_lookup(host, 9092, lambda: None)
        assert lookup.done()
        assert [(f, address[:2]) for f, address in lookup.result()] == [(family, (host, 9092))]
        assert not [one for one in threading.enumerate() if one.name == f"kafka-chunked-dns-{host}"]


def test_a_name_is_looked_up_elsewhere_and_told() -> None:
    found = finished("localhost").result()
    assert found
    assert {address[0] for _, address in found} <= {"127.0.0.1", "::1"}
    # A name with a zero byte is not another name, and an empty label crashes nothing.
    for host in ("localhost\0.evil.test", "127.0.0.1\0x"):
        assert "zero byte" in str(finished(host).exception())
    assert isinstance(finished("a..b").exception(), OSError)


@pytest.mark.parametrize(
    ("problem", "text"),
    [
        (socket.gaierror(-2, "Name or service not known"), "cannot resolve nowhere: .*not known"),
        (UnicodeError("label too long"), "'nowhere' is not a host name"),
        (None, "nowhere has no address"),
        (MemoryError("none left"), "cannot resolve nowhere: none left"),
    ],
)
def test_failures_become_errors(
    problem: Exception | None, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def resolve(_host: str, _port: int, flags: int) -> list[SocketAddress]:
        if flags:
            raise socket.gaierror("not numeric")
        if problem is not None:
            raise problem
        return []

    monkeypatch.setattr("kafka_sink.network.transport.resolve_host", resolve)
    with pytest.raises(OSError, match=text):
        finished("nowhere").result()
