"""Keeps the batch sizes that brokers refused for the next producers of the Spark application."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from msgspec import Meta

from kafka_sink import spark_application

# How long a limit that an earlier producer learnt is used. An administrator may have raised it since.
_BELIEVED_S = 3600.0
_Limits = dict[str, Annotated[int, Meta(gt=0)]]


class KeptLimits:
    """The ``LimitStore`` of the brokers with these bootstrap addresses, in a marker of the application."""

    def __init__(self, brokers: object) -> None:
        self._key = f"batch size limits of {brokers!r}"

    def read(self) -> dict[str, int]:
        """The limits in bytes by topic; empty if none were written lately or the marker is unreadable."""
        return spark_application.noted_within(self._key, _BELIEVED_S, _Limits) or {}

    def write(self, limits: Mapping[str, int]) -> None:
        spark_application.note(self._key, limits)
