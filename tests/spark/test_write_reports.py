"""What the driver reports when a write ends: JSON summary, delivery report, the live view's metrics."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import resource
import signal
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kafka_sink import spark_application
from kafka_sink.coordinator import writes
from kafka_sink.coordinator.address import CoordinatorAddress, CoordinatorLocation, PlannedCoordinator
from kafka_sink.coordinator.live.application import ApplicationMetrics, ReportService
from kafka_sink.coordinator.server import Services
from kafka_sink.coordinator.writes import WriteService
from kafka_sink.driver import driver_conf
from kafka_sink.errors import ConfigurationError
from kafka_sink.model import EndedTransactions, PartitionResult, TaskResult
from kafka_sink.options import parse
from kafka_sink.reports import delivery_report, write_report
from kafka_sink.reports.delivery_report import EndedWrite
from kafka_sink.reports.write_report import write_ended
from kafka_sink.rows.column_plan import ColumnPlan
from kafka_sink.spark.write import PlannedWrite, TaskCommitted
from kafka_sink.spark_application import SparkApplication, planning_for
from kafka_sink.transactions.batch import BatchOutcome
from tests.support.coordinator_harness import Serving, serving

PLAN = ColumnPlan.of([("value", "string")], "t")
LOCATION = CoordinatorLocation(1, b"fingerprint", "name", b"token")


def planned(coordinator: PlannedCoordinator | None = None, **options: str) -> PlannedWrite:
    raw = {"kafka.bootstrap.servers": "h:1", "topic": "t"}
    raw |= {name.replace("_", "."): value for name, value in options.items()}
    return PlannedWrite(parse(raw).options, PLAN, coordinator or PlannedCoordinator(), name="0123")


def committed(
    *ranges: tuple[int, int], partition: int = 0, query: str = "", records: int | None = None
) -> TaskCommitted:
    count = sum(last - first + 1 for first, last in ranges) if records is None else records
    written = PartitionResult("t", partition, count, 1, 10 * count, tuple(ranges), raw_bytes=20 * count)
    result = TaskResult(
        partitions=(written,),
        records=count,
        batches=1,
        raw_bytes=20 * count,
        sent_bytes=10 * count,
        requests=1,
    )
    return TaskCommitted(result, query=query)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_json_summary_is_one_object_that_joins_with_a_querys_progress(
    capfd: pytest.CaptureFixture[str],
) -> None:
    for handler in list(logging.getLogger().handlers):
        logging.getLogger().removeHandler(handler)
    write = planned(log_summary_format="json")
    write.commit([committed((0, 9), query="q-1"), committed((10, 14), query="q-1")], 7)
    (line,) = capfd.readouterr().err.splitlines()
    found = json.loads(line)
    assert (found["queryId"], found["batchId"], found["outcome"]) == ("q-1", 7, "committed")
    assert (found["rows"], found["rowsByTopic"], found["tasks"]) == (15, {"t": 15}, 2)
    assert (found["sentBytes"], found["rawBytes"], found["partitions"]) == (150, 300, 1)


@pytest.mark.usefixtures("application")
@pytest.mark.parametrize(
    ("others", "advice"),
    [
        ([TaskResult()] * 199, "199 of 200 tasks had no rows"),
        ([TaskResult(arrow_batch_bytes_max=64_000_000)], "Arrow batches of up to 64.0 MB"),
    ],
)
def test_advice_is_given_once_for_a_query(
    others: list[TaskResult],
    advice: str,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Catches: a foreachBatch after groupBy with 200 tasks for 2 rows, and nothing that says so."""
    for handler in list(logging.getLogger().handlers):
        logging.getLogger().removeHandler(handler)
    tasks = [committed((0, 1), query="q-1"), *(TaskCommitted(one, query="q-1") for one in others)]
    planned().commit(tasks, 1)
    planned().commit(tasks, 2)
    assert capfd.readouterr().err.count(advice) == 1
    planned().commit([replace(one, query="q-0") for one in tasks], 1)
    assert capfd.readouterr().err.count(advice) == 1, "another query's"
    with planning_for(SparkApplication("", None, {})):
        planned().commit(tasks, 3)
    assert advice not in capfd.readouterr().err, "else in each micro-batch"
    planned(log_summary="false").commit([*tasks[1:], committed((0, 1), query="q-2")], 1)
    assert capfd.readouterr().err == ""


