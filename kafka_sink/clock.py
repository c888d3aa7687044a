"""Two clocks, chance, and growing waits. Code that decides by time takes a ``Clock``: tests can set it."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Final

# Milliseconds since any fixed moment, never going back.
Clock = Callable[[], float]

# Of the system, which has no state. Python's own generator is the user's, who may have seeded it, and one of
# ours would give all forks the same numbers.
RANDOM: Final = random.SystemRandom()


def monotonic_ms() -> float:
    """For waits, deadlines and ages within one process."""
    return time.monotonic() * 1000


def wall_ms() -> float:
    """Milliseconds since 1970, to compare with other processes' or Kafka's times. May be set back."""
    return time.time() * 1000


# -- growing waits between attempts -------------------------------------------------------------------------


_JITTER = 0.2
# A base of 1 ms is 12 days by then; more doublings would only make numbers too large for a float.
_MAX_DOUBLINGS = 30


class ExponentialBackoff:
    """``base_ms`` doubled after each attempt up to ``max_ms``, with 20 % of jitter either way (KIP-580).

    A ``max_ms`` below ``base_ms`` counts as ``base_ms``. ``random`` returns values in [0, 1).
    """

    def __init__(self, base_ms: float, max_ms: float, random: Callable[[], float]) -> None:
        self._base_ms = base_ms
        self._max_ms = max(max_ms, base_ms)
        self._random = random

    def delay_ms(self, attempts: int) -> float:
        """The wait after ``attempts`` attempts; the first is about ``base_ms``."""
        doublings = min(max(attempts - 1, 0), _MAX_DOUBLINGS)
        delay_ms = min(self._base_ms * (1 << doublings), self._max_ms)
        return delay_ms * (1 - _JITTER + 2 * _JITTER * self._random())
