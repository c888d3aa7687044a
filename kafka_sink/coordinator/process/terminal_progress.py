"""Shows rows and rate of the batch jobs that run, in the driver's terminal, below Spark's own progress bar.

Spark redraws its bar in place, on the line of the cursor. This line goes below it, and the cursor returns to
where it was, so that the two do not overwrite each other. The line is removed when the last batch job ends,
before ``save()`` returns.
"""

from __future__ import annotations

import fcntl
import os
import stat
import struct
import termios
from collections.abc import Callable
from pathlib import Path

_WIDTH = 80
# To the line below, erase it, ... and back up.
_BELOW, _BACK = "\n\r\x1b[2K", "\x1b[1A\r"


class TerminalProgress:
    """``progress``: rows and rows per second of the batch jobs, None where none runs. Used on one loop.

    ``is_wanted`` says whether the user wants progress in the terminal.
    """

    def __init__(
        self,
        driver_pid: int,
        progress: Callable[[], tuple[int, float] | None],
        is_wanted: Callable[[], bool],
    ) -> None:
        self._driver_pid = driver_pid
        self._progress = progress
        self._is_wanted = is_wanted
        self._shown = ""

    def update(self) -> None:
        """Once a second, and when a write has ended."""
        found = self._progress()
        if found is None:
            self.clear()
        elif self._is_wanted():
            rows, rate = found
            # While a job commits no rows come, and it does not stand still.
            per_second = f", {rate:,.0f} rows/s" if rate >= 1 else ""
            self._draw(f"[Kafka: {rows:,} rows{per_second}]")

    def clear(self) -> None:
        """Remove the line, if there is one."""
        if self._shown:
            self._draw("")

    def _draw(self, text: str) -> None:
        # Each time anew: the user may have put the driver into the background.
        path = driver_terminal(self._driver_pid)
        if path is None:
            self._shown = ""
            return
        try:
            terminal = os.open(path, os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return
        try:
            os.write(terminal, f"{_BELOW}{text[: _columns(terminal) - 1]}{_BACK}".encode())
            self._shown = text
        except OSError:
            pass  # stopped with Ctrl-S, say: the next update draws it
        finally:
            os.close(terminal)


def _columns(terminal: int) -> int:
    try:
        size = fcntl.ioctl(terminal, termios.TIOCGWINSZ, bytes(8))
    except OSError:
        return _WIDTH
    columns: int = struct.unpack("HHHH", size)[1]
    return columns or _WIDTH


def driver_terminal(pid: int) -> str | None:
    """The path of the device of the terminal in which a user watches the driver, or None. Linux only.

    It is the stderr of the driver's JVM, where Spark draws its progress bars, if that is the controlling
    terminal of the JVM and the JVM runs in its foreground. So there is none for a log file, a notebook
    (kernels have a session without a terminal) or a job in the background.
    """
    try:
        path = os.readlink(f"/proc/{pid}/fd/2")
        found = os.stat(path)
        # After the name, which may contain blanks: state, parent, group, session, terminal, foreground group.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        group, terminal, foreground = int(fields[2]), int(fields[4]), int(fields[5])
    except (OSError, ValueError, IndexError):
        return None
    if not stat.S_ISCHR(found.st_mode) or group != foreground:
        return None
    # As in the kernel's new_decode_dev.
    device = os.makedev((terminal & 0xFFF00) >> 8, (terminal & 0xFF) | ((terminal >> 12) & 0xFFF00))
    return path if device == found.st_rdev else None
