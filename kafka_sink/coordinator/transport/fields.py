"""Checks of the fields of a message: a peer that knows the secret may still run another version.

Each function returns the field, or raises ValueError; ``decoding`` makes a ProtocolError of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from kafka_sink.counts import Number
from kafka_sink.errors import ProtocolError
from kafka_sink.options.values import TOPIC_MAX_LENGTH

MAX_TEXT = 300


@contextmanager
def decoding(what: str) -> Iterator[None]:
    """Within the block, a field that is missing or invalid raises ProtocolError: "invalid <what>: ..."."""
    try:
        yield
    except (KeyError, TypeError, ValueError) as error:
        raise ProtocolError(f"invalid {what}: {cut(str(error))}") from None


def whole(value: Any) -> int:
    """A 64-bit integer."""
    if not isinstance(value, int) or isinstance(value, bool) or not -(1 << 63) <= value < 1 << 63:
        raise ValueError("not an integer")
    return value


def int32(value: Any) -> int:
    """An integer as Kafka's protocol has them for leaders and epochs."""
    if not -(2**31) <= whole(value) < 2**31:
        raise ValueError("a number exceeds 32 bits")
    return int(value)


def count(value: Any) -> int:
    """An integer of at least 0."""
    if whole(value) < 0:
        raise ValueError("not a count")
    return int(value)


def amount(value: Any) -> Number:
    """A number of at least 0, such as an age in milliseconds."""
    # The bounds exclude infinities and NaN.
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1 << 63:
        raise ValueError("not an amount")
    return value


def ms(value: Any) -> float:
    """An age or a delay in milliseconds."""
    return float(amount(value))


def text(value: Any, max_length: int = MAX_TEXT) -> str:
    """A string of at most so many characters."""
    if not isinstance(value, str) or len(value) > max_length:
        raise ValueError("not a text, or too long")
    return value


def name(value: Any, max_length: int = 200) -> str:
    """A text that is not empty, such as the name of a write."""
    if not text(value, max_length):
        raise ValueError("a name is empty")
    return str(value)


def topic(value: Any) -> str:
    """The name of a topic."""
    return text(value, TOPIC_MAX_LENGTH)


def list_of(value: Any, max_length: int) -> list[Any]:
    """A list of at most so many values, which are not checked."""
    if not isinstance(value, list) or len(value) > max_length:
        raise ValueError("not a list, or too long")
    return value


def list_in(body: Mapping[str, Any], key: str, max_length: int) -> list[Any]:
    """The list under a key; an empty one if it is missing."""
    try:
        return list_of(body.get(key, []), max_length)
    except ValueError as error:
        raise ValueError(f"{key} is {error}") from None


def cut(value: str) -> str:
    """A text that ``text`` accepts."""
    return value if len(value) <= MAX_TEXT else value[: MAX_TEXT - 3] + "..."
