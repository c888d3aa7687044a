"""Python imports this at its start if its folder is on PYTHONPATH; see prohibitions.py."""

from __future__ import annotations

import os

import prohibitions

# Python imports one such module only, and this one comes first.
if os.environ.get("KAFKA_SINK_TEST_STRATEGY"):
    import forced

    forced.install()
prohibitions.obey(os.environ)
