"""How many tasks run at once, from Spark's settings."""

from __future__ import annotations

import os

import pytest

from kafka_sink.driver.driver_conf import UNKNOWN, tasks_of


@pytest.mark.parametrize(
    ("conf", "expected"),
    [
        ({"spark.master": "local"}, 1),
        ({"spark.master": "local[3]"}, 3),
        ({"spark.master": "local[3,4]"}, 3),
        ({"spark.master": "local[*]"}, os.cpu_count()),
        ({"spark.master": "spark://h:7077"}, UNKNOWN),
        ({"spark.master": "spark://h:7077", "spark.cores.max": "12"}, 12),
        ({"spark.master": "yarn", "spark.executor.instances": "5", "spark.executor.cores": "4"}, 20),
        ({"spark.master": "yarn", "spark.executor.instances": "5"}, 5),
        ({"spark.master": "k8s://x", "spark.dynamicAllocation.maxExecutors": "3", "spark.task.cpus": "2"}, 1),
        ({"spark.cores.max": "nonsense"}, UNKNOWN),
        ({}, UNKNOWN),
    ],
)
def test_tasks_of_a_configuration(conf: dict[str, str], expected: int) -> None:
    assert tasks_of(conf) == expected
