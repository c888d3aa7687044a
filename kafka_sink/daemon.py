"""Spark's Python daemon with the sink already imported: ``spark.python.daemon.module=kafka_sink.daemon``.

Spark starts one daemon for each executor, and the daemon forks a worker for each task that runs at once.
PySpark's own daemon imports little, so each worker imports PySpark, Arrow, numpy, pandas and this package for
itself. PySpark's archives contain no bytecode, so each worker even compiles what it imports from them. This
daemon imports everything once. Workers share it with the daemon, memory included.

A fork copies only the calling thread. If an import starts a thread, or if the check for threads is not
possible, this module runs PySpark's daemon in its place.
"""

from __future__ import annotations

import functools
import gc
import importlib
import os
import sys
import warnings

_UNCHANGED = "pyspark.daemon"
# In this order: what a task that writes needs. Missing ones are left out; pandas, for example, is optional.
MODULES = (
    "pyspark.worker",
    "pyspark.sql.worker.write_into_data_source",
    "pyspark.sql.conversion",
    "pyspark.sql.pandas.serializers",
    "numpy",
    "pyarrow",
    "pyarrow.compute",
    # pyarrow imports it for the first Python object that it converts, and PySpark returns the commit message
    # so.
    "pandas",
    "kafka_sink.spark.write",
    "kafka_sink.spark.executor_connection",
    "kafka_sink.task.producer_cache",
    "kafka_sink.rows.rebatching",
)
_THREADS = "/proc/self/task"
# Arrow includes jemalloc, which starts a thread when Arrow is imported, although Arrow prefers mimalloc.
_JEMALLOC_SETTINGS, _NO_THREAD = "JE_ARROW_MALLOC_CONF", "background_thread:false"


def preload() -> None:
    """Import everything. Raises nothing: a worker meets the problem again, where Spark reports it."""
    users = os.environ.get(_JEMALLOC_SETTINGS)
    os.environ[_JEMALLOC_SETTINGS] = _NO_THREAD if users is None else f"{users},{_NO_THREAD}"
    try:
        _import_all()
    finally:
        if users is None:
            del os.environ[_JEMALLOC_SETTINGS]
        else:
            os.environ[_JEMALLOC_SETTINGS] = users


def _import_all() -> None:
    for name in MODULES:
        try:
            with warnings.catch_warnings():
                # Each worker would show them as well, or never: they are about versions of libraries.
                warnings.simplefilter("ignore")
                importlib.import_module(name)
        except Exception:  # noqa: BLE001, S112 - whatever a library does when it is imported
            continue


def is_single_threaded() -> bool:
    """Whether the process may be forked. False where the system does not tell (elsewhere than on Linux)."""
    try:
        return len(os.listdir(_THREADS)) == 1
    except OSError:
        return False


def _reseed(daemon: int) -> None:
    """Seed numpy's global generator in a new worker: it would return the same numbers in all of them."""
    random = sys.modules.get("numpy.random")
    # Not in processes that a worker forks.
    if random is not None and os.getppid() == daemon:
        random.seed()


def _run_unchanged(reason: str) -> None:
    """Replace this process by PySpark's own daemon, with the same arguments, input and output."""
    print(f"kafka_sink.daemon: {reason}. {_UNCHANGED} runs in its place", file=sys.stderr, flush=True)
    os.execv(sys.executable, [sys.executable, "-m", _UNCHANGED, *sys.argv[1:]])  # noqa: S606 - the same program


def main() -> None:
    """What Spark runs, with the name of the worker's module as argument."""
    if not is_single_threaded():
        _run_unchanged("it is not known whether threads are running")
    preload()
    if not is_single_threaded():
        _run_unchanged("an import has started a thread")
    from kafka_sink.spark import worker

    worker.forget_spark_archives()
    os.register_at_fork(after_in_child=functools.partial(_reseed, os.getpid()))
    # Collections in the workers would also copy the pages of all objects that they look at.
    gc.collect()
    gc.freeze()
    importlib.import_module(_UNCHANGED).manager()


if __name__ == "__main__":
    main()
