"""The live view: what its pages show, to whom, and how many snapshots they cost."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing
from http.client import HTTPConnection, HTTPResponse

import pytest

from benchmarks import live_view_cost
from kafka_sink.clock import monotonic_ms
from kafka_sink.coordinator.live import view
from kafka_sink.coordinator.live.application import ApplicationMetrics
from kafka_sink.coordinator.live.http_server import Response
from kafka_sink.coordinator.live.messages import OpenView, ViewOpened
from kafka_sink.coordinator.live.view import LivePages, ViewService
from kafka_sink.coordinator.schema import deliver
from tests.support.fake_outbox import FakeOutbox
from tests.support.looping import call, looping
from tests.support.task_reports import Board, final, full_report


class Served:
    def __init__(self, port: int) -> None:
        self.port = port

    def get(self, path: str, host: str | None = None, method: str = "GET") -> tuple[HTTPResponse, bytes]:
        with closing(HTTPConnection("127.0.0.1", self.port, timeout=60)) as connection:
            connection.request(method, path, headers={} if host is None else {"Host": host})
            response = connection.getresponse()
            return response, response.read()


def opened(loop: asyncio.AbstractEventLoop, service: ViewService, address: str, port: int) -> ViewOpened:
    """The answer that planning gets."""
    assert isinstance(service.out, FakeOutbox)
    call(loop, lambda: deliver(service, 1, OpenView(address, port), 0.0))
    ((_, answer),) = service.out.taken()
    assert isinstance(answer, ViewOpened)
    return answer


@pytest.fixture
def served() -> Iterator[Served]:
    board = Board()
    board.report(full_report())
    with looping() as loop:
        service = ViewService(FakeOutbox(), board.metrics)
        answer = opened(loop, service, "127.0.0.1", 0)
        assert (answer.url, answer.error) == (f"http://127.0.0.1:{answer.port}/", "")
        try:
            assert opened(loop, service, "127.0.0.1", 0) == answer, "it is opened once"
            yield Served(answer.port)
        finally:
            call(loop, service.close)


def test_the_page_loads_nothing_from_elsewhere_and_runs_only_its_own_script(served: Served) -> None:
    response, body = served.get("/")
    text = body.decode()
    policy = response.headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "Access-Control-Allow-Origin" not in response.headers
    assert response.headers["X-Frame-Options"] == "DENY"
    assert "innerHTML" not in text
    assert "document.write" not in text
    assert not re.findall(r"""(?:src|href)=["'](?!/metrics|data:,)""", text)
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")


def test_the_pages_data_is_json(served: Served) -> None:
    response, body = served.get("/metrics.json")
    data = json.loads(body)
    assert (response.status, data["application"]) == (200, "app")
    assert data["jobs"][0]["counters"]["records"] == 3


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:4040", 200),
        ("localhost:4040", 200),
        ("[::1]:4040", 200),
        (socket.gethostname(), 200),
        ("evil.example.com:4040", 403),
        ("127.0.0.1.evil.example.com", 403),
        ("[::1].evil.example.com", 403),
        ("[::1].evil.example.com:4040", 403),
        ("[::1]4040", 403),
        ("localhost:4040.evil.example.com", 403),
        ("localhost:evil", 403),
        ("", 403),
    ],
)
def test_a_foreign_site_whose_name_leads_here_gets_nothing(served: Served, host: str, status: int) -> None:
    assert served.get("/metrics.json", host=host)[0].status == status


def test_other_methods_and_paths_are_refused(served: Served) -> None:
    assert served.get("/", method="POST")[0].status == 405
    assert served.get("/../../etc/passwd")[0].status == 404
    assert served.get("/metrics", method="HEAD")[1] == b""


def test_a_port_in_use_is_named_instead_of_failing_the_write() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, looping() as loop:
        port = taken.getsockname()[1]
        answer = opened(loop, ViewService(FakeOutbox(), ApplicationMetrics()), "127.0.0.1", port)
    assert answer.url == ""
    assert f"ui.port={port}" in answer.error
    assert "in use" in answer.error


