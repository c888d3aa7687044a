"""Requests that carry a login: bounded in time and size, and led nowhere else."""

from __future__ import annotations

import gzip
import socket
import ssl
import threading
import time
import tracemalloc
from collections.abc import Iterator

import pytest

from kafka_sink.security.http import HttpClient
from tests.support.http_server import Server
from tests.support.surroundings import Environ
from tests.support.waiting import until

LIMIT = 64 << 10


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as running:
        yield running


def get(url: str, timeout_s: float = 60.0) -> tuple[int, bytes]:
    client = HttpClient(url, ssl.create_default_context, 60.0, "some.option")
    try:
        return client.request("GET", "/path", {"A": "b"}, None, timeout_s=timeout_s, max_bytes=LIMIT)
    finally:
        client.close()


def test_requests_share_a_connection(server: Server) -> None:
    client = HttpClient(f"{server.url}/root?a=b", ssl.create_default_context, 60.0, "some.option")
    for _ in range(3):
        assert client.request("POST", "", {}, b"body", timeout_s=60.0, max_bytes=10) == (200, b"{}")
    client.close()
    assert [one[:2] for one in server.requests] == [("POST", "/root?a=b")] * 3
    assert server.connections == 1
    assert client.shown == f"{server.url.removeprefix('http://')}/root"


def test_a_large_response_is_left_unread_and_nothing_is_decompressed(server: Server) -> None:
    """Catches: 597 KiB of gzip that became 503 MiB."""
    server.respond = lambda _: (200, {}, bytes(50 << 20))
    tracemalloc.start()
    try:
        with pytest.raises(OSError, match=f"the response has more than {LIMIT} bytes"):
            get(server.url)
        # The server's own 50 MiB are in this process.
        assert tracemalloc.get_traced_memory()[1] < 55 << 20
    finally:
        tracemalloc.stop()
    small = gzip.compress(bytes(20 << 20))
    server.respond = lambda _: (200, {"Content-Encoding": "gzip"}, small)
    assert get(server.url) == (200, small)
    assert server.requests[-1][2]["Accept-Encoding"] == "identity"


def test_no_redirection_is_followed(server: Server) -> None:
    for number, status in enumerate((301, 302, 307, 308), 1):
        server.respond = lambda _, status=status: (status, {"Location": f"{server.url}/other"}, b"")
        assert get(server.url)[0] == status
        assert len(server.requests) == number


def test_no_proxy_of_the_environment_is_asked(server: Server, environ: Environ) -> None:
    with Server() as proxy:
        names = ("http_proxy", "https_proxy", "all_proxy")
        environ(**dict.fromkeys((*names, *map(str.upper, names)), proxy.url), no_proxy=None)
        assert get(server.url) == (200, b"{}")
        assert proxy.requests == []


@pytest.mark.parametrize("drop", [b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 200 OK\r\n\r\n", b"x"])
def test_a_server_that_drips_is_left_within_the_bound(drop: bytes) -> None:
    """Catches: a socket's own time-out, which begins anew with each byte."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        done = threading.Event()

        def drip() -> None:
            peer, _ = listener.accept()
            with peer:
                while not done.wait(0.05):
                    try:
                        peer.sendall(drop)
                    except OSError:
                        return

        thread = threading.Thread(target=drip, daemon=True)
        thread.start()
        began = time.monotonic()
        with pytest.raises(TimeoutError, match=r"no response within 1 s; some\.option sets this bound"):
            get(f"http://127.0.0.1:{listener.getsockname()[1]}", 0.6)
        assert time.monotonic() - began < 50
        done.set()
        thread.join(60)


def test_a_name_lookup_that_hangs_is_left_within_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: no bound at all for token endpoints."""
    answer = threading.Event()
    asked: list[str] = []

    def look_up(host: str, *_: object) -> list[object]:
        asked.append(host)
        answer.wait(60)
        raise OSError(f"no {host}")

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    with pytest.raises(TimeoutError, match=r"some\.option sets this bound"):
        get("http://slow.test", 0.1)
    until(lambda: asked == ["slow.test"])
    answer.set()
    until(lambda: not any(thread.name == "kafka-chunked-http" for thread in threading.enumerate()))
