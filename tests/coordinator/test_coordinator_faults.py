"""Losing the coordinator, at whatever moment, costs only efficiency."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from kafka_sink.coordinator.breaker_service import BreakerService
from kafka_sink.coordinator.live.application import ApplicationMetrics, ReportService
from kafka_sink.coordinator.live.messages import TaskIdentity
from kafka_sink.coordinator.metadata_service import MetadataService
from kafka_sink.coordinator.rates import RateService
from kafka_sink.coordinator.schema import Message
from kafka_sink.coordinator.server import Services
from kafka_sink.coordinator.transport import Peer
from kafka_sink.coordinator.writes import WriteService
from kafka_sink.options import parse
from kafka_sink.task.producer import Producer
from tests.support.coordinator_harness import serving, wait_long
from tests.support.fake_broker import FakeCluster
from tests.support.fault_rounds import FAULTS, run_round, run_tasks

TASKS, ROWS = 2, 10
TOPICS = ("a", "b")


@pytest.mark.usefixtures("_programs")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_coordinator_that_something_befalls_costs_no_row(fault: str, tmp_path: Path) -> None:
    # Chance decides when; every run of the tests is another round.
    run_round(fault, int.from_bytes(os.urandom(4), "big"), tmp_path)


def services() -> Services:
    metrics = ApplicationMetrics()
    return {
        MetadataService: MetadataService,
        BreakerService: BreakerService,
        RateService: RateService,
        WriteService: partial(WriteService, on_failed=metrics.on_attempt_failed),
        ReportService: partial(ReportService, metrics=metrics),
    }


def run_and_kill(at: int) -> list[str]:
    """Two tasks write to two topics, one after the other, under a rate limit and with a live view. The
    coordinator is killed when this message comes. Returns the messages that came. Each row must be there.
    """
    handled: list[str] = []
    with FakeCluster(dict.fromkeys(TOPICS, 2)) as cluster, serving(services=services()) as found:
        raw = {
            "kafka.bootstrap.servers": cluster.bootstrap_servers,
            "kafka.linger.ms": "0",
            "max.rows.per.second": "1000",
        }
        options = parse(raw).options
        server = found.server
        assert server is not None
        handle = server.on_message

        def count(peer: Peer, message: Message) -> None:
            handled.append(type(message).__name__)
            if len(handled) == at:
                found.die()
                raise ConnectionError("killed")
            handle(peer, message)

        server.on_message = count  # type: ignore[method-assign]
        address = replace(found.address, has_view=True)

        def begin(number: int, producer: Producer) -> None:
            producer.begin(address, None, TaskIdentity("w", number), TASKS)

        begins = [partial(begin, number) for number in range(TASKS)]
        run_tasks(options, begins, [[topic] * ROWS for topic in TOPICS], f"message {at}")
        for topic in TOPICS:
            written = sum(batch.record_count for number in (0, 1) for batch in cluster.batches(topic, number))
            assert written == TASKS * ROWS, f"{topic}: {written} rows after message {at}"
    return handled


def test_a_coordinator_killed_at_any_message_costs_no_row(monkeypatch: pytest.MonkeyPatch) -> None:
    wait_long(monkeypatch)
    whole = run_and_kill(0)
    assert {"Hello", "TopicsWanted", "TopicsFetched", "RowsWanted", "Writing", "TaskReport"} <= set(whole)
    for at in range(1, len(whole) + 1):
        run_and_kill(at)


def test_a_task_that_fails_has_reported_by_then() -> None:
    """Spark ends its process next, and the driver ends the write."""
    metrics = ApplicationMetrics()
    reports: Services = {ReportService: partial(ReportService, metrics=metrics)}
    with FakeCluster({"a": 1}) as cluster, serving(services=reports) as found:
        producer = Producer(parse({"kafka.bootstrap.servers": cluster.bootstrap_servers}).options)
        address = replace(found.address, has_view=True)
        producer.begin(address, None, TaskIdentity("w", 1))
        producer.close(abort=True)
        assert metrics.reports == 1
