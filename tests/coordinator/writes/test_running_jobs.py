"""The end of a job, as Spark's monitoring REST API shows it."""

from __future__ import annotations

import os
import threading

import pytest

from kafka_sink.coordinator.writes import running_jobs
from kafka_sink.coordinator.writes.running_jobs import RunningJobs, StageTracker
from kafka_sink.driver.driver_process import DriverProcess
from tests.support.coordinator_harness import eventually
from tests.support.spark_ui import serving_ui


def test_a_stage_ends_with_the_job_that_had_it_and_not_before() -> None:
    tracker = StageTracker()
    tracker.watch(7, 0.0)
    tracker.watch(8, 0.0)
    assert tracker.observe({}, 10.0) == [], "its job is not listed yet"
    assert tracker.observe({1: [5, 7], 2: [8]}, 20.0) == []
    assert tracker.observe({2: [8], 3: [9]}, 30.0) == [7]
    assert tracker.observe({3: [9]}, 40.0) == [8]
    assert not tracker.stages


def test_a_stage_whose_job_is_never_listed_is_watched_for_a_minute() -> None:
    """Catches: the UI was asked for ever, as Spark drops events under load."""
    tracker = StageTracker()
    tracker.watch(7, 0.0)
    assert tracker.observe({}, 60_000.0) == []
    assert tracker.stages == {7}
    assert tracker.observe({}, 60_001.0) == []
    assert not tracker.stages


