"""The topic that the options name, through real Spark: created or refused before a task starts."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from local_kafka import LocalBroker
from tests.support.topics import read_topic
from tests.support.waiting import until

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_numbers = itertools.count()
CREATE = {"topic.create": "true", "topic.partitions": "6", "topic.replication.factor": "1"}
REFUSE = {"kafka.allow.auto.create.topics": "false", "kafka.max.block.ms": "1500"}


@pytest.fixture
def topic() -> str:
    return f"made-{next(_numbers)}"


def stream(spark: SparkSession, broker: LocalBroker, topic: str, given: dict[str, str], folder: Path) -> Any:
    rows = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 100).load()
    writer = (
        rows.selectExpr("cast(value AS string) AS key", "cast(value AS string) AS value")
        .writeStream.format("kafka-chunked")
        .options(topic=topic, checkpointLocation=str(folder / topic), **given)
    )
    return writer.option("kafka.bootstrap.servers", broker.bootstrap_servers).start()


def test_stream_creates_it(spark: SparkSession, broker: LocalBroker, topic: str, tmp_path: Path) -> None:
    query = stream(spark, broker, topic, CREATE, tmp_path)
    try:
        until(lambda: not query.isActive or (query.lastProgress or {}).get("batchId", 0) >= 2, "progress", 90)
    finally:
        query.stop()
    rows = read_topic(broker, topic)
    assert len(rows) >= 200
    assert {row.partition for row in rows} == set(range(6))


def test_stream_fails_at_planning(
    spark: SparkSession, broker: LocalBroker, topic: str, tmp_path: Path
) -> None:
    query = stream(spark, broker, topic, REFUSE, tmp_path)
    with pytest.raises(Exception, match=f"MissingTopicError: Option 'topic': there is no topic '{topic}'"):
        query.awaitTermination(60)
