"""Tasks' checks that the coordinator responds: their relay answers all, and asks once. No I/O."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from kafka_sink.coordinator.metadata.messages import KIND
from kafka_sink.coordinator.transport.group import Group, ToTask

# A relay that has not heard the coordinator for so long checks it, if tasks ask: shorter than their own
# intervals.
_QUIET_MS = 5_000.0
_CHECK: Mapping[str, Any] = {"use": [], "stale": []}


class MetadataGroup(Group):
    """What tasks ask and report goes to the coordinator under their own numbers: each gets its own answer."""

    kind = KIND

    def __init__(self) -> None:
        super().__init__()
        self._is_asked = False

    def on_task(self, task: int, request: int, body: Mapping[str, Any], now_ms: float) -> bool:
        if any(body.values()):
            return False
        self._is_asked = True
        self.outgoing.append(ToTask(task, request, {}))
        return True

    def due_ms(self, now_ms: float) -> float:
        return self.heard_ms + _QUIET_MS if self._is_asked else math.inf

    def next_message(self, now_ms: float) -> Mapping[str, Any] | None:
        if now_ms < self.due_ms(now_ms):
            return None
        self._is_asked = False
        return _CHECK
