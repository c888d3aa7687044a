"""The commit messages of tasks that finished, for a job of mapInArrow that fails: Spark returns no row of it.

They reach the driver by one accumulator of the application. Spark adds what the first successful attempt of
each task says, and nothing of others. An accumulator stays registered for the life of the application, so a
write has none of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyspark.accumulators import AccumulatorParam

from kafka_sink.spark.writer import TaskCommitted

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.accumulators import Accumulator

# The write's name and the task's message.
Messages = list[tuple[str, TaskCommitted]]


@dataclass(frozen=True)
class FinishedTasks:
    """Of one write. ``accumulator`` takes the messages in tasks."""

    accumulator: Accumulator[Messages]
    _arrived: Sequence[TaskCommitted]

    def messages(self) -> list[TaskCommitted]:
        """The messages of all tasks that finished before their job failed."""
        return list(self._arrived)


@contextmanager
def of_write(name: str, context: SparkContext) -> Iterator[FinishedTasks]:
    """Within the block, messages of this write are kept."""
    arrived: list[TaskCommitted] = []
    _arriving[name] = arrived
    try:
        yield FinishedTasks(_accumulator_of(context), arrived)
    finally:
        del _arriving[name]


# By the name of each write that runs. PySpark's thread for accumulators appends.
_arriving: dict[str, list[TaskCommitted]] = {}
_lock = threading.Lock()  # guards the one below
_accumulator: tuple[SparkContext, Accumulator[Messages]] | None = None


def _accumulator_of(context: SparkContext) -> Accumulator[Messages]:
    global _accumulator
    with _lock:
        if _accumulator is None or _accumulator[0] is not context:
            _accumulator = context, context.accumulator([], _OnDriver())
        return _accumulator[1]


class _InTask(AccumulatorParam[Messages]):
    def zero(self, value: Messages) -> Messages:
        return []

    def addInPlace(self, value1: Messages, value2: Messages) -> Messages:  # noqa: N802 - PySpark's name
        return value1 + value2


class _OnDriver(_InTask):
    """Its value stays empty. In tasks it is an ``_InTask``."""

    def addInPlace(self, value1: Messages, value2: Messages) -> Messages:  # noqa: N802 - PySpark's name
        for name, message in value2:
            arrived = _arriving.get(name)
            if arrived is not None:
                arrived.append(message)
        return value1

    def __reduce__(self) -> tuple[type[_InTask], tuple[()]]:
        return _InTask, ()
