"""The live view's HTTP server: to whom it responds, and what clients that misbehave cannot do."""

from __future__ import annotations

import http.client
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress

import pytest

from kafka_sink.clock import monotonic_ms
from kafka_sink.coordinator.live.http_server import HttpBounds, HttpServer, Page, Response
from kafka_sink.coordinator.server import CoordinatorServer
from kafka_sink.coordinator.transport import ServerBounds, new_identity
from tests.support.looping import call, looping
from tests.support.waiting import repeat_until


@contextmanager
def serving(page: Page | None = None, **bounds: float) -> Iterator[tuple[int, list[float]]]:
    """A server with one page: its port, and when the page was computed."""
    computed: list[float] = []

    async def one_page() -> Response:
        computed.append(time.monotonic())
        return Response(b"x" * 1_000_000)

    listening = socket.create_server(("127.0.0.1", 0), backlog=64)
    given = HttpBounds(**bounds)  # type: ignore[arg-type]  # some are whole numbers
    pages: dict[str, Page] = {"/": page or one_page}
    with looping() as loop:
        server = call(loop, lambda: HttpServer(listening, pages, {"localhost"}, given))
        try:
            yield listening.getsockname()[1], computed
        finally:
            call(loop, server.close)


def fetch(port: int) -> int:
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
        connection.request("GET", "/")
        with connection.getresponse() as response:
            response.read()
            return response.status


def test_scrapers_that_hang_make_room_for_others() -> None:
    with ExitStack() as stack, serving(connections=8, accepts_per_s=1_000.0) as (port, _):
        silent = [stack.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(20)]
        for one in silent[:4]:
            one.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")  # and reads nothing
        assert fetch(port) == 200


def test_ended_scrapers_take_no_task_with_them() -> None:
    """Both servers run on one loop, and a task's connection may get the descriptor of an ended one."""
    identity = new_identity()
    listening = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    scrapers, tasks = list[socket.socket](), list[socket.socket]()

    def connect_both() -> None:
        # The loop accepts neither while this runs, so it accepts both in its next iteration.
        scrapers.append(socket.create_connection(listening[0].getsockname(), 60))
        tasks.append(socket.create_connection(listening[1].getsockname(), 60))

    def serve() -> tuple[HttpServer, CoordinatorServer]:
        bounds = HttpBounds(connections=1, accepts_per_s=10_000.0)
        coordinator = CoordinatorServer(identity, {}, monotonic_ms, ServerBounds(frame_ms=600_000.0))
        coordinator.start(listening[1])
        return HttpServer(listening[0], {}, {"localhost"}, bounds), coordinator

    with looping() as loop:
        servers = call(loop, serve)
        for _ in range(8):
            call(loop, connect_both)
        for task in tasks:
            task.sendall(b"this is no TLS, so the coordinator ends the connection when it reads it")
            with suppress(ConnectionResetError), task:
                while task.recv(100):
                    pass
        for server in servers:
            call(loop, server.close)
    for connected in (*scrapers, *listening):
        connected.close()


def test_a_request_that_drips_in_ends_after_its_time() -> None:
    with (
        serving(request_s=0.3) as (port, computed),
        socket.create_connection(("127.0.0.1", port), 30) as dripping,
    ):
        started = time.monotonic()
        with suppress(OSError):
            repeat_until(lambda: False, lambda: dripping.sendall(b"G"), "its end", 30, 0.02)
        assert time.monotonic() - started < 20
        assert not computed


def test_a_request_without_end_is_cut_off() -> None:
    with (
        serving(request_bytes=4096) as (port, computed),
        socket.create_connection(("127.0.0.1", port)) as endless,
    ):
        endless.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"y" * 5_000)
        assert endless.recv(100).startswith(b"HTTP/1.1 431")
        assert not computed


def test_a_flood_of_requests_costs_a_bounded_number_of_responses() -> None:
    with serving(accepts_per_s=50.0) as (port, computed):
        began = time.monotonic()
        stop = threading.Event()

        def flood() -> None:
            while not stop.is_set():
                with suppress(OSError):
                    fetch(port)

        threads = [threading.Thread(target=flood, daemon=True) for _ in range(8)]
        for thread in threads:
            thread.start()
        time.sleep(1.0)
        stop.set()
        for thread in threads:
            thread.join(30)
        assert 0 < len(computed) <= 70 * (time.monotonic() - began)


def test_a_page_that_fails_is_an_error_that_the_log_explains(caplog: pytest.LogCaptureFixture) -> None:
    """Catches: the connection was closed, and the reason logged at DEBUG only where it was a ValueError."""

    async def broken() -> Response:
        raise UnicodeEncodeError("utf-8", "\ud800", 0, 1, "surrogates not allowed")

    with serving(broken) as (port, _):
        assert fetch(port) == 500
    assert "surrogates not allowed" in caplog.text


def test_the_connections_of_a_server_that_ends_are_closed() -> None:
    with ExitStack() as clients:
        with serving() as (port, _):
            silent = clients.enter_context(socket.create_connection(("127.0.0.1", port), timeout=30))
            assert fetch(port) == 200, "the silent client was accepted before"
        assert silent.recv(1) == b""
