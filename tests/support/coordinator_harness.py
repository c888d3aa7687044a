"""A coordinator in a thread with a service that repeats its messages, and helpers for tests of services."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Annotated, Any
from unittest.mock import patch

import pytest
from msgspec import Meta

from kafka_sink.cluster import producer_metadata
from kafka_sink.coordinator import metadata as coordinator_metadata
from kafka_sink.coordinator import metadata_service, rendezvous
from kafka_sink.coordinator.address import CoordinatorAddress
from kafka_sink.coordinator.client import ClientTimes, CoordinatorClient
from kafka_sink.coordinator.schema import (
    Channel,
    Count,
    Hello,
    Message,
    Outbox,
    Service,
    ServiceScope,
    receives,
)
from kafka_sink.coordinator.server import CoordinatorServer, Services
from kafka_sink.coordinator.transport import ServerBounds, ServerIdentity, new_identity
from kafka_sink.options import SinkOptions, parse

GROUP = "a-group"
OPTIONS = parse({"kafka.bootstrap.servers": "127.0.0.1:1"}).options
HELLO = Hello(GROUP, "a-cluster", {})


class Said(Message, frozen=True):
    number: Count
    text: Annotated[str, Meta(max_length=2**21)] = ""


class Shout(Message, frozen=True):
    """Goes to all tasks of the group."""

    length: Count


def clock_ms() -> float:
    return time.monotonic() * 1000


class Echo(Service):
    scope = ServiceScope.CLUSTER

    def __init__(self, options: SinkOptions, out: Outbox) -> None:
        super().__init__(out)
        self.options = options
        self.heard: list[Message] = []
        self.tasks: set[int] = set()
        self.gone: list[int] = []
        self.closed = 0

    def on_joined(self, peer: int, now_ms: float) -> None:
        self.tasks.add(peer)

    def on_gone(self, peer: int, now_ms: float) -> None:
        self.tasks.remove(peer)
        self.gone.append(peer)

    @receives(Said)
    def on_said(self, peer: int, message: Said, now_ms: float) -> None:
        self.heard.append(message)
        self.out.send(peer, message)

    @receives(Shout)
    def on_shout(self, peer: int, message: Shout, now_ms: float) -> None:
        self.heard.append(message)
        self.out.broadcast(list(self.tasks), Said(0, "x" * message.length))

    def close(self) -> None:
        self.closed += 1


class RecordingChannel(Channel):
    """Sends the messages in ``to_tell``, and records the messages that arrive."""

    scope = ServiceScope.CLUSTER

    def __init__(self) -> None:
        super().__init__()
        self.to_tell: list[Message] = []
        self.received: list[Message] = []
        self.events: list[str] = []

    def next_message(self, now_ms: float) -> Message | None:
        return self.to_tell.pop(0) if self.to_tell else None

    @receives(Said)
    def on_said(self, message: Said, now_ms: float) -> None:
        self.received.append(message)

    def on_connected(self, now_ms: float) -> None:
        self.events.append("connected")

    def on_lost(self, now_ms: float) -> None:
        self.events.append("lost")


@cache
def identity() -> ServerIdentity:
    return new_identity()


def address_at(port: int, identity: ServerIdentity, group: str = GROUP) -> CoordinatorAddress:
    return replace(identity.address("127.0.0.1", port), group=group)


class Serving:
    def __init__(self, listening: socket.socket) -> None:
        self.echoes: list[Echo] = []
        self.listening = listening
        self.port = int(listening.getsockname()[1])
        self.is_dead = False
        self.server: CoordinatorServer | None = None
        self.loop: asyncio.AbstractEventLoop | None = None

    @property
    def echo(self) -> Echo:
        (found,) = self.echoes
        return found

    @contextmanager
    def busy(self) -> Iterator[None]:
        over = threading.Event()
        assert self.loop is not None
        self.loop.call_soon_threadsafe(over.wait, 60)
        try:
            yield
        finally:
            over.set()

    def die(self) -> None:
        assert self.server is not None
        self.is_dead = True
        self.server.close()
        self.listening.close()

    @property
    def address(self) -> CoordinatorAddress:
        return address_at(self.port, identity())

    @property
    def driver_address(self) -> CoordinatorAddress:
        return replace(self.address, token=identity().driver_token, has_view=True)

    def has_driver(self) -> Any:
        """Within the block, this process finds the coordinator as the driver does."""
        return patch.object(rendezvous, "address_for_driver", lambda: self.driver_address)

    def echoing(self, options: SinkOptions, out: Outbox) -> Echo:
        self.echoes.append(Echo(options, out))
        return self.echoes[-1]

    def connections(self) -> int:
        return 0 if self.server is None else self.server.connections

    def settle(self) -> None:
        """Return once the server has written its answers to all messages that it has handled."""
        for _ in range(2):
            done = threading.Event()
            assert self.loop is not None
            self.loop.call_soon_threadsafe(done.set)
            assert done.wait(60)

    def waiting(self) -> int:
        """The number of peers that wait for their turn."""
        assert self.server is not None
        return sum(peer.is_waiting for peer in list(self.server._connections.peers.values()))

    def state(self) -> Mapping[str, Any]:
        assert self.server is not None
        return self.server.state()

    def messages(self) -> int:
        """The number of messages that the server has handled."""
        return int(self.state()["messages"])


@contextmanager
def serving(
    bounds: ServerBounds | None = None,
    services: Services | None = None,
    clock: Callable[[], float] = clock_ms,
) -> Iterator[Serving]:
    """A server on a thread. It reads ``clock`` (milliseconds), by real time."""
    listening = socket.create_server(("127.0.0.1", 0), backlog=1024)
    found = Serving(listening)
    started, stop = threading.Event(), asyncio.Event()

    async def serve() -> None:
        found.loop = asyncio.get_running_loop()
        made: Any = services if services is not None else {Echo: found.echoing}
        found.server = CoordinatorServer(identity(), made, clock, bounds or ServerBounds())
        found.server.start(listening)
        started.set()
        await stop.wait()
        if not found.is_dead:
            found.server.close()
        await asyncio.sleep(0.01)

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    try:
        assert started.wait(60)
        yield found
    finally:
        if found.loop is not None:
            found.loop.call_soon_threadsafe(stop.set)
        thread.join(60)
        listening.close()


def wait_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let tasks and the coordinator wait for each other as long as a very busy machine needs."""
    for module, name in (
        (producer_metadata, "COORDINATOR_WAIT_MS"),
        (coordinator_metadata, "COORDINATOR_WAIT_MS"),
        (metadata_service, "FETCH_SILENCE_MS"),
    ):
        monkeypatch.setattr(module, name, 60_000.0)
    monkeypatch.setattr(CoordinatorClient.__init__, "__defaults__", (ClientTimes(silence_ms=60_000.0),))
