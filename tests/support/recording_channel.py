"""A coordinator's client with a channel that sends what a test gives it and records what comes back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from kafka_sink.coordinator.client.client import CoordinatorClient
from kafka_sink.coordinator.transport.address import CoordinatorAddress
from kafka_sink.coordinator.transport.channel import Channel
from tests.support.coordinator_harness import clock_ms


class RecordingChannel(Channel):
    """Sends what is in ``to_tell``, to the handler that echoes."""

    kind = "echo"

    def __init__(self) -> None:
        super().__init__()
        self.to_tell: list[dict[str, Any]] = []
        self.replies: list[tuple[Mapping[str, Any], bool]] = []
        self.pushes: list[Mapping[str, Any]] = []
        self.events: list[str] = []

    def next_message(self, now_ms: float) -> Mapping[str, Any] | None:
        return self.to_tell.pop(0) if self.to_tell else None

    def hurry(self) -> None:
        self.events.append("hurry")

    def on_reply(self, body: Mapping[str, Any], last: bool, now_ms: float) -> None:
        self.replies.append((body, last))

    def on_push(self, body: Mapping[str, Any], now_ms: float) -> None:
        self.pushes.append(body)

    def on_connected(self, now_ms: float) -> None:
        self.events.append("connected")

    def on_lost(self, now_ms: float) -> None:
        self.events.append("lost")


@contextmanager
def client_of(
    address: CoordinatorAddress, silence_ms: float = 20_000
) -> Iterator[tuple[CoordinatorClient, RecordingChannel]]:
    channel = RecordingChannel()
    client = CoordinatorClient(address, [channel], clock_ms, silence_ms)
    client.start()
    client.resume()
    try:
        yield client, channel
    finally:
        client.close()
        client.join(30)
        assert not client.is_alive()
