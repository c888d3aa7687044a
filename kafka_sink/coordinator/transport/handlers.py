"""The message handlers of one cluster, one for each kind of message.

A handler ("metadata", "breaker") is a pure object: messages and the time come in, replies go out. The server
owns the sockets, the clock and the bounds. Each message gets exactly one last reply. Any number of interim
replies may precede it, which say that the request is still pending. A handler may push messages to any task
that has sent one.

``ClusterRegistry`` knows which clusters of a coordinator are running, idle or evicted. A running cluster has
a thread, connections to its brokers and cached metadata. The registry stops one that has had no connected
task for ``idle_ms``, which frees all of that. Its settings stay, because the rows of a job may come hours
after its planning. When the registry is full, it evicts the cluster that has gone longest without a task.
Planning then has to add that cluster again.
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

# A task's number, whether it has a connection of its own or not. A relay that adds up is one task by itself.
TaskId = int


class SharedBody(dict[str, Any]):
    """A body, or most of one, that many tasks receive. Its JSON is encoded once."""

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
    """A body that adds ``facts``, meant for one task, to a shared body."""
    return ChainMap(dict(facts), shared)


@dataclass(frozen=True, slots=True)
class Reply:
    """A reply to a task's message number ``request``. ``last``: no other reply follows."""

    task: TaskId
    request: int
    body: Mapping[str, Any]
    last: bool = True


@dataclass(frozen=True, slots=True)
class Push:
    """A message to a task that replies to none of its messages."""

    task: TaskId
    body: Mapping[str, Any]


ServerMessage = Reply | Push


class Handler:
    """Base of handlers, each for one kind of message of one cluster. A handler overrides what it needs.

    Methods are called on the server's loop only, and must not block.

    Times are monotonic milliseconds of the coordinator's clock. Bodies are JSON objects. An invalid body
    raises ProtocolError, which ends the connection and leaves the handler's state unchanged.
    """

    def on_message(
        self, task: TaskId, request: int, body: Mapping[str, Any], now_ms: float
    ) -> Sequence[ServerMessage]:
        """Handle a message. Returns replies to it and to tasks that waited for its content, and pushes."""
        raise NotImplementedError

    def on_disconnect(self, task: TaskId, now_ms: float) -> None:
        """The task has disconnected: replies no longer reach it."""

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
        self, kind: str, task: TaskId, request: int, body: Any, now_ms: float
    ) -> list[tuple[str, ServerMessage]]:
        """The messages to send, each with its kind. Raises ProtocolError for an unknown kind."""
        handler = self.handlers.get(kind)
        if handler is None or not isinstance(body, dict):
            raise ProtocolError(
                f"unknown kind of message {printable(repr(kind), 60)}, or a body that is not a JSON object"
            )
        return [(kind, one) for one in handler.on_message(task, request, body, now_ms)]

    def on_disconnect(self, task: TaskId, now_ms: float) -> None:
        for handler in self.handlers.values():
            handler.on_disconnect(task, now_ms)

    def on_time(self, now_ms: float) -> list[tuple[str, ServerMessage]]:
        """The messages to send, each with its kind."""
        return [(kind, one) for kind, handler in self.handlers.items() for one in handler.on_time(now_ms)]

    def next_change_ms(self, now_ms: float) -> float:
        return min((one.next_change_ms(now_ms) for one in self.handlers.values()), default=math.inf)

    def close(self) -> None:
        for handler in self.handlers.values():
            handler.close()


@dataclass(slots=True)
class _Cluster:
    """``used_ms``: when the cluster was added, or its last task disconnected."""

    options: SinkOptions
    used_ms: float
    running: ClusterHandlers | None = None
    tasks: int = 0


class ClusterRegistry:
    """Times are monotonic milliseconds.

    Handlers that have work to do call ``wake(key)``, from any thread. The registry calls ``forgotten(key)``
    for a cluster that it evicts or does not accept.
    """

    def __init__(
        self,
        factories: Mapping[str, HandlerFactory],
        wake: Callable[[str], None],
        forgotten: Callable[[str], None],
        *,
        max_clusters: int,
        idle_ms: float,
    ) -> None:
        self._factories = factories
        self._wake = wake
        self._forgotten = forgotten
        self._max_clusters = max_clusters
        self._idle_ms = idle_ms
        self._known: dict[str, _Cluster] = {}

    def __contains__(self, key: object) -> bool:
        return key in self._known

    def add(self, key: str, options: SinkOptions, now_ms: float) -> bool:
        """Add a cluster, unless it is known. Returns False if all places are taken by clusters with tasks."""
        if key in self._known:
            return True
        if len(self._known) >= self._max_clusters and not self._make_room():
            self._forgotten(key)
            return False
        self._known[key] = _Cluster(options, now_ms)
        return True

    def _make_room(self) -> bool:
        unused = [key for key, one in self._known.items() if not one.tasks]
        if not unused:
            return False
        oldest = min(unused, key=lambda key: self._known[key].used_ms)
        self._stop(self._known.pop(oldest))
        self._forgotten(oldest)
        return True

    def enter(self, key: str) -> bool:
        """A task of this cluster has connected. Returns False if the cluster is not known."""
        found = self._known.get(key)
        if found is None:
            return False
        if found.running is None:
            handlers = {
                kind: make(found.options, lambda: self._wake(key)) for kind, make in self._factories.items()
            }
            found.running = ClusterHandlers(handlers)
        found.tasks += 1
        return True

    def leave(self, key: str, now_ms: float) -> None:
        """A task that entered has disconnected."""
        found = self._known[key]
        found.tasks -= 1
        found.used_ms = now_ms

    def running(self, key: str) -> ClusterHandlers | None:
        """The cluster's handlers. They exist as long as one of its tasks is connected."""
        found = self._known.get(key)
        return None if found is None else found.running

    def stop_idle(self, now_ms: float) -> list[str]:
        """Stop the clusters that have had no task for ``idle_ms``, and return their keys."""
        idle = [
            key
            for key, one in self._known.items()
            if one.running is not None and not one.tasks and now_ms - one.used_ms >= self._idle_ms
        ]
        for key in idle:
            self._stop(self._known[key])
        return idle

    def close(self) -> None:
        for one in self._known.values():
            self._stop(one)

    def _stop(self, cluster: _Cluster) -> None:
        running, cluster.running = cluster.running, None
        if running is not None:
            running.close()
