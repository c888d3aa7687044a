"""Planning a write, on the driver."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext

import pyarrow as pa
import pytest
from pyspark.sql.datasource import CaseInsensitiveDict
from pyspark.sql.types import BinaryType, StructField, StructType

from kafka_sink.errors import ConfigurationError
from kafka_sink.rows.column_plan import ColumnPlan
from kafka_sink.spark import datasource, planning
from kafka_sink.spark.datasource import KafkaChunkedDataSource
from kafka_sink.spark.write import PlannedWrite
from tests.support.fake_broker import FakeCluster

PLAN = ColumnPlan(value=1, topic="t")


pytestmark = pytest.mark.usefixtures("bare_logging")


@pytest.fixture
def options() -> Iterator[dict[str, str]]:
    """For planning: of brokers that have the topic."""
    with FakeCluster({"t": 1}) as cluster:
        servers = {"kafka.bootstrap.servers": cluster.bootstrap_servers}
        yield {**servers, "topic": "t", "coordinator.enabled": "false"}


@pytest.mark.usefixtures("application")
def test_planning_warns_of_columns_that_it_ignores_once_for_a_query(
    options: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches: rows without keys, because the column is called 'Key'."""
    ignored = "the column 'Key' is ignored"
    schema = StructType().add("value", "string").add("Key", "string")
    for _ in range(2):
        source = datasource.KafkaChunkedDataSource({**options, "checkpointLocation": "/checkpoint"})
        source.streamWriter(schema, False)
    assert capsys.readouterr().err.count(ignored) == 1
    datasource.KafkaChunkedDataSource(options).writer(schema, False)
    assert capsys.readouterr().err.count(ignored) == 1


def test_sail_hands_over_an_arrow_schema(options: dict[str, str]) -> None:
    """Catches: "'Schema' object has no attribute 'fields'", and exactly-once that fails in tasks only."""
    schema = pa.schema([("extra", pa.int64()), ("value", pa.string())])
    writer = datasource.KafkaChunkedDataSource(options).writer(schema, False)
    assert writer.planned.plan == PLAN
    once = datasource.KafkaChunkedDataSource({**options, "delivery.guarantee": "exactly-once"})
    with pytest.raises(ConfigurationError, match="needs Spark"):
        once.writer(schema, False)


def test_the_tasks_and_the_commits_of_a_query_use_one_name(options: dict[str, str]) -> None:
    """Catches: Spark plans a stream again to commit it, so the commit named a write that no task had."""
    schema = StructType([StructField("value", BinaryType())])

    def planned(**more: str) -> PlannedWrite:
        source = KafkaChunkedDataSource(CaseInsensitiveDict(options | more))
        return source.streamWriter(schema, overwrite=False).planned

    assert planned(checkpointLocation="/c").name == planned(checkpointLocation="/c").name
    assert planned(checkpointLocation="/c").name != planned(checkpointLocation="/d").name
    assert planned().name != planned().name, "two queries without this option are not mixed up"


def test_what_two_writes_without_a_name_wait_for_is_told_apart(
    options: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches: the live view showed one wait where two jobs waited."""
    waiting: list[str] = []

    def waits(_options: object, write: str, *_: object) -> AbstractContextManager[None]:
        waiting.append(write)
        return nullcontext()

    monkeypatch.setattr(planning, "DriverWaiting", waits)
    schema = StructType([StructField("value", BinaryType())])
    names = [planning.plan(options, schema).name for _ in range(2)]
    assert waiting == names
    assert len(set(waiting)) == 2
