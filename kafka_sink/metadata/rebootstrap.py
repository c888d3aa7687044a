"""When the brokers known are given up for the bootstrap addresses (KIP-899, KIP-1102)."""

from __future__ import annotations

import math

# What a new start is given to connect and be answered: with a shorter trigger it would be given up for the
# next one over and over, with 0 before anything was sent.
_MIN_APART_MS = 1000.0


class RebootstrapTimer:
    """Times how long metadata has been wanted without an answer. Times are monotonic milliseconds.

    ``trigger_ms`` is metadata.recovery.rebootstrap.trigger.ms; ``rebootstrap`` is whether
    metadata.recovery.strategy says so. Brokers that refuse connections need no timer: the network goes on to
    the bootstrap addresses at once. This is for brokers that take requests and never answer.
    """

    def __init__(self, *, rebootstrap: bool, trigger_ms: float) -> None:
        self._rebootstrap = rebootstrap
        self._trigger_ms = trigger_ms
        self._since_ms: float | None = None
        self._not_before_ms = -math.inf

    def wanted(self, now_ms: float) -> bool:
        """A request is due or under way; True when it is time to start over, which starts the timer anew."""
        if self._since_ms is None:
            self._since_ms = now_ms
        early = now_ms - self._since_ms < self._trigger_ms or now_ms < self._not_before_ms
        if not self._rebootstrap or early:
            return False
        self._since_ms = now_ms
        self._not_before_ms = now_ms + _MIN_APART_MS
        return True

    def satisfied(self) -> None:
        """An answer came, or nothing is wanted any more."""
        self._since_ms = None
