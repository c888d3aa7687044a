"""``kafka_sink.write`` and ``kafka_sink.foreach_batch``: the sink for every PySpark since 3.5, with
mapInArrow.

Planning and commit are the same as for the data source, and run in the driver's own Python. Each task returns
its commit message as its only row.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import pyarrow as pa
from pyspark import SparkContext, TaskContext
from pyspark.accumulators import Accumulator, AccumulatorParam
from pyspark.sql import DataFrame
from pyspark.sql.pandas.utils import require_minimum_pandas_version

from kafka_sink import spark_application
from kafka_sink.errors import ConfigurationError
from kafka_sink.options import parse, texts
from kafka_sink.reports.delivery_report import WriteResult
from kafka_sink.spark.planning import plan
from kafka_sink.spark.short_tracebacks import short_tracebacks
from kafka_sink.spark.write import QUERY_ID, PlannedWrite, TaskCommitted
from kafka_sink.spark_application import SparkApplication

_MESSAGE = "message"
_SCHEMA = f"{_MESSAGE} binary"
_APP_ID, _VERSION = "txnappid", "txnversion"


class ForeachBatch:
    """The function that Spark calls with each micro-batch. With exactly-once its number is the version."""

    def __init__(self, given_options: Mapping[str, Any]) -> None:
        options = texts(given_options)
        given = {name.strip().lower() for name in options}
        if _VERSION in given:
            raise ConfigurationError(
                "Option 'txnVersion' cannot be set in foreach_batch: the batch's id is the version"
            )
        self._options = options
        # Check the options now, so that errors do not appear only in the first micro-batch.
        checked = parse({**options, _VERSION: "0"} if _APP_ID in given else options)
        self._is_named = checked.options.exactly_once
        self._has_name = _APP_ID in given

    def __call__(self, df: DataFrame, batch_id: int) -> None:
        _require_driver(df)
        query = df.sparkSession.sparkContext.getLocalProperty(QUERY_ID)
        if not query:
            raise ConfigurationError(
                "kafka_sink.foreach_batch is for writeStream.foreachBatch; elsewhere use kafka_sink.write"
            )
        options = dict(self._options)
        if self._is_named:
            options[_VERSION] = str(batch_id)
            if not self._has_name:
                options[_APP_ID] = query
        write(df, options, query=query, micro_batch=batch_id)


def write(
    df: DataFrame, options: Mapping[str, Any], query: str | None = None, micro_batch: int | None = None
) -> WriteResult:
    """See ``kafka_sink.write``."""
    _require_driver(df)
    if df.isStreaming:
        raise ConfigurationError(
            "kafka_sink.write does not accept a streaming DataFrame: use "
            "df.writeStream.foreachBatch(kafka_sink.foreach_batch(options))"
        )
    _require_pandas()
    context = df.sparkSession.sparkContext
    with spark_application.planning_for(application_of(context)):
        planned = replace(plan(texts(options), df.schema, query=query), micro_batch=micro_batch)
        return _run(df, planned, context)


def _run(df: DataFrame, planned: PlannedWrite, context: SparkContext) -> WriteResult:
    messages: list[TaskCommitted] | None = None
    with _finished_tasks(planned.name) as finished:
        try:
            task = _MapTask(planned, _accumulator_of(context))
            rows = df.mapInArrow(task, _SCHEMA).collect()
            if not rows:
                # Without a partition there is no task. Spark's own writes also run one task in this case.
                one_row = df.sparkSession.range(0, 1, 1, 1)
                rows = one_row.mapInArrow(replace(task, is_empty=True), _SCHEMA).collect()
            messages = [pickle.loads(row[0]) for row in rows]  # noqa: S301 - from this job's own tasks
            ended = planned.commit(messages)
        except BaseException:
            if messages is None:
                planned.abort(list(finished), has_all=False)
            else:
                planned.abort(messages)
            raise
    return WriteResult.of(ended.results, planned.options, already_written=ended.outcome == "skipped")


@dataclass
class _MapTask:
    """The function that runs in tasks. Its one row is the commit message. ``is_empty`` means without rows."""

    planned: PlannedWrite
    finished: Accumulator[_Messages]
    is_empty: bool = False

    def __post_init__(self) -> None:
        # PySpark shows this name in query plans.
        self.__name__ = "kafka_chunked"

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        written = short_tracebacks(self.planned.write)(iter(()) if self.is_empty else batches)
        self.finished.add([(self.planned.name, written)])
        message = pa.array([pickle.dumps(written)], pa.binary())
        yield pa.record_batch([message], names=[_MESSAGE])


def _require_driver(df: DataFrame) -> None:
    """Raise ConfigurationError unless this is a DataFrame of Spark on the driver."""
    kind = type(df)
    if kind.__module__.startswith("pyspark.sql.connect"):
        raise ConfigurationError(
            "kafka_sink.write and foreach_batch plan and commit in the driver's own Python, and a client of "
            "Spark Connect is not that. With PySpark 4.0 or later on the server use "
            "df.write.format('kafka-chunked').mode('append') or df.writeStream.format('kafka-chunked'); with "
            "3.5, submit the program to the cluster"
        )
    if not isinstance(df, DataFrame):
        raise ConfigurationError(
            f"kafka_sink.write needs a DataFrame of Spark, not {kind.__module__}.{kind.__name__}; "
            "kafka_sink.write_arrow accepts Arrow data, and frames of Polars and pandas"
        )


def _require_pandas() -> None:
    try:
        require_minimum_pandas_version()
    except ImportError as error:
        raise ConfigurationError(
            "kafka_sink.write and foreach_batch need pandas on the driver, which PySpark's mapInArrow "
            f"imports ({error}): {sys.executable} -m pip install 'pandas>=2,<3'"
        ) from None


def application_of(context: SparkContext) -> SparkApplication:
    """The application. Spark's workers find the same facts in their environment."""
    # The JVM is a child of this process, unless spark-submit started this Python. Spark's scripts exec the
    # JVM, so it has their pid.
    started = getattr(context._gateway, "proc", None)
    pid = None if started is None else started.pid
    return SparkApplication(_local_dirs(context), pid, dict(context.getConf().getAll()))


