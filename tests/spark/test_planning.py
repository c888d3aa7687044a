"""Planning a write, on the driver."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql.datasource import CaseInsensitiveDict
from pyspark.sql.types import StructType

from kafka_sink.clock import TOPIC_RECHECK_S
from kafka_sink.errors import AuthenticationError, BrokersUnreachableError, ConfigurationError
from kafka_sink.rows.column_plan import ColumnPlan
from kafka_sink.spark import planning
from kafka_sink.spark.datasource import KafkaChunkedDataSource
from kafka_sink.spark.write import PlannedWrite
from tests.support.fake_broker import METADATA, FakeCluster
from tests.support.lookups import options as asking

SCHEMA = StructType().add("value", "binary")


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
        source = KafkaChunkedDataSource({**options, "checkpointLocation": "/checkpoint"})
        source.streamWriter(schema, False)
    assert capsys.readouterr().err.count(ignored) == 1
    KafkaChunkedDataSource(options).writer(schema, False)
    assert capsys.readouterr().err.count(ignored) == 1


def test_sail_hands_over_an_arrow_schema(options: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    """Catches: "'Schema' object has no attribute 'fields'", and exactly-once that fails in tasks only."""
    schema = pa.schema([("extra", pa.int64()), ("value", pa.string())])
    writer = KafkaChunkedDataSource(options).writer(schema, False)
    assert writer.planned.plan == ColumnPlan(value=1, topic="t")
    once = KafkaChunkedDataSource({**options, "delivery.guarantee": "exactly-once"})
    with pytest.raises(ConfigurationError, match="needs Spark"):
        once.writer(schema, False)
    assert capsys.readouterr().err.count("needs Spark") == 1, "the error is logged once"


def test_the_tasks_and_the_commits_of_a_query_use_one_name(options: dict[str, str]) -> None:
    """Catches: Spark plans a stream again to commit it, so the commit named a write that no task had."""

    def planned(**more: str) -> PlannedWrite:
        source = KafkaChunkedDataSource(CaseInsensitiveDict(options | more))
        return source.streamWriter(SCHEMA, overwrite=False).planned

    assert planned(checkpointLocation="/c").name == planned(checkpointLocation="/c").name
    assert planned(checkpointLocation="/c").name != planned(checkpointLocation="/d").name
    assert planned().name != planned().name, "two queries without this option are not mixed up"


def test_unnamed_writes_show_separate_waits(options: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: the live view showed one wait where two jobs waited."""
    waiting: list[str] = []

    def waits(_options: object, write: str, *_: object) -> AbstractContextManager[None]:
        waiting.append(write)
        return nullcontext()

    monkeypatch.setattr(planning, "DriverWaiting", waits)
    names = [planning.plan(options, SCHEMA).name for _ in range(2)]
    assert waiting == names
    assert len(set(waiting)) == 2


def test_a_stream_checks_once_a_minute_and_another_login_at_once(application: Path) -> None:
    with FakeCluster({"t": 1}) as cluster:
        given = asking(cluster.bootstrap_servers, "t")

        def asks(is_repeated: bool = True) -> bool:
            before = len(cluster.received(METADATA))
            planning.looked_up(given, is_repeated=is_repeated)
            return len(cluster.received(METADATA)) > before

        assert [asks(), asks(), asks()] == [True, False, False]
        assert asks(is_repeated=False), "a batch job looks each time"
        pass_time(application)
        assert [asks(), asks()] == [True, False]
        login = {"kafka_security_protocol": "SASL_PLAINTEXT", "kafka_sasl_mechanism": "PLAIN"}
        login |= {"kafka_sasl_username": "u", "kafka_sasl_password": "p"}
        with pytest.raises(AuthenticationError, match="does not offer SASL"):
            planning.looked_up(asking(cluster.bootstrap_servers, "t", **login), is_repeated=True)


def pass_time(application: Path) -> None:
    """After it, what was looked up is asked for again."""
    for marker in application.iterdir():
        os.utime(marker, (time.time(), time.time() - TOPIC_RECHECK_S - 1))


def test_a_stream_that_was_connected_waits_for_brokers_that_restart_and_a_batch_job_does_not(
    application: Path,
) -> None:
    with FakeCluster({"t": 1}) as cluster:
        given = asking(cluster.bootstrap_servers, "t")
        planning.looked_up(given, is_repeated=True)
        pass_time(application)
        cluster.stop(0)
        with pytest.raises(BrokersUnreachableError):
            planning.looked_up(given, is_repeated=False, connect_bound_ms=300.0)
        later = threading.Timer(1.0, cluster.start, [0])
        later.start()
        planning.looked_up(given, is_repeated=True, connect_bound_ms=300.0)
        later.join()


@pytest.mark.usefixtures("application")
def test_a_stream_checks_again_after_an_error() -> None:
    given = asking("127.0.0.1:1", "t", kafka_max_block_ms="50")
    for _ in range(2):
        with pytest.raises(BrokersUnreachableError):
            planning.looked_up(given, is_repeated=True)
