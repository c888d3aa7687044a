"""Rows that wait for muted brokers and partitions, added up as tasks report them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from kafka_sink.coordinator.figures.messages import MAX_PARTITIONS, MuteFigures

# A cluster and a target.
_Key = tuple[str, str]


@dataclass(slots=True)
class _Waiting:
    """``first``: the attempt whose rows reach delivery.timeout.ms first, at ``deadline_ms``."""

    rows: dict[object, int] = field(default_factory=dict)
    total: int = 0
    partitions: int = 0
    named: dict[str, None] = field(default_factory=dict)
    first: object = None
    deadline_ms: float = math.inf


class WaitingRows:
    """The cost of a report is that of its own entries, and a look costs nothing: tens of thousands of tasks
    may wait. After a task has left, which one is first is known again once each has reported anew.
    """

    def __init__(self) -> None:
        self._by_target: dict[_Key, _Waiting] = {}
        self._targets: dict[object, tuple[_Key, ...]] = {}

    def report(self, cluster: str, attempt: object, mutes: Iterable[MuteFigures], now_ms: float) -> None:
        """What an attempt says, in place of what it said before."""
        self.forget(attempt)
        # Each target once, whatever the report says: ``forget`` takes back what is added here.
        held = {one.target: one for one in mutes if one.rows}
        if held:
            self._targets[attempt] = tuple((cluster, target) for target in held)
        for one in held.values():
            waiting = self._by_target.setdefault((cluster, one.target), _Waiting())
            waiting.rows[attempt] = one.rows
            waiting.total += one.rows
            waiting.partitions = max(waiting.partitions, one.partitions)
            for name in one.named:
                if len(waiting.named) < MAX_PARTITIONS:
                    waiting.named[name] = None
            if waiting.first is None or now_ms + one.left_ms < waiting.deadline_ms:
                waiting.first, waiting.deadline_ms = attempt, now_ms + one.left_ms

    def forget(self, attempt: object) -> None:
        """It has ended."""
        for key in self._targets.pop(attempt, ()):
            waiting = self._by_target[key]
            waiting.total -= waiting.rows.pop(attempt)
            if not waiting.rows:
                del self._by_target[key]
            elif waiting.first == attempt:
                waiting.first, waiting.deadline_ms = None, math.inf

    def shown(self, cluster: str, target: str, now_ms: float) -> dict[str, Any]:
        """``left``: seconds until the first rows reach delivery.timeout.ms; None where that is not known."""
        waiting = self._by_target.get((cluster, target), _Waiting())
        is_known = waiting.deadline_ms < math.inf
        return {
            "rows": waiting.total,
            "partitions": waiting.partitions,
            "named": list(waiting.named),
            "left": max(0.0, waiting.deadline_ms - now_ms) / 1000 if is_known else None,
        }
