"""What planning remembers from one micro-batch to the next, whose processes may all be new.

Markers are empty files in a folder of Spark's that lives as long as the application. Where there is none,
nothing is remembered.
"""

from __future__ import annotations

import hashlib
import os
import time


def first_time(key: str) -> bool:
    """Whether nobody asked this in the Spark application before."""
    path = _path(key)
    if path is None:
        return True
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    except FileExistsError:
        return False
    except OSError:
        return True
    return True


def remember(key: str) -> None:
    """What ``happened_within`` asks for happened now."""
    path = _path(key)
    if path is None:
        return
    try:
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600))
        os.utime(path)
    except OSError:
        pass  # it costs doing the thing again


def happened_within(key: str, seconds: float) -> bool:
    """Whether somebody remembered this in the Spark application, no longer ago than that."""
    path = _path(key)
    if path is None:
        return False
    try:
        # Both by the wall clock, which processes share. A time to come is of a clock that was put back.
        return 0 <= time.time() - os.stat(path).st_mtime <= seconds
    except OSError:
        return False


def folder() -> str:
    """Where the markers are; empty where nothing is remembered."""
    return os.environ.get("SPARK_LOCAL_DIRS", "").split(",")[0]


def _path(key: str) -> str | None:
    where = folder()
    if not where:
        return None
    return os.path.join(where, f"kafka-chunked-{hashlib.sha256(key.encode()).hexdigest()[:32]}")
