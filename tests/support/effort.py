"""The number of examples that the searching tests try: fewer in `make quick`, more in `make fuzz`."""

from __future__ import annotations

import os

# `make test` tries 1 times the usual number of examples. Other targets set the variable.
EFFORT = float(os.environ.get("KAFKA_CHUNKED_TEST_EFFORT", "1"))


def tries(usual: int) -> int:
    """The number of examples to try if `make test` tries ``usual``."""
    return max(1, int(usual * EFFORT))
