"""The rack of a producer (KIP-1123)."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kafka_sink.model import Node


class ClientRack:
    """The rack of this process. ``name`` is kafka.client.rack, which is empty if there is no rack. ``nodes``
    returns the brokers by id."""

    def __init__(self, name: str, nodes: Callable[[], Mapping[int, Node]]) -> None:
        self.name = name
        self._nodes = nodes

    def brokers(self) -> frozenset[int]:
        """The ids of the brokers in this rack."""
        if not self.name:
            return frozenset()
        return frozenset(node.id for node in self._nodes().values() if node.rack == self.name)

    def is_other(self, node_id: int) -> bool:
        """Whether a broker is known to be in another rack."""
        node = self._nodes().get(node_id)
        return node is not None and node.rack is not None and node.rack != self.name
