"""A blocking client for planning, which sends one request at a time.

It uses the tasks' network client, and so tests the TLS settings, the login and the addresses of tasks.
"""

from __future__ import annotations

import errno
import math
from collections.abc import Callable, Sequence
from typing import Any

from kafka_sink.clock import monotonic_ms
from kafka_sink.errors import (
    AuthenticationError,
    BrokersUnreachableError,
    BrokerVersionError,
    KafkaSinkError,
    ProtocolError,
)
from kafka_sink.model import Node
from kafka_sink.network.blocking import BlockingCalls, Call, awaited
from kafka_sink.network.broker_connection import STEPS, BrokerConnection
from kafka_sink.network.broker_protocol import ConnectionState
from kafka_sink.options import SinkOptions

# How many brokers of a cluster to try. One that responds is enough.
_MAX_TRIED = 5
# Give up if brokers close this many connections at the first request.
_MAX_RESETS = 3
# Retrying does not help: the login fails, or the address is not a Kafka broker, or the broker expects TLS.
_FINAL = (AuthenticationError, BrokerVersionError, ProtocolError)
_REMEDIES = {
    errno.ECONNREFUSED: "nothing listens there: check host and port",
    errno.EHOSTUNREACH: "there is no route: check the address and the network",
    errno.ENETUNREACH: "there is no route: check the address and the network",
    errno.ETIMEDOUT: "no response: check the address and firewalls",
}


