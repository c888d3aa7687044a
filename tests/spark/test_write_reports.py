"""What the driver reports when a write ends: JSON summary, delivery report, the live view's metrics."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kafka_sink.coordinator.address import CoordinatorAddress, PlannedCoordinator
from kafka_sink.coordinator.live.application import ApplicationMetrics, ReportService
from kafka_sink.coordinator.server import Services
from kafka_sink.coordinator.writes import WriteService
from kafka_sink.model import TaskResult
from kafka_sink.reports import write_report
from kafka_sink.reports.delivery_report import EndedWrite
from kafka_sink.reports.write_report import write_ended
from kafka_sink.spark.write import TaskCommitted
from kafka_sink.spark_application import SparkApplication, planning_for
from kafka_sink.transactions.batch import BatchOutcome
from tests.support.coordinator_harness import Serving, serving
from tests.support.planned_writes import Context, committed, lines, planned

pytestmark = pytest.mark.usefixtures("bare_logging")
ADDRESS = CoordinatorAddress("127.0.0.1", 1, b"fingerprint", "name", b"token")


@pytest.mark.usefixtures("application")
@pytest.mark.parametrize(
    ("others", "advice"),
    [
        ([TaskResult()] * 199, "199 of 200 tasks had no rows"),
        ([TaskResult(arrow_batch_bytes_max=64_000_000)], "Arrow batches of up to 64.0 MB"),
    ],
)
def test_advice_is_given_once_for_a_query(
    others: list[TaskResult], advice: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Catches: a foreachBatch after groupBy with 200 tasks for 2 rows, and nothing that says so."""
    tasks = [committed((0, 1), query="q-1"), *(TaskCommitted(one, query="q-1") for one in others)]
    planned().commit(tasks, 1)
    planned().commit(tasks, 2)
    assert capfd.readouterr().err.count(advice) == 1
    planned().commit([replace(one, query="q-0") for one in tasks], 1)
    assert capfd.readouterr().err.count(advice) == 1, "another query's"
    with planning_for(SparkApplication("", None, {})):
        planned().commit(tasks, 3)
        planned().commit(tasks, 4)
    assert capfd.readouterr().err.count(advice) == 1, "else in each micro-batch"
    planned(log_summary="false").commit([*tasks[1:], committed((0, 1), query="q-2")], 1)
    assert capfd.readouterr().err == ""


@pytest.mark.usefixtures("application")
def test_the_first_micro_batch_with_rows_has_a_line(capfd: pytest.CaptureFixture[str]) -> None:
    """Catches: "0 rows acknowledged" as the only line of a stream's first minute."""
    empty = TaskCommitted(TaskResult(), query="q-1")
    for batch, task in enumerate([empty, committed((0, 9), query="q-1"), committed((10, 19), query="q-1")]):
        planned().commit([task], batch)
    (line,) = capfd.readouterr().err.splitlines()
    assert "micro-batch 1: 10 rows acknowledged in t (1 partition)" in line


def test_the_end_of_a_write_has_the_numbers_of_transactions() -> None:
    ended = {"committed": 2, "aborted": 1}
    write = EndedWrite("w", "committed", "q-1", 7, 2, [], ended)
    assert write_ended(planned().options, write).transactions == ended


def test_a_micro_batch_has_one_name_in_all_its_reports(
    tmp_path: Path, in_task: Callable[[object], None], producers: list[dict[str, Any]]
) -> None:
    path = tmp_path / "report.jsonl"
    address = replace(ADDRESS, has_view=True)
    write = replace(planned(PlannedCoordinator(address), delivery_report_path=str(path)), is_streaming=True)
    in_task(Context({"streaming.sql.batchId": "7", "sql.streaming.queryId": "q-1"}))
    of_task = write.write(iter([]))
    in_task(None)
    write.abort([None], 7)
    write.commit([of_task], 7)
    planned_again = replace(write, name="other")
    planned_again.commit([of_task], 7)
    assert [line["write"] for line in lines(path)] == [producers[0]["task"].write] * 3 == ["0123/7"] * 3
    assert [line["queryId"] for line in lines(path)] == [None, "q-1", "q-1"]


def test_a_skip_is_logged_even_with_log_summary_false(capfd: pytest.CaptureFixture[str]) -> None:
    """Catches: rows that were skipped, and one line at INFO about it, or none with log.summary=false."""
    note = str(BatchOutcome(skipped=1234, compared=True))
    ended = EndedWrite("w", "skipped", "q", 7, 2, [TaskResult()], note=note)
    options = planned(log_summary="false").options
    write_report.report(options, PlannedCoordinator(), ended)
    (warning,) = capfd.readouterr().err.splitlines()
    assert "WARNING kafka-chunked, micro-batch 7: its 1,234 rows are skipped" in warning


@contextmanager
def viewed(metrics: ApplicationMetrics) -> Iterator[tuple[PlannedCoordinator, Serving]]:
    """What planning gives to a write whose metrics are shown."""
    writes = partial(WriteService, on_failed=metrics.on_attempt_failed)
    services: Services = {ReportService: partial(ReportService, metrics=metrics), WriteService: writes}
    with serving(services=services) as server, server.has_driver():
        yield PlannedCoordinator(replace(server.address, has_view=True)), server


def test_the_live_view_shows_the_metrics_of_the_summary_once_save_returns() -> None:
    metrics = ApplicationMetrics()
    with viewed(metrics) as (coordinator, _):
        planned(coordinator, log_summary="false").commit([committed((0, 9), query="q")], 3)
        (job,) = metrics.snapshot(0.0)["jobs"]
    assert (job["counters"]["records"], job["query"], job["batch"]) == (10, "q", 3)


def test_save_waits_for_a_coordinator_that_is_busy_for_a_moment() -> None:
    """Catches: the job would be shown as running, for ten minutes."""
    metrics = ApplicationMetrics()
    with viewed(metrics) as (coordinator, served):
        assert served.loop is not None
        served.loop.call_soon_threadsafe(time.sleep, 0.8)
        planned(coordinator, log_summary="false").commit([committed((0, 9))])
        (job,) = metrics.snapshot(0.0)["jobs"]
    assert (job["state"], job["counters"]["records"]) == ("committed", 10)
