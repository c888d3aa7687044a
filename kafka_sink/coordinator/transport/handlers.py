"""The message handlers of one cluster, one for each kind of message.

A handler ("metadata", "breaker") is a pure object: messages and the time come in, replies go out. The server
owns the sockets, the clock and the bounds. Each message gets exactly one last reply. Any number of interim
replies may precede it, which say that the request is still pending. A handler may push messages to any peer
that has sent one.
"""

from __future__ import annotations

import json
import math
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kafka_sink.coordinator.transport.message_format import packed
from kafka_sink.errors import ProtocolError
from kafka_sink.printable import printable

if TYPE_CHECKING:
    from kafka_sink.options import SinkOptions


class SharedBody(dict[str, Any]):
    """A body, or most of one, that many peers receive. Its JSON is encoded once."""

    __slots__ = ("_tail", "made_ms")

    def __init__(self, body: Mapping[str, Any], made_ms: float) -> None:
        super().__init__(body)
        self.made_ms = made_ms
        self._tail: bytes | None = None

    @property
    def tail(self) -> bytes:
        """The JSON, compressed if it is large, without its opening brace; then the enclosing message's
        closing brace."""
        if self._tail is None:
            self._tail = packed(json.dumps(self, separators=(",", ":")).encode())[1:] + b"}"
        return self._tail


def with_facts(facts: Mapping[str, Any], shared: SharedBody) -> Mapping[str, Any]:
    """A body that adds ``facts``, meant for one peer, to a shared body."""
    return ChainMap(dict(facts), shared)


@dataclass(frozen=True, slots=True)
class Reply:
    """A reply to message number ``request`` of task ``peer``. ``last``: no other reply follows."""

    peer: int
    request: int
    body: Mapping[str, Any]
    last: bool = True


@dataclass(frozen=True, slots=True)
class Push:
    """A message to task ``peer`` that replies to none of its messages."""

    peer: int
    body: Mapping[str, Any]


ServerMessage = Reply | Push


class Handler:
    """Base of handlers, each for one kind of message of one cluster. A handler overrides what it needs.

    Methods are called on the server's loop only, and must not block.
    ``peer`` is the number of a task, which has its own connection or shares one with others of its executor.

    Times are monotonic milliseconds of the coordinator's clock. Bodies are JSON objects. An invalid body
    raises ProtocolError, which ends the peer and leaves the handler's state unchanged.
    """

    def on_message(
        self, peer: int, request: int, body: Mapping[str, Any], now_ms: float
    ) -> Sequence[ServerMessage]:
        """Handle a message. Returns replies to it and to peers that waited for its content, and pushes."""
        raise NotImplementedError

    def on_disconnect(self, peer: int, now_ms: float) -> None:
        """The peer has disconnected: replies no longer reach it."""

    def on_time(self, now_ms: float) -> Sequence[ServerMessage]:
        """Called when ``next_change_ms`` has passed, or when ``wake`` was called from any thread."""
        return ()

    def next_change_ms(self, now_ms: float) -> float:
        """Milliseconds until ``on_time`` has work to do; infinite if only a message can bring work."""
        return math.inf

    def close(self) -> None:
        """The process ends. Release threads and sockets without waiting long."""


# Makes the handler of one kind for a cluster; the second argument wakes the server from any thread.
HandlerFactory = Callable[["SinkOptions", Callable[[], None]], Handler]


@dataclass(slots=True)
class ClusterHandlers:
    """The handlers of one cluster with one set of security settings, by kind."""

    handlers: Mapping[str, Handler] = field(default_factory=dict)

    def on_message(
        self, kind: str, peer: int, request: int, body: Any, now_ms: float
    ) -> list[tuple[str, ServerMessage]]:
        """The messages to send, each with its kind. Raises ProtocolError for an unknown kind."""
        handler = self.handlers.get(kind)
        if handler is None or not isinstance(body, dict):
            raise ProtocolError(
                f"unknown kind of message {printable(repr(kind), 60)}, or a body that is not a JSON object"
            )
        return [(kind, one) for one in handler.on_message(peer, request, body, now_ms)]

    def on_disconnect(self, peer: int, now_ms: float) -> None:
        for handler in self.handlers.values():
            handler.on_disconnect(peer, now_ms)

    def on_time(self, now_ms: float) -> list[tuple[str, ServerMessage]]:
        """The messages to send, each with its kind."""
        return [(kind, one) for kind, handler in self.handlers.items() for one in handler.on_time(now_ms)]

    def next_change_ms(self, now_ms: float) -> float:
        return min((one.next_change_ms(now_ms) for one in self.handlers.values()), default=math.inf)

    def close(self) -> None:
        for handler in self.handlers.values():
            handler.close()
