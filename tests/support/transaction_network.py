"""A network for transaction clients, of brokers that respond when it is polled, in a time of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import SimpleNamespace
from typing import Any

from kafka_sink.model import Node
from kafka_sink.network import apis
from kafka_sink.options import parse
from kafka_sink.transactions.client import TransactionClient

NODES = {number: Node(number, "host", number, None) for number in (1, 2, 3)}
_OPTIONS = parse({"kafka.bootstrap.servers": "host:1"}).options


class Connection:
    """Speaks all that this sink does."""

    def __init__(self, node: Node, protocol: int) -> None:
        self.node = node
        self.protocol = SimpleNamespace(features={"transaction.version": protocol})
        self.newest: Mapping[int, int] = dict.fromkeys(apis.APIS, 4)

    def ready_delay_ms(self, _now_ms: float) -> float:
        return 50.0

    def newest_version(self, api: int) -> int:
        return self.newest.get(api, -1)

    def api_version(self, api: int, versions: tuple[int, int] | None = None) -> int:
        return (versions or apis.APIS[api].versions)[1]


class Network:
    """The next poll reports ``happened``."""

    def __init__(self, protocol: int = 2) -> None:
        self.now_ms = 0.0
        self.connections = {number: Connection(node, protocol) for number, node in NODES.items()}
        self.on_disconnected: Callable[..., object] = lambda *_: None
        self.happened: list[Callable[[], object]] = []

    def client(self) -> TransactionClient:
        """A client on this network, with its clock."""
        network: Any = self
        return TransactionClient(_OPTIONS, network, lambda: self.now_ms)

    def is_ready(self, _connection: Connection, _now_ms: float) -> bool:
        return True

    def describe_brokers(self) -> str:
        return "scripted"

    def set_addresses(self, nodes: Iterable[Node]) -> None:
        known = {node.id for node in nodes}
        self.connections = {number: one for number, one in self.connections.items() if number in known}

    def close(self) -> None:
        self.happened = []

    def respond(self, request: Any, response: Any) -> None:
        self.happened.append(lambda: request.on_response(response, self.now_ms))

    def lose(self, node: int, request: Any) -> None:
        lost = TimeoutError("no response")
        self.happened.append(lambda: request.on_failure(lost, True, self.now_ms))
        self.happened.append(lambda: self.on_disconnected(node, lost, True, self.now_ms))

    def poll(self, wait_ms: float, _now_ms: float) -> int:
        happened, self.happened = self.happened, []
        if not happened:
            self.now_ms += max(wait_ms, 1.0)
        for one in happened:
            one()
        return len(happened)
