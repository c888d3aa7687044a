"""Helpers that the network tests share: a clock that only tests move, a client that is driven by hand."""

from __future__ import annotations

import dataclasses
import math
import struct
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from kafka.protocol.metadata import ApiVersionsResponse
from kafka.record.default_records import DefaultRecordBatchBuilder

from kafka_sink.network import apis, produce, requests
from kafka_sink.network.broker_connection import BrokerConnection
from kafka_sink.network.broker_protocol import BrokerProtocol, Request
from kafka_sink.network.client import NetworkClient
from kafka_sink.options import SinkOptions
from tests.support.fake_state import framed

OPTIONS = SinkOptions(
    bootstrap_servers=(("127.0.0.1", 1),),
    client_id="test",
    connections_max_idle_ms=540_000,
)
PATIENCE_S = 60.0


@dataclass(frozen=True)
class Responded:
    node_id: int
    name: object
    response: Any
    latency_ms: float


@dataclass(frozen=True)
class Failed:
    node_id: int
    name: object
    cause: Exception
    possibly_sent: bool


@dataclass(frozen=True)
class Connected:
    node_id: int
    setup_ms: float


@dataclass(frozen=True)
class Disconnected:
    node_id: int
    cause: Exception


Event = Responded | Failed | Connected | Disconnected


def _nothing(*_: object) -> None: ...


def request(api_key: int, version: int, body: list[Any], **more: Any) -> Request:
    """A request without a listener for its end; ``Driver.send`` sets one."""
    return Request(api_key, version, body, 30_000, _nothing, _nothing, **more)


def response_to(sent: Request, answer: bytes) -> Any:
    """The response as a connection decodes it, after the correlation id."""
    protocol = BrokerProtocol("client", "broker", 1000.0)
    ours = [(key, 0, 20) for key in range(90)]
    outgoing = protocol.send_buffer
    protocol.start(0.0)
    outgoing.advance(outgoing.queued_bytes)
    protocol.receive(framed(ApiVersionsResponse(version=4, error_code=0, api_keys=ours), 0))
    assert protocol.next_response(0.0) is None
    protocol.submit(sent, 0.0)
    outgoing.advance(outgoing.queued_bytes - outgoing.written_bytes)
    protocol.receive(struct.pack(">ii", 4 + len(answer), 1) + answer)
    completed = protocol.next_response(0.0)
    assert completed is not None
    return completed.response


class Clock:
    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


def addresses(bootstrap_servers: str) -> tuple[tuple[str, int], ...]:
    pairs = (entry.rpartition(":") for entry in bootstrap_servers.split(","))
    return tuple((host, int(port)) for host, _, port in pairs)


def batch(count: int, *, producer_id: int = -1, sequence: int = -1, value: bytes = b"v" * 20) -> bytes:
    builder = DefaultRecordBatchBuilder(
        magic=2,
        compression_type=0,
        is_transactional=False,
        producer_id=producer_id,
        producer_epoch=0 if producer_id >= 0 else -1,
        base_sequence=sequence,
        batch_size=1 << 26,
    )
    for index in range(count):
        builder.append(index, timestamp=1_700_000_000_000, key=None, value=value, headers=[])
    return bytes(builder.build())


def produce_request(
    data: bytes,
    *,
    topic: str = "t",
    partition: int = 0,
    version: int = 12,
    acks: int = -1,
    topic_id: bytes | None = None,
) -> Request:
    rows = [(topic, topic_id, [(partition, [memoryview(data)], len(data))])]
    body = produce.produce_body(version, acks, 30_000, None, rows)
    return request(apis.PRODUCE, version, list(body), expects_response=acks != 0)


def metadata_request(*topics: str, version: int = 12) -> Request:
    body = [requests.encode_metadata(version, topics, False)]
    return request(apis.METADATA, version, body)


class Driver(AbstractContextManager["Driver"]):
    """A client, its clock and all events so far. Polls really wait; the client's time is the clock's."""

    def __init__(
        self,
        bootstrap_servers: str,
        clock: Callable[[], float] | None = None,
        **changes: Any,
    ) -> None:
        options = dataclasses.replace(OPTIONS, bootstrap_servers=addresses(bootstrap_servers), **changes)
        self.clock = Clock()
        self.client = NetworkClient(options, clock or self.clock, random=lambda: 0.5)
        self.events: list[Event] = []
        self.client.on_connected = lambda node, setup_ms, _: self.events.append(Connected(node, setup_ms))
        self.client.on_disconnected = lambda node, cause, *_: self.events.append(Disconnected(node, cause))

    def __exit__(self, *_: object) -> None:
        self.client.close()

    def poll(self, wait_ms: float = 0.0) -> list[Event]:
        before = len(self.events)
        assert self.client.poll(wait_ms, self.clock.now) == len(self.events) - before
        return self.events[before:]

    def until(self, condition: Callable[[], Any], what: str = "") -> Any:
        """Polls until the condition holds; fails the test after PATIENCE_S."""
        deadline = time.monotonic() + PATIENCE_S
        while not (found := condition()):
            if time.monotonic() > deadline:
                raise AssertionError(f"never happened: {what or condition}; events: {self.events}")
            self.poll(20)
        return found

    def connect(self, node_id: int = -1) -> int:
        self.until(lambda: self.ready_for_any(node_id), "connected")
        return node_id

    def connection(self, node_id: int = -1) -> BrokerConnection:
        return self.client.connections[node_id]

    def ready_for_any(self, node_id: int = -1) -> bool:
        """Start to connect, at the clock's time."""
        connection = self.client.connections.get(node_id)
        return connection is not None and self.client.is_ready(connection, self.clock.now)

    def ready(self, node_id: int = -1) -> bool:
        return self.ready_for_any(node_id) and self.connection(node_id).accepts(self.clock.now)

    def ready_delay_ms(self, node_id: int = -1) -> float:
        connection = self.client.connections.get(node_id)
        return math.inf if connection is None else connection.ready_delay_ms(self.clock.now)

    def to_ask(self) -> int | None:
        connection = self.client.least_loaded(self.clock.now)
        return None if connection is None else connection.node.id

    def send(self, request: Request, node_id: int = -1, name: object = "a request") -> None:
        """Send the request, at the clock's time. The events of its end have this name."""

        def on_response(response: Any, now_ms: float) -> None:
            self.events.append(Responded(node_id, name, response, now_ms - request.sent_ms))

        def on_failure(cause: Exception, possibly_sent: bool, _: float) -> None:
            self.events.append(Failed(node_id, name, cause, possibly_sent))

        request.on_response, request.on_failure = on_response, on_failure
        self.client.send(self.connection(node_id), request, self.clock.now)

    def of(self, kind: type, name: object = None) -> list[Any]:
        """Events of this class so far; only those of one request if a name is given."""
        found = [event for event in self.events if isinstance(event, kind)]
        return [event for event in found if name is None or getattr(event, "name", None) == name]

    def event(self, kind: type, name: object = None) -> Any:
        return self.until(lambda: self.of(kind, name), f"{kind.__name__} {name}")[0]
