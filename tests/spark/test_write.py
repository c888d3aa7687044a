"""A write's tasks and its commit, without Spark: a fake producer stands in for the real one."""

from __future__ import annotations

import logging
import pickle
import re
import socket
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext

import pyarrow as pa
import pytest
from pyspark.sql.datasource import CaseInsensitiveDict
from pyspark.sql.types import BinaryType, StructField, StructType

from kafka_sink.coordinator.address import CoordinatorLocation, PlannedCoordinator
from kafka_sink.driver import driver_log
from kafka_sink.errors import ConfigurationError, DeliveryError
from kafka_sink.model import PartitionResult, TaskResult
from kafka_sink.options import parse
from kafka_sink.rows.column_plan import ColumnPlan
from kafka_sink.spark import datasource, executor_connection, planning
from kafka_sink.spark.datasource import BatchWriter, KafkaChunkedDataSource, StreamWriter
from kafka_sink.spark.write import PlannedWrite, TaskCommitted, job_name
from kafka_sink.task import producer_cache
from kafka_sink.task.producer_cache import ProducerCache
from tests.support.fake_broker import FakeCluster
from tests.support.forked import in_a_fork
from tests.support.table_sink import FakeProducer, batch

PLAN = ColumnPlan(value=1, topic="t")


OPTIONS = parse({"kafka.bootstrap.servers": "h:1", "topic": "t"}).options


class WholeProducer(FakeProducer):
    """Has all that a task uses of a producer."""

    activity = None

    def abort(self, cause: Exception) -> None:
        raise cause

    def finish(self) -> TaskResult:
        return TaskResult(records=len(self.values))


pytestmark = pytest.mark.usefixtures("bare_logging")


@pytest.fixture
def options() -> Iterator[dict[str, str]]:
    """For planning: of brokers that have the topic."""
    with FakeCluster({"t": 1}) as cluster:
        servers = {"kafka.bootstrap.servers": cluster.bootstrap_servers}
        yield {**servers, "topic": "t", "coordinator.enabled": "false"}


@pytest.mark.skipif(not hasattr(socket, "TCP_QUICKACK"), reason="an option of Linux")
def test_a_task_acknowledges_its_rows_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: each task ended 40 ms late, because nothing called what acknowledges rows."""
    option = socket.IPPROTO_TCP, socket.TCP_QUICKACK
    acknowledges: list[bool] = []
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()),
        server.accept()[0] as worker,
    ):
        monkeypatch.setattr(executor_connection, "executor_socket", worker.fileno)
        monkeypatch.setattr(producer_cache, "task_producer", lambda *_, **__: nullcontext(WholeProducer()))
        worker.setsockopt(*option, 0)

        def batches() -> Iterator[pa.RecordBatch]:
            for _ in range(3):
                acknowledges.append(bool(worker.getsockopt(*option)))
                worker.setsockopt(*option, 0)
                yield batch("a")

        PlannedWrite(OPTIONS, PLAN).write(batches())
    assert acknowledges == [True] * 3


def test_a_fork_has_producers_of_its_own() -> None:
    """Catches: a wait for ever for a lock that was held at the fork."""
    cache = ProducerCache()
    with cache._lock:
        assert in_a_fork(lambda: cache.take(OPTIONS.for_tasks()).is_reusable)


RESULT = TaskResult(
    partitions=(PartitionResult("flights", 0, 5, 1, 300, ((0, 4),)),),
    records=5,
    batches=1,
    raw_bytes=500,
    sent_bytes=300,
    requests=1,
    elapsed_ms=20,
)


@pytest.mark.parametrize(
    "writer", [BatchWriter(PlannedWrite(OPTIONS, PLAN)), StreamWriter(PlannedWrite(OPTIONS, PLAN))]
)
def test_writers_and_messages_are_values(writer: BatchWriter | StreamWriter) -> None:
    assert pickle.loads(pickle.dumps(writer)).planned == writer.planned
    assert pickle.dumps(writer) == pickle.dumps(pickle.loads(pickle.dumps(writer)))
    assert pickle.loads(pickle.dumps(TaskCommitted(RESULT))) == TaskCommitted(RESULT)


def test_commit_says_what_was_written(capsys: pytest.CaptureFixture[str]) -> None:
    StreamWriter(PlannedWrite(OPTIONS, PLAN)).commit([TaskCommitted(RESULT)], 7)
    (line,) = capsys.readouterr().err.splitlines()
    assert (
        "INFO kafka_sink: kafka-chunked, micro-batch 7: 5 rows acknowledged in flights (1 partition)" in line
    )
    assert driver_log.LOGGER.handlers == []
    BatchWriter(PlannedWrite(OPTIONS, PLAN)).commit([])
    assert "kafka-chunked: 0 rows acknowledged by 0 tasks" in capsys.readouterr().err


def test_the_summary_can_be_switched_off(capsys: pytest.CaptureFixture[str]) -> None:
    quiet = parse({"kafka.bootstrap.servers": "h:1", "log.summary": "false"}).options
    BatchWriter(PlannedWrite(quiet, PLAN)).commit([TaskCommitted(RESULT)])
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("messages", [[None], [TaskCommitted(RESULT), None]])
def test_commit_without_every_message_raises(
    messages: list[TaskCommitted | None], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(
        DeliveryError, match=rf"^1 of {len(messages)} tasks did not report.*Trigger\.Continuous"
    ):
        StreamWriter(PlannedWrite(OPTIONS, PLAN)).commit(messages, 0)
    assert "ERROR kafka_sink" in capsys.readouterr().err


def test_abort_says_what_kafka_keeps(capsys: pytest.CaptureFixture[str]) -> None:
    BatchWriter(PlannedWrite(OPTIONS, PLAN)).abort([TaskCommitted(RESULT), None])
    line = capsys.readouterr().err
    assert "aborted, 1 of 2 tasks did not finish; Kafka keeps what others wrote: 5 rows" in line
    StreamWriter(PlannedWrite(OPTIONS, PLAN)).abort([None, None], 3)
    assert "micro-batch 3: aborted, 2 of 2 tasks did not finish. No task reported" in capsys.readouterr().err


@pytest.mark.usefixtures("application")
def test_abort_says_why_the_commit_before_it_failed(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches: a warning without the cause as the last line, below the commit's error."""
    write = PlannedWrite(OPTIONS, PLAN, name="query")
    with pytest.raises(DeliveryError):
        StreamWriter(write).commit([TaskCommitted(RESULT), None], 3)
    StreamWriter(write).abort([TaskCommitted(RESULT), None], 3)
    last = capsys.readouterr().err.splitlines()[-1]
    assert "ERROR kafka_sink: kafka-chunked, micro-batch 3: aborted, 1 of 2 tasks did not finish" in last
    assert last.endswith("Use Trigger.ProcessingTime or Trigger.AvailableNow.")


