"""A task's Arrow batches in memory that the worker has already.

glibc takes fresh pages from the kernel for each large batch that Spark hands over, and gives them back after
it: 100 to 280 page faults a MB, which are a third of the kernel's part of a task that writes. Told to keep
them, it has 10. Other C libraries have no such setting and stay as they are.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

# From glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
_MIB = 1024 * 1024
# Enough for batches of 64 MiB, Spark's largest by default.
_DURING_A_TASK = {_M_TRIM_THRESHOLD: 128 * _MIB, _M_TOP_PAD: 16 * _MIB, _M_MMAP_THRESHOLD: 128 * _MIB}
# What glibc's own adaptation ends at: a worker runs others' functions too.
_BETWEEN_TASKS = {_M_TRIM_THRESHOLD: 64 * _MIB, _M_TOP_PAD: 128 * 1024, _M_MMAP_THRESHOLD: 32 * _MIB}


@contextmanager
def memory_kept() -> Iterator[None]:
    """Keep what is freed in the process until the end, when all of it goes back to the system (20 us)."""
    libc = _glibc()
    if libc is None:
        yield
        return
    _set(libc, _DURING_A_TASK)
    try:
        yield
    finally:
        _set(libc, _BETWEEN_TASKS)
        libc.malloc_trim(0)


def _set(libc: Any, parameters: dict[int, int]) -> None:
    for parameter, value in parameters.items():
        libc.mallopt(parameter, value)


@cache
def _glibc() -> Any:
    libc = ctypes.CDLL(None)
    return libc if hasattr(libc, "gnu_get_libc_version") else None
