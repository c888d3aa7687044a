"""What planning asks brokers, one thing at a time, over the network client that tasks use: the same TLS, the
same login, the same addresses. Its first connection is the test of all three.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from types import TracebackType
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
from kafka_sink.network.client import (
    ConnectionStep,
    NetworkClient,
    NetworkSettings,
    OutboundRequest,
    RequestFailed,
    ResponseReceived,
)
from kafka_sink.options import SinkOptions

# For connections; what is asked on them has the caller's bound.
CONNECT_BOUND_MS = 9_000.0
_POLL_MS = 100.0
# Brokers of a cluster that are tried; one that answers is enough.
_MAX_TRIED = 5
# A broker that closes connections this often at the first request will go on to.
_MAX_CUT = 3
# What answers like that once is no Kafka broker, or one that expects TLS.
_FINAL = (AuthenticationError, BrokerVersionError, ProtocolError)
_REMEDIES = {
    errno.ECONNREFUSED: "nothing listens there: check host and port",
    errno.EHOSTUNREACH: "there is no route: check the address and the network between",
    errno.ENETUNREACH: "there is no route: check the address and the network between",
    errno.ETIMEDOUT: "no answer: check the address, and firewalls between",
}


class PlanningClient:
    """A context manager for one thread. Raises BrokersUnreachableError where no broker can be used, which
    names each address, its step and what to change; AuthenticationError where that is about the login."""

    def __init__(self, options: SinkOptions, connect_bound_ms: float) -> None:
        self._connect_bound_ms = connect_bound_ms
        self._network = NetworkClient(NetworkSettings.from_options(options), monotonic_ms)
        self._bootstrap = self._network.bootstrap_nodes()
        self._advertised: list[Node] = []
        self._cut = 0

    def __enter__(self) -> PlanningClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._network.close()

    def connect(self) -> int:
        """A broker that takes requests: tries all addresses at once, until the bound for connections.

        Raises ConfigurationError for files of keys and certificates that cannot be used.
        """
        self._network.check_security()
        nodes = self._advertised[:_MAX_TRIED] or self._bootstrap
        begun = monotonic_ms()
        until = begun + self._connect_bound_ms
        while True:
            now = monotonic_ms()
            ready = [node.id for node in nodes if self._network.ready_for_any(node.id, now)]
            if ready:
                return ready[0]
            steps = self._steps(nodes)
            if now >= until or all(isinstance(one.error, _FINAL) for one in steps):
                raise self._unreachable(steps, now - begun)
            self._network.poll(min(_POLL_MS, until - now), now)

    def use_advertised(self, nodes: Sequence[Node]) -> None:
        """From now on the cluster's own addresses are used, as tasks do."""
        self._advertised = list(nodes)
        self._network.set_nodes(nodes)
        self._cut = 0

    def reach(self, node_id: int) -> bool:
        """Whether this broker takes requests at once, or within the time of one connection."""
        if all(node.id != node_id for node in self._advertised):
            return False
        until = monotonic_ms() + self._connect_bound_ms
        while (now := monotonic_ms()) < until:
            if self._network.ready_for_any(node_id, now):
                return True
            if self._network.is_gone(node_id):
                return False
            self._network.poll(_POLL_MS, now)
        return False

    def api_version(self, node_id: int, api: int, versions: tuple[int, int]) -> int:
        """The newest version that both sides speak. Raises BrokerVersionError where there is none."""
        return self._network.api_version(node_id, api, versions)

    def ask(
        self,
        node_id: int,
        api: int,
        versions: tuple[int, int],
        encode: Callable[[int], bytes],
        timeout_ms: float,
    ) -> Any | None:
        """The answer, None where the broker gave none in time, or was lost; try again then.

        Raises BrokersUnreachableError where brokers keep closing connections at the first request.
        """
        now = monotonic_ms()
        version = self._network.api_version(node_id, api, versions)
        body = encode(version)
        request = OutboundRequest(api, version, [body], True, max(1.0, timeout_ms), "ask")
        self._network.send(node_id, request, now)
        while True:
            for event in self._network.poll(timeout_ms, monotonic_ms()):
                if isinstance(event, ResponseReceived):
                    self._cut = 0
                    return event.response
                if isinstance(event, RequestFailed):
                    self._failed(event.cause)
                    return None

    def _failed(self, cause: Exception) -> None:
        if isinstance(cause, AuthenticationError):
            raise AuthenticationError(str(cause)) from None
        self._cut += isinstance(cause, ConnectionResetError)
        if self._cut >= _MAX_CUT:
            raise self._unreachable(self._steps(self._advertised or self._bootstrap), None)

    def reasons(self) -> str:
        """Why brokers that are not connected are not."""
        steps = [one for one in self._network.connection_steps() if one.error is not None]
        return "; ".join(_line(one) for one in steps)

    # -- messages -----------------------------------------------------------------------------------

    def _steps(self, nodes: Sequence[Node]) -> list[ConnectionStep]:
        ids = {node.id for node in nodes}
        return [one for one in self._network.connection_steps() if one.node.id in ids]

    def _unreachable(self, steps: Sequence[ConnectionStep], waited_ms: float | None) -> KafkaSinkError:
        after = "" if waited_ms is None else f" within {waited_ms / 1000:.1f} s"
        which = "the brokers' own addresses (advertised.listeners)" if self._advertised else "any broker"
        lines = "; ".join(_line(one) for one in steps)
        text = f"could not connect to {which}{after}: {lines}"
        if all(isinstance(one.error, AuthenticationError) for one in steps):
            return AuthenticationError(text)
        return BrokersUnreachableError(text)


def _line(step: ConnectionStep) -> str:
    where = f"{step.node.host}:{step.node.port}"
    error = step.error
    if error is None:
        what = f"{step.step} did not end" if step.step else "not tried"
        return f"{where}: {what}; no answer: check the address, and firewalls between"
    if isinstance(error, KafkaSinkError):
        return f"{where}: {_without_id(str(error), step.node).removeprefix(f'{where} ')}"
    remedy = _REMEDIES.get(getattr(error, "errno", None) or 0, "")
    reason = getattr(error, "strerror", None) or _without_id(str(error), step.node)
    step_text = f"{step.step} failed: " if step.step else ""
    return f"{where}: {step_text}{reason}" + (f" ({remedy})" if remedy else "")


def _without_id(text: str, node: Node) -> str:
    """Ids below zero are this client's own numbers of bootstrap addresses."""
    return text.replace(f" (id {node.id})", "") if node.id < 0 else text
