"""Ends the wait of a thread in a selector, from any other thread."""

from __future__ import annotations

import os
import threading
from io import FileIO

_ONE = (1).to_bytes(8, "little")


class WakeUp:
    """A file that a selector reports as readable from ``wake`` until ``clear``.

    A wake-up that happens between "nothing to do" and "wait" is therefore not lost. The waiting thread calls
    ``clear`` before it looks at its queues: an entry that is added later wakes it again.
    """

    def __init__(self) -> None:
        # The kernel adds up wake-ups to one event. FileIO closes the descriptor if the object is dropped.
        self._file = FileIO(os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC), "r+")
        # Any thread may wake, and the waiting thread closes. Without the lock, a wake-up could be written to
        # another file that got the descriptor just after the close.
        self._lock = threading.Lock()

    def fileno(self) -> int:
        return self._file.fileno()

    def wake(self) -> None:
        """Any thread may call it, even after ``close``."""
        with self._lock:
            if not self._file.closed:
                self._file.write(_ONE)

    def clear(self) -> None:
        self._file.read(len(_ONE))

    def close(self) -> None:
        with self._lock:
            self._file.close()