def count_snapshots(metrics: ApplicationMetrics) -> list[float]:
    """The times of all snapshots that are taken from now on."""
    taken: list[float] = []
    original = metrics.snapshot

    def counted(now_ms: float) -> dict[str, object]:
        taken.append(now_ms)
        return original(now_ms)

    metrics.snapshot = counted  # type: ignore[method-assign]
    return taken


Pages = Callable[[LivePages], Awaitable[None]]


def with_pages(metrics: ApplicationMetrics, use: Pages, interval_ms: float) -> None:
    async def run() -> None:
        await use(LivePages(metrics, interval_ms))

    asyncio.run(run())


def test_clients_that_ask_at_the_same_time_share_a_snapshot() -> None:
    board = Board()
    taken = count_snapshots(board.metrics)

    async def ask(pages: LivePages) -> None:
        found = await asyncio.gather(*(pages.by_path[path]() for path in ("/metrics", "/metrics.json") * 8))
        assert {response.status for response in found} == {"200 OK"}
        assert len(set(map(id, found))) == 2, "each is made once"

    with_pages(board.metrics, ask, 60_000.0)
    assert len(taken) == 1


def test_a_client_gets_no_snapshot_that_was_begun_before_the_write_it_waited_for() -> None:
    """The snapshot is under way when the write ends and the client asks."""
    board = Board()
    bodies: list[bytes] = []

    async def ask(pages: LivePages) -> None:
        original, later = board.metrics.snapshot, list[asyncio.Task[Response]]()

        def overtaken(now_ms: float) -> dict[str, object]:
            shown = original(now_ms)
            if not later:
                board.end(final(9))
                later.append(asyncio.get_running_loop().create_task(ask_again()))
            return shown

        async def ask_again() -> Response:
            return await pages.by_path["/metrics.json"]()

        board.metrics.snapshot = overtaken  # type: ignore[method-assign]
        await pages.by_path["/metrics.json"]()
        bodies.append((await later[0]).body)

    with_pages(board.metrics, ask, 0.0)
    (job,) = json.loads(bodies[0])["jobs"]
    assert job["state"] == "committed"


def test_clients_that_ask_again_and_again_cost_no_more_snapshots_than_the_interval_allows() -> None:
    board = Board()
    taken = count_snapshots(board.metrics)

    async def ask(pages: LivePages) -> None:
        for number in range(5):
            board.end(final(1, write=str(number)))
            shown = json.loads((await pages.by_path["/metrics.json"]()).body)
            assert len(shown["jobs"]) == number + 1

    began_ms = monotonic_ms()
    with_pages(board.metrics, ask, 50.0)
    assert len(taken) == 5
    # From the second on each may begin 50 ms after the one before has begun.
    assert taken[-1] - began_ms >= 4 * 50


def test_clients_that_leave_do_not_leave_responses_to_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """A flood of clients makes the server end the connections that it accepted first."""
    release, board, made = threading.Event(), Board(), list[object]()

    def slow(snapshot: dict[str, object]) -> Response:
        made.append(snapshot)
        release.wait(60)
        return Response(b"")

    monkeypatch.setattr(view, "as_json", slow)

    async def leave(pages: LivePages) -> None:
        for _ in range(20):
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(pages.by_path["/metrics.json"](), 0.01)
        release.set()
        assert (await pages.by_path["/metrics.json"]()).status == "200 OK"

    with_pages(board.metrics, leave, 0.0)
    assert len(made) == 2


@pytest.mark.skipif("coverage" in sys.modules, reason="make coverage takes processor time itself")
def test_the_live_view_costs_less_than_a_hundredth_of_a_jobs_processor_time() -> None:
    """Each of 100 tasks keeps a core busy, and writes to 100 topics on 20 brokers."""
    # Other work on the machine only adds to it, by what it does to caches.
    assert any(live_view_cost.measure(60)["job_share"] < 0.01 for _ in range(3))
