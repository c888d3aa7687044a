"""The live view of an application: its page, the page's data, and metrics for Prometheus."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import logging
import os
import re
import socket
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from kafka_sink.clock import monotonic_ms
from kafka_sink.coordinator.figures.application_figures import ApplicationFigures
from kafka_sink.coordinator.figures.history import History
from kafka_sink.coordinator.figures.http_server import HttpServer, Response
from kafka_sink.coordinator.transport.address import ANY_ADDRESSES
from kafka_sink.version import __version__

_log = logging.getLogger(__name__)
# How long a snapshot and what is made of it serve all clients, unless a write ends, and even then.
_FRESH_MS, _ALWAYS_FRESH_MS = 500.0, 50.0
# How long a client waits for a snapshot.
_SNAPSHOT_S = 2.0
_BACKLOG = 64


class LiveView:
    """Opened at most once. ``open`` and ``close`` are called on the coordinator's loop.

    ``marker``: the file that tells planning where the live view is, or why there is none.
    """

    def __init__(self, figures: ApplicationFigures, marker: Path) -> None:
        self._figures = figures
        self._marker = marker
        self._server: HttpServer | None = None
        self._history: History | None = None

    def open(self, where: Mapping[str, Any]) -> Mapping[str, Any]:
        """Listen on ``where``'s address and port, and return the same with the port chosen. ``history``: the
        folder for a file that keeps what was shown; "" for none.

        Raises nothing: planning reads the marker.
        """
        if self._server is not None:
            return where
        try:
            address, port = str(where["address"]), int(where["port"])
            listening = _listen(address, port)
        except (OSError, KeyError, TypeError, ValueError) as error:
            self._write(
                {"error": f"ui.bind.address={where.get('address')}, ui.port={where.get('port')}: {error}"}
            )
            return where
        port = int(listening.getsockname()[1])
        name = socket.gethostname() if address in ANY_ADDRESSES else address
        pages = LivePages(self._figures, asyncio.get_running_loop())
        hosts = {"localhost", address, socket.gethostname()}
        self._server = HttpServer(listening, pages.by_path, hosts)
        self._server.start()
        shown = f"[{name}]" if ":" in name else name
        folder = str(where.get("history") or "")
        self._history = History(self._figures, Path(folder)) if folder else None
        self._write({"url": f"http://{shown}:{port}/", "address": address, "port": port})
        return {"address": address, "port": port, "history": folder}

    def record(self) -> None:
        """Once a second."""
        if self._history is not None:
            self._history.record(monotonic_ms(), time.time())

    def _write(self, content: dict[str, Any]) -> None:
        try:
            draft = self._marker.with_name(self._marker.name + ".new")
            with open(os.open(draft, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600), "w") as file:
                json.dump(content, file)
            os.replace(draft, self._marker)
        except OSError as error:
            _log.warning("The address of the live view could not be written: %s", error)

    def close(self) -> None:
        """End the server and the history."""
        if self._history is not None:
            self._history.close(monotonic_ms(), time.time())
        if self._server is not None:
            self._server.close()


def _listen(address: str, port: int) -> socket.socket:
    family = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0][0]
    dual = address == "::" and socket.has_dualstack_ipv6()
    return socket.create_server((address, port), family=family, dualstack_ipv6=dual, backlog=_BACKLOG)


@dataclass(frozen=True, slots=True)
class _Snapshot:
    """``taken_ms``: monotonic. ``writes_ended``: how many writes had ended by then."""

    taken_ms: float
    writes_ended: int
    content: dict[str, Any]


class LivePages:
    """The pages, for the server's thread. ``owner`` is the loop that ``figures`` belongs to.

    All clients share a snapshot for a moment, so that many cost no more than one. A response contains the
    final figures of each write that ended before its request, so of a write whose ``save()`` has returned.
    """

    def __init__(self, figures: ApplicationFigures, owner: asyncio.AbstractEventLoop) -> None:
        self._figures = figures
        self._owner = owner
        self._snapshot: _Snapshot | None = None
        # The next snapshot, for all clients that wait for it.
        self._taking: asyncio.Future[_Snapshot] | None = None
        self._made: dict[str, tuple[_Snapshot, Response]] = {}
        self.by_path: dict[str, Callable[[], Awaitable[Response]]] = {
            "/": self._page,
            "/figures.json": lambda: self._shared("figures", as_json),
            "/metrics": lambda: self._shared("metrics", _metrics),
        }

    async def _page(self) -> Response:
        return page()

    async def _shared(self, name: str, render: Callable[[dict[str, Any]], Response]) -> Response:
        """A response that is made once of each snapshot."""
        try:
            snapshot = await asyncio.wait_for(self._current(), _SNAPSHOT_S)
        except asyncio.TimeoutError:
            busy = "503 Service Unavailable"
            return Response(b"the coordinator is busy\n", status=busy, headers={"Retry-After": "1"})
        made = self._made.get(name)
        if made is None or made[0] is not snapshot:
            made = self._made[name] = snapshot, render(snapshot.content)
        return made[1]

    async def _current(self) -> _Snapshot:
        """A snapshot that a request of this moment may get."""
        asked_ms, writes_ended = monotonic_ms(), self._figures.writes_ended
        while True:
            found = self._snapshot
            if found is not None:
                # The time of the request counts: on a busy host, a new snapshot may be old before it gets
                # here.
                if found.writes_ended >= writes_ended and found.taken_ms >= asked_ms - _FRESH_MS:
                    return found
                left_ms = found.taken_ms + _ALWAYS_FRESH_MS - monotonic_ms()
                if left_ms > 0:
                    # Short writes may end one after another.
                    await asyncio.sleep(left_ms / 1000)
                    continue
            if self._taking is None or self._taking.done():
                taken = asyncio.run_coroutine_threadsafe(_snapshot_of(self._figures), self._owner)
                self._taking = asyncio.wrap_future(taken)
            # A client that gives up must not take it from the others.
            self._snapshot = await asyncio.shield(self._taking)


async def _snapshot_of(figures: ApplicationFigures) -> _Snapshot:
    now_ms = monotonic_ms()
    return _Snapshot(now_ms, figures.writes_ended, figures.snapshot(now_ms))


def as_json(snapshot: Mapping[str, Any]) -> Response:
    """What the page reads."""
    body = json.dumps({**snapshot, "version": __version__}, separators=(",", ":")).encode()
    return Response(body, "application/json")


def _metrics(snapshot: dict[str, Any]) -> Response:
    # Imported when somebody asks for it first: most applications are not scraped.
    from kafka_sink.coordinator.figures.metrics import exposition

    body, content_type = exposition(snapshot)
    return Response(body, content_type)


@lru_cache(maxsize=1)
def page() -> Response:
    """The page. Its script and styles are in it, and nothing else may run or load."""
    text = files("kafka_sink.coordinator.figures").joinpath("page.html").read_text("utf-8")
    policy = (
        "default-src 'none'; connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
        f"frame-ancestors 'none'; script-src {_hash(text, 'script')}; style-src {_hash(text, 'style')}"
    )
    headers = {"Content-Security-Policy": policy}
    return Response(text.encode(), "text/html; charset=utf-8", headers=headers)


def _hash(text: str, element: str) -> str:
    found = re.search(rf"<{element}>(.*?)</{element}>", text, re.DOTALL)
    content = found.group(1) if found else ""
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"
