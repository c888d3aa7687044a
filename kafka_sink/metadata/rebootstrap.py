"""When to forget the known brokers and start again from the bootstrap addresses (KIP-899, KIP-1102)."""

from __future__ import annotations

import math

# The least time between two rebootstraps. With a shorter trigger each would be given up before it could
# connect and receive a response; with a trigger of 0, before it sent anything.
_MIN_APART_MS = 1000.0


class RebootstrapTimer:
    """Measures how long metadata has been wanted without a response. Times are monotonic milliseconds.

    ``trigger_ms`` is metadata.recovery.rebootstrap.trigger.ms; ``rebootstrap`` is whether
    metadata.recovery.strategy says so. Brokers that refuse connections need no timer: the network client
    tries the bootstrap addresses at once. The timer is for brokers that take requests and never respond.
    """

    def __init__(self, *, rebootstrap: bool, trigger_ms: float) -> None:
        self._rebootstrap = rebootstrap
        self._trigger_ms = trigger_ms
        self._since_ms: float | None = None
        self._not_before_ms = -math.inf

    def wanted(self, now_ms: float) -> bool:
        """A request is due or in flight; True when it is time to rebootstrap, which restarts the timer."""
        if self._since_ms is None:
            self._since_ms = now_ms
        early = now_ms - self._since_ms < self._trigger_ms or now_ms < self._not_before_ms
        if not self._rebootstrap or early:
            return False
        self._since_ms = now_ms
        self._not_before_ms = now_ms + _MIN_APART_MS
        return True

    def satisfied(self) -> None:
        """A response came, or nothing is wanted any more."""
        self._since_ms = None
