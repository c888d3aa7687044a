"""Improves Spark's Python workers: their imports, garbage collections and memory.

Imports: PySpark 4.1 calls ``importlib.invalidate_caches()`` whenever a worker starts to plan, to run a task
or to commit. Before Python 3.12, each ``zipimporter`` then re-reads the directory of its archive at once.
This takes 100 to 200 ms for the archives that Spark puts on PYTHONPATH, three times for every job and
micro-batch (a third of a second of 1.9 s for two million rows, measured). Spark's archives never change while
it runs.

Garbage collections: PySpark's daemon runs a full collection after everything that a reused worker does:
planning, a task or a commit. The collection visits each object of each imported module. With pandas, Arrow
and this package, this takes 40 ms of CPU time after a task and 12 ms after planning or a commit (Python
3.11). For a micro-batch of two tasks this is 100 ms, more than everything else that its Python processes do.

Address space: Spark may limit it, so that an import fails.

Memory: glibc takes new pages from the kernel for each large batch that Spark hands over, and returns them
after the batch. The 100 to 280 page faults per MB are a third of the kernel's time in a task that writes. If
glibc keeps the pages, there are 10 faults per MB after the first two batches of a task (PySpark holds one
batch while it reads the next). Huge pages (madvise) also save these faults, but cost the kernel more time.
Other C libraries have no such setting and stay unchanged.
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

# Examples: pyspark.zip, py4j-0.10.9.9-src.zip, spark-core_2.13-4.1.1.jar
_SPARK_ARCHIVES = ("pyspark", "py4j-", "spark-core_")
# Since Python 3.12, a zipimporter re-reads its directory only when it is next used.
_READS_AT_ONCE = sys.version_info < (3, 12)


def forget_spark_archives(reads_at_once: bool = _READS_AT_ONCE) -> None:
    """Remove the finders of Spark's archives from an idle worker. zipimport recreates them from its cache."""
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
    """Exempt all existing objects from garbage collection, in the second call in a worker of the daemon.

    Called at the start of planning, a task or a commit. At the second call everything is imported (PySpark
    imports pandas at the end of the first task), and the daemon has just collected the garbage. The objects
    are still freed when nothing refers to them any longer. Only reference cycles among them remain.
    """
    global _calls
    _calls += 1
    main = getattr(sys.modules["__main__"], "__spec__", None)
    is_forked_by_daemon = _DAEMON in sys.modules or (main is not None and main.name == _DAEMON)
    if _calls == 2 and is_forked_by_daemon:
        gc.freeze()


# Parts of the error messages of the dynamic loader and the kernel, for dlopen, mmap and malloc.
_SIGNS = (
    "failed to map segment",
    "cannot allocate memory",
    "unable to allocate",
    "cannot map zero-fill pages",
)


@contextmanager
def explained() -> Iterator[None]:
    """For imports. Replaces an error about memory by a KafkaSinkError with what to do."""
    try:
        yield
    except (ImportError, MemoryError, OSError) as error:
        text = str(error)
        if not isinstance(error, MemoryError) and not any(sign in text.lower() for sign in _SIGNS):
            raise
        raise KafkaSinkError(
            "this Python process may not use as much memory as its libraries need "
            f"({text or type(error).__name__}). Spark limits its address space: raise "
            "spark.executor.pyspark.memory (tasks) or spark.sql.planner.pythonExecution.memory (start and "
            "commit), or leave them unset"
        ) from None


# The constants of glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
_MIB = 1024 * 1024
# Enough for batches of 64 MiB, the largest that Spark hands over by default.
_DURING_A_TASK = {_M_TRIM_THRESHOLD: 128 * _MIB, _M_TOP_PAD: 16 * _MIB, _M_MMAP_THRESHOLD: 128 * _MIB}
# The highest values that glibc reaches by itself. A worker also runs functions of other packages.
_BETWEEN_TASKS = {_M_TRIM_THRESHOLD: 64 * _MIB, _M_TOP_PAD: 128 * 1024, _M_MMAP_THRESHOLD: 32 * _MIB}


@contextmanager
def memory_kept() -> Iterator[None]:
    """Keep freed memory in the process during the block, and then return all of it to the system (20 us)."""
    libc = _glibc()
    if libc is None:
        yield
        return
    for parameter, value in _DURING_A_TASK.items():
        libc.mallopt(parameter, value)
    try:
        yield
    finally:
        for parameter, value in _BETWEEN_TASKS.items():
            libc.mallopt(parameter, value)
        libc.malloc_trim(0)


@cache
def _glibc() -> Any:
    libc = ctypes.CDLL(None)
    return libc if hasattr(libc, "gnu_get_libc_version") else None
