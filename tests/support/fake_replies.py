"""The replies that a test scripts for the fake broker. They are immutable, so that a script can be reused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Reply:
    """The right response, with the changes given here.

    ``error``: the code of every partition (Produce), topic (Metadata) or of the response (InitProducerId,
    ApiVersions); ``partition_errors`` are of single partitions, by (topic, partition).
    ``append``: whether batches with an error are appended in spite of it (NOT_ENOUGH_REPLICAS_AFTER_APPEND).
    ``delay_ms``: real time before the response goes out. ``throttle_ms``: throttle_time_ms in the response.
    ``leader``: (node id, epoch) as current_leader of partitions with an error, with its address (KIP-951).
    ``message``: error_message of partitions with an error.
    ``mangle``: maps the whole frame, length included, to the bytes that are sent instead; b"" is silence.
    ``tell_offset``: send an error together with the offset of the appended batch, like a leader that was
    deposed while it waited for its replicas. ``log_start_offset``: sent with errors; -1 is unknown.
    ``producer_epoch``: the epoch in InitProducerId's response.
    ``disconnect``: close the connection after that. ``silent``: handle the request, send no response, keep
    the connection.
    """

    error: int = 0
    partition_errors: Mapping[tuple[str, int], int] = field(default_factory=dict)
    append: bool = False
    delay_ms: float = 0.0
    throttle_ms: int = 0
    leader: tuple[int, int] | None = None
    message: str | None = None
    mangle: Callable[[bytes], bytes] | None = None
    tell_offset: bool = False
    log_start_offset: int = -1
    producer_epoch: int = 0
    disconnect: bool = False
    silent: bool = False


OK = Reply()
# Handled, and the client never learns of it.
SWALLOWED = Reply(silent=True, disconnect=True)


@dataclass(frozen=True)
class Refuse(Reply):
    """Closes the connection without handling the request: nothing is appended."""


def error(code: int, **changes: object) -> Reply:
    return Reply(error=code, **changes)  # type: ignore[arg-type]  # checked by the dataclass


def cut_after(count: int) -> Reply:
    """Handles the request, sends the response's first ``count`` bytes and closes."""
    return Reply(mangle=lambda frame: frame[:count], disconnect=True)


def garbage(data: bytes) -> Reply:
    """Handles the request and responds with these bytes."""
    return Reply(mangle=lambda frame: data)


def wrong_correlation_id(delta: int = 1) -> Reply:
    """The right response to another question."""

    def mangle(frame: bytes) -> bytes:
        correlation = int.from_bytes(frame[4:8], "big") + delta
        return frame[:4] + (correlation & 0xFFFFFFFF).to_bytes(4, "big") + frame[8:]

    return Reply(mangle=mangle)


def claimed_length(length: int) -> Reply:
    """The right response under a length that is not its own."""
    return Reply(mangle=lambda frame: (length & 0xFFFFFFFF).to_bytes(4, "big") + frame[4:])


def trailing(data: bytes) -> Reply:
    """The right response with bytes after its end, inside of the frame."""
    return Reply(mangle=lambda frame: (len(frame) - 4 + len(data)).to_bytes(4, "big") + frame[4:] + data)
