"""The live view's HTTP server: what it serves, to whom, and what clients that misbehave cannot do."""

from __future__ import annotations

import asyncio
import http.client
import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from email.message import Message
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from tests.support.reported_figures import CLUSTER, Board, broker, final, full_report, report

from benchmarks import live_view_cost
from kafka_sink.coordinator.figures import live_view
from kafka_sink.coordinator.figures.application_figures import ApplicationFigures
from kafka_sink.coordinator.figures.http_server import HttpBounds, HttpServer, Response
from kafka_sink.coordinator.figures.live_view import LivePages, LiveView, page
from kafka_sink.coordinator.figures.metrics import METRICS, PREFIX, exposition
from kafka_sink.counts import TopicFigures
from tests.support.live_view_client import sample_names


class Got(NamedTuple):
    status: int
    headers: Message
    body: bytes


class Served:
    def __init__(self, port: int, figures: ApplicationFigures, loop: asyncio.AbstractEventLoop) -> None:
        self.port = port
        self.figures = figures
        self.loop = loop

    def get(self, path: str, host: str | None = None, method: str = "GET") -> Got:
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)) as connection:
            connection.request(method, path, headers={} if host is None else {"Host": host})
            with connection.getresponse() as response:
                return Got(response.status, response.headers, response.read())

    def body(self, path: str) -> bytes:
        got = self.get(path)
        assert got.status == 200
        return got.body


@contextmanager
def looping() -> Iterator[asyncio.AbstractEventLoop]:
    """Stands for the coordinator's loop."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield loop
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(5)
        loop.close()


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    board = Board()
    board.report(full_report())
    with looping() as loop:
        view = LiveView(board.figures, tmp_path / "ui")

        async def open_view() -> None:
            view.open({"address": "127.0.0.1", "port": 0})

        asyncio.run_coroutine_threadsafe(open_view(), loop).result(5)
        port = json.loads((tmp_path / "ui").read_text())["port"]
        try:
            yield Served(port, board.figures, loop)
        finally:
            view.close()


def parsed(board: Board) -> dict[str, Metric]:
    text = exposition(board.shown())[0].decode()
    return {family.name: family for family in text_string_to_metric_families(text)}


def test_prometheus_own_parser_reads_the_metrics() -> None:
    board = Board()
    board.report(full_report())
    body, content_type = exposition(board.shown())
    families = {family.name: family for family in text_string_to_metric_families(body.decode())}
    assert content_type.startswith("text/plain; version=")
    assert {PREFIX + spec.name for spec in METRICS} <= families.keys()
    names = {sample.name for family in families.values() for sample in family.samples}
    assert names <= sample_names() | {name + "_created" for name in families}
    (rows,) = families[PREFIX + "record_send"].samples
    assert (rows.labels, rows.value) == ({"cluster": CLUSTER, "topic": "t"}, 5.0)
    # All metrics are documented.
    text = Path("docs/metrics.md").read_text()
    missing = [spec.name for spec in METRICS if PREFIX + spec.name not in text]
    assert not missing


def test_the_totals_of_the_metrics_are_those_of_the_summary() -> None:
    board = Board()
    board.report(report(10))
    board.end(final(12_345))
    families = {
        one.name: one for one in text_string_to_metric_families(exposition(board.shown())[0].decode())
    }
    assert [one.value for one in families[PREFIX + "record_send"].samples] == [12_345]


def test_latencies_are_a_histogram() -> None:
    board = Board()
    board.report(report(1, brokers={3: broker(6, (1, 0, 2) + (0,) * 9 + (3,))}))
    text = exposition(board.shown())[0].decode()
    name = PREFIX + "request_latency_seconds"
    assert f'{name}_bucket{{broker="3",cluster="{CLUSTER}",le="0.025"}} 3.0' in text
    assert f'{name}_bucket{{broker="3",cluster="{CLUSTER}",le="+Inf"}} 6.0' in text
    assert f'{name}_count{{broker="3",cluster="{CLUSTER}"}} 6.0' in text


def test_names_of_topics_cannot_break_the_format_or_the_page() -> None:
    board = Board()
    # Kafka refuses such names; a task that is not ours could send one.
    nasty = 'a"b\\c\n<script>alert(1)</script>'
    board.report(report(0, topics={nasty: report(1).topics["t"]}))
    families = {
        one.name: one for one in text_string_to_metric_families(exposition(board.shown())[0].decode())
    }
    assert families[PREFIX + "record_send"].samples[0].labels["topic"] == nasty
    text = page().body.decode()
    assert "innerHTML" not in text
    assert "document.write" not in text


def test_the_page_loads_nothing_from_elsewhere_and_runs_only_its_own_script(served: Served) -> None:
    response = served.get("/")
    text = response.body.decode()
    policy = response.headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "Access-Control-Allow-Origin" not in response.headers
    assert response.headers["X-Frame-Options"] == "DENY"
    assert not re.findall(r"""(?:src|href)=["'](?!/metrics|data:,)""", text)
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")