class PlanningClient(BlockingCalls):
    """A client for one thread, which must close it.

    Methods raise BrokersUnreachableError if no broker is usable; its message has each address, the step that
    failed and the remedy. They raise AuthenticationError if the login is the reason.
    """

    def __init__(
        self, options: SinkOptions, connect_bound_ms: float, clock_ms: Callable[[], float] = monotonic_ms
    ) -> None:
        super().__init__(options, clock_ms=clock_ms)
        self._connect_bound_ms = connect_bound_ms
        self._bootstrap = [connection.node for connection in self.network.bootstrap]
        self._advertised: Sequence[Node] = ()
        self._resets = 0
        # When the last response arrived, and when the caller gives up.
        self._since_ms = self._clock_ms()
        self._until_ms = self._since_ms + options.max_block_ms

    def connect(self) -> int:
        """Connect to all brokers at once, and return the id of the first that accepts requests.

        Each address of a broker may take the time given to the constructor, and all of them together
        max.block.ms. Raises ConfigurationError if key or certificate files cannot be used.
        """
        self.network.check_security()
        nodes = self._advertised[:_MAX_TRIED] or self._bootstrap
        begun = self._clock_ms()
        until = begun + self._connect_bound_ms
        ready: list[int] = []

        def advance(now: float) -> float | None:
            ready.extend(node.id for node in nodes if self._is_ready(node.id, now))
            if ready:
                return None
            steps = self._connections(nodes)
            if all(isinstance(step.last_error, _FINAL) for step in steps):
                raise self._unusable("cannot use", steps)
            tried_ms = max(step.first_tries_end_ms(self._connect_bound_ms) for step in steps)
            if now >= max(until, min(tried_ms, begun + self._options.max_block_ms)):
                raise self._unusable("could not connect to", steps, f" within {(now - begun) / 1000:.1f} s")
            return max(until - now, 0.0) or math.inf

        self._loop(advance, self._reached, until)
        return ready[0]

    def _reached(self) -> str:
        option = "the brokers' advertised.listeners" if self._advertised else "kafka.bootstrap.servers"
        lines = "; ".join(map(_line, self._connections(self._advertised or self._bootstrap)))
        check = "" if option in lines else f"; check {option}"
        return f"any broker to be reached ({lines}{check})"

    def use_advertised(self, nodes: Sequence[Node]) -> None:
        """From now on use the addresses that the cluster advertises, as tasks do."""
        self._advertised = nodes
        self.network.set_addresses(nodes)
        self._resets = 0

    def reach(self, node_id: int) -> bool:
        """Whether this broker accepts requests, now or within the time for connecting."""
        if all(node.id != node_id for node in self._advertised):
            return False
        until = self._clock_ms() + self._connect_bound_ms

        def advance(now: float) -> float | None:
            is_over = self._is_ready(node_id, now) or self._connection(node_id).is_gone or now >= until
            return None if is_over else until - now

        self._loop(advance, self._reached, until)
        return self._is_ready(node_id, self._clock_ms())

    def api_version(self, node_id: int, api: int) -> int:
        return self._connection(node_id).api_version(api)

    def _connection(self, node_id: int) -> BrokerConnection:
        return self.network.connections[node_id]

    def ask(
        self, node_id: int, api: int, encode: Callable[[int], bytes], timeout_ms: float, asked: int = 0
    ) -> Any | None:
        """Send a request. Returns the response, or None if it timed out or the connection was lost.

        ``asked`` is as in Request. Callers retry after None. Raises BrokersUnreachableError if brokers
        repeatedly close connections at the first request.
        """
        responses: list[Any] = []

        def take(_: Call, response: Any) -> bool:
            self._resets, self._since_ms = 0, self._clock_ms()
            responses.append(response)
            return True

        self._deadline_ms = self._clock_ms() + timeout_ms
        self.calls = [Call(api, encode, take, node=node_id, asked=asked)]
        node = self._connection(node_id).node
        self._loop(self._send_due, lambda: awaited(node, api), self._until_ms, self._since_ms)
        return responses[0] if responses else None

    def _give_up(self) -> None:
        self.calls = []

    def _on_failure(self, call: Call, cause: Exception, *_: object) -> None:
        # The call that failed may have been given up already, while another one is in flight.
        self.calls = [other for other in self.calls if other is not call]
        if isinstance(cause, AuthenticationError):
            raise AuthenticationError(str(cause)) from None
        self._resets += isinstance(cause, ConnectionResetError)
        if self._resets >= _MAX_RESETS:
            tried = self._connections(self._advertised or self._bootstrap)
            raise self._unusable("could not connect to", tried)

    def reasons(self) -> str:
        """The errors of brokers that are not connected."""
        connections = self.network.connections.values()
        return "; ".join(_line(connection) for connection in connections if connection.last_error is not None)

    def _connections(self, nodes: Sequence[Node]) -> list[BrokerConnection]:
        return [self._connection(node.id) for node in nodes]

    def _unusable(self, what: str, tried: Sequence[BrokerConnection], within: str = "") -> KafkaSinkError:
        which = "the brokers' own addresses (advertised.listeners)" if self._advertised else "any broker"
        lines = "; ".join(map(_line, tried))
        text = f"{what} {which}{within}: {lines}"
        if all(isinstance(connection.last_error, AuthenticationError) for connection in tried):
            return AuthenticationError(text)
        return BrokersUnreachableError(text)


def _line(connection: BrokerConnection) -> str:
    """What the connection is doing, or why it failed."""
    node, error = connection.node, connection.last_error
    where = f"{node.host}:{node.port}"
    if error is None:
        what = f"{connection.step} did not complete" if connection.step else "not tried"
        return f"{where}: {what}{connection.silence_hint or '; no response: check the address and firewalls'}"
    if isinstance(error, KafkaSinkError):
        return f"{where}: {_without_id(str(error), node).removeprefix(f'{where} ')}"
    remedy = _REMEDIES.get(getattr(error, "errno", None) or 0, "")
    if connection.failed_step == STEPS[ConnectionState.RESOLVING]:
        remedy = "check the host name in " + (
            "kafka.bootstrap.servers" if node.id < 0 else "the broker's advertised.listeners"
        )
    reason = getattr(error, "strerror", None) or _without_id(str(error), node)
    step_text = f"{connection.failed_step} failed: " if connection.failed_step else ""
    return f"{where}: {step_text}{reason}" + (f" ({remedy})" if remedy else "")


def _without_id(text: str, node: Node) -> str:
    """Remove negative ids, which are this client's own numbers for bootstrap addresses."""
    return text.replace(f" (id {node.id})", "") if node.id < 0 else text
