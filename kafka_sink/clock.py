"""The two clocks. Code that decides by time takes a ``Clock`` as an argument, so that tests can set it."""

from __future__ import annotations

import time
from collections.abc import Callable

# Milliseconds since any fixed moment, never going back.
Clock = Callable[[], float]


def monotonic_ms() -> float:
    """For waits, deadlines and ages within one process."""
    return time.monotonic() * 1000


def wall_ms() -> float:
    """Milliseconds since 1970, to compare with other processes' or Kafka's times. May be set back."""
    return time.time() * 1000
