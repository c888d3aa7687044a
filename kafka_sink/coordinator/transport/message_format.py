"""Messages of several tasks in one frame: a payload of lines.

A line is a JSON object, preceded by the numbers of the tasks that it concerns:

    {"id":1,...}       on a connection that belongs to one task; on a relay's, from the relay, or to it
    3{"id":1,...}      from task 3, or to it
    1,3{"kind":...}    to tasks 1 and 3
    3                  from a relay: task 3 has left; to a relay: task 3 must leave

JSON contains no raw line breaks, so that a relay passes messages of most kinds on as they are. Those of some
kinds it adds up (see group).
"""

from __future__ import annotations

import base64
import binascii
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from kafka_sink.counts import Number
from kafka_sink.errors import ProtocolError
from kafka_sink.options.values import TOPIC_MAX_LENGTH

_MAX_TASK = 1 << 31


@dataclass(frozen=True, slots=True)
class Line:
    """``tasks`` is empty where a task or a relay speaks for itself. ``message``: JSON, empty if the tasks
    leave."""

    tasks: tuple[int, ...]
    message: bytes


def split_lines(payload: bytes) -> Iterator[Line]:
    """The lines of a payload. Raises ProtocolError."""
    for line in payload.split(b"\n"):
        brace = line.find(b"{")
        if brace == 0:
            yield Line((), line)
            continue
        prefix, message = (line, b"") if brace < 0 else (line[:brace], line[brace:])
        yield Line(_tasks(prefix), message)


def _tasks(prefix: bytes) -> tuple[int, ...]:
    numbers = prefix.split(b",")
    if not all(one.isdigit() and len(one) < 11 for one in numbers):
        raise ProtocolError("a line names no tasks and contains no JSON object")
    tasks = tuple(map(int, numbers))
    if max(tasks) >= _MAX_TASK:
        raise ProtocolError("a task's number is too large")
    return tasks


def prefixed(tasks: Iterable[int], message: bytes) -> bytes:
    """A line for these tasks."""
    return b",".join(b"%d" % task for task in tasks) + message


def in_frames(lines: Sequence[bytes], max_bytes: int) -> Iterator[bytes]:
    """Payloads of at most ``max_bytes``. A line that is longer gets one of its own."""
    held: list[bytes] = []
    size = 0
    for line in lines:
        if held and size + len(line) >= max_bytes:
            yield b"\n".join(held)
            held, size = [], 0
        held.append(line)
        size += len(line) + 1
    if held:
        yield b"\n".join(held)


# Compression of large bodies: JSON within JSON, in zlib's format and base64.
#
# Metadata of 2,000 topics shrinks to a sixth, and is compressed once for all tasks that receive it. base64
# keeps a frame's lines free of line breaks.


_KEY = "packed"
# Smaller bodies stay as they are: they fit into one packet either way.
_MIN_BYTES = 2048
# The metadata of 5,000 topics with the longest names, 50,000 partitions and 5,000 brokers takes 5 MiB.
_MAX_BYTES = 8 * 1024 * 1024
_LEVEL = 1


def packed(body: bytes) -> bytes:
    """The JSON of a body, compressed if it is large."""
    if len(body) < _MIN_BYTES:
        return body
    return b'{"%s":"%s"}' % (_KEY.encode(), base64.b64encode(zlib.compress(body, _LEVEL)))


def unpacked(body: Mapping[str, Any]) -> dict[str, Any]:
    """The body that was packed, with the keys that stand beside the packed part. Raises ProtocolError."""
    if _KEY not in body:
        return dict(body)
    try:
        decompress = zlib.decompressobj()
        text = decompress.decompress(base64.b64decode(body[_KEY], validate=True), _MAX_BYTES)
        # What is cut off is not parsed, which would take ten times the memory.
        inner = json.loads(text) if decompress.eof else None
    except (TypeError, ValueError, binascii.Error, zlib.error, RecursionError):
        raise ProtocolError("a message contains an invalid packed body") from None
    if not isinstance(inner, dict):
        raise ProtocolError("a packed body is too large, or is not an object")
    return {**inner, **{name: value for name, value in body.items() if name != _KEY}}


# Checks of the fields of a message: a peer that knows the secret may still run another version.
#
# Each function returns the field, or raises ValueError; ``decoding`` makes a ProtocolError of it.


MAX_TEXT = 300
_MAX_SUM = 1 << 53
_Amount = TypeVar("_Amount", int, float)


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


def counts_of(values: list[Any]) -> list[int]:
    """Integers of at least 0. Reports have hundreds, so they are not checked one by one."""
    if values and (set(map(type, values)) != {int} or min(values) < 0 or max(values) >= 1 << 63):
        raise ValueError("not counts")
    return values


def amount(value: Any) -> Number:
    """A number of at least 0, such as an age in milliseconds."""
    # The bounds exclude infinities and NaN.
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1 << 63:
        raise ValueError("not an amount")
    return value


def capped(value: _Amount) -> _Amount:
    """What ``count`` and ``ms`` accept, of a sum of such values."""
    return min(value, _MAX_SUM)


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
    return text(value, TOPIC_MAX_LENGTH)


def list_of(value: Any, max_length: int) -> list[Any]:
    """A list of at most so many values, which are not checked."""
    if not isinstance(value, list) or len(value) > max_length:
        raise ValueError("not a list, or too long")
    return value


def list_in(body: Mapping[str, Any], key: str, max_length: int) -> list[Any]:
    """The list under a key; an empty one if it is missing."""
    if key not in body:
        return []
    try:
        return list_of(body[key], max_length)
    except ValueError as error:
        raise ValueError(f"{key} is {error}") from None


def cut(value: str) -> str:
    """A text that ``text`` accepts."""
    return value if len(value) <= MAX_TEXT else value[: MAX_TEXT - 3] + "..."
