"""Spark's Python daemon with the sink already imported: ``spark.python.daemon.module=kafka_sink.daemon``.

Spark starts one daemon for each executor, and the daemon forks a worker for each task that runs at the same
time. PySpark's own daemon imports little, so each worker has to import PySpark, Arrow, numpy, pandas and this
package. It even has to compile PySpark's modules if they come from an archive, because archives contain no
bytecode. This daemon imports everything once, and the workers share its memory.

A fork copies only the calling thread. If an import has started a thread, this module therefore runs PySpark's
daemon instead.
"""

from __future__ import annotations

import functools
import gc
import importlib
import os
import sys
import warnings
from contextlib import suppress

from kafka_sink.spark import worker

_UNCHANGED = "pyspark.daemon"
# The modules that a writing task needs, in the order of import. A missing one, such as pandas, is skipped.
MODULES = (
    "pyspark.worker",
    "pyspark.sql.worker.write_into_data_source",
    "pyspark.sql.conversion",
    "pyspark.sql.pandas.serializers",
    "numpy",
    "pyarrow",
    "pyarrow.compute",
    # pyarrow imports pandas when it first converts a Python object, such as PySpark's commit message.
    "pandas",
    "kafka_sink.spark.write",
    "kafka_sink.spark.executor_connection",
    "kafka_sink.task.producer_cache",
    "kafka_sink.rows.rebatching",
)
# Arrow includes jemalloc, which starts a thread when Arrow is imported, although Arrow prefers mimalloc.
_JEMALLOC_SETTINGS, _NO_THREAD = "JE_ARROW_MALLOC_CONF", "background_thread:false"


def preload() -> None:
    """Import all modules. Raises nothing: a worker has the same problem again, and Spark reports it there."""
    users = os.environ.get(_JEMALLOC_SETTINGS)
    os.environ[_JEMALLOC_SETTINGS] = _NO_THREAD if users is None else f"{users},{_NO_THREAD}"
    try:
        for name in MODULES:
            # The warnings are about versions of libraries. Without the daemon, each worker would show them or
            # none would. A library may raise anything while it is imported.
            with warnings.catch_warnings(), suppress(Exception):
                warnings.simplefilter("ignore")
                importlib.import_module(name)
    finally:
        if users is None:
            del os.environ[_JEMALLOC_SETTINGS]
        else:
            os.environ[_JEMALLOC_SETTINGS] = users


def is_single_threaded() -> bool:
    """Whether the process has one thread, so that it may fork. False if /proc does not show this."""
    try:
        return len(os.listdir("/proc/self/task")) == 1
    except OSError:
        return False


def _reseed(daemon: int) -> None:
    """Seed numpy's global generator in a new worker. Otherwise all workers would draw the same numbers."""
    random = sys.modules.get("numpy.random")
    # A process that a worker forks keeps the worker's generator, as it would without this daemon.
    if random is not None and os.getppid() == daemon:
        random.seed()


def _run_unchanged() -> None:
    """Replace this process by PySpark's own daemon, with the same arguments, input and output."""
    line = (
        "kafka_sink.daemon: an import has started a thread, or /proc cannot be read. "
        f"{_UNCHANGED} runs in its place"
    )
    print(line, file=sys.stderr, flush=True)
    os.execv(sys.executable, [sys.executable, "-m", _UNCHANGED, *sys.argv[1:]])  # noqa: S606 - this interpreter


def main() -> None:
    """The entry point. Spark passes the name of the worker's module as argument."""
    preload()
    if not is_single_threaded():
        _run_unchanged()
    worker.forget_spark_archives()
    os.register_at_fork(after_in_child=functools.partial(_reseed, os.getpid()))
    # A garbage collection in a worker would otherwise touch all these objects, and so copy their pages.
    gc.collect()
    gc.freeze()
    importlib.import_module(_UNCHANGED).manager()


if __name__ == "__main__":
    main()
