"""Transactions that a real broker holds open for a write that Spark interrupted before it called abort."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator

import pytest

from kafka_sink.coordinator.writes.channel import WriteChannel
from kafka_sink.coordinator.writes.handler import write_handler
from kafka_sink.coordinator.writes.running_jobs import RunningJobs
from kafka_sink.model import WriteTransactions
from kafka_sink.options import parse
from kafka_sink.transactions.batch import Handover
from kafka_sink.transactions.client import TransactionClient
from kafka_sink.transactions.scope import Scope
from local_kafka import LocalBroker
from tests.support.batches_by_hand import PARTITIONS, Job
from tests.support.coordinator_harness import clock_ms, eventually
from tests.support.spark_ui import serving_ui

_EXECUTION, _STAGE = 5, 7
_LEFT = "left to the next run"
_numbers = iter(range(1000))


@pytest.fixture(params=["broker", "old_broker"], ids=["protocol 2", "protocol 1"])
def job(request: pytest.FixtureRequest) -> Iterator[Job]:
    kafka: LocalBroker = request.getfixturevalue(request.param)
    topic = f"unfinished-{next(_numbers)}"
    kafka.create_topic(topic, PARTITIONS)
    raw = {
        "kafka.bootstrap.servers": kafka.bootstrap_servers,
        "topic": topic,
        "delivery.guarantee": "exactly-once",
    }
    options = parse(raw).options
    client = TransactionClient(options)
    yield Job(options, client, Scope(f"prefix-{topic}", topic, PARTITIONS))
    client.close()


class _Coordinator:
    """Its handler, with Spark's UI by a script and a thread for the server's loop."""

    def __init__(self, job: Job, ui_port: int) -> None:
        self._woken = threading.Event()
        self.jobs = RunningJobs(lambda: ("127.0.0.1", ui_port), clock_ms, interval_s=0.01)
        self.handler = write_handler(job.options, self._woken.set, self.jobs)

    def hear_task(self, job: Job, handover: Handover) -> None:
        """A task begins."""
        channel = WriteChannel(lambda error: None)
        channel.begin("q/0", _STAGE, _transactions(job, handover))
        message = channel.next_message(0)
        assert message is not None
        self.handler.on_message(1, 1, message, 0)

    def hear_driver(self) -> None:
        self.handler.on_message(9, 1, {"over": "q/0", "again": True}, 0)

    def await_failure(self) -> None:
        assert self._woken.wait(60)
        self.handler.on_time(0)

    def close(self) -> None:
        self.jobs.close()


def _transactions(job: Job, handover: Handover) -> WriteTransactions:
    scope = job.scope
    return WriteTransactions(_EXECUTION, scope.prefix, scope.topic, scope.partitions, *handover.claim)


@pytest.fixture
def ui() -> dict[int, str]:
    """The status of SQL executions, as Spark's UI shows it."""
    return {_EXECUTION: "RUNNING"}


@pytest.fixture
def asked() -> list[int]:
    """The SQL executions that the UI was asked for."""
    return []


@pytest.fixture
def coordinator(job: Job, ui: dict[int, str], asked: list[int]) -> Iterator[_Coordinator]:
    with serving_ui({}, executions=ui, asked=asked) as port:
        made = _Coordinator(job, port)
        yield made
        made.close()


def _warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    name = "kafka_sink.coordinator.writes.running_jobs"
    return [one.getMessage() for one in caplog.records if one.name == name and one.levelno == logging.WARNING]


def test_an_interrupted_write_holds_readers_up_no_longer(
    job: Job, coordinator: _Coordinator, ui: dict[int, str], caplog: pytest.LogCaptureFixture
) -> None:
    """Catches: the transactions were open until the next run, or their time-out."""
    handover = job.take_over()
    coordinator.hear_task(job, handover)
    for index in range(2):
        job.write(handover, 0, index, [f"lost-{index}"])
    assert len(job.open()) == 2
    ui[_EXECUTION] = "FAILED"
    coordinator.await_failure()
    eventually(lambda: _warnings(caplog))
    (line,) = _warnings(caplog)
    assert job.scope.prefix in line
    assert "2 aborted" in line
    assert job.open() == []
    assert job.read() == []
    again = job.take_over()
    job.commit(job.write(again, 0, 0, ["again"]))
    job.await_rows(["again"])


def test_what_was_decided_is_completed_and_not_aborted(
    job: Job, coordinator: _Coordinator, ui: dict[int, str], caplog: pytest.LogCaptureFixture
) -> None:
    handover = job.take_over()
    coordinator.hear_task(job, handover)
    reports = [job.write(handover, 0, index, [f"0-{index}"]) for index in range(2)]
    job.decide_only(handover, *reports)
    ui[_EXECUTION] = "FAILED"
    coordinator.await_failure()
    eventually(lambda: _warnings(caplog))
    assert "2 committed, as the batch was decided" in _warnings(caplog)[0]
    job.await_rows(["0-0", "0-1"])


def test_the_next_run_is_not_disturbed(
    job: Job, coordinator: _Coordinator, ui: dict[int, str], caplog: pytest.LogCaptureFixture
) -> None:
    """Catches: an end of all that is open under the prefix would hit the run that took over meanwhile."""
    coordinator.hear_task(job, job.take_over())
    newer = job.take_over()
    report = job.write(newer, 0, 0, ["newer"])
    ui[_EXECUTION] = "FAILED"
    coordinator.await_failure()
    eventually(lambda: _warnings(caplog))
    assert _LEFT in _warnings(caplog)[0]
    job.commit(report)
    job.await_rows(["newer"])


def test_what_the_driver_commits_is_left_to_it(
    job: Job,
    coordinator: _Coordinator,
    ui: dict[int, str],
    asked: list[int],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its commit reports first, and may go on while Spark's query has ended."""
    handover = job.take_over()
    coordinator.hear_task(job, handover)
    report = job.write(handover, 0, 0, ["committed"])
    coordinator.hear_driver()
    before = len(asked)
    ui[_EXECUTION] = "FAILED"
    coordinator.handler.on_time(0)
    job.commit(report)
    job.await_rows(["committed"])
    assert _warnings(caplog) == []
    assert len(asked) <= before + 1, "nobody asks for it any more, but for a request that was on its way"
