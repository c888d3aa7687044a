"""Spark's Python workers: their imports, their garbage collections and their memory.

PySpark 4.1 calls ``importlib.invalidate_caches()`` whenever a worker starts to plan, to run a task or to
commit. Before Python 3.12, each ``zipimporter`` then re-reads its archive's directory at once. That takes 100
to 200 ms for the archives that Spark puts on PYTHONPATH, three times for every job and micro-batch (a third
of a second of 1.9 s for two million rows, measured). Spark's archives never change while it runs.

PySpark's daemon runs a full collection after everything that a reused worker does: planning, a task or a
commit. It looks at each object of each imported module. With pandas, Arrow and this package that takes 40 ms
of processor time after a task and 12 ms after planning or a commit (Python 3.11): together 100 ms for a
micro-batch of two tasks, more than everything else that its Python processes do.

Spark may limit a worker's address space, so that an import fails.

glibc takes fresh pages from the kernel for each large batch that Spark hands over, and gives them back after
it: 100 to 280 page faults a MB, which are a third of the kernel's part of a task that writes. Told to keep
them, it has 10, after the first two batches of a task: PySpark holds one while it reads the next. Huge pages
(madvise) save these faults, too, but cost the kernel more time. Other C libraries have no such setting and
stay as they are.
"""

from __future__ import annotations

import ctypes
import gc
import sys
import zipimport
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import PurePath
from typing import Any

from kafka_sink.errors import KafkaSinkError

# pyspark.zip, py4j-0.10.9.9-src.zip, spark-core_2.13-4.1.1.jar
_SPARK_ARCHIVES = ("pyspark", "py4j-", "spark-core_")
# Since 3.12, a zipimporter postpones re-reading its directory until it is next used.
_READS_AT_ONCE = sys.version_info < (3, 12)


def forget_spark_archives(reads_at_once: bool = _READS_AT_ONCE) -> None:
    """Remove the finders of Spark's archives. The next import recreates them from zipimport's own cache.

    Called when a worker is about to become idle. The user's archives are not affected.
    """
    if not reads_at_once:
        return
    for path, finder in list(sys.path_importer_cache.items()):
        # Folders within an archive, such as pyspark.zip/pyspark/sql, have their own finders.
        if isinstance(finder, zipimport.zipimporter):
            archive = PurePath(finder.archive).name
            if archive.startswith(_SPARK_ARCHIVES):
                del sys.path_importer_cache[path]


_DAEMON = "pyspark.daemon"
_calls = 0


def freeze_when_reused() -> None:
    """Called at the start of planning, a task or a commit. The second call in a process exempts all present
    objects from garbage collections.

    Everything is imported by then (PySpark imports pandas at the end of the first task), and the daemon has
    just collected the garbage. The objects are still freed when nothing refers to them any more. Only
    reference cycles among them stay. Elsewhere than in a worker of the daemon, nothing happens.
    """
    global _calls
    _calls += 1
    if _calls == 2 and _is_forked_by_daemon():
        gc.freeze()


def _is_forked_by_daemon() -> bool:
    main = getattr(sys.modules["__main__"], "__spec__", None)
    return _DAEMON in sys.modules or (main is not None and main.name == _DAEMON)


# What the dynamic loader and the kernel say: dlopen, mmap, malloc.
_SIGNS = (
    "failed to map segment",
    "cannot allocate memory",
    "unable to allocate",
    "cannot map zero-fill pages",
)


@contextmanager
def explained() -> Iterator[None]:
    """For imports. Raises KafkaSinkError, which says what to do, in place of an error about memory."""
    try:
        yield
    except (ImportError, MemoryError, OSError) as error:
        text = str(error)
        if not isinstance(error, MemoryError) and not any(sign in text.lower() for sign in _SIGNS):
            raise
        raise KafkaSinkError(
            "this Python process may not use the memory its libraries need "
            f"({text or type(error).__name__}). Spark limits its address space: raise "
            "spark.executor.pyspark.memory (tasks) or spark.sql.planner.pythonExecution.memory (start and "
            "commit), or leave them unset"
        ) from None


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
