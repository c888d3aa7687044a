"""Spark Connect: a client without a JVM writes through a server that runs in the tests' Spark."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from local_kafka import LocalBroker
from tests.support.commands import run
from tests.support.ports import free_port
from tests.support.topics import read_topic

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROOT = Path(__file__).resolve().parents[2]
CLIENT = ROOT / "tests" / "support" / "connect_job.py"
EXAMPLE = ROOT / "examples" / "spark_connect.py"


@pytest.fixture(scope="module")
def remote(spark: SparkSession) -> Iterator[str]:
    """The address of a Spark Connect server, started as the setting ``spark.plugins`` would."""
    port = str(free_port())
    jvm, context = spark._jvm, spark.sparkContext._jsc.sc()
    assert jvm is not None
    context.conf().set("spark.connect.grpc.binding.port", port)
    server = jvm.org.apache.spark.sql.connect.SparkConnectPlugin().driverPlugin()
    server.init(context, None)
    yield f"sc://127.0.0.1:{port}"
    server.shutdown()


def test_batches_and_streams_arrive_with_and_without_coordinator_and_registration(
    remote: str, broker: LocalBroker, project_environment: dict[str, str], tmp_path: Path
) -> None:
    command = [sys.executable, CLIENT, remote, broker.bootstrap_servers, "connect", tmp_path]
    printed = run(command, project_environment).stdout
    numbers = [str(number).encode() for number in range(100)]
    for coordinator in ("true", "false"):
        rows = [row.value or b"" for row in read_topic(broker, f"connect-{coordinator}")]
        assert sorted(rows) == sorted([*numbers, *(b"stream-" + number for number in numbers)])
        reports = (tmp_path / f"report-{coordinator}").read_text().splitlines()
        assert [json.loads(line)["outcome"] for line in reports] == ["committed", "committed"]
    assert "kafka.linger.ms" in json.loads(printed.splitlines()[-1])["wrong"], "the nearest known option"


def test_the_example(remote: str, broker: LocalBroker, project_environment: dict[str, str]) -> None:
    topic = "connect-example"
    command = [sys.executable, EXAMPLE, broker.bootstrap_servers, topic, remote]
    printed = run(command, project_environment).stdout
    assert "1,000 rows of a stream" in printed
    rows = read_topic(broker, topic)
    assert len({row.value for row in rows}) == len(rows) == 11_000
    assert sum((row.value or b"").startswith(b"stream-") for row in rows) == 1_000
