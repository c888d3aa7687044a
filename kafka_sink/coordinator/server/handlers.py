"""What the coordinator knows of one cluster, by kind of message; and who may answer it.

A kind ("metadata", "breaker") is a pure object: messages and the time come in, replies go out. The server
brings the sockets, the clock and the bounds. Every message of a peer gets one last reply, and any number of
earlier ones that say that it is still under way. Any peer that has spoken may be pushed what it did not ask.
"""

from __future__ import annotations

import json
import math
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from kafka_sink.errors import ProtocolError

if TYPE_CHECKING:
    from kafka_sink.options import SinkOptions


class SharedBody(dict[str, Any]):
    """A body, or most of one, that many are told: its JSON is made once."""

    __slots__ = ("_tail", "made_ms")

    def __init__(self, body: Mapping[str, Any], made_ms: float) -> None:
        super().__init__(body)
        self.made_ms = made_ms
        self._tail: bytes | None = None

    @property
    def tail(self) -> bytes:
        """The JSON without its first brace, and the brace that ends the message that it is in."""
        if self._tail is None:
            self._tail = json.dumps(self, separators=(",", ":")).encode()[1:] + b"}"
        return self._tail


def with_facts(facts: Mapping[str, Any], shared: SharedBody) -> Mapping[str, Any]:
    """A body of what one peer is told, and what it is told as others are."""
    return ChainMap(dict(facts), shared)


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer to message number ``request`` of connection ``peer``. ``last``: no other will follow."""

    peer: int
    request: int
    body: Mapping[str, Any]
    last: bool = True


@dataclass(frozen=True, slots=True)
class Push:
    """News for connection ``peer``, an answer to nothing."""

    peer: int
    body: Mapping[str, Any]


ServerMessage = Reply | Push


class Handler(Protocol):
    """One kind of message for one cluster. Called on the server's loop only; must not block.

    Times are monotonic milliseconds of the coordinator's clock. Bodies are JSON objects; ones that make no
    sense raise ProtocolError, which closes the peer's connection and changes nothing.
    """

    def on_message(
        self, peer: int, request: int, body: Mapping[str, Any], now_ms: float
    ) -> Sequence[ServerMessage]:
        """A peer's message; replies to it, or to others that waited for what it tells, and pushes."""

    def on_disconnect(self, peer: int, now_ms: float) -> None:
        """No reply reaches this peer any more."""

    def on_time(self, now_ms: float) -> Sequence[ServerMessage]:
        """Called when ``next_change_ms`` has passed, or when ``wake`` was called from any thread."""

    def next_change_ms(self, now_ms: float) -> float:
        """Milliseconds until ``on_time`` has something to do; infinite where a message must come first."""

    def close(self) -> None:
        """The process ends: let threads and sockets go, without waiting long."""


# Makes the handler of one kind for a cluster; the second argument wakes the server from any thread.
HandlerFactory = Callable[["SinkOptions", Callable[[], None]], Handler]


@dataclass(slots=True)
class ClusterHandlers:
    """Handlers by kind of one cluster with one set of security settings."""

    handlers: Mapping[str, Handler] = field(default_factory=dict)

    def on_message(
        self, kind: str, peer: int, request: int, body: Any, now_ms: float
    ) -> list[tuple[str, ServerMessage]]:
        """What is to be sent, each with its kind. Raises ProtocolError for a kind that nobody handles."""
        handler = self.handlers.get(kind)
        if handler is None or not isinstance(body, dict):
            raise ProtocolError(f"nobody handles messages of kind {kind!r}")
        return [(kind, one) for one in handler.on_message(peer, request, body, now_ms)]

    def on_disconnect(self, peer: int, now_ms: float) -> None:
        """See Handler."""
        for handler in self.handlers.values():
            handler.on_disconnect(peer, now_ms)

    def on_time(self, now_ms: float) -> list[tuple[str, ServerMessage]]:
        """What is to be sent, each with its kind."""
        return [(kind, one) for kind, handler in self.handlers.items() for one in handler.on_time(now_ms)]

    def next_change_ms(self, now_ms: float) -> float:
        """See Handler."""
        return min((one.next_change_ms(now_ms) for one in self.handlers.values()), default=math.inf)

    def close(self) -> None:
        """See Handler."""
        for handler in self.handlers.values():
            handler.close()
