"""Runs a function in a process that is forked from the tests' own."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable

_PATIENCE_S = 60


def in_a_fork(works: Callable[[], bool]) -> bool:
    """Return the result of ``works`` in a forked child; False if it raises, or does not return within a
    minute."""
    with warnings.catch_warnings():
        # Python 3.12 and later warn of threads, which are what such tests are about.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if not child:
        failed = True
        try:
            threading.Timer(_PATIENCE_S, os._exit, [2]).start()
            failed = not works()
        finally:
            os._exit(failed)
    return os.waitpid(child, 0)[1] == 0
