"""The Spark application for which this process plans writes, and settings that make its rows cheaper to read.

Workers import this module before Arrow, because their memory limit may be too small for Arrow.

Spark's planning workers find the application through their environment and their ancestors. The driver's own
Python cannot: its SPARK_LOCAL_DIRS may be set by the user and shared by many applications, and the JVM may be
its child.

Markers are state that planning and tasks keep for the life of the application: files, most of them empty, in
a local folder of Spark that is deleted with the application. Without such a folder, or if none can be written
to, each process keeps its own.
"""

from __future__ import annotations

import hashlib
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import SupportsFloat, TypeVar

import msgspec

from kafka_sink.libraries import foreign


@dataclass(frozen=True, slots=True)
class SparkApplication:
    """The identity of an application on the driver's host.

    ``local_dirs`` are Spark's folders of this application, separated by commas. ``driver_pid`` is the JVM
    that this process started; None if the JVM is an ancestor of this process. ``conf`` has all settings of
    Spark, so it may contain secrets.
    """

    local_dirs: str
    driver_pid: int | None
    conf: Mapping[str, str] = field(repr=False)


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
    """The application set by ``planning_for``. None in Spark's workers, which find it otherwise."""
    return _current.get()


def local_dirs(environ: Mapping[str, str] = os.environ) -> str:
    """The folders that are deleted with the application, separated by commas; empty if there are none."""
    application = _current.get()
    return environ.get("SPARK_LOCAL_DIRS", "") if application is None else application.local_dirs


_MAX_NOTE = 1 << 20
_Result = TypeVar("_Result")
_Noted = TypeVar("_Noted")
# The time and the text of an event.
_Event = tuple[float, str]
# Notes that this process keeps itself if no folder can be used, oldest first. A stream's planning and commit
# each run in one worker, so this still saves most repeated work. Each step is one dictionary operation, so
# threads need no lock.
KEPT: dict[str, _Event] = {}
_NEVER, _MAX_KEPT = (math.nan, ""), 200


def claim(key: str) -> bool | None:
    """Whether this is the first call with this key in the Spark application on this host; None if no folder
    can be used, so that processes cannot know this."""

    def make(path: str) -> bool:
        try:
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        except FileExistsError:
            return False
        return True

    return _in_a_folder(key, make)


def first_time(key: str) -> bool:
    """Like ``claim``; without a folder, whether this is the first call in this process."""
    is_first = claim(key)
    if is_first is None:
        is_first = folder() + key not in KEPT
        _keep(key, "")
    return is_first


def forget(key: str) -> None:
    """Remove the marker, so that the next ``first_time`` returns True again."""
    KEPT.pop(folder() + key, None)
    _in_a_folder(key, os.unlink)


def happened_within(key: str, seconds: float) -> bool:
    """Whether ``note`` was called with this key in the application on this host at most ``seconds`` ago. If
    ``seconds`` is infinite, the clock does not matter."""
    return _is_within(_event(key), seconds)


def note(key: str, value: object = None) -> None:
    """Record an event with the current time and a value, such as a text or a dataclass.

    It replaces an earlier event with the same key. A value of more than a megabyte is not recorded.
    """
    text = msgspec.json.encode(value).decode()

    def write(path: str) -> bool:
        draft = _unique(path)
        try:
            with open(draft, "x", encoding="utf-8", opener=partial(os.open, mode=0o600)) as file:
                file.write(text)
            os.replace(draft, path)
        finally:
            # The draft still exists if the disk is full.
            with suppress(OSError):
                os.unlink(draft)
        return True

    if len(text) <= _MAX_NOTE and not _in_a_folder(key, write):
        _keep(key, text)


def noted_within(key: str, seconds: float, kind: type[_Noted]) -> _Noted | None:
    """The value of the event if it was recorded at most ``seconds`` ago, or None.

    A value that is not of this kind counts as absent: another version of this package may have written it,
    with which the application was started.
    """
    return _value(_event(key), seconds, kind)


def take_noted(key: str, seconds: float, kind: type[_Noted]) -> _Noted | None:
    """Like ``noted_within``, but the event is forgotten. Only one of several callers gets the value, and
    without a folder none does."""

    def take(path: str) -> _Event:
        # Between a read and a removal, another process could record the next event, which would be removed.
        taken = _unique(path)
        os.rename(path, taken)
        try:
            return _read(taken)
        finally:
            os.unlink(taken)

    return _value(_in_a_folder(key, take) or _NEVER, seconds, kind)


def _event(key: str) -> _Event:
    return _in_a_folder(key, _read) or KEPT.get(folder() + key, _NEVER)


def _read(path: str) -> _Event:
    # Another user's pipe would block the call without O_NONBLOCK.
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
    with open(path, encoding="utf-8", opener=lambda name, _: os.open(name, flags)) as file:
        status = os.fstat(file.fileno())
        return _NEVER if foreign(status) else (status.st_mtime, file.read(_MAX_NOTE))


def _is_within(event: _Event, seconds: float) -> bool:
    # Processes share the wall clock. A negative age means that the clock was set back.
    age_s = time.time() - event[0]
    return 0 <= age_s <= seconds or (age_s < 0 and seconds == math.inf)


def _value(event: _Event, seconds: float, kind: type[_Noted]) -> _Noted | None:
    with suppress(msgspec.MsgspecError):
        return msgspec.json.decode(event[1], type=kind) if _is_within(event, seconds) else None
    return None


def _unique(path: str) -> str:
    """A path next to this one that no other call uses, not even one of a process that was killed."""
    return f"{path}-{os.urandom(8).hex()}"


def _keep(key: str, text: str) -> None:
    KEPT.pop(folder() + key, None)
    KEPT[folder() + key] = time.time(), text
    if len(KEPT) > _MAX_KEPT:
        # Copying the keys is one step, so that another thread cannot change them in between.
        KEPT.pop(next(iter(tuple(KEPT)), ""), None)


def _in_a_folder(key: str, use: Callable[[str], _Result]) -> _Result | None:
    """Call ``use`` with the marker's path in the first folder that allows it; None if no folder does."""
    name = f"kafka-chunked-{hashlib.sha256(key.encode()).hexdigest()[:32]}"
    for directory in filter(None, local_dirs().split(",")):
        with suppress(OSError, ValueError):
            return use(os.path.join(directory, name))
    return None


def folder() -> str:
    """The path of a folder that belongs to the application alone; empty if no folder can be used."""
    return local_dirs().split(",")[0]


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
    """The session settings, by name, for rows of about this many bytes. Raises ValueError if it is not a
    number, or below 1."""
    if not isinstance(row_bytes, SupportsFloat) or not float(row_bytes) >= 1:
        raise ValueError(f"row_bytes is {row_bytes!r}: give the bytes that a row has on average, as a number")
    wanted = {_ROWS: str(min(_MOST_ROWS, rows_of_good_batch(row_bytes)))}
    if row_bytes < LARGE_ROW_BYTES:
        # For larger rows the sum costs little, and the limit matters, as some may be much larger still.
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
