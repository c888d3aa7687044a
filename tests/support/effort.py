"""How long tests that search may search: more in a target of their own than in every run."""

from __future__ import annotations

import os

# How many times as many examples as a usual run tries. ``make fuzz`` sets it.
EFFORT = max(1, int(os.environ.get("KAFKA_CHUNKED_TEST_EFFORT", "1")))


def tries(usual: int) -> int:
    """How many examples to try, where a usual run tries ``usual``."""
    return usual * EFFORT
