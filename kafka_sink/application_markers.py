"""What planning and tasks remember in an application whose processes may all be new each time.

Markers are files, most of them empty, in a folder of Spark's that lives as long as the application. Where
SPARK_LOCAL_DIRS names none, nothing is remembered.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import threading
import time

_MAX_NOTE = 1 << 20


def first_time(key: str) -> bool:
    """Whether nobody asked this in the Spark application before."""
    for path in _paths(key):
        try:
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        except FileExistsError:
            return False
        except OSError:
            continue  # the next folder may take it
        return True
    return True


def remember(key: str) -> None:
    """What ``happened_within`` asks for happened now."""
    for path in _paths(key):
        try:
            os.close(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_NOFOLLOW, 0o600))
            os.utime(path)
        except OSError:
            continue
        return


def forget(key: str) -> None:
    """Whoever asks ``first_time`` next is the first again."""
    for path in _paths(key):
        try:
            os.unlink(path)
        except OSError:
            continue
        return


def happened_within(key: str, seconds: float) -> bool:
    """Whether somebody remembered this in the Spark application, no longer ago than that."""
    for path in _paths(key):
        try:
            found = os.lstat(path)
        except OSError:
            continue
        # Both by the wall clock, which processes share. A time to come is of a clock that was put back.
        return found.st_uid == os.getuid() and 0 <= time.time() - found.st_mtime <= seconds
    return False


def note(key: str, text: str) -> None:
    """What ``noted_within`` asks for; replaces what was noted before."""
    for path in _paths(key):
        draft = f"{path}-{os.getpid()}-{threading.get_ident()}"
        try:
            with open(os.open(draft, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:
                file.write(text)
            os.replace(draft, path)
        except OSError:
            continue  # the next folder may take it
        return


def noted_within(key: str, seconds: float) -> str | None:
    """What was noted in the Spark application on this host, no longer ago than that."""
    if not happened_within(key, seconds):
        return None
    for path in _paths(key):
        try:
            with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW)) as file:
                return file.read(_MAX_NOTE)
        except (OSError, ValueError):
            continue
    return None


def folder() -> str:
    """What tells the application from others; empty where nothing is remembered."""
    return os.environ.get("SPARK_LOCAL_DIRS", "").split(",")[0]


def _paths(key: str) -> list[str]:
    """Where a marker may be, the best first: Spark's folders, or where none can be written to (their disk is
    full, or read-only), the system's for temporary files, under a name that has the application in it."""
    folders = list(filter(None, os.environ.get("SPARK_LOCAL_DIRS", "").split(",")))
    if not folders:
        return []
    paths = [os.path.join(one, f"kafka-chunked-{_hash(key)}") for one in folders]
    return [*paths, os.path.join(tempfile.gettempdir(), f"kafka-chunked-{_hash(folder() + key)}")]


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]
