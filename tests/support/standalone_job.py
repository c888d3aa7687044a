"""A driver of its own: ``standalone_job.py MASTER FOLDER``; stdin has the options of its writes, as JSON.

At its end it writes the file ``done`` in FOLDER, as JSON: the pid of its JVM (``jvm``), and what its workers
have seen before any write (``workers``). Then it lives on until its stdin ends.

``numbers``: rows whose key says which executor wrote them. ``speculated``: rows that are written while Spark
speculates. Task 1's first attempt writes a part of them and hangs. Its copy waits for the file ``go`` in
FOLDER, and then writes all rows, so it is the copy that wins.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import SparkSession

from tests.support.jvms import SPARK_VARIABLE
from tests.support.waiting import until

NUMBERS, NUMBERS_TASKS = 20_000, 8
ROWS, TASKS = 160_000, 2
_Batches = Iterator[pa.RecordBatch]
# Spark gives 10,000 at a time to a Python sink, and its buffers keep the last ones back.
_BATCHES_BEFORE_IT_HANGS = 6
_PATIENCE_S = 120.0
# All tasks are done by then, so nothing is left to speculate on.
_NEVER, _AFTER_A_HALF = "1.0", "0.5"


def tell_executor(batches: _Batches) -> _Batches:
    # A standalone worker's folder is named after its host here, and an executor's after its number.
    where = os.getcwd().rpartition(".work/")[0].rpartition("/")[2]
    for batch in batches:
        yield pa.record_batch([pa.array([where] * batch.num_rows), batch.column(0)], names=["key", "value"])


def hangs_at_first(go: Path) -> Callable[[_Batches], _Batches]:
    """The function for ``mapInArrow``."""

    def rows(batches: _Batches) -> _Batches:
        context = TaskContext.get()
        assert context is not None
        task, is_copy = context.partitionId(), context.attemptNumber() > 0
        if task and is_copy:
            until(go.exists, "somebody lets the copy go on", _PATIENCE_S)
        for count, batch in enumerate(batches):
            if task and not is_copy and count == _BATCHES_BEFORE_IT_HANGS:
                until(lambda: False, "a copy takes this attempt's place", _PATIENCE_S)
            yield batch

    return rows


def look(batches: _Batches) -> _Batches:
    """The worker's pid, whether the modules that writes need are imported, its parent's command, two random
    draws."""
    import random

    import numpy as np

    loaded = {"kafka_sink.task.producer_cache", "pyspark.worker", "pyarrow.compute"} <= set(sys.modules)
    parent = Path(f"/proc/{os.getppid()}/cmdline").read_text().split("\0")
    for _ in batches:
        pass
    seen = [os.getpid(), loaded, parent, random.random(), float(np.random.random())]
    yield pa.record_batch([pa.array([json.dumps(seen)])], names=["seen"])


def main(master: str, folder: str) -> None:
    spark = (
        SparkSession.builder.master(master)
        .appName("standalone")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.log.level", "ERROR")
        .config("spark.python.daemon.module", "kafka_sink.daemon")
        .config("spark.executor.extraJavaOptions", os.environ.get(SPARK_VARIABLE, ""))
        # Tasks of a short job would all run on the executor that registers first.
        .config("spark.scheduler.minRegisteredResourcesRatio", "1.0")
        .config("spark.scheduler.maxRegisteredResourcesWaitingTime", "60s")
        # However quick the other tasks were.
        .config("spark.speculation", "true")
        .config("spark.speculation.interval", "50ms")
        .config("spark.speculation.multiplier", "0.1")
        .config("spark.speculation.minTaskRuntime", "50ms")
        .config("spark.speculation.efficiency.enabled", "false")
        .config("spark.speculation.quantile", _NEVER)
        .getOrCreate()
    )
    options = json.loads(sys.stdin.readline())
    # This runs first: a worker that has run another task has imported that task's modules.
    seen = spark.range(0, 4, 1, 4).mapInArrow(look, "seen string").collect()
    numbers = spark.range(0, NUMBERS, 1, NUMBERS_TASKS).selectExpr("cast(id AS string) AS value")
    _write(numbers.mapInArrow(tell_executor, "key string, value string"), options["numbers"])
    # Each stage looks it up when it starts.
    spark.sparkContext._jsc.sc().conf().set("spark.speculation.quantile", _AFTER_A_HALF)  # type: ignore[attr-defined]
    rows = spark.range(0, ROWS, 1, TASKS).selectExpr("lpad(id, 50, '0') value")
    _write(rows.mapInArrow(hangs_at_first(Path(folder) / "go"), "value string"), options["speculated"])
    jvm = spark.sparkContext._gateway.proc.pid  # type: ignore[union-attr]
    draft = Path(folder) / "draft"
    draft.write_text(json.dumps({"jvm": jvm, "workers": [json.loads(row.seen) for row in seen]}))
    draft.rename(Path(folder) / "done")
    sys.stdin.read()


def _write(frame: Any, options: dict[str, str]) -> None:
    frame.write.format("kafka-chunked").mode("append").options(**options).save()


if __name__ == "__main__":
    main(*sys.argv[1:])
