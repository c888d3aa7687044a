"""A request of rows, as a JSON body. Decoding checks every field."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from kafka_sink.coordinator.transport import message_format as fields
from kafka_sink.coordinator.transport.message_format import count, decoding

KIND = "rates"
_DIMENSIONS = ("rows", "bytes")


class Ask(NamedTuple):
    """What a group has ready to send: a task by itself, or so many behind a relay."""

    rows: int
    bytes: int
    tasks: int = 1


class RateRequest(NamedTuple):
    """``limits``: by dimension, in a second. Rows of 0: none wait any more."""

    job: str
    limits: Mapping[str, int]
    ask: Ask

    @property
    def key(self) -> str:
        """Writes of one query may have different limits, and each its own bucket."""
        return f"{self.job} {sorted(self.limits.items())}"


def encode_request(request: RateRequest) -> dict[str, Any]:
    """A relay's request as a JSON body."""
    return {"job": request.job, "limits": dict(request.limits), **request.ask._asdict()}


def decode_request(body: Mapping[str, Any]) -> RateRequest:
    """A request from its JSON body. Raises ProtocolError."""
    with decoding("request of rows"):
        tasks = count(body.get("tasks", 1))
        rows = count(body["rows"]) if not tasks else _positive(body["rows"])
        return RateRequest(
            fields.name(body["job"]), _limits(body["limits"]), Ask(rows, count(body["bytes"]), tasks)
        )


def _limits(value: Any) -> dict[str, int]:
    if not isinstance(value, dict) or not value or not value.keys() <= set(_DIMENSIONS):
        raise ValueError("a job's limits are missing or unknown")
    return {name: _positive(limit) for name, limit in value.items()}


def _positive(value: Any) -> int:
    if count(value) < 1:
        raise ValueError("not a positive number")
    return int(value)
