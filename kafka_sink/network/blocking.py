"""Sends the requests of one step from the caller's thread, which waits until all of them are answered.

Planning and transactions use it. It sends over the same kind of connections as tasks do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

from kafka_sink.clock import WAIT_LISTENER, monotonic_ms
from kafka_sink.model import Node
from kafka_sink.network import apis
from kafka_sink.network.broker_connection import BrokerConnection
from kafka_sink.network.broker_protocol import Request
from kafka_sink.network.client import NetworkClient
from kafka_sink.options import SinkOptions

_MAX_POLL_MS = 100.0
# For messages: what a request asks a broker to do.
_PURPOSES: Mapping[int, str] = {
    apis.METADATA: "describe the cluster",
    apis.CREATE_TOPICS: "create the topic",
    apis.INIT_PRODUCER_ID: "begin a transaction",
    apis.FIND_COORDINATOR: "name the coordinator of a transaction",
    apis.OFFSET_FETCH: "tell what was committed",
    apis.TXN_OFFSET_COMMIT: "record the decision",
    apis.END_TXN: "end a transaction",
    apis.LIST_TRANSACTIONS: "list open transactions",
    apis.DESCRIBE_TRANSACTIONS: "describe transactions",
}


def awaited(broker: Node | None, api: int) -> str:
    """The broker for which the caller waits (None if it is not known yet), and what it should do."""
    who = f"broker {broker.id} ({broker.host}:{broker.port})" if broker and broker.id >= 0 else "a broker"
    return f"{who} to {_PURPOSES.get(api, f'answer {apis.APIS[api].name}')}"


class KeyType(Enum):
    """The key type of FindCoordinator: the coordinator of a transactional id or of a group."""

    TRANSACTION = "transactional id"
    GROUP = "group"


@dataclass(slots=True, eq=False)
class Call:
    """One request. It goes to the coordinator of ``key``, or to ``node``; None if that is not known yet.

    ``encode`` returns its body for a version. ``take`` gets the call itself and its response, and returns
    whether that is final.
    """

    api: int
    encode: Callable[[int], bytes]
    take: Callable[[Call, Any], bool]
    key: tuple[KeyType, str] | None = None
    node: int | None = None
    # See Request.asked.
    asked: int = 0
    timeout_ms: float = math.inf
    attempts: int = 0
    not_before_ms: float = 0.0
    is_sent: bool = False
    last_error: str = ""
    # When the call ends without a response, or with a response that an offset is still pending.
    give_up_ms: float = math.inf
    # A call of the same step and coordinator. A response only counts if this call was sent after that one.
    behind: Call | None = None
    # A call of the same step that must be complete before this one is sent.
    after: Call | None = None


class BlockingCalls:
    """Used by one thread at a time. ``calls`` are the calls of the current step that are not complete."""

    def __init__(
        self,
        options: SinkOptions,
        network: NetworkClient | None = None,
        clock_ms: Callable[[], float] = monotonic_ms,
    ) -> None:
        self._options = options
        self._clock_ms = clock_ms
        self.network = network or NetworkClient(options, clock_ms)
        self._deadline_ms = 0.0
        # The versions to choose from, by API, if not all supported versions may be used.
        self._versions: Mapping[int, tuple[int, int]] = {}
        self.calls: list[Call] = []

    def close(self) -> None:
        self.network.close()

    def _loop(
        self,
        advance: Callable[[float], float | None],
        awaited: Callable[[], str],
        until_ms: float,
        since_ms: float | None = None,
    ) -> None:
        """Process the network's events until ``advance`` returns None. ``advance`` gets the time, and returns
        the milliseconds until it has more to do. For messages, ``awaited`` returns what the wait is for; it
        began at ``since_ms`` (default: now) and lasts until ``until_ms`` at most."""
        since_ms = self._clock_ms() if since_ms is None else since_ms
        while (wait_ms := advance(self._clock_ms())) is not None:
            self.network.poll(min(wait_ms, _MAX_POLL_MS), self._clock_ms())
            WAIT_LISTENER.get()(awaited, since_ms, until_ms)

    def _give_up(self) -> None:
        """Called when the time for the step has passed. Raises, or drops the calls."""
        raise NotImplementedError

    def _on_failure(self, call: Call, cause: Exception, *_: object) -> None:
        """Called when a request was sent and will get no response."""
        raise NotImplementedError

    def _send_due(self, now_ms: float) -> float | None:
        """Send the requests that may be sent now."""
        if self.calls and now_ms > self._deadline_ms:
            self._give_up()
        if not self.calls:
            return None
        wait = _MAX_POLL_MS
        for call in self.calls:
            node = call.node
            if call.is_sent or node is None or (call.behind in self.calls and not call.behind.is_sent):
                continue
            if call.after in self.calls:
                continue
            if now_ms < call.not_before_ms:
                wait = min(wait, call.not_before_ms - now_ms)
            elif self._is_ready(node, now_ms):
                self._send(call, self.network.connections[node], now_ms)
            elif node in self.network.connections:
                wait = min(wait, self.network.connections[node].ready_delay_ms(now_ms))
        return wait

    def _send(self, call: Call, connection: BrokerConnection, now_ms: float) -> None:
        version = connection.api_version(call.api, self._versions.get(call.api))
        left_ms = max(self._deadline_ms - now_ms, 1.0)
        timeout = min(self._options.request_timeout_ms, call.timeout_ms, left_ms)
        call.is_sent = True
        request = Request(
            call.api,
            version,
            [call.encode(version)],
            timeout,
            partial(self._on_response, call),
            partial(self._on_failure, call),
            asked=call.asked,
        )
        self.network.send(connection, request, now_ms)

    def _is_ready(self, node: int, now_ms: float) -> bool:
        connection = self.network.connections.get(node)
        return connection is not None and self.network.is_ready(connection, now_ms)

    def _on_response(self, call: Call, response: Any, _: float) -> None:
        # The response may belong to an earlier step that timed out.
        if call in self.calls and call.take(call, response):
            self.calls.remove(call)
