"""A run under the other allocation strategy is one: in this process, in subprocesses, in Spark's workers."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from kafka_sink.memory.allocator import WorkerPools
from tests.support.strategy import forced

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

FULL = {"incremental": False, "full": True}
ASK = """
from kafka_sink.memory.allocator import WorkerPools
print(WorkerPools(lambda: 0.0).allocator("incremental", 1 << 20, 1024).full)
"""


def test_this_process_obeys_the_fixture(allocation_strategy: str) -> None:
    allocator = WorkerPools(lambda: 0.0).allocator("incremental", 1 << 20, 1024)
    assert allocator.full == FULL[allocation_strategy]


@pytest.mark.parametrize("strategy", ["incremental", "full"])
def test_subprocesses_obey_the_variable(project_environment: dict[str, str], strategy: str) -> None:
    environ = {**project_environment, forced.VARIABLE: strategy}
    done = subprocess.run(
        [sys.executable, "-c", ASK], env=environ, capture_output=True, text=True, check=True, timeout=240
    )
    assert done.stdout.strip() == str(FULL[strategy])


def test_sparks_workers_obey_the_command_line(spark: SparkSession, request: pytest.FixtureRequest) -> None:
    chosen = request.config.getoption("--allocation-strategy") or "incremental"

    def ask(_: int) -> bool:
        pools = WorkerPools(lambda: 0.0)
        return pools.allocator("incremental", 1 << 20, 1024).full

    assert spark.sparkContext.parallelize([0], 1).map(ask).collect() == [FULL[chosen]]
