"""Collects the rows of one task that can never be written until their letters are, and stops a task that has
too many."""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque

from kafka_sink.dead_letters.refused_rows import Refused, RefusedLetter
from kafka_sink.errors import TooManyDeadLettersError

_log = logging.getLogger(__name__)
UNLIMITED = -1
# Rows may name any number of topics.
_MAX_REASONS = 1000
# Rows that a task logs one by one. The summary counts all.
_LOGGED = 3
# The context headers of a letter take some 500 bytes.
_MIN_BYTES = 1024
# Bytes of refused rows from which on the sender leaves others in their batches, and so in buffer.memory. It
# takes as many out of a batch at once.
ROOM_BYTES = 4 << 20


class DeadLetters:
    """Thread-safe: the task's thread and the sender's add, the task's thread takes.

    ``topic`` is the dead letter topic. Without one, rows are counted and their content is dropped.
    ``max_rows`` is the maximum number per task, ``max_bytes`` the maximum size of a letter.
    """

    def __init__(self, topic: str | None, max_rows: int, max_bytes: int) -> None:
        self.topic = topic
        self._max_rows = max_rows
        self._lock = threading.Lock()  # guards everything below
        self._waiting: deque[Refused | RefusedLetter] = deque()
        self._held_bytes = 0
        # Of a letter. Lower once the dead letter topic has refused one.
        self._max_bytes = max_bytes
        # By topic and class of the error.
        self._reasons: Counter[tuple[str, str]] = Counter()
        self._rows = 0
        self.task = ""

    def begin(self, task: str) -> None:
        """A new task: counts start at zero."""
        with self._lock:
            self.task = task
            self._waiting.clear()
            self._held_bytes = 0
            self._reasons = Counter()
            self._rows = 0

    def require_room(self, rows: int, reason: str) -> None:
        """Raise TooManyDeadLettersError where so many more rows would exceed the maximum."""
        rows += self._rows
        if self._max_rows != UNLIMITED and rows > self._max_rows:
            raise TooManyDeadLettersError(
                f"{rows} rows of this task can never be written, more than errors.max = {self._max_rows}. "
                f"The last one: {reason}. Mend the rows, or raise errors.max"
            )

    def add(self, refused: Refused) -> None:
        """Rows that can never be written. Beyond the maximum, TooManyDeadLettersError is raised."""
        with self._lock:
            self.require_room(refused.count, refused.reason)
            logged = max(0, min(_LOGGED - self._rows, refused.count))
            self._rows += refused.count
            for topic, count in refused.counts_by_topic():
                is_kept = len(self._reasons) < _MAX_REASONS or (topic, refused.error) in self._reasons
                self._reasons[topic if is_kept else "", refused.error] += count
            if self.topic is not None:
                self._waiting.append(refused)
                self._held_bytes += refused.held_bytes
        for row in range(logged):
            _log.warning(
                "a row for topic %.255s can never be written: %s; errors.tolerance=all skips it",
                refused.topic_of(row),
                refused.reason,
            )

    def refused(self, letter: RefusedLetter, size: int) -> bool:
        """The dead letter topic refused a letter of ``size`` bytes as too large.

        It is taken again, cut to half of that; False where there is nothing left to cut.
        """
        with self._lock:
            if size < 2 * _MIN_BYTES:
                return False
            self._max_bytes = min(self._max_bytes, size // 2)
            self._waiting.append(letter)
            return True

    @property
    def max_bytes(self) -> int:
        """The maximum size of a letter."""
        return self._max_bytes

    @property
    def has_room(self) -> bool:
        """Whether the sender may add rows. Those that wait are in memory beyond buffer.memory."""
        return self._held_bytes < ROOM_BYTES

    @property
    def is_waiting(self) -> bool:
        """Whether ``take`` has any. Read without the lock."""
        return bool(self._waiting)

    def take(self) -> Refused | RefusedLetter | None:
        """Rows whose letters are not yet written, the first that were added; None if there are none."""
        with self._lock:
            if not self._waiting:
                return None
            refused = self._waiting.popleft()
            if not isinstance(refused, RefusedLetter):
                self._held_bytes -= refused.held_bytes
            return refused

    @property
    def rows(self) -> int:
        """Rows of this task that can never be written."""
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
