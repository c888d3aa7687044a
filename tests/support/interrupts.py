"""Ctrl-C in tests."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def interruptible() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt here, and in Python processes that start here.

    A shell's background jobs ignore SIGINT, and so does all that they start. The tests may be such a job.
    Only for the main thread.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
