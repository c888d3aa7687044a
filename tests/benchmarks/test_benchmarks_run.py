"""Each benchmark runs on tiny input; nothing is timed here.

They run in this process, on the Spark and the brokers that all tests share. One is run from the command line.
Those that take longest run in ``make smoke`` only; the others use the same helpers.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from benchmarks.__main__ import BENCHMARKS
from local_kafka import LocalBroker
from tests.support.commands import run as run_command
from tests.support.effort import EFFORT
from tests.support.lent_spark import lent

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

FROM_COMMAND_LINE = ("coordinator",)
ON_ONE_BROKER = ("mixed_memory", "partition_growth", "many_topics", "arrow_clients", "arrow_profile")
ON_SPARK = (
    *("many_partitions", "slow_brokers", "throughput", "throughput_shapes", "value_sizes", "streaming"),
    "formats",
)
ON_SPARK_AND_THREE_BROKERS = ("frozen_broker", "muted_together", "exactly_once")
# Their brokers have listeners and certificates of their own.
NOT_ON_OURS = ("throughput_shapes",)

LONGEST = (
    *(
        "arrow_clients",
        "arrow_profile",
        "exactly_once",
        "frozen_broker",
        "many_partitions",
        "many_topics",
        "muted_together",
    ),
    *("formats", "slow_brokers", "streaming", "throughput", "throughput_shapes", "value_sizes"),
)

Run = Callable[..., None]


def each(names: tuple[str, ...]) -> pytest.MarkDecorator:
    longest = pytest.mark.skipif(EFFORT <= 1, reason="make smoke runs it")
    marked = [pytest.param(name, marks=[longest] if name in LONGEST else []) for name in names]
    return pytest.mark.parametrize("name", marked)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, temporary_folder: Callable[[str | None], None]) -> Run:
    """``run(name, broker, spark)`` is ``python -m benchmarks.<name> --smoke`` on what is lent."""

    def run_here(name: str, broker: LocalBroker | None = None, spark: SparkSession | None = None) -> None:
        module = importlib.import_module(f"benchmarks.{name}")
        monkeypatch.setattr(sys, "argv", [module.__name__, "--smoke"])
        # Benchmarks may move it to memory.
        temporary_folder(None)
        if broker is not None:
            monkeypatch.setattr(module, "LocalBroker", lambda *_, **__: contextlib.nullcontext(broker))
        if spark is not None:
            local = SimpleNamespace(url="local[2]")
            monkeypatch.setattr(
                module, "StandaloneCluster", lambda *_, **__: contextlib.nullcontext(local), raising=False
            )
        with contextlib.nullcontext() if spark is None else lent(spark):
            assert module.main() in (None, 0)

    return run_here


def test_every_benchmark_is_run() -> None:
    groups = (FROM_COMMAND_LINE, ON_ONE_BROKER, ON_SPARK, ON_SPARK_AND_THREE_BROKERS)
    assert sorted(name for names in groups for name in names) == sorted(BENCHMARKS)


@pytest.mark.parametrize("name", FROM_COMMAND_LINE)
def test_benchmark_runs_from_the_command_line(name: str, project_environment: dict[str, str]) -> None:
    run_command([sys.executable, "-m", "benchmarks", name, "--smoke"], project_environment)


@each(ON_ONE_BROKER)
def test_benchmark_runs_on_a_broker(name: str, run: Run, broker: LocalBroker) -> None:
    run(name, broker)


@each(ON_SPARK)
def test_benchmark_runs_on_spark(name: str, run: Run, broker: LocalBroker, spark: SparkSession) -> None:
    run(name, None if name in NOT_ON_OURS else broker, spark)


@each(ON_SPARK_AND_THREE_BROKERS)
def test_benchmark_runs_on_spark_and_three_brokers(
    name: str, run: Run, cluster3: LocalBroker, spark: SparkSession
) -> None:
    run(name, cluster3, spark)
