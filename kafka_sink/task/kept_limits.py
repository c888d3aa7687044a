"""Keeps the batch sizes that brokers refused for the next producers of the Spark application."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping

from kafka_sink import spark_application

# How long a limit that an earlier producer learnt is used. An administrator may have raised it since.
_BELIEVED_S = 3600.0


class KeptLimits:
    """The ``LimitStore`` of the brokers with these bootstrap addresses, in a marker of the application."""

    def __init__(self, brokers: object) -> None:
        self._key = f"batch size limits of {brokers!r}"

    def read(self) -> dict[str, int]:
        """The limits in bytes by topic; empty if none were written lately or the marker is unreadable."""
        kept: object = None
        with contextlib.suppress(ValueError):
            kept = json.loads(spark_application.noted_within(self._key, _BELIEVED_S) or "null")
        if not isinstance(kept, dict):
            return {}
        return {topic: limit for topic, limit in kept.items() if type(limit) is int and limit > 0}

    def write(self, limits: Mapping[str, int]) -> None:
        spark_application.note(self._key, json.dumps(limits))
