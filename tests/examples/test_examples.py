"""Every example runs, and what it claims is looked up in Kafka.

Two run as their texts say, with ``python`` and with ``spark-submit``; the others in this process, on the
Spark that all tests share.
"""

from __future__ import annotations

import runpy
import subprocess
import sys
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from confluent_kafka import Consumer, Message, TopicPartition

from kafka_sink.local_broker import LocalBroker
from tests.support.lent_spark import lent

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"


def run(command: list[str], environ: dict[str, str], folder: Path) -> str:
    """The command in a process of its own; what it printed."""
    done = subprocess.run(
        command, env=environ, cwd=folder, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def read_topic(broker: LocalBroker, topic: str) -> list[Message]:
    consumer = Consumer({"bootstrap.servers": broker.bootstrap_servers, "group.id": topic, "log_level": 3})
    try:
        partitions = consumer.list_topics(topic, timeout=10).topics[topic].partitions
        remaining = sum(
            consumer.get_watermark_offsets(TopicPartition(topic, number), timeout=10)[1]
            for number in partitions
        )
        consumer.assign([TopicPartition(topic, number, 0) for number in partitions])
        messages: list[Message] = []
        while len(messages) < remaining:
            batch = consumer.consume(10_000, timeout=20)
            assert batch, f"{len(messages)} of {remaining} read"
            assert all(message.error() is None for message in batch)
            messages += batch
        return messages
    finally:
        consumer.close()


@pytest.fixture
def topic() -> str:
    return f"example-{uuid.uuid4().hex[:8]}"


def test_flights_arrive_complete(
    broker: LocalBroker, project_environment: dict[str, str], tmp_path: Path, topic: str
) -> None:
    command = [sys.executable, str(EXAMPLES / "flights.py"), "--topic", topic]
    printed = run([*command, "--bootstrap-servers", broker.bootstrap_servers], project_environment, tmp_path)
    assert "Every row arrived exactly once, unchanged, in its key's order." in printed
    assert "0 missing, 0 doubled, 0 changed" in printed
    assert "all    336,776    5,725" in printed


def run_here(script: str, arguments: list[str], spark: SparkSession, patch: pytest.MonkeyPatch) -> None:
    path = str(EXAMPLES / script)
    patch.setattr(sys, "argv", [path, *arguments])
    with lent(spark):
        runpy.run_path(path, run_name="__main__")


def test_batch(broker: LocalBroker, spark: SparkSession, monkeypatch: pytest.MonkeyPatch, topic: str) -> None:
    run_here("batch.py", [broker.bootstrap_servers, topic], spark, monkeypatch)
    messages = read_topic(broker, topic)
    assert len(messages) == 10_000
    assert {message.key() for message in messages} == {str(n).encode() for n in range(100)}
    assert len({message.value() for message in messages}) == 10_000


def test_streaming_goes_on_where_it_stopped(
    broker: LocalBroker, spark: SparkSession, monkeypatch: pytest.MonkeyPatch, topic: str
) -> None:
    run_here("streaming.py", [broker.bootstrap_servers, topic], spark, monkeypatch)
    values = [message.value() for message in read_topic(broker, topic)]
    assert len(values) == len(set(values)) == 2_500


def test_spark_submit(
    broker: LocalBroker, project_environment: dict[str, str], tmp_path: Path, topic: str
) -> None:
    import pyspark

    submit = Path(pyspark.__file__).parent / "bin" / "spark-submit"
    command = [str(submit), "--master", "local[2]", str(EXAMPLES / "spark_submit_job.py")]
    run([*command, broker.bootstrap_servers, topic], project_environment, tmp_path)
    messages = read_topic(broker, topic)
    assert len({message.value() for message in messages}) == len(messages) == 50_000
    assert len({message.key() for message in messages}) == 500


@pytest.mark.parametrize("script", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_each_example_says_how_to_run_it(script: Path) -> None:
    assert f"examples/{script.name}" in script.read_text(encoding="utf-8").split('"""')[1]
