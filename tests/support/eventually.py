"""Waits for what another thread does."""

from __future__ import annotations

import time
from collections.abc import Callable


def eventually(condition: Callable[[], object], within_s: float = 20.0) -> None:
    """Fails where it takes too long."""
    until = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < until, "it did not happen in time"
        time.sleep(0.005)
