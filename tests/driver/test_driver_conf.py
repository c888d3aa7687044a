"""How many tasks run at once, from Spark's settings."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kafka_sink.driver.driver_conf import UNKNOWN, spark_conf, tasks_of


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


def test_sparks_configuration_is_read_as_spark_reads_it(tmp_path: Path) -> None:
    (tmp_path / "spark-defaults.conf").write_text(
        "# a comment\n\nspark.driver.host  from.defaults\nspark.kafka-chunked.coordinator.port=7\n"
        "spark.kafka-chunked.coordinator.enabled : false\nspark.hadoop.secret hidden\n"
    )
    of_file = {
        "spark.driver.host": "from.defaults",
        "spark.kafka-chunked.coordinator.port": "7",
        "spark.kafka-chunked.coordinator.enabled": "false",
    }
    environ = {"SPARK_CONF_DIR": str(tmp_path)}
    assert spark_conf(["java"], environ) == of_file
    (tmp_path / "conf").mkdir()
    other = tmp_path / "other.properties"
    other.write_text("spark.driver.bindAddress=0.0.0.0\n")
    named = ["java", "--properties-file", str(other)]
    assert spark_conf(named, environ) == {"spark.driver.bindAddress": "0.0.0.0"}
    given = ["java", "-Dspark.driver.host=a", "-Dother=b", "X", "--conf", "spark.driver.host=c", "--conf=x=y"]
    assert spark_conf(given, environ) == {**of_file, "spark.driver.host": "c"}
    assert spark_conf([], {"SPARK_HOME": "/nowhere"}) == {}
