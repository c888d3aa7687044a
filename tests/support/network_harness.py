"""What the network tests share: a clock that only tests move, a client that is driven by hand."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

from kafka.record.default_records import DefaultRecordBatchBuilder

from kafka_sink.network import apis, produce, requests
from kafka_sink.network.client import NetworkClient, NetworkEvent, OutboundRequest
from kafka_sink.options import SinkOptions

OPTIONS = SinkOptions(
    bootstrap_servers=(("127.0.0.1", 1),),
    client_id="test",
    connections_max_idle_ms=540_000,
    send_buffer_bytes=-1,
    receive_buffer_bytes=-1,
)
PATIENCE_S = 60.0


class Clock:
    """A fake clock: milliseconds that only a test changes."""

    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


def addresses(bootstrap_servers: str) -> tuple[tuple[str, int], ...]:
    """As SinkOptions wants them."""
    pairs = (entry.rpartition(":") for entry in bootstrap_servers.split(","))
    return tuple((host, int(port)) for host, _, port in pairs)


def batch(count: int, *, producer_id: int = -1, sequence: int = -1, value: bytes = b"v" * 20) -> bytes:
    """A valid V2 record batch, by kafka-python."""
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
    tag: object = "produce",
) -> OutboundRequest:
    """One batch for one partition."""
    body = produce.produce_body(
        version, acks, 30_000, None, [(topic, None, [(partition, [memoryview(data)], len(data))])]
    )
    return OutboundRequest(apis.PRODUCE, version, body, acks != 0, 30_000, tag)


def metadata_request(*topics: str, version: int = 12, tag: object = "metadata") -> OutboundRequest:
    """Metadata of these topics."""
    body = [requests.encode_metadata(version, topics, False)]
    return OutboundRequest(apis.METADATA, version, body, True, 30_000, tag)


class Driver:
    """A client, its clock and all events so far. Polls really wait; the client's time is the clock's."""

    def __init__(
        self, bootstrap_servers: str, clock: Callable[[], float] | None = None, **changes: Any
    ) -> None:
        options = dataclasses.replace(OPTIONS, bootstrap_servers=addresses(bootstrap_servers), **changes)
        self.clock = Clock()
        self.client = NetworkClient(options, clock or self.clock, random=lambda: 0.5)
        self.events: list[NetworkEvent] = []

    def __enter__(self) -> Driver:
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()

    def poll(self, wait_ms: float = 0.0) -> list[NetworkEvent]:
        """One poll; the events are kept as well."""
        events = self.client.poll(wait_ms, self.clock.now)
        self.events += events
        return events

    def until(self, condition: Callable[[], Any], what: str = "") -> Any:
        """Polls until the condition holds; fails the test after PATIENCE_S."""
        deadline = time.monotonic() + PATIENCE_S
        while not (found := condition()):
            if time.monotonic() > deadline:
                raise AssertionError(f"never happened: {what or condition}; events: {self.events}")
            self.poll(20)
        return found

    def connect(self, node_id: int = -1) -> int:
        """Until the broker takes requests."""
        self.until(lambda: self.client.ready_for_any(node_id, self.clock.now), "connected")
        return node_id

    def send(self, request: OutboundRequest, node_id: int = -1) -> None:
        """At the clock's time."""
        self.client.send(node_id, request, self.clock.now)

    def of(self, kind: type, tag: object = None) -> list[Any]:
        """Events of this class so far, of one request where a tag is given."""
        found = [event for event in self.events if isinstance(event, kind)]
        return [event for event in found if tag is None or getattr(event, "tag", None) == tag]

    def event(self, kind: type, tag: object = None) -> Any:
        """The first such event; waits for it."""
        return self.until(lambda: self.of(kind, tag), f"{kind.__name__} {tag}")[0]
