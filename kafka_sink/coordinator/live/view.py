"""The live view of an application: its page, the page's data, and metrics for Prometheus."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import math
import socket
from collections.abc import Awaitable, Callable
from importlib.resources import files
from typing import Any

from kafka_sink.clock import monotonic_ms
from kafka_sink.coordinator.address import ANY_ADDRESSES
from kafka_sink.coordinator.live.application import ApplicationMetrics
from kafka_sink.coordinator.live.http_server import HttpServer, Response
from kafka_sink.coordinator.live.messages import OpenView, ViewOpened
from kafka_sink.coordinator.placement import Placement
from kafka_sink.coordinator.schema import Outbox, Service, ServiceScope, cut, receives
from kafka_sink.version import __version__

_BACKLOG = 64
_Render = Callable[[dict[str, Any]], Response]


class ViewService(Service):
    """Opens the live view at the first request, and answers with its address. Belongs to a running loop."""

    scope = ServiceScope.APPLICATION

    def __init__(self, out: Outbox, metrics: ApplicationMetrics) -> None:
        super().__init__(out)
        self._metrics = metrics
        self._server: HttpServer | None = None
        self._opened = ViewOpened()

    @receives(OpenView)
    def on_open_view(self, peer: int, message: OpenView, now_ms: float) -> None:
        if self._server is None:
            self._opened = self._open(message.address, message.port)
        self.out.send(peer, self._opened)

    def _open(self, address: str, port: int) -> ViewOpened:
        try:
            listening = Placement(address, port).listen(_BACKLOG)
        except (OSError, ValueError) as error:
            return ViewOpened(error=cut(f"ui.bind.address={address}, ui.port={port}: {error}"))
        name = socket.gethostname() if address in ANY_ADDRESSES else address
        pages = LivePages(self._metrics).by_path
        self._server = HttpServer(listening, pages, {"localhost", address, socket.gethostname()})
        shown = f"[{name}]" if ":" in name else name
        chosen = int(listening.getsockname()[1])
        return ViewOpened(f"http://{shown}:{chosen}/", chosen)

    def close(self) -> None:
        if self._server is not None:
            self._server.close()


class LivePages:
    """The pages.

    A client gets a snapshot that was taken after its request, so it contains the sums of each write that had
    ended by then. All waiting clients share a snapshot, and at most one is taken in ``interval_ms``.
    """

    def __init__(self, metrics: ApplicationMetrics, interval_ms: float = 500.0) -> None:
        self._metrics = metrics
        self._interval_ms = interval_ms
        # Guards the last snapshot, the time at which it was taken, and the responses made of it. Without it,
        # requests that wait at the same time would each take a snapshot of their own.
        self._taking = asyncio.Lock()
        self._taken_ms = -math.inf
        self._snapshot: dict[str, Any] = {}
        self._made: dict[_Render, asyncio.Task[Response]] = {}
        self.by_path: dict[str, Callable[[], Awaitable[Response]]] = {
            "/": page,
            "/metrics.json": lambda: self._shared(as_json),
            "/metrics": lambda: self._shared(_metrics),
        }

    async def _shared(self, render: _Render) -> Response:
        """A response, made once for each snapshot."""
        asked_ms = monotonic_ms()
        async with self._taking:
            if self._taken_ms < asked_ms:
                # Clients that come and go must not leave more and more responses to be made.
                if self._made:
                    await asyncio.wait(self._made.values())
                await asyncio.sleep(max(0.0, self._taken_ms + self._interval_ms - asked_ms) / 1000)
                self._taken_ms = monotonic_ms()
                self._snapshot = self._metrics.snapshot(self._taken_ms)
                self._made.clear()
            if render not in self._made:
                # A thread makes it, because a snapshot of thousands of tasks would hold the loop up for long.
                made = asyncio.to_thread(render, self._snapshot)
                self._made[render] = asyncio.create_task(made)
            response = self._made[render]
        return await asyncio.shield(response)


def as_json(snapshot: dict[str, Any]) -> Response:
    """The data of the page."""
    body = json.dumps({**snapshot, "version": __version__}, separators=(",", ":")).encode()
    return Response(body, "application/json")


def _metrics(snapshot: dict[str, Any]) -> Response:
    from kafka_sink.coordinator.live.prometheus import exposition

    body, content_type = exposition(snapshot)
    return Response(body, content_type)


async def page() -> Response:
    """The page. It contains its script and styles, and nothing else may run or load."""
    text = files("kafka_sink.coordinator.live").joinpath("page.html").read_text("utf-8")
    policy = (
        "default-src 'none'; connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
        f"frame-ancestors 'none'; script-src {_hash(text, 'script')}; style-src {_hash(text, 'style')}"
    )
    headers = {"Content-Security-Policy": policy}
    return Response(text.encode(), "text/html; charset=utf-8", headers=headers)


def _hash(text: str, element: str) -> str:
    content = text.partition(f"<{element}>")[2].partition(f"</{element}>")[0]
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"
