"""Messages of several tasks in one frame: a payload of lines.

A line is a JSON object, preceded by the numbers of the tasks that it concerns:

    {"id":1,...}       on a connection that belongs to one task
    3{"id":1,...}      from task 3, or to it
    1,3{"kind":...}    to tasks 1 and 3
    3                  from a relay: task 3 has left; to a relay: task 3 must leave

JSON contains no raw line breaks, so that a relay passes messages on without decoding them. It therefore knows
no kind of message.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from kafka_sink.errors import ProtocolError

_MAX_TASK = 1 << 31


@dataclass(frozen=True, slots=True)
class Line:
    """``tasks`` is empty on a connection of one task. ``message``: JSON, empty if the tasks leave."""

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
