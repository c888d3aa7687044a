"""Rows that can never be written, while they wait for their dead letters. In columns, as there may be many.

``DeadLetters`` collects those of one task, and stops a task that has too many.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from kafka_sink.errors import TooManyDeadLettersError
from kafka_sink.printable import one_line
from kafka_sink.records.arrays import Int64s

if TYPE_CHECKING:
    import pyarrow as pa


# Spark's strings may be no UTF-8, so the names of headers are bytes.
Header = tuple[bytes, bytes | None]

# A row beside its content: lengths, timestamp, partition.
_ROW_BYTES = 32


@dataclass(frozen=True, slots=True)
class OwnHeaders:
    """The headers that rows had: row i ``counts[i]`` of them, which take ``sizes[i]`` bytes in a dead letter.

    ``keys`` (binary, no nulls) and ``values`` (binary) are those of all rows. ``kept[i]`` are of row i: all
    that it had, or none where they are too many for any dead letter.
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
    """Rows of which each has the same flaw. Arrays have one entry a row; None: no row has this part.

    ``key``, ``value`` and a ``topic`` by row are binary, ``partition`` is -1 where none was chosen,
    ``timestamps_ms`` are milliseconds since the epoch, NO_TIMESTAMP where a row has none. ``sizes`` are about
    the bytes of each row. ``reason`` says what is wrong with a row, ``error`` is the exception's class.
    """

    key: pa.Array | None
    value: pa.Array
    headers: OwnHeaders | None
    topic: pa.Array | str | None
    partition: Int64s | int
    timestamps_ms: Int64s | int
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
        if self.topic is None or isinstance(self.topic, str):
            return self.topic
        name = self.topic[row].as_py()
        return None if name is None else name.decode(errors="replace")

    def counts_by_topic(self) -> list[tuple[str, int]]:
        """Rows by the topic that they were for, "" where it was null."""
        if self.topic is None or isinstance(self.topic, str):
            return [(self.topic or "", self.count)]
        counted = self.topic.value_counts()
        names = [(one or b"").decode(errors="replace") for one in counted.field(0).to_pylist()]
        return list(zip(names, counted.field(1).to_pylist(), strict=True))

    def slice(self, start: int, stop: int) -> RejectedRows:
        def part(of: Any) -> Any:
            """Of what each row has of its own."""
            return of if of is None or isinstance(of, str | int) else of[start:stop]

        return replace(
            self,
            key=part(self.key),
            value=part(self.value),
            headers=None if self.headers is None else self.headers.slice(start, stop),
            topic=part(self.topic),
            partition=part(self.partition),
            timestamps_ms=part(self.timestamps_ms),
            sizes=part(self.sizes),
        )


@dataclass(frozen=True, slots=True)
class RejectedRecords:
    """Rows that a broker rejected, as encoded: record i is ``bodies[ends[i - 1]:ends[i]]``, from its key's
    length on. Otherwise as RejectedRows."""

    bodies: bytes | bytearray
    ends: Int64s
    topic: str
    partition: int
    timestamps_ms: Int64s
    reason: str
    error: str

    @property
    def count(self) -> int:
        return len(self.ends)

    @property
    def memory_bytes(self) -> int:
        return len(self.bodies) + self.count * _ROW_BYTES

    def topic_of(self, row: int) -> str:
        return self.topic

    def counts_by_topic(self) -> list[tuple[str, int]]:
        """Rows by the topic that they were for."""
        return [(self.topic, self.count)]


Rejected = RejectedRows | RejectedRecords


# -- the headers that say of a dead letter what it is and why, as Kafka Connect has them (KIP-298) ----------


PREFIX = b"__connect.errors."
# Not Kafka Connect's: the row's own timestamp, and what was cut off.
CUT_PREFIX = b"kafka-chunked.errors."
# Kafka Connect's name for the step that failed.
STAGE = b"KAFKA_PRODUCE"
NAME = b"kafka-chunked"
# Bytes of a record's header beside its key and value: two lengths, and some to spare.
HEADER_OVERHEAD = 12
_log = logging.getLogger(__name__)
UNLIMITED = -1
# Rows may name any number of topics.
_MAX_REASONS = 1000
# Rows that a task logs one by one. The summary counts all.
_LOGGED = 3
_LONGEST_REASON = 1000
# Bytes of rejected rows that wait, from which on the sender leaves others in their batches, and so in
# buffer.memory. It takes as many out of a batch at once.
MAX_WAITING_BYTES = 4 << 20


class DeadLetters:
    """Thread-safe: the task's thread and the sender's add, the task's thread takes.

    ``topic`` is the dead letter topic. Without one, rows are counted and their content is dropped.
    ``max_rows`` is the maximum number in ``task``, whose dead letters these are, ``max_bytes`` the maximum
    size of one.
    """

    def __init__(self, topic: str | None, max_rows: int, max_bytes: int, task: str = "") -> None:
        self.topic, self.task = topic, task
        self.max_bytes = max_bytes
        self._max_rows = max_rows
        self._lock = threading.Lock()  # guards everything below
        self._waiting: deque[Rejected] = deque()
        self._waiting_bytes = 0
        # By topic and class of the error.
        self._reasons: Counter[tuple[str, str]] = Counter()
        self._rows = 0

    def require_room(self, rows: int, reason: str) -> None:
        """Raise TooManyDeadLettersError where so many more rows would exceed the maximum."""
        rows += self._rows
        if self._max_rows != UNLIMITED and rows > self._max_rows:
            raise TooManyDeadLettersError(
                f"{rows} rows of this task can never be written, more than errors.max = {self._max_rows}. "
                f"The last one: {one_line(reason, _LONGEST_REASON)}. Mend the rows, or raise errors.max"
            )

    def add(self, rejected: Rejected) -> None:
        """Rows that can never be written. Beyond the maximum, TooManyDeadLettersError is raised."""
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
        """Whether the sender may add rows. Those that wait are in memory beyond buffer.memory."""
        return self._waiting_bytes < MAX_WAITING_BYTES

    @property
    def is_waiting(self) -> bool:
        """Whether ``take`` has any. Read without the lock."""
        return bool(self._waiting)

    def take(self) -> Rejected | None:
        """Rows whose dead letters are not yet written, the first that were added; None if there are none."""
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
        """Counts by the class of the error."""
        counts: Counter[str] = Counter()
        for (_, error), count in self.by_topic().items():
            counts[error] += count
        return dict(counts)

    def by_topic(self) -> dict[tuple[str, str], int]:
        """Counts by topic and class of the error."""
        with self._lock:
            return dict(self._reasons)
