"""Ends attempts that outlive their write: the coordinator notifies tasks that the write is over. Pure.

The driver reports a write that commits or aborts, before ``save()`` or ``query.stop()`` returns. Some
attempts still run then: superseded speculative copies, tasks of a cancelled job, and tasks of executors that
lost the driver. Nobody waits for their rows, and their executor may take seconds to end them.

    task -> {"writing": name}     reply {} or {"over": name}; the push {"over": name} may follow
    driver -> {"over": name}      reply {}
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kafka_sink.coordinator.server.handlers import Push, Reply, ServerMessage
from kafka_sink.errors import ProtocolError

if TYPE_CHECKING:
    from kafka_sink.coordinator.server.handlers import Handler
    from kafka_sink.options import SinkOptions

# Finished writes that are remembered. An attempt that starts later than that is not ended.
_MAX_OVER = 10_000
_MAX_NAME = 200


class WriteHandler:
    """See Handler."""

    def __init__(self) -> None:
        self._writing: dict[int, str] = {}
        self._over: OrderedDict[str, None] = OrderedDict()

    def on_message(
        self,
        peer: int,
        request: int,
        body: Mapping[str, Any],
        now_ms: float,  # noqa: ARG002 - Handler's signature
    ) -> Sequence[ServerMessage]:
        """See Handler."""
        if "over" in body:
            return [Reply(peer, request, {}), *self._end(_name(body["over"]))]
        name = _name(body.get("writing"))
        self._writing[peer] = name
        return [Reply(peer, request, {"over": name} if name in self._over else {})]

    def _end(self, name: str) -> list[ServerMessage]:
        self._over[name] = None
        if len(self._over) > _MAX_OVER:
            self._over.popitem(last=False)
        return [Push(peer, {"over": name}) for peer, writing in self._writing.items() if writing == name]

    def on_disconnect(self, peer: int, now_ms: float) -> None:  # noqa: ARG002 - Handler's signature
        """See Handler."""
        self._writing.pop(peer, None)

    def on_time(self, now_ms: float) -> Sequence[ServerMessage]:  # noqa: ARG002 - Handler's signature
        """See Handler."""
        return ()

    def next_change_ms(self, now_ms: float) -> float:  # noqa: ARG002 - Handler's signature
        """See Handler."""
        return math.inf

    def close(self) -> None:
        """See Handler."""


def _name(value: object) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= _MAX_NAME:
        raise ProtocolError("the name of a write is missing or too long")
    return value


def write_handler(options: SinkOptions, wake: Callable[[], None]) -> Handler:  # noqa: ARG001 - HandlerFactory's signature
    """The handler of one cluster."""
    return WriteHandler()
