"""Collects the dead letters of one task until they are written, and stops a task that has too many."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Sequence

from kafka_sink.dead_letters.letter import DeadLetter, RefusedLetter
from kafka_sink.errors import TooManyDeadLettersError

_log = logging.getLogger(__name__)
UNLIMITED = -1
# Rows that a task logs one by one. The summary counts all.
_LOGGED = 3
# The context headers of a letter take some 500 bytes.
_MIN_BYTES = 1024


class DeadLetters:
    """Thread-safe: the task's thread and the sender's add, the task's thread takes.

    ``topic`` is the dead letter topic. Without one, letters are counted and their content is dropped.
    ``max_rows`` is the maximum number per task, ``max_bytes`` the maximum size of a letter.
    """

    def __init__(self, topic: str | None, max_rows: int, max_bytes: int) -> None:
        self.topic = topic
        self._max_rows = max_rows
        self._lock = threading.Lock()  # guards everything below
        self._waiting: list[DeadLetter | RefusedLetter] = []
        # Of a letter. Lower once the dead letter topic has refused one.
        self._max_bytes = max_bytes
        self._reasons: Counter[str] = Counter()
        self._rows = 0
        self.task = ""

    def begin(self, task: str) -> None:
        """A new task: counts start at zero."""
        with self._lock:
            self.task = task
            self._waiting = []
            self._reasons = Counter()
            self._rows = 0

    def require_room(self, rows: int, reason: str) -> None:
        """Raises TooManyDeadLettersError where so many more rows would exceed the maximum."""
        rows += self._rows
        if self._max_rows != UNLIMITED and rows > self._max_rows:
            raise TooManyDeadLettersError(
                f"{rows} rows of this task can never be written, more than errors.max = {self._max_rows}. "
                f"The last one: {reason}"
            )

    def add(self, letters: Sequence[DeadLetter]) -> None:
        """Rows that can never be written. Beyond the maximum, TooManyDeadLettersError is raised."""
        with self._lock:
            self.require_room(len(letters), letters[-1].reason)
            rows = self._rows + len(letters)
            logged = letters[: max(0, _LOGGED - self._rows)]
            self._rows = rows
            self._reasons.update(letter.error for letter in letters)
            if self.topic is not None:
                self._waiting.extend(letters)
        for letter in logged:
            _log.warning(
                "a row for topic %s can never be written: %s; errors.tolerance=all skips it",
                letter.topic,
                letter.reason,
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

    def take(self) -> list[DeadLetter | RefusedLetter]:
        """Letters that are not yet written."""
        with self._lock:
            letters, self._waiting = self._waiting, []
            return letters

    @property
    def rows(self) -> int:
        """Rows of this task that can never be written."""
        return self._rows

    def reasons(self) -> dict[str, int]:
        """Counts by the class of the error."""
        with self._lock:
            return dict(self._reasons)
