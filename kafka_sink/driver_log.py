"""How the driver's side of the sink speaks to the user: through logging, and visibly so.

Spark runs planning and commit in Python workers that nobody configured logging in: what is logged there below
WARNING goes nowhere, while their stderr reaches the driver's own (checked on PySpark 4.1.1 and 4.3.0).
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

LOGGER = logging.getLogger("kafka_sink")
# As Spark's own lines look, among which these stand.
_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_DATE_FORMAT = "%y/%m/%d %H:%M:%S"


def report(line: str) -> None:
    """Say something that the user should see although nothing is wrong."""
    with _visible():
        LOGGER.info(line)


def warn(line: str) -> None:
    """Say something that the user should look into."""
    with _visible():
        LOGGER.warning(line)


def error(line: str) -> None:
    """Say that something failed, where an exception alone may not reach the user."""
    with _visible():
        LOGGER.error(line)


@contextmanager
def _visible() -> Iterator[None]:
    """Give the logger a way out for one line, where nobody set up another.

    Only for one line: Spark's own log capture comes and goes with each call, and would repeat what a lasting
    handler prints.
    """
    level = LOGGER.level
    if level == logging.NOTSET:
        LOGGER.setLevel(logging.INFO)
    handler = None
    if not LOGGER.hasHandlers():
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter(_FORMAT, _DATE_FORMAT))
        LOGGER.addHandler(handler)
    try:
        yield
    finally:
        LOGGER.setLevel(level)
        if handler:
            LOGGER.removeHandler(handler)
