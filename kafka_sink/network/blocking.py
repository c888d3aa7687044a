"""Requests of a step, sent from the caller's thread, which waits until all are answered.

Planning and transactions use it, over the project's own connections.
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


# What a broker is asked to do.
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
    """Which broker is waited for, and what it is to do; None: not known yet."""
    who = f"broker {broker.id} ({broker.host}:{broker.port})" if broker and broker.id >= 0 else "a broker"
    return f"{who} to {_PURPOSES.get(api, f'answer {apis.APIS[api].name}')}"


class KeyType(Enum):
    """What FindCoordinator is asked for: the coordinator of a transactional id or of a group."""

    TRANSACTION = "transactional id"
    GROUP = "group"


@dataclass(slots=True, eq=False)
class Call:
    """One request. ``key`` names its coordinator; ``node``: where it goes, None while that is not known.

    ``encode`` makes its body of a version. ``take`` gets the call itself and its response, and says whether
    that is final.
    """

    api: int
    encode: Callable[[int], bytes]
    take: Callable[[Call, Any], bool]
    key: tuple[KeyType, str] | None = None
    node: int | None = None
    # As in Request.
    asked: int = 0
    timeout_ms: float = math.inf
    attempts: int = 0
    not_before_ms: float = 0.0
    is_sent: bool = False
    last_error: str = ""
    # When the call ends without a response, or with one that says that an offset is pending.
    give_up_ms: float = math.inf
    # A call of the same step and coordinator: the response counts only if this was sent behind that one.
    behind: Call | None = None
    # A call of the same step that has to be done before this one is sent.
    after: Call | None = None


class BlockingCalls:
    """One thread at a time. ``calls`` of the present step are not done yet."""

    def __init__(
        self,
        options: SinkOptions,
        network: NetworkClient | None = None,
        clock_ms: Callable[[], float] = monotonic_ms,
    ) -> None:
        self._options = options
        self._clock_ms = clock_ms
        self._network = network or NetworkClient(options, clock_ms)
        self._deadline_ms = 0.0
        # Those to choose from, by API, where these are not all.
        self._versions: Mapping[int, tuple[int, int]] = {}
        self.calls: list[Call] = []

    def close(self) -> None:
        self._network.close()

    def _loop(
        self,
        advance: Callable[[float], float | None],
        awaited: Callable[[], str],
        until_ms: float,
        since_ms: float | None = None,
    ) -> None:
        """Take what the network reports until ``advance`` returns None. It gets the time, and returns the
        milliseconds until it has more to do. ``awaited`` says what is waited for, since ``since_ms`` (now)
        and until ``until_ms`` at most."""
        since_ms = self._clock_ms() if since_ms is None else since_ms
        while (wait_ms := advance(self._clock_ms())) is not None:
            self._network.poll(min(wait_ms, _MAX_POLL_MS), self._clock_ms())
            WAIT_LISTENER.get()(awaited, since_ms, until_ms)

    def _give_up(self) -> None:
        """The time for the step is over: raise, or drop its calls."""
        raise NotImplementedError

    def _on_failure(self, call: Call, cause: Exception, *_: object) -> None:
        """The call was sent and gets no response."""
        raise NotImplementedError

    def _send_due(self, now_ms: float) -> float | None:
        """Send the requests that may go."""
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
                self._send(call, self._network.connections[node], now_ms)
            elif node in self._network.connections:
                wait = min(wait, self._network.connections[node].ready_delay_ms(now_ms))
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
        self._network.send(connection, request, now_ms)

    def _is_ready(self, node: int, now_ms: float) -> bool:
        connection = self._network.connections.get(node)
        return connection is not None and self._network.is_ready(connection, now_ms)

    def _on_response(self, call: Call, response: Any, _: float) -> None:
        # It may belong to an earlier step that timed out.
        if call in self.calls and call.take(call, response):
            self.calls.remove(call)
