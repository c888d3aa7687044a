"""Python imports this at its start if its folder is on PYTHONPATH; see forced.py."""

from __future__ import annotations

import os

if os.environ.get("KAFKA_SINK_TEST_STRATEGY"):
    import forced

    forced.install()
