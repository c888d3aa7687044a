"""The Spark application for which this process plans writes, and settings that make its rows cheaper to read.

Workers import this module before Arrow, because their memory limit may be too small for Arrow.

Spark's planning workers find the application through their environment and their ancestors. The driver's own
Python cannot: its SPARK_LOCAL_DIRS may be set by the user and shared by many applications, and the JVM may be
its child.

Markers are state that planning and tasks keep for the life of the application: files, most of them empty, in
a local folder of Spark that is deleted with the application. Without such a folder, nothing is kept.
"""

from __future__ import annotations

import hashlib
import math
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TypeVar

from kafka_sink.libraries import foreign


@dataclass(frozen=True, slots=True)
class SparkApplication:
    """What identifies an application on the driver's host.

    ``local_dirs`` are Spark's folders of this application, separated by commas. ``driver_pid`` is the JVM
    that this process started; None if the JVM is an ancestor of this process. ``conf`` has all settings of
    Spark, so it may contain secrets.
    """

    local_dirs: str
    driver_pid: int | None
    conf: Mapping[str, str]

    def __repr__(self) -> str:
        return f"SparkApplication(driver_pid={self.driver_pid})"


_current: ContextVar[SparkApplication | None] = ContextVar("spark_application", default=None)


@contextmanager
def planning_for(application: SparkApplication) -> Iterator[None]:
    """Within the block, this thread plans and commits writes of this application."""
    token = _current.set(application)
    try:
        yield
    finally:
        _current.reset(token)


def current() -> SparkApplication | None:
    """The application set by ``planning_for``. None in Spark's workers, which find it through their
    environment and ancestors."""
    return _current.get()


def local_dirs(environ: Mapping[str, str] = os.environ) -> str:
    """The folders that are deleted with the application, separated by commas; empty if there are none."""
    application = _current.get()
    return environ.get("SPARK_LOCAL_DIRS", "") if application is None else application.local_dirs


_MAX_NOTE = 1 << 20
_Result = TypeVar("_Result")


def first_time(key: str) -> bool:
    """Whether this is the first call with this key in the Spark application on this host. True without
    markers."""

    def make(path: str) -> bool:
        try:
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        except FileExistsError:
            return False
        return True

    return _in_a_folder(key, make) is not False


def only_once(key: str) -> bool:
    """Like ``first_time``, but False without markers: for log lines that no micro-batch may repeat."""
    return bool(folder()) and first_time(key)


def forget(key: str) -> None:
    """Remove the marker, so that the next ``first_time`` returns True again."""
    _in_a_folder(key, os.unlink)


def happened_within(key: str, seconds: float) -> bool:
    """Whether ``note`` was called with this key in the application on this host at most ``seconds`` ago.

    If ``seconds`` is infinite, the clock does not matter.
    """
    status = _in_a_folder(key, os.lstat)
    if status is None:
        return False
    # Processes share the wall clock. A time in the future means that the clock was set back.
    is_recent = seconds == math.inf or 0 <= time.time() - status.st_mtime <= seconds
    return is_recent and not foreign(status)


def note(key: str, text: str = "") -> None:
    """Record an event with the current time and a text. It replaces an earlier event with the same key."""

    def write(path: str) -> None:
        draft = f"{path}-{os.getpid()}-{threading.get_ident()}"
        with open(os.open(draft, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:
            file.write(text)
        os.replace(draft, path)

    _in_a_folder(key, write)


def noted_within(key: str, seconds: float) -> str | None:
    """The text of the event if it was recorded at most ``seconds`` ago, or None."""
    if not happened_within(key, seconds):
        return None

    def read(path: str) -> str:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW)) as file:
            return file.read(_MAX_NOTE)

    return _in_a_folder(key, read)


def _in_a_folder(key: str, use: Callable[[str], _Result]) -> _Result | None:
    """Call ``use`` with the marker's path in the first folder that allows it; None if no folder does."""
    for path in _paths(key):
        try:
            return use(path)
        except (OSError, ValueError):
            continue
    return None


def folder() -> str:
    """A folder that belongs to the application alone; empty if no markers are kept."""
    return local_dirs().split(",")[0]


def _paths(key: str) -> list[str]:
    """The possible paths of a marker, best first.

    The system's temporary folder is the last choice, for a Spark folder that is not writable (full or
    read-only disk). The file's name there contains a hash of the application's folder.
    """
    folders = list(filter(None, local_dirs().split(",")))
    if not folders:
        return []
    paths = [os.path.join(directory, f"kafka-chunked-{_hash(key)}") for directory in folders]
    return [*paths, os.path.join(tempfile.gettempdir(), f"kafka-chunked-{_hash(folder() + key)}")]


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]


# -- settings that make it cheaper to hand rows to Python, for ``kafka_sink.tune`` and the doctor -------

LARGE_ROW_BYTES = 512
_ROWS = "spark.sql.execution.arrow.maxRecordsPerBatch"
# Spark's default, which is already the best for small rows.
_MOST_ROWS = 10_000
# Spark 4.1 and later add up the bytes of each row, unless this setting is _NO_LIMIT.
_BYTES = "spark.sql.execution.arrow.maxBytesPerBatch"
_NO_LIMIT = str(2**31 - 1)
_CODEC = "spark.sql.execution.arrow.compression.codec"
_GOOD_ARROW_BATCH = 4_000_000


def rows_of_good_batch(row_bytes: float) -> int:
    """How many rows of this size an Arrow batch should have."""
    fitting = max(1, int(_GOOD_ARROW_BATCH / row_bytes))
    # Keep the first digit only: 83 becomes 80.
    magnitude = int("1".ljust(len(str(fitting)), "0"))
    return fitting // magnitude * magnitude


def arrow_batch_settings(row_bytes: int) -> dict[str, str]:
    """The session settings, by name, for rows of about this many bytes. Raises ValueError below 1."""
    if row_bytes < 1:
        raise ValueError(f"row_bytes is {row_bytes}; give the bytes that a row has on average")
    wanted = {_ROWS: str(min(_MOST_ROWS, rows_of_good_batch(row_bytes)))}
    if row_bytes < LARGE_ROW_BYTES:
        # For larger rows the sum costs little, and the limit matters because some rows may be much larger
        # still.
        wanted[_BYTES] = _NO_LIMIT
    return wanted


def arrow_batch_advice(conf: Callable[[str], str | None]) -> Iterator[str]:
    """What to change in a session. ``conf`` returns the value of a setting, or None if it was not set."""
    if conf(_ROWS) is None and conf(_BYTES) is None:
        yield (
            "Spark hands rows to Python in pieces of its default size: kafka_sink.tune(spark, row_bytes=...) "
            "sets those that cost less for rows of that size"
        )
    codec = conf(_CODEC)
    if codec not in (None, "none"):
        yield (
            f"{_CODEC}={codec} compresses rows that only go to Python on the same host, lz4 at some 100 us a "
            "row: unset it"
        )