def test_nothing_is_kept_of_a_stage_that_is_not_watched_any_more(
    driver: DriverProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches: where tasks always write, stages whose job was never listed left their listeners."""
    now, ended = [0.0], list[int]()
    monkeypatch.setattr(running_jobs, "monotonic_ms", lambda: now[0])
    jobs = RunningJobs(driver)
    monkeypatch.setattr(threading.Thread, "start", lambda _: None)
    jobs.watch(1, ended.append)
    now[0] = 60_001.0
    jobs.watch(2, ended.append)
    jobs.watch(3, ended.append)
    jobs._observe({5: [2]})
    jobs._observe({})
    assert ended == [2]
    assert jobs._on_end.keys() == jobs._tracker.stages == {3}
    jobs.unwatch(3)
    assert not jobs._on_end
    assert not jobs._work.is_set()


def test_a_micro_batch_asks_nothing(driver: DriverProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: each micro-batch was looked for three times a second, for a minute after its end."""
    looks: list[float] = []
    passes: list[bool] = []
    must_look = RunningJobs._must_look

    def look(jobs: RunningJobs) -> dict[int, list[int]]:
        looks.append(jobs._tracker.oldest_ms)
        return {}

    def ask(jobs: RunningJobs) -> bool:
        passes.append(must_look(jobs))
        return passes[-1]

    now = [0.0]
    monkeypatch.setattr(running_jobs, "monotonic_ms", lambda: now[0])
    monkeypatch.setattr(running_jobs, "_INTERVAL_S", 0.001)
    monkeypatch.setattr(RunningJobs, "_running", look)
    monkeypatch.setattr(RunningJobs, "_must_look", ask)
    jobs = RunningJobs(driver)
    for stage in range(3):
        jobs.watch(stage, lambda ended: None)
        jobs.unwatch(stage)
    assert not jobs._work.is_set(), "the thread sleeps between micro-batches"
    assert not jobs._on_end, "nothing is left of a micro-batch"
    now[0] = 10.0
    assert not must_look(jobs)
    jobs.watch(9, lambda ended: None)
    eventually(lambda: len(passes) >= 3)
    assert not looks
    now[0] = 11.0
    eventually(lambda: looks)
    jobs.close()
    assert jobs._thread is not None
    jobs._thread.join(30)


@pytest.fixture
def driver() -> DriverProcess:
    """This process, which listens as a driver does."""
    return DriverProcess(os.getpid(), "0")


def test_the_end_of_a_job_is_reported(driver: DriverProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    running = {1: [6, 7]}
    ended: list[int] = []
    with serving_ui(running) as port:
        monkeypatch.setattr(running_jobs, "first_port", lambda arguments: port)
        monkeypatch.setattr(running_jobs, "_INTERVAL_S", 0.01)
        jobs = RunningJobs(driver)
        jobs.watch(7, ended.append)
        eventually(lambda: jobs._tracker._jobs)
        assert not ended
        running.clear()
        eventually(lambda: ended == [7])
        eventually(lambda: not jobs._work.is_set())
        jobs.close()
        assert jobs._thread is not None
        jobs._thread.join(30)


def test_the_failure_of_a_sql_execution_is_reported_once_its_job_is_not_listed(
    driver: DriverProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches: nobody learned that Spark had been interrupted before it called abort."""
    running, executions, asked = {1: [7]}, {5: "RUNNING", 6: "COMPLETED"}, list[int]()
    failed: list[int] = []
    with serving_ui(running, executions=executions, asked=asked) as port:
        monkeypatch.setattr(running_jobs, "first_port", lambda arguments: port)
        monkeypatch.setattr(running_jobs, "_INTERVAL_S", 0.01)
        jobs = RunningJobs(driver)
        jobs.watch_execution(7, 5, failed.append)
        jobs.watch_execution(8, 6, failed.append)
        eventually(lambda: 8 not in jobs._executions)
        assert set(asked) == {6}, "while the job is listed, its execution runs"
        running.clear()
        eventually(lambda: 5 in asked)
        executions[5] = "FAILED"
        eventually(lambda: failed == [7])
        eventually(lambda: not jobs._work.is_set())
        jobs.close()
        assert jobs._thread is not None
        jobs._thread.join(30)


def test_a_sql_execution_that_spark_does_not_know_is_watched_for_a_minute(
    driver: DriverProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(running_jobs, "monotonic_ms", lambda: now[0])
    monkeypatch.setattr(threading.Thread, "start", lambda _: None)
    monkeypatch.setattr(RunningJobs, "_status", lambda jobs, execution: "")
    jobs = RunningJobs(driver)
    jobs.watch_execution(7, 5, lambda stage: None)
    assert jobs._failed({}) == []
    now[0] = 60_001.0
    assert jobs._failed({1: [7]}) == [], "its job is listed again"
    assert jobs._failed({}) == []
    now[0] = 120_001.0
    assert jobs._failed({}) == []
    assert jobs._executions
    now[0] = 120_002.0
    assert jobs._failed({}) == []
    jobs._observe({})
    assert not jobs._executions
    assert not jobs._work.is_set()


def test_the_failure_of_a_write_whose_end_was_reported_meanwhile_is_no_news(
    driver: DriverProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed: list[int] = []
    monkeypatch.setattr(threading.Thread, "start", lambda _: None)
    monkeypatch.setattr(RunningJobs, "_status", lambda jobs, execution: "FAILED")
    jobs = RunningJobs(driver)
    jobs.watch_execution(7, 5, failed.append)
    found = jobs._failed({})
    jobs.unwatch(7)
    jobs._observe({}, found)
    assert (found, failed) == ([7], [])


@pytest.mark.parametrize("status", [302, 403, 500])
def test_a_ui_that_may_not_be_read_lists_nothing(
    driver: DriverProcess, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    """Catches: an error page taken for a list without running jobs would end all tasks."""
    with serving_ui({1: [7]}, status) as port:
        monkeypatch.setattr(running_jobs, "first_port", lambda arguments: port)
        jobs = RunningJobs(driver)
        with pytest.raises(LookupError):
            jobs._running()
        jobs._disconnect()


def test_only_the_ports_of_the_ui_are_tried() -> None:
    """Catches: Spark logs an error for each HTTP request at its RPC port."""
    assert running_jobs.first_port(["java", "--conf", "spark.ui.port=5050"]) == 5050
    assert running_jobs.first_port(["java", "-Dspark.ui.port=5060"]) == 5060
    assert running_jobs.first_port(["java"]) == 4040


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("0100007F:0FC8", ("127.0.0.1", 4040)),
        ("00000000:0FC8", ("127.0.0.1", 4040)),
        ("00000000000000000000000000000000:0FC9", ("127.0.0.1", 4041)),
        ("0000000000000000FFFF00000100007F:0FC8", ("127.0.0.1", 4040)),
        ("00000000000000000000000001000000:0FC8", ("::1", 4040)),
    ],
)
def test_addresses_are_read_as_the_kernel_writes_them(text: str, address: tuple[str, int]) -> None:
    assert running_jobs.listening_address(text) == address