def test_warnings_of_a_task_have_time_level_and_host(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches: bare texts of many tasks in the stderr of an executor."""

    def work(*_: object, **__: object) -> TaskCommitted:
        driver_log.LOGGER.warning("a broker is slow")
        return TaskCommitted(RESULT)

    monkeypatch.setattr(PlannedWrite, "_write", work)
    PlannedWrite(OPTIONS, PLAN).write(iter(()))
    line = capsys.readouterr().err
    assert re.fullmatch(
        rf"\d\d/\d\d/\d\d [\d:]+ WARNING kafka_sink on {socket.gethostname()}: a broker is slow\n", line
    )


@pytest.mark.parametrize(("level", "expected"), [(logging.NOTSET, ["line"]), (logging.ERROR, [])])
def test_a_users_own_logging_is_left_alone(
    level: int, expected: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    lines: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    driver_log.LOGGER.addHandler(Keep())
    driver_log.LOGGER.setLevel(level)
    driver_log.report("line")
    assert lines == expected
    assert driver_log.LOGGER.level == level
    assert capsys.readouterr().err == ""


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


@pytest.mark.parametrize(
    ("of_driver", "of_location", "expected"),
    [
        ("[2001:db8::7]", "", "2001:db8::7"),
        ("driver.example", "", "driver.example"),
        ("driver.example", "127.0.0.1", "127.0.0.1"),
    ],
)
def test_tasks_find_the_coordinator_of_any_driver_host(
    of_driver: str, of_location: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches: brackets, which Spark writes around IPv6 addresses and sockets do not take."""

    class Context:
        @staticmethod
        def getLocalProperty(name: str) -> str | None:
            return {"spark.driver.host": of_driver}.get(name)

    monkeypatch.setattr("kafka_sink.spark.write.TaskContext.get", Context)
    options = parse({"kafka.bootstrap.servers": "h:1", "topic": "t"}).options
    planned = PlannedCoordinator(CoordinatorLocation(7, b"f", "n", b"t", "group", of_location))
    found = PlannedWrite(options, ColumnPlan.of([("value", "string")], "t"), planned)._coordinator()
    assert found is not None
    assert found.host == expected


def test_spark_says_what_a_query_is_called() -> None:
    assert job_name("clicks\nid = 1\nrunId = 2\nbatch = 3") == "clicks"
    assert job_name("\nid = 1\nrunId = 2\nbatch = 3") == ""
    assert job_name("nightly orders") == "nightly orders"


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
