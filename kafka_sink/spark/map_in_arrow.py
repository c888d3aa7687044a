"""``kafka_sink.write`` and ``kafka_sink.foreach_batch``: the sink in every PySpark since 3.5, by mapInArrow.

Planning and commit are the data source's, in the driver's own Python. Each task returns its commit message as
its only row.
"""

from __future__ import annotations

import pickle
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pyspark import TaskContext
from pyspark.accumulators import AccumulatorParam

from kafka_sink import spark_application
from kafka_sink.errors import ConfigurationError
from kafka_sink.options import parse, texts
from kafka_sink.reports.delivery_report import WriteResult
from kafka_sink.spark.planning import plan
from kafka_sink.spark.short_tracebacks import short_tracebacks
from kafka_sink.spark.write import PlannedWrite, TaskCommitted
from kafka_sink.spark_application import SparkApplication

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark import SparkContext
    from pyspark.accumulators import Accumulator
    from pyspark.sql import DataFrame

_MESSAGE = "message"
_SCHEMA = f"{_MESSAGE} binary"
_QUERY_ID = "sql.streaming.queryId"
_APP_ID, _VERSION = "txnappid", "txnversion"


class ForeachBatch:
    """What Spark calls with each micro-batch. With exactly-once, the micro-batch's number is the version."""

    def __init__(self, given_options: Mapping[str, Any]) -> None:
        options = texts(given_options)
        given = {name.strip().lower() for name in options}
        if _VERSION in given:
            raise ConfigurationError(
                "Option 'txnVersion' is not for foreach_batch: the batch's id is the version"
            )
        self._options = options
        # What is wrong with the options should not wait for the first batch.
        checked = parse({**options, _VERSION: "0"} if _APP_ID in given else options)
        self._is_named = checked.options.exactly_once
        self._has_name = _APP_ID in given

    def __call__(self, df: DataFrame, batch_id: int) -> None:
        _require_driver(df)
        query = df.sparkSession.sparkContext.getLocalProperty(_QUERY_ID)
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
    """As ``kafka_sink.write``."""
    _require_driver(df)
    if df.isStreaming:
        raise ConfigurationError(
            "kafka_sink.write takes no streaming DataFrame: use "
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
                # No partition, so no task. Spark's own writes run one then, too.
                one = df.sparkSession.range(0, 1, 1, 1)
                rows = one.mapInArrow(replace(task, is_empty=True), _SCHEMA).collect()
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
    """What runs in tasks. Its one row is the commit message. ``is_empty``: without rows."""

    planned: PlannedWrite
    finished: Accumulator[_Messages]
    is_empty: bool = False

    def __post_init__(self) -> None:
        # PySpark shows it in plans.
        self.__name__ = "kafka_chunked"

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import pyarrow

        written = short_tracebacks(self.planned.write)(iter(()) if self.is_empty else batches)
        self.finished.add([(self.planned.name, written)])
        message = pyarrow.array([pickle.dumps(written)], pyarrow.binary())
        yield pyarrow.record_batch([message], names=[_MESSAGE])


def _require_driver(df: DataFrame) -> None:
    """Raise ConfigurationError for what is no DataFrame of Spark, and for one of Spark Connect: its client is
    not in the application."""
    from pyspark.sql import DataFrame

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
            f"kafka_sink.write takes a DataFrame of Spark, not {kind.__module__}.{kind.__name__}; "
            "kafka_sink.write_arrow takes Arrow data, and frames of Polars and pandas"
        )


def _require_pandas() -> None:
    """Raise ConfigurationError without the pandas that PySpark's ``mapInArrow`` imports, in every version."""
    from pyspark.sql.pandas.utils import require_minimum_pandas_version

    try:
        require_minimum_pandas_version()
    except ImportError as error:
        raise ConfigurationError(
            "kafka_sink.write and foreach_batch need pandas on the driver, which PySpark's mapInArrow "
            f"imports ({error}): {sys.executable} -m pip install 'pandas>=2,<3'"
        ) from None


def application_of(context: SparkContext) -> SparkApplication:
    """What Spark's workers find in their environment."""
    # The JVM is its child, unless spark-submit started this Python. Spark's scripts become the JVM, under
    # their pid.
    started = getattr(context._gateway, "proc", None)
    pid = None if started is None else started.pid
    return SparkApplication(_local_dirs(context), pid, dict(context.getConf().getAll()))


def _local_dirs(context: SparkContext) -> str:
    """SPARK_LOCAL_DIRS of Spark's workers on the driver's host, which Spark keeps to itself.

    By a field, as Py4J looks at all methods of a class before it calls one, and loses its connection if a
    class in a signature is missing. PySpark 4.3.0 comes without one that SparkEnv names.
    """
    jvm: Any = context._jvm
    try:
        field = jvm.java.lang.Class.forName("org.apache.spark.SparkEnv").getDeclaredField("blockManager")
        field.setAccessible(True)
        manager = field.get(context._jsc.sc().env())
        return ",".join(manager.diskBlockManager().localDirsString())
    except Exception:  # noqa: BLE001 - another folder of this application: only workers do not look there
        return str(context._temp_dir)


# -- the commit messages of tasks that finished, for a job that fails: Spark returns no row of it ------------
#
# They reach the driver by one accumulator of the application. Spark adds what the first successful attempt of
# each task says, and nothing of others. An accumulator stays registered for the life of the application, so a
# write has none of its own.

# The write's name and the task's message.
_Messages = list[tuple[str, TaskCommitted]]


@contextmanager
def _finished_tasks(name: str) -> Iterator[Sequence[TaskCommitted]]:
    """Within the block, the messages of this write are kept in the list that it yields."""
    arrived: list[TaskCommitted] = []
    _arriving[name] = arrived
    try:
        yield arrived
    finally:
        del _arriving[name]


# By the name of each write that runs. PySpark's thread for accumulators appends.
_arriving: dict[str, list[TaskCommitted]] = {}
_lock = threading.Lock()  # guards the one below
_accumulator: tuple[SparkContext, Accumulator[_Messages]] | None = None


def _accumulator_of(context: SparkContext) -> Accumulator[_Messages]:
    global _accumulator
    with _lock:
        if _accumulator is None or _accumulator[0] is not context:
            _accumulator = context, context.accumulator([], _Arrivals())
        return _accumulator[1]


class _Arrivals(AccumulatorParam[_Messages]):
    """In tasks a list of messages. On the driver it hands them to their writes, and stays empty."""

    def zero(self, value: _Messages) -> _Messages:
        return []

    def addInPlace(self, value1: _Messages, value2: _Messages) -> _Messages:  # noqa: N802 - PySpark's name
        if TaskContext.get() is not None:
            return value1 + value2
        for name, message in value2:
            if name in _arriving:
                _arriving[name].append(message)
        return value1
