"""A write's tasks and its commit, without Spark: a fake producer stands in for the real one."""

from __future__ import annotations

import pickle
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
import pytest

from kafka_sink.coordinator.address import CoordinatorAddress, PlannedCoordinator
from kafka_sink.driver import driver_log
from kafka_sink.errors import DeliveryError
from kafka_sink.spark import executor_connection
from kafka_sink.spark.datasource import BatchWriter, StreamWriter
from kafka_sink.spark.write import TaskCommitted, job_name
from tests.support.planned_writes import Context, committed, planned
from tests.support.table_sink import batch

pytestmark = pytest.mark.usefixtures("bare_logging")


@pytest.mark.usefixtures("producers")
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
        worker.setsockopt(*option, 0)

        def batches() -> Iterator[pa.RecordBatch]:
            for _ in range(3):
                acknowledges.append(bool(worker.getsockopt(*option)))
                worker.setsockopt(*option, 0)
                yield batch("a")

        planned().write(batches())
    assert acknowledges == [True] * 3


FIVE = committed((0, 4))


@pytest.mark.parametrize("writer", [BatchWriter(planned()), StreamWriter(planned())])
def test_writers_and_messages_are_values(writer: BatchWriter | StreamWriter) -> None:
    assert vars(pickle.loads(pickle.dumps(writer))) == vars(writer)
    assert pickle.loads(pickle.dumps(FIVE)) == FIVE


def test_commit_says_what_was_written_unless_the_summary_is_switched_off(
    capsys: pytest.CaptureFixture[str],
) -> None:
    StreamWriter(planned()).commit([FIVE], 7)
    (line,) = capsys.readouterr().err.splitlines()
    assert "INFO kafka-chunked, micro-batch 7: 5 rows acknowledged in t (1 partition)" in line
    assert driver_log.LOGGER.handlers == []
    BatchWriter(planned()).commit([])
    assert "kafka-chunked: 0 rows acknowledged" in capsys.readouterr().err
    BatchWriter(planned(log_summary="false")).commit([FIVE])
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("messages", [[None], [FIVE, None]])
def test_commit_without_every_message_raises(
    messages: list[TaskCommitted | None], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(
        DeliveryError, match=rf"^1 of {len(messages)} tasks did not report.*Trigger\.Continuous"
    ):
        StreamWriter(planned()).commit(messages, 0)
    assert "ERROR kafka-chunked" in capsys.readouterr().err


def test_abort_says_what_kafka_keeps(capsys: pytest.CaptureFixture[str]) -> None:
    BatchWriter(planned()).abort([FIVE, None])
    line = capsys.readouterr().err
    assert "aborted, 1 of 2 tasks did not finish; Kafka keeps what the other tasks wrote: 5 rows" in line
    StreamWriter(planned()).abort([None, None], 3)
    assert "micro-batch 3: aborted, 2 of 2 tasks did not finish. No task reported" in capsys.readouterr().err


@pytest.mark.usefixtures("application")
def test_abort_says_why_the_commit_before_it_failed(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches: a warning without the cause as the last line, below the commit's error."""
    write = planned()
    with pytest.raises(DeliveryError):
        StreamWriter(write).commit([FIVE, None], 3)
    StreamWriter(write).abort([FIVE, None], 3)
    last = capsys.readouterr().err.splitlines()[-1]
    assert "ERROR kafka-chunked, micro-batch 3: aborted, 1 of 2 tasks did not finish" in last
    assert last.endswith("Use Trigger.ProcessingTime or Trigger.AvailableNow.")


@pytest.mark.parametrize(
    ("of_driver", "of_address", "expected"),
    [
        ("[2001:db8::7]", "", "2001:db8::7"),
        ("driver.example", "", "driver.example"),
        ("driver.example", "127.0.0.1", "127.0.0.1"),
    ],
)
def test_tasks_find_the_coordinator_of_any_driver_host(
    of_driver: str,
    of_address: str,
    expected: str,
    in_task: Callable[[object], None],
    producers: list[dict[str, Any]],
) -> None:
    """Catches: brackets, which Spark writes around IPv6 addresses and sockets do not take."""

    in_task(Context({"spark.driver.host": of_driver}))
    address = CoordinatorAddress(of_address, 7, b"f", "n", b"t", "group")
    planned(PlannedCoordinator(address)).write(iter([]))
    assert producers[0]["coordinator"].host == expected


def test_spark_says_what_a_query_is_called() -> None:
    assert job_name("clicks\nid = 1\nrunId = 2\nbatch = 3") == "clicks"
    assert job_name("\nid = 1\nrunId = 2\nbatch = 3") == ""
    assert job_name("nightly orders") == "nightly orders"
