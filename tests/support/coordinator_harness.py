"""A coordinator in a thread, and a handler that says back what it hears."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from kafka_sink.coordinator.transport.address import CoordinatorAddress, Rendezvous
from kafka_sink.coordinator.transport.connections import ServerBounds
from kafka_sink.coordinator.transport.handlers import (
    Handler,
    HandlerFactory,
    Push,
    Reply,
    ServerMessage,
    SharedBody,
)
from kafka_sink.coordinator.transport.loop_watch import LoopWatch
from kafka_sink.coordinator.transport.server import CoordinatorServer
from kafka_sink.options import SinkOptions, parse

SECRET = bytes(range(32))
KEY = "a-cluster"
OPTIONS = parse({"kafka.bootstrap.servers": "127.0.0.1:1"}).options


def clock_ms() -> float:
    return time.monotonic() * 1000


def eventually(condition: Callable[[], object], within_s: float = 20.0) -> None:
    """Waits for another thread; fails where it takes too long."""
    until = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < until, "it did not happen in time"
        time.sleep(0.005)


class Echo(Handler):
    """Replies with the request's body; the last reply to {"later": true} waits for another peer's message."""

    def __init__(self) -> None:
        self.heard: list[Mapping[str, Any]] = []
        self.gone: list[int] = []
        self.waiting: list[tuple[int, int]] = []
        self.closed = 0

    def on_message(
        self, peer: int, request: int, body: Mapping[str, Any], now_ms: float
    ) -> Sequence[ServerMessage]:
        self.heard.append(body)
        if "shout" in body:
            shared = SharedBody(body, 0.0)
            return [*(Push(other, shared) for other, _ in self.waiting), Reply(peer, request, {})]
        if body.get("later"):
            self.waiting.append((peer, request))
            return [Reply(peer, request, {"pending": 1}, last=False)]
        if "bytes" in body:
            return [Reply(peer, request, {"filler": "x" * body["bytes"]})]
        late = [Reply(other, number, body) for other, number in self.waiting]
        self.waiting.clear()
        return [Reply(peer, request, body), *late]

    def on_disconnect(self, peer: int, now_ms: float) -> None:
        self.gone.append(peer)

    def close(self) -> None:
        self.closed += 1


class Serving:
    """What the tests see of a running server."""

    def __init__(self, port: int) -> None:
        self.echo = Echo()
        self.port = port
        self.server: CoordinatorServer | None = None
        self.loop: asyncio.AbstractEventLoop | None = None

    @contextmanager
    def busy(self) -> Iterator[None]:
        """The server's loop stands still meanwhile."""
        over = threading.Event()
        assert self.loop is not None
        self.loop.call_soon_threadsafe(over.wait, 60)
        try:
            yield
        finally:
            over.set()

    @property
    def address(self) -> CoordinatorAddress:
        return CoordinatorAddress("127.0.0.1", Rendezvous(self.port, KEY, SECRET))

    def echoing(self, options: SinkOptions, wake: Callable[[], None]) -> Handler:
        return self.echo

    def connections(self) -> int:
        return 0 if self.server is None else self.server.connections


@contextmanager
def serving(
    bounds: ServerBounds | None = None,
    factories: Mapping[str, HandlerFactory] | None = None,
    options: SinkOptions = OPTIONS,
    clock: Callable[[], float] = clock_ms,
    watch: LoopWatch | None = None,
) -> Iterator[Serving]:
    """A server on a thread. It looks at ``clock`` (milliseconds) by real time, and takes ``watch`` for its
    loop's."""
    listening = socket.create_server(("127.0.0.1", 0), backlog=1024)
    found = Serving(listening.getsockname()[1])
    started, stop = threading.Event(), threading.Event()

    async def serve() -> None:
        found.loop = asyncio.get_running_loop()
        made = factories if factories is not None else {"echo": found.echoing}
        found.server = CoordinatorServer(SECRET, made, clock, bounds or ServerBounds(), watch=watch)
        found.server.add_cluster(KEY, options)
        await found.server.start(listening)
        started.set()
        while not stop.is_set():
            await asyncio.sleep(0.01)
        found.server.close()
        await asyncio.sleep(0.01)

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    try:
        assert started.wait(30)
        yield found
    finally:
        stop.set()
        thread.join(30)
        listening.close()