def _local_dirs(context: SparkContext) -> str:
    """SPARK_LOCAL_DIRS of Spark's workers on the driver's host, for which Spark has no public API.

    It is read from a field and not through a method: before calling a method, Py4J inspects all methods of
    the class, and it loses its connection if a class in one of the signatures is missing. PySpark 4.3.0 lacks
    one that SparkEnv mentions.
    """
    jvm: Any = context._jvm
    try:
        field = jvm.java.lang.Class.forName("org.apache.spark.SparkEnv").getDeclaredField("blockManager")
        field.setAccessible(True)
        manager = field.get(context._jsc.sc().env())
        return ",".join(manager.diskBlockManager().localDirsString())
    except Exception:  # noqa: BLE001 - another folder of this application: only workers do not look there
        return str(context._temp_dir)


# -- commit messages of finished tasks, for a job that fails: Spark then returns none of its rows ------------
#
# They reach the driver through one accumulator of the application. Spark adds the values of the first
# successful attempt of each task, and ignores other attempts. An accumulator stays registered for the life of
# the application, so a write cannot have its own.

# Pairs of a write's name and a task's message.
_Messages = list[tuple[str, TaskCommitted]]


@contextmanager
def _finished_tasks(name: str) -> Iterator[Sequence[TaskCommitted]]:
    arrived: list[TaskCommitted] = []
    _arriving[name] = arrived
    try:
        yield arrived
    finally:
        del _arriving[name]


# The lists of the running writes, by write name. PySpark's accumulator thread appends to a list, and the
# thread that writes adds and removes its own list. Each step is one dictionary or list operation, so no lock
# is needed.
_arriving: dict[str, list[TaskCommitted]] = {}


@lru_cache(maxsize=1)
def _accumulator_of(context: SparkContext) -> Accumulator[_Messages]:
    # Two threads may each create one at first, and both work.
    return context.accumulator([], _Arrivals())


class _Arrivals(AccumulatorParam[_Messages]):
    """In tasks, the value is a list of messages. On the driver they go to their writes, and it is empty."""

    def zero(self, value: _Messages) -> _Messages:
        return []

    def addInPlace(self, value1: _Messages, value2: _Messages) -> _Messages:  # noqa: N802 - PySpark's name
        if TaskContext.get() is not None:
            return value1 + value2
        for name, message in value2:
            if name in _arriving:
                _arriving[name].append(message)
        return value1
