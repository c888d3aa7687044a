"""A row that can never be written."""

from __future__ import annotations

from dataclasses import dataclass

Header = tuple[str, bytes | None]


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A row that can never be written.

    ``topic`` is None for a row with a null topic, ``partition`` -1 where none was chosen, ``timestamp_ms`` is
    milliseconds since the epoch. ``reason`` says what is wrong with this row, ``error`` is the exception's
    class.
    """

    topic: str | None
    partition: int
    key: bytes | None
    value: bytes | None
    headers: tuple[Header, ...]
    timestamp_ms: int
    reason: str
    error: str


@dataclass(frozen=True, slots=True)
class RefusedLetter:
    """A letter that the dead letter topic refused as too large, with its context in ``headers``."""

    key: bytes | None
    value: bytes | None
    headers: tuple[Header, ...]
