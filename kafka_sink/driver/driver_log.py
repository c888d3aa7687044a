"""Log lines for the user, from the driver and from tasks.

Spark runs planning and commit in Python workers without a logging configuration, which drops records below
WARNING. The stderr of these workers is forwarded to the driver's stderr (checked on PySpark 4.1.1 and 4.3.0).
"""

from __future__ import annotations

import logging
import socket
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from kafka_sink.printable import one_line

LOGGER = logging.getLogger("kafka_sink")
# Lines quote names of topics and transactions of other programs, so their length must be limited.
_LONGEST = 10_000
# The format of Spark's own lines, between which these lines appear. Each message begins with "kafka-chunked".
_FORMAT = "%(asctime)s %(levelname)s %(message)s"
_DATE_FORMAT = "%y/%m/%d %H:%M:%S"


def report(line: str) -> None:
    """Log a line that the user should see although nothing is wrong."""
    with _visible():
        LOGGER.info("%s", one_line(line, _LONGEST))


def debug(line: str) -> None:
    """Log a line for those who set the level of the logger ``kafka_sink`` to DEBUG."""
    LOGGER.debug("%s", one_line(line, _LONGEST))


def warn(line: str) -> None:
    with _visible():
        LOGGER.warning("%s", one_line(line, _LONGEST))


def error(line: str) -> None:
    with _visible():
        LOGGER.error("%s", one_line(line, _LONGEST))


def task_lines() -> AbstractContextManager[None]:
    """Within the block, a task's warnings have time, level and host, unless the user has handlers.

    Otherwise Python prints only their text, and an executor's stderr contains lines of many tasks.
    """
    form = f"%(asctime)s %(levelname)s kafka-chunked on {socket.gethostname()}: %(message)s"
    return _visible(form, logging.WARNING)


@contextmanager
def _visible(form: str = _FORMAT, lowest: int = logging.INFO) -> Iterator[None]:
    """Within the block, give the logger a handler unless it has one, and show records of at least ``lowest``.

    A permanent handler would print lines twice, because Spark installs its own log capture during a call.
    """
    level = LOGGER.level
    if level == logging.NOTSET:
        LOGGER.setLevel(lowest)
    handler = None
    if not LOGGER.hasHandlers():
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter(form, _DATE_FORMAT))
        LOGGER.addHandler(handler)
    try:
        yield
    finally:
        LOGGER.setLevel(level)
        if handler:
            LOGGER.removeHandler(handler)
