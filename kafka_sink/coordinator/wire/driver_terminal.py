"""The terminal in which a user watches the driver, on Linux.

It is the stderr of the driver's JVM, where Spark draws its progress bars, if that is the controlling terminal
of the JVM and the JVM runs in its foreground. So neither a log file nor a notebook is one (kernels have a
session without a terminal), nor a job in the background.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path


def driver_terminal(pid: int) -> str | None:
    """The path of the terminal's device, or None."""
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
