"""The messages that services put into their outbox, without a server."""

from __future__ import annotations

from collections.abc import Iterable

from kafka_sink.coordinator.schema import Message, decode, encode


class FakeOutbox:
    def __init__(self) -> None:
        self.sent: list[tuple[int, Message]] = []
        self.encoded = 0

    def send(self, peer: int, message: Message) -> None:
        self.broadcast([peer], message)

    def broadcast(self, peers: Iterable[int], message: Message) -> None:
        self.encoded += 1
        arrived = decode(encode(message))
        self.sent += [(peer, arrived) for peer in peers]

    def taken(self) -> list[tuple[int, Message]]:
        sent, self.sent = self.sent, []
        return sent