def test_the_pages_data_is_json_without_secrets(served: Served) -> None:
    data = json.loads(served.body("/figures.json"))
    assert data["application"] == "app"
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
    assert served.get("/figures.json", host=host).status == status


def test_other_methods_and_paths_are_refused(served: Served) -> None:
    assert served.get("/", method="POST").status == 405
    assert served.get("/../../etc/passwd").status == 404
    assert served.get("/metrics", method="HEAD").body == b""


def test_a_port_in_use_is_named_instead_of_failing_the_write(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        view = LiveView(ApplicationFigures(), tmp_path / "ui")
        view.open({"address": "127.0.0.1", "port": taken.getsockname()[1]})
        error = json.loads((tmp_path / "ui").read_text())["error"]
    assert f"ui.port={taken.getsockname()[1] if taken.fileno() >= 0 else ''}" in error
    assert "in use" in error


# -- clients that misbehave -------------------------------------------------------------------------


def serve(stack: ExitStack, bounds: HttpBounds) -> tuple[int, list[float]]:
    """A server with one page; returns its port and when the page was computed."""
    computed: list[float] = []

    async def one_page() -> Response:
        computed.append(time.monotonic())
        return Response(b"x" * 1_000_000)

    listening = socket.create_server(("127.0.0.1", 0), backlog=64)
    server = HttpServer(listening, {"/": one_page}, {"localhost"}, bounds)
    server.start()
    stack.callback(server.close)
    return listening.getsockname()[1], computed


def fetch(port: int) -> int:
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=10)) as connection:
        connection.request("GET", "/")
        with connection.getresponse() as response:
            response.read()
            return response.status


def test_scrapers_that_hang_make_room_for_others() -> None:
    with ExitStack() as stack:
        port, _ = serve(stack, HttpBounds(connections=8, accepts_per_s=1_000.0))
        silent = [stack.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(20)]
        for one in silent[:4]:
            one.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")  # and reads nothing
        assert fetch(port) == 200


def test_a_request_that_drips_in_ends_after_its_time() -> None:
    with ExitStack() as stack:
        port, computed = serve(stack, HttpBounds(request_s=0.3))
        dripping = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
        dripping.settimeout(30)
        started = time.monotonic()
        with suppress(OSError):
            while time.monotonic() - started < 30:
                dripping.sendall(b"G")
                time.sleep(0.02)
        assert time.monotonic() - started < 20
        assert not computed


def test_a_request_without_end_is_cut_off() -> None:
    with ExitStack() as stack:
        port, computed = serve(stack, HttpBounds(request_bytes=4096))
        endless = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
        endless.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"y" * 5_000)
        assert endless.recv(100).startswith(b"HTTP/1.1 431")
        assert not computed


def test_a_flood_of_requests_costs_a_bounded_number_of_responses() -> None:
    with ExitStack() as stack:
        port, computed = serve(stack, HttpBounds(accepts_per_s=50.0))
        began = time.monotonic()
        stop = threading.Event()

        def flood() -> None:
            while not stop.is_set():
                try:
                    fetch(port)
                except OSError:
                    pass

        threads = [threading.Thread(target=flood, daemon=True) for _ in range(8)]
        for thread in threads:
            thread.start()
        time.sleep(1.0)
        stop.set()
        for thread in threads:
            thread.join(30)
        assert 0 < len(computed) <= 70 * (time.monotonic() - began)


def count_snapshots(figures: ApplicationFigures) -> list[float]:
    """The times of all snapshots that are taken from now on."""
    taken: list[float] = []
    original = figures.snapshot

    def counted(now_ms: float) -> dict[str, object]:
        taken.append(now_ms)
        return original(now_ms)

    figures.snapshot = counted  # type: ignore[method-assign]
    return taken


@pytest.fixture
def still(monkeypatch: pytest.MonkeyPatch) -> None:
    """A snapshot serves for longer than any test takes."""
    monkeypatch.setattr(live_view, "_FRESH_MS", 600_000.0)


