"""The rack, or zone, that a producer runs in, and which brokers are in it (KIP-1123)."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping

from kafka_sink.model import Node

_log = logging.getLogger(__name__)
# As Kafka's EnvVarConfigProvider is written.
_VARIABLE = re.compile(r"\$\{env:([^}]+)\}")


class ClientRack:
    """``rack`` is kafka.client.rack, ``nodes`` returns the brokers by id. ``name`` is "" without a rack."""

    def __init__(
        self, rack: str, nodes: Callable[[], Mapping[int, Node]], environ: Mapping[str, str]
    ) -> None:
        self._nodes = nodes
        found = _VARIABLE.fullmatch(rack)
        self.name = rack if found is None else environ.get(found[1], "")
        if found is not None and not self.name:
            _log.warning(
                "kafka.client.rack=%s: this executor has no variable %s, so it prefers no rack",
                rack,
                found[1],
            )

    def brokers(self) -> frozenset[int]:
        """The brokers in this rack."""
        if not self.name:
            return frozenset()
        return frozenset(node.id for node in self._nodes().values() if node.rack == self.name)

    def is_other(self, node_id: int) -> bool:
        """Whether the broker is known to be in another rack."""
        node = self._nodes().get(node_id)
        return node is not None and node.rack is not None and node.rack != self.name
