"""Mutes and unmutes on their way to the tasks. No I/O."""

from __future__ import annotations

import math
from collections.abc import Callable

from kafka_sink.breaker.states import Target
from kafka_sink.coordinator.breaker.messages import BreakerUpdate, encode_update
from kafka_sink.coordinator.breaker.tasks import BreakerTasks
from kafka_sink.coordinator.transport.handlers import Push, SharedBody, with_facts
from kafka_sink.timing_bounds import GATHER_MUTES_MS

# After a mute one task sends again, a step later two more, then four, and so on.
_RAMP_STEP_MS = 100.0


class MutePushes:
    """The changes that have not been sent. Those that follow one another closely share a message.

    ``random`` returns a number in [0, 1). No unmute takes effect later than ``max_delay_ms``.
    """

    def __init__(self, max_delay_ms: float, random: Callable[[], float]) -> None:
        self._max_delay_ms = max_delay_ms
        self._random = random
        self._added: dict[Target, str] = {}
        self._removed: set[Target] = set()
        self._pushed_ms = -math.inf

    def add(self, target: Target, reason: str) -> None:
        """A target is muted."""
        self._added[target] = reason
        self._removed.discard(target)

    def remove(self, target: Target) -> None:
        """A target is muted no more."""
        self._removed.add(target)
        self._added.pop(target, None)

    @property
    def due_ms(self) -> float:
        """When the next push may go; infinite if nothing has changed."""
        return self._pushed_ms + GATHER_MUTES_MS if self._added or self._removed else math.inf

    def take(self, tasks: BreakerTasks, now_ms: float) -> list[Push]:
        """What to send now.

        New mutes go to all tasks at once. Unmutes take effect in one task after another: otherwise
        hundreds that wait would all send to a broker that has just come back.
        """
        if now_ms < self.due_ms:
            return []
        added, removed = self._added, self._removed
        self._added, self._removed, self._pushed_ms = {}, set(), now_ms
        update = SharedBody(
            encode_update(BreakerUpdate(added=added, removed=tuple(sorted(removed, key=str)))), 0.0
        )
        if not removed:
            return [Push(peer, update) for peer in tasks]
        # Tasks that hold rows for these targets go first. For the others the moment does not matter yet.
        order = sorted(tasks, key=lambda peer: (not tasks.holds_any(peer, removed), self._random()))
        # Hundreds of targets may end together: all tasks share their list, and each has a delay of its own.
        return [
            Push(peer, with_facts({"delay": self._delay_ms(turn)}, update)) for turn, peer in enumerate(order)
        ]

    def _delay_ms(self, turn: int) -> float:
        if turn == 0:
            return 0.0
        step = (turn + 1).bit_length() - 2 + self._random()
        return min(step * _RAMP_STEP_MS, self._max_delay_ms)
