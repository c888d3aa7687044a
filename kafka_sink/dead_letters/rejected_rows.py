"""Rows that can never be written, until their dead letters are written. They are stored in columns for speed.
``DeadLetters`` collects the rejected rows of one task, and stops a task that has too many of them."""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from dataclasses import dataclass, replace

import pyarrow as pa

from kafka_sink.errors import TooManyDeadLettersError
from kafka_sink.printable import one_line
from kafka_sink.records.arrays import Int64s

# The memory of a row in addition to its content: lengths, timestamp, partition.
_ROW_BYTES = 32


@dataclass(frozen=True, slots=True)
class OwnHeaders:
    """The headers that rows had. Row i had ``counts[i]``, which take ``sizes[i]`` bytes in a dead letter.

    ``keys`` (binary, without nulls) and ``values`` (binary) are those of all rows in sequence. ``kept[i]`` of
    them belong to row i: all headers that it had, or none if they are too many for any dead letter.
    """

    counts: Int64s
    kept: Int64s
    sizes: Int64s
    keys: pa.Array
    values: pa.Array

    def slice(self, start: int, stop: int) -> OwnHeaders:
        first, last = int(self.kept[:start].sum()), int(self.kept[:stop].sum())
        return OwnHeaders(
            self.counts[start:stop],
            self.kept[start:stop],
            self.sizes[start:stop],
            self.keys.slice(first, last - first),
            self.values.slice(first, last - first),
        )


@dataclass(frozen=True, slots=True)
class RejectedRows:
    """Rows with the same problem. Arrays have one entry for each row.

    ``key``, ``value`` and ``topic`` are binary, and null if a row has none. ``partition`` is -1 if none was
    chosen. ``timestamps_ms`` are milliseconds since the epoch, NO_TIMESTAMP for a row without one. ``sizes``
    are the approximate bytes of each row. ``reason`` is what is wrong; ``error`` is the exception's class.
    """

    key: pa.Array
    value: pa.Array
    headers: OwnHeaders
    topic: pa.Array
    partition: Int64s
    timestamps_ms: Int64s
    sizes: Int64s
    reason: str
    error: str

    @property
    def count(self) -> int:
        return len(self.value)

    @property
    def memory_bytes(self) -> int:
        return int(self.sizes.sum()) + self.count * _ROW_BYTES

    def topic_of(self, row: int) -> str | None:
        name = self.topic[row].as_py()
        return None if name is None else name.decode(errors="replace")

    def counts_by_topic(self) -> list[tuple[str, int]]:
        """The number of rows for each topic, "" for a null topic."""
        counted = self.topic.value_counts()
        names = [(name or b"").decode(errors="replace") for name in counted.field(0).to_pylist()]
        return list(zip(names, counted.field(1).to_pylist(), strict=True))

    def slice(self, start: int, stop: int) -> RejectedRows:
        return replace(
            self,
            key=self.key[start:stop],
            value=self.value[start:stop],
            headers=self.headers.slice(start, stop),
            topic=self.topic[start:stop],
            partition=self.partition[start:stop],
            timestamps_ms=self.timestamps_ms[start:stop],
            sizes=self.sizes[start:stop],
        )


# -- headers of a dead letter that describe it and the reason for it, as in Kafka Connect (KIP-298) ---------


PREFIX = b"__connect.errors."
# The prefix of headers that Kafka Connect does not have: the row's own timestamp, and what was cut off.
CUT_PREFIX = b"kafka-chunked.errors."
# Kafka Connect's name for the stage that failed.
STAGE = b"KAFKA_PRODUCE"
NAME = b"kafka-chunked"
# The bytes of a record's header in addition to its key and value: two lengths, with some reserve.
HEADER_OVERHEAD = 12
_log = logging.getLogger(__name__)
UNLIMITED = -1
# Rows may contain any number of topics, so this many pairs of topic and error are counted separately.
_MAX_REASONS = 1000
# This many rows of a task are logged one by one. The summary counts all of them.
_LOGGED = 3
_LONGEST_REASON = 1000
# If this many bytes of rejected rows wait, the sender leaves further ones in their batches, and so within
# buffer.memory. It takes at most this many out of a batch at a time.
MAX_WAITING_BYTES = 4 << 20


class DeadLetters:
    """The rejected rows of one task. Thread-safe: task and sender add rows, and the task takes them.

    ``topic`` is the dead letter topic. Without one, rows are counted and their content is dropped.
    ``max_rows`` is the maximum number of rows for the task. ``max_bytes`` is the maximum size of one dead
    letter. ``task`` identifies the task in its dead letters.
    """

    def __init__(self, topic: str | None, max_rows: int, max_bytes: int, task: str = "") -> None:
        self.topic, self.task = topic, task
        self.max_bytes = max_bytes
        self._max_rows = max_rows
        # Guards everything below. Without it, rows that both threads add at the same time could exceed the
        # maximum unnoticed, and counts could be lost.
        self._lock = threading.Lock()
        self._waiting: deque[RejectedRows] = deque()
        self._waiting_bytes = 0
        # The number of rows, by topic and by the error's class.
        self._reasons: Counter[tuple[str, str]] = Counter()
        self._rows = 0

    def require_room(self, rows: int, reason: str) -> None:
        """Raise TooManyDeadLettersError if this many more rows would exceed the maximum."""
        rows += self._rows
        if self._max_rows != UNLIMITED and rows > self._max_rows:
            raise TooManyDeadLettersError(
                f"{rows} rows of this task can never be written, more than errors.max = {self._max_rows}. "
                f"The last one: {one_line(reason, _LONGEST_REASON)}. Fix the rows, or raise errors.max"
            )

    def add(self, rejected: RejectedRows) -> None:
        """Add rows that can never be written. Raises TooManyDeadLettersError above the maximum."""
        with self._lock:
            self.require_room(rejected.count, rejected.reason)
            logged = max(0, min(_LOGGED - self._rows, rejected.count))
            self._rows += rejected.count
            for topic, count in rejected.counts_by_topic():
                is_kept = len(self._reasons) < _MAX_REASONS or (topic, rejected.error) in self._reasons
                self._reasons[topic if is_kept else "", rejected.error] += count
            if self.topic is not None:
                self._waiting.append(rejected)
                self._waiting_bytes += rejected.memory_bytes
        for row in range(logged):
            _log.warning(
                "a row for topic %s can never be written: %s; errors.tolerance=all skips it",
                one_line(str(rejected.topic_of(row))),
                one_line(rejected.reason, _LONGEST_REASON),
            )

    @property
    def has_room(self) -> bool:
        """Whether the sender may add rows, whose memory comes on top of buffer.memory. A hint."""
        return self._waiting_bytes < MAX_WAITING_BYTES

    @property
    def is_waiting(self) -> bool:
        """Whether ``take`` would return rows. Read without the lock."""
        return bool(self._waiting)

    def take(self) -> RejectedRows | None:
        """Remove and return the rows that were added first; None if there are none."""
        with self._lock:
            if not self._waiting:
                return None
            rejected = self._waiting.popleft()
            self._waiting_bytes -= rejected.memory_bytes
            return rejected

    @property
    def rows(self) -> int:
        return self._rows

    def reasons(self) -> dict[str, int]:
        """The number of rows for each class of error."""
        counts: Counter[str] = Counter()
        for (_, error), count in self.by_topic().items():
            counts[error] += count
        return dict(counts)

    def by_topic(self) -> dict[tuple[str, str], int]:
        """The number of rows for each topic and class of error."""
        with self._lock:
            return dict(self._reasons)
