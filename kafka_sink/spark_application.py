"""The Spark application that this process plans writes for.

Spark's planning workers know it by their environment and their ancestors. The driver's own Python does not:
SPARK_LOCAL_DIRS may be the user's there, the same for many applications, and the JVM may be its child.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SparkApplication:
    """``local_dirs``: Spark's folders of this application, separated by commas. ``driver_pid``: of the JVM
    that this process started; None if it is an ancestor.

    ``conf``: all of Spark's settings, so it may hold secrets.
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
    """None where the environment and the ancestors tell: in Spark's workers."""
    return _current.get()


def local_dirs(environ: Mapping[str, str] = os.environ) -> str:
    """Folders that live as long as the application, separated by commas. Empty if there are none."""
    application = _current.get()
    return environ.get("SPARK_LOCAL_DIRS", "") if application is None else application.local_dirs
