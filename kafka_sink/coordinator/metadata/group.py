"""Tasks' checks that the coordinator responds: their relay answers all, and asks once. No I/O."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from kafka_sink.coordinator.metadata.messages import KIND, topics_in
from kafka_sink.coordinator.transport.group import Group, ToTask

# A relay that has not heard the coordinator for so long checks it, if tasks ask: shorter than their own
# intervals.
_QUIET_MS = 5_000.0
_CHECK: Mapping[str, Any] = {"use": [], "stale": []}
_MAX_TOPICS_OF_A_TASK = 50_000


class MetadataGroup(Group):
    """What tasks ask and report goes to the coordinator under their own numbers: each gets its own answer.

    That a topic is in use is news once for all tasks. Each says so about once a minute, of a topic that it
    has named before; half as long after another one has, the relay only answers.
    """

    kind = KIND

    def __init__(self) -> None:
        super().__init__()
        self._is_asked = False
        # By task, the topics that the coordinator knows of it, and when it has said so last.
        self._named: dict[int, tuple[set[str], float]] = {}
        # When the coordinator was told last that a topic is in use.
        self._told_ms: dict[str, float] = {}

    def on_task(self, task: int, request: int, body: Mapping[str, Any], now_ms: float) -> bool:
        asked, used = topics_in(body, "ask"), topics_in(body, "use")
        named, said_ms = self._named.get(task, (set(), now_ms))
        is_news = any(value for key, value in body.items() if key != "use") or any(
            one not in named or self._told_ms[one] < (said_ms + now_ms) / 2 for one in used
        )
        if len(named) + len(asked) + len(used) > _MAX_TOPICS_OF_A_TASK:
            # As the coordinator does.
            named = set()
        self._named[task] = named, now_ms
        if is_news:
            named.update(asked, used)
            self._told_ms.update(dict.fromkeys([*asked, *used], now_ms))
            return False
        self._is_asked |= not used
        self.outgoing.append(ToTask(task, request, {}))
        return True

    def on_task_left(self, task: int, now_ms: float) -> None:
        self._named.pop(task, None)
        if not self._named:
            self._told_ms.clear()

    def due_ms(self, now_ms: float) -> float:
        return self.heard_ms + _QUIET_MS if self._is_asked else math.inf

    def next_message(self, now_ms: float) -> Mapping[str, Any] | None:
        if now_ms < self.due_ms(now_ms):
            return None
        self._is_asked = False
        return _CHECK