def test_the_json_summary_has_the_numbers_and_ages_of_transactions(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Catches: counts without ages, which do not say for how long readers were held up."""
    for handler in list(logging.getLogger().handlers):
        logging.getLogger().removeHandler(handler)
    ended = {
        "committed": EndedTransactions(2, 1_240),
        "recovered": EndedTransactions(1, 34_000),
    }
    write = EndedWrite("w", "committed", "q-1", 7, 2, [], ended)
    write_report.report(planned(log_summary_format="json").options, PlannedCoordinator(), write)
    (line,) = capfd.readouterr().err.splitlines()
    assert json.loads(line)["transactions"] == {
        "committed": 2,
        "recovered": 1,
        "oldestMs": {"committed": 1_240, "recovered": 34_000},
    }
    assert write_ended(planned().options, write).transactions == {"committed": 2, "recovered": 1}


@pytest.mark.parametrize("batch", [None, 3])
def test_only_a_streams_commit_does_not_wait_for_the_coordinator(
    batch: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches: attempts that write on after an abort, or after a job, as nobody had notified them yet."""
    urgent: list[bool] = []
    monkeypatch.setattr(writes, "end_attempts", lambda *_, is_urgent, **__: urgent.append(is_urgent))
    address = CoordinatorAddress("127.0.0.1", LOCATION)
    write = planned(PlannedCoordinator(driver_address=address), log_summary="false")
    write.commit([committed((0, 9))], batch)
    write.abort([None], batch)
    assert urgent == [batch is None, True]


def test_a_micro_batch_has_one_name_in_all_its_reports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Context:
        taskAttemptId = partitionId = attemptNumber = staticmethod(lambda: 3)  # noqa: N815 - Spark's names

        @staticmethod
        def getLocalProperty(name: str) -> str | None:
            return {"streaming.sql.batchId": "7", "sql.streaming.queryId": "q-1"}.get(name)

    path = tmp_path / "report.jsonl"
    location = replace(LOCATION, has_view=True)
    write = replace(planned(PlannedCoordinator(location), delivery_report_path=str(path)), is_streaming=True)
    with monkeypatch.context() as in_task:
        in_task.setattr("kafka_sink.spark.write.TaskContext.get", Context)
        identity = write._identity_in_task()
        in_task.setattr(PlannedWrite, "_send", lambda *_, **__: TaskResult())
        of_task = write.write(iter([]))
    assert identity is not None
    write.abort([None], 7)
    write.commit([of_task], 7)
    planned_again = replace(write, name="other")
    planned_again.commit([of_task], 7)
    assert [line["write"] for line in lines(path)] == [identity.write] * 3 == ["0123/7"] * 3
    assert [line["queryId"] for line in lines(path)] == [None, "q-1", "q-1"]


def test_a_failed_write_has_a_json_line_too(capfd: pytest.CaptureFixture[str]) -> None:
    for handler in list(logging.getLogger().handlers):
        logging.getLogger().removeHandler(handler)
    planned(log_summary_format="json").abort([committed((0, 9)), None])
    (line,) = capfd.readouterr().err.splitlines()
    found = json.loads(line)
    assert (found["outcome"], found["rows"], found["tasks"], found["queryId"]) == ("aborted", 10, 2, None)


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_skip_is_told_whatever_the_log_is_like(form: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Catches: rows that were skipped, and one line at INFO about it, or none with log.summary=false."""
    for handler in list(logging.getLogger().handlers):
        logging.getLogger().removeHandler(handler)
    note = str(BatchOutcome(skipped=1234, compared=True))
    ended = EndedWrite("w", "skipped", "q", 7, 2, [TaskResult()], note=note)
    options = planned(log_summary="false", log_summary_format=form).options
    write_report.report(options, PlannedCoordinator(), ended)
    warning, *more = capfd.readouterr().err.splitlines()
    assert "WARNING kafka_sink: kafka-chunked, micro-batch 7: its 1,234 rows are skipped" in warning
    assert [json.loads(line)["outcome"] for line in more] == ["skipped"] * (form == "json")


def test_the_delivery_report_has_the_offsets_of_every_write(tmp_path: Path) -> None:
    path = tmp_path / "report.jsonl"
    write = planned(delivery_report_path=str(path))
    write.commit([committed((10, 14), (20, 29)), committed((15, 19)), committed((3, 4), partition=1)])
    write.abort([committed((100, 100)), None])
    first, second = lines(path)
    assert first["partitions"] == [
        {
            "topic": "t",
            "partition": 0,
            "rows": 20,
            "batches": 2,
            "bytes": 200,
            "offsets": [[10, 29]],
            "endOffset": 30,
            "rowsWithoutOffset": 0,
        },
        {
            "topic": "t",
            "partition": 1,
            "rows": 2,
            "batches": 1,
            "bytes": 20,
            "offsets": [[3, 4]],
            "endOffset": 5,
            "rowsWithoutOffset": 0,
        },
    ]
    assert (first["outcome"], second["outcome"], second["partitions"][0]["endOffset"]) == (
        "committed",
        "aborted",
        101,
    )


def test_rows_whose_offsets_are_unknown_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "report.jsonl"
    planned(delivery_report_path=f"file://{path}").commit([committed(records=7)])
    (partition,) = lines(path)[0]["partitions"]
    assert (partition["rowsWithoutOffset"], partition["endOffset"], partition["offsets"]) == (7, None, [])


def test_lines_of_writes_that_end_together_do_not_mix(tmp_path: Path) -> None:
    path = tmp_path / "report.jsonl"
    content = {"partitions": "x" * 200_000}

    def append() -> None:
        for _ in range(10):
            delivery_report.append(str(path), content)

    threads = [threading.Thread(target=append) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert lines(path) == [content] * 40


def test_a_full_disk_leaves_no_half_line_and_fails_no_write(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "report.jsonl"
    write = planned(delivery_report_path=str(path))
    write.commit([committed((0, 9))])
    size = path.stat().st_size
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 20, limits[1]))
        write.commit([committed((10, 19))])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert path.stat().st_size == size
    assert any("delivery.report.path" in message for message in caplog.messages)


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("s3://bucket/report", "only files on the driver's host"),
        ("hdfs:/x", "only files on the driver's host"),
        ("report.jsonl", "must be an absolute path"),
        ("/nowhere/report.jsonl", "No such file or directory"),
    ],
)
def test_a_report_that_cannot_be_written_fails_at_planning(path: str, text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        delivery_report.check(path)


@pytest.mark.parametrize("has_reader", [False, True])
def test_a_report_to_a_fifo_is_refused_instead_of_waiting_for_its_reader(
    tmp_path: Path, has_reader: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[int] = []
    os_open = os.open

    def noted(*args: Any) -> int:
        opened.append(os_open(*args))
        return opened[-1]

    path = tmp_path / "fifo"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK) if has_reader else None
    monkeypatch.setattr(os, "open", noted)
    with pytest.raises(ConfigurationError, match=r"'delivery.report.path'.*not a regular file"):
        delivery_report.check(str(path))
    with pytest.raises(OSError, match="not a regular file"):
        delivery_report.append(str(path), {})
    assert len(opened) == 2 * has_reader
    for handle in opened:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(handle)
    if reader is not None:
        os.close(reader)


def test_a_reader_who_holds_a_lock_keeps_no_line_out(tmp_path: Path) -> None:
    """Catches: whoever may read the report could suppress it by flock."""
    path = tmp_path / "report.jsonl"
    path.touch()
    with path.open() as reader:
        fcntl.flock(reader, fcntl.LOCK_EX)
        planned(delivery_report_path=str(path)).commit([committed((0, 9))])
    assert len(lines(path)) == 1


def test_the_report_is_for_its_owner_and_group_only(tmp_path: Path) -> None:
    path = tmp_path / "report.jsonl"
    old = os.umask(0)
    try:
        delivery_report.check(str(path))
    finally:
        os.umask(old)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_a_symbolic_link_is_not_followed(tmp_path: Path) -> None:
    """Catches: another user's link in a shared folder, through which the job appends to a file of its own."""
    target, path = tmp_path / "bashrc", tmp_path / "report.jsonl"
    target.write_text("")
    path.symlink_to(target)
    with pytest.raises(ConfigurationError, match="symbolic link"):
        delivery_report.check(str(path))
    with pytest.raises(OSError, match="symbolic link"):
        delivery_report.append(str(path), {})
    path.unlink()
    path.hardlink_to(target)
    with pytest.raises(ConfigurationError, match="second name"):
        delivery_report.check(str(path))
    assert target.read_text() == ""


def test_another_users_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its owner would read the report, and could change it."""
    path = tmp_path / "report.jsonl"
    path.write_text("")
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(ConfigurationError, match="belongs to another user"):
        delivery_report.check(str(path))
    with pytest.raises(OSError, match="belongs to another user"):
        delivery_report.append(str(path), {})


@contextmanager
def viewed(metrics: ApplicationMetrics) -> Iterator[tuple[PlannedCoordinator, Serving]]:
    """What planning gives to a write whose metrics are shown."""
    services: Services = {ReportService: partial(ReportService, metrics=metrics), WriteService: WriteService}
    with serving(services=services) as server:
        location = replace(server.address.location, has_view=True)
        yield PlannedCoordinator(location, None, CoordinatorAddress("127.0.0.1", location)), server


def test_the_live_view_shows_the_metrics_of_the_summary_once_save_returns() -> None:
    metrics = ApplicationMetrics()
    with viewed(metrics) as (coordinator, _):
        planned(coordinator, log_summary="false").commit([committed((0, 9), query="q")], 3)
        (job,) = metrics.snapshot(0.0)["jobs"]
    assert (job["counters"]["records"], job["query"], job["batch"]) == (10, "q", 3)


def test_save_waits_for_a_coordinator_that_is_busy_for_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: the job would be shown as running, for ten minutes."""
    metrics = ApplicationMetrics()
    # Until attempts have been notified, which comes first.
    monkeypatch.setattr(writes, "_DRIVER_TIMEOUT_MS", 50.0)
    with viewed(metrics) as (coordinator, served):
        assert served.loop is not None
        served.loop.call_soon_threadsafe(time.sleep, 0.7)
        planned(coordinator, log_summary="false").commit([committed((0, 9))])
        (job,) = metrics.snapshot(0.0)["jobs"]
    assert (job["state"], job["counters"]["records"]) == ("committed", 10)


# -- Spark's idle timeout ----------------------------------------------------------------------------

SQL, CORE = "spark.sql.execution.pyspark.udf.", "spark.python.worker."


def test_a_secret_option_that_spark_would_show_is_warned_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Catches: a private key that stands in exceptions, plans and the event log, without a word about it."""
    conf = {"spark.redaction.regex": "(?i)keystore"}
    with planning_for(SparkApplication(str(tmp_path), os.getpid(), conf)):
        driver_conf.warn_of_shown_secrets({"kafka.ssl.keystore.key": "k", "topic": "t"})
        assert caplog.messages == [], "the session's expression covers it"
        spark_application.forget("secrets checked")
        for _ in range(2):
            driver_conf.warn_of_shown_secrets({"kafka.sasl.password": "hunter2", "topic": "t"})
    (line,) = caplog.messages
    assert "'kafka.sasl.password'" in line
    assert "hunter2" not in line


@pytest.mark.parametrize(
    ("conf", "warns"),
    [
        ({}, False),
        ({SQL + "idleTimeoutSeconds": "60"}, False),
        ({SQL + "idleTimeoutSeconds": "60", SQL + "killOnIdleTimeout": "true"}, True),
        ({CORE + "idleTimeoutSeconds": "1min", CORE + "killOnIdleTimeout": "true"}, True),
        ({CORE + "idleTimeoutSeconds": "120s", CORE + "killOnIdleTimeout": "True"}, True),
        ({SQL + "idleTimeoutSeconds": "121", SQL + "killOnIdleTimeout": "true"}, False),
        ({SQL + "idleTimeoutSeconds": "0", SQL + "killOnIdleTimeout": "true"}, False),
        ({CORE + "idleTimeoutSeconds": "60", CORE + "killOnIdleTimeout": "false"}, False),
        ({CORE + "idleTimeoutSeconds": "soon", CORE + "killOnIdleTimeout": "true"}, False),
    ],
)
def test_an_idle_timeout_that_ends_tasks_before_the_sink_can_say_why_is_warned_of(
    conf: dict[str, str], warns: bool
) -> None:
    line = driver_conf.idle_timeout_problem(conf.get, 120_000)
    assert (line is not None) is warns
    if line is not None:
        assert "kafka.delivery.timeout.ms" in line
        assert "idleTimeoutSeconds" in line