@pytest.mark.usefixtures("still")
def test_many_clients_of_one_moment_share_a_snapshot(served: Served) -> None:
    taken = count_snapshots(served.figures)
    for _ in range(10):
        served.body("/figures.json")
        served.body("/metrics")
    assert len(taken) == 1


@pytest.mark.usefixtures("still")
def test_a_write_that_has_ended_is_in_the_next_response_whoever_asked_just_before(served: Served) -> None:
    assert b"late-topic" not in served.body("/figures.json") + served.body("/metrics")
    ended = final(9, write="late", topics={"late-topic": TopicFigures(9, 90, 180, 1)})

    async def end() -> None:
        served.figures.end_write(CLUSTER, ended, 0.0)

    asyncio.run_coroutine_threadsafe(end(), served.loop).result(10)
    assert {job["job"]: job["state"] for job in json.loads(served.body("/figures.json"))["jobs"]} == {
        "w": "running",
        "late": "committed",
    }
    assert b'topic="late-topic"} 9' in served.body("/metrics")


@pytest.mark.usefixtures("still")
def test_clients_that_ask_while_a_snapshot_is_taken_wait_for_the_same_one() -> None:
    board = Board()
    taken = count_snapshots(board.figures)

    async def ask() -> None:
        pages = LivePages(board.figures, asyncio.get_running_loop())
        found = await asyncio.gather(*(pages.by_path[path]() for path in ("/metrics", "/figures.json") * 8))
        assert {response.status for response in found} == {"200 OK"}

    asyncio.run(ask())
    assert len(taken) == 1


@pytest.mark.usefixtures("still")
def test_a_client_gets_no_snapshot_that_was_begun_before_the_write_it_waited_for() -> None:
    """The snapshot is under way when the write ends and the client asks."""
    board = Board()

    async def ask() -> bytes:
        pages = LivePages(board.figures, asyncio.get_running_loop())
        original, later = board.figures.snapshot, list[asyncio.Task[Response]]()

        def overtaken(now_ms: float) -> dict[str, object]:
            shown = original(now_ms)
            if not later:
                board.end(final(9))
                later.append(asyncio.get_running_loop().create_task(ask_again()))
            return shown

        async def ask_again() -> Response:
            return await pages.by_path["/figures.json"]()

        board.figures.snapshot = overtaken  # type: ignore[method-assign]
        await pages.by_path["/figures.json"]()
        return (await later[0]).body

    (job,) = json.loads(asyncio.run(ask()))["jobs"]
    assert job["state"] == "committed"


@pytest.mark.usefixtures("still")
def test_writes_that_end_one_after_another_cost_twenty_snapshots_a_second_at_most() -> None:
    board = Board()
    taken = count_snapshots(board.figures)

    async def ask() -> None:
        pages = LivePages(board.figures, asyncio.get_running_loop())
        for number in range(5):
            board.end(final(1, write=str(number)))
            shown = json.loads((await pages.by_path["/figures.json"]()).body)
            assert len(shown["jobs"]) == number + 1

    asyncio.run(ask())
    assert all(after - before >= 50 for before, after in pairwise(taken))


def test_a_snapshot_that_takes_longer_than_it_serves_is_a_response(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: on a busy host, a client would wait for one snapshot after the other."""
    board = Board()
    monkeypatch.setattr(live_view, "_FRESH_MS", 0.0)
    taken = count_snapshots(board.figures)

    async def ask() -> None:
        await LivePages(board.figures, asyncio.get_running_loop()).by_path["/figures.json"]()

    asyncio.run(ask())
    assert len(taken) == 1


def test_a_coordinator_that_is_busy_is_reported_and_not_waited_for_for_long(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = threading.Event()
    served.loop.call_soon_threadsafe(release.wait, 60)
    with monkeypatch.context() as impatient:
        impatient.setattr(live_view, "_SNAPSHOT_S", 0.1)
        try:
            assert served.get("/metrics").status == 503
        finally:
            release.set()
    monkeypatch.setattr(live_view, "_SNAPSHOT_S", 60.0)
    assert served.get("/metrics").status == 200


def test_the_live_view_costs_less_than_a_hundredth_of_a_jobs_processor_time() -> None:
    """Each of 100 tasks keeps a core busy, and writes to 100 topics on 20 brokers."""
    assert live_view_cost.measure()["job_share"] < 0.01
