"""The end of a job, as Spark's monitoring REST API shows it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from kafka_sink.coordinator.writes import running_jobs
from kafka_sink.coordinator.writes.running_jobs import RunningJobs, SparkUi, StageTracker
from kafka_sink.driver.driver_process import DriverProcess
from tests.support.coordinator_harness import clock_ms, eventually
from tests.support.spark_ui import serving_ui


def _nothing(stage: int) -> None:
    raise AssertionError(f"stage {stage} has not ended")


def _observe(
    tracker: StageTracker,
    running: dict[int, list[int]],
    now_ms: float,
    statuses: dict[int, str] | None = None,
) -> None:
    """A look at the UI, and what follows from it."""
    assert set(statuses or {}) <= tracker.executions_to_ask_for(running).keys()
    for call, stage in tracker.observe(running, statuses or {}, now_ms):
        call(stage)


def test_a_stage_ends_with_the_job_that_had_it_and_not_before() -> None:
    tracker, ended = StageTracker(), list[int]()
    tracker.watch(7, ended.append, 0.0)
    tracker.watch(8, ended.append, 0.0)
    _observe(tracker, {}, 10.0)
    assert ended == [], "its job is not listed yet"
    _observe(tracker, {1: [5, 7], 2: [8]}, 20.0)
    assert ended == []
    _observe(tracker, {2: [8], 3: [9]}, 30.0)
    assert ended == [7]
    _observe(tracker, {3: [9]}, 40.0)
    assert ended == [7, 8]
    assert not tracker.stages


def test_a_stage_whose_job_is_never_listed_is_watched_for_a_minute() -> None:
    """Catches: the UI was asked for ever, as Spark drops events under load."""
    tracker = StageTracker()
    tracker.watch(7, _nothing, 0.0)
    _observe(tracker, {}, 60_000.0)
    assert tracker.stages == {7}
    _observe(tracker, {}, 60_001.0)
    assert not tracker.stages


def test_nothing_is_kept_of_a_stage_that_is_not_watched_any_more() -> None:
    """Catches: where tasks always write, stages whose job was never listed left their listeners."""
    tracker, first, again = StageTracker(), list[int](), list[int]()
    tracker.watch(1, first.append, 0.0)
    _observe(tracker, {}, 60_001.0)
    tracker.watch(1, again.append, 60_001.0)
    _observe(tracker, {5: [1]}, 60_002.0)
    _observe(tracker, {}, 60_003.0)
    assert (first, again) == ([], [1])


def test_a_micro_batch_is_not_looked_for() -> None:
    """Catches: each micro-batch was looked for three times a second, for a minute after its end."""
    tracker = StageTracker()
    for stage in range(3):
        tracker.watch(stage, _nothing, 0.0)
        tracker.watch_execution(stage, 5, _nothing, 0.0)
        tracker.unwatch(stage)
    assert not tracker.stages, "nothing is left of a micro-batch, so the thread sleeps"
    assert tracker.watched_for_ms(1000.0) < 0
    tracker.watch(9, _nothing, 1000.0)
    assert tracker.watched_for_ms(1010.0) == 10.0


def test_a_sql_execution_that_spark_does_not_know_is_watched_for_a_minute() -> None:
    tracker = StageTracker()
    tracker.watch_execution(7, 5, _nothing, 0.0)
    _observe(tracker, {}, 0.0, {7: ""})
    _observe(tracker, {1: [7]}, 60_001.0)
    _observe(tracker, {}, 60_001.0, {7: ""})
    _observe(tracker, {}, 120_001.0, {7: ""})
    assert tracker.stages, "its job was listed again"
    _observe(tracker, {}, 120_002.0, {7: ""})
    assert not tracker.stages


def test_the_failure_of_a_write_whose_end_was_reported_meanwhile_is_no_news() -> None:
    tracker = StageTracker()
    tracker.watch_execution(7, 5, _nothing, 0.0)
    assert tracker.executions_to_ask_for({}) == {7: 5}
    tracker.unwatch(7)
    _observe(tracker, {}, 10.0)
    assert tracker.observe({}, {7: "FAILED"}, 20.0) == []


@contextmanager
def watching(
    port: int, clock: Callable[[], float] = clock_ms, interval_s: float = 0.01
) -> Iterator[RunningJobs]:
    jobs = RunningJobs(lambda: ("127.0.0.1", port), clock, interval_s=interval_s)
    yield jobs
    jobs.close()
    eventually(lambda: not any(one.name == "kafka-chunked-jobs" for one in threading.enumerate()))


def test_a_stage_that_is_watched_for_less_than_an_interval_costs_no_request() -> None:
    requests, looks = list[str](), list[float]()
    now = [0.0]

    def clock() -> float:
        looks.append(now[0])
        return now[0]

    with serving_ui({}, requests=requests) as port, watching(port, clock, interval_s=0.001) as jobs:
        jobs.watch(9, _nothing)
        eventually(lambda: len(looks) >= 4)
        assert not requests
        now[0] = 1.0
        eventually(lambda: requests)


def test_the_end_of_a_job_is_reported() -> None:
    running = {1: [6, 7]}
    ended, requests = list[int](), list[str]()
    with serving_ui(running, requests=requests) as port, watching(port) as jobs:
        jobs.watch(7, ended.append)
        # The second list is asked for once the first was looked at.
        eventually(lambda: sum("/jobs?" in one for one in requests) >= 2)
        assert not ended
        running.clear()
        eventually(lambda: ended == [7])


def test_the_failure_of_a_sql_execution_is_reported_once_its_job_is_not_listed() -> None:
    """Catches: nobody learned that Spark had been interrupted before it called abort."""
    running, executions, asked = {1: [7]}, {5: "RUNNING", 6: "COMPLETED"}, list[int]()
    failed: list[int] = []
    with serving_ui(running, executions=executions, asked=asked) as port, watching(port) as jobs:
        jobs.watch_execution(7, 5, failed.append)
        jobs.watch_execution(8, 6, failed.append)
        eventually(lambda: asked)
        assert set(asked) == {6}, "while the job is listed, its execution runs"
        running.clear()
        eventually(lambda: 5 in asked)
        executions[5] = "FAILED"
        eventually(lambda: failed == [7])
    assert asked.count(6) == 1, "an execution that is over is not asked for again"


@pytest.mark.parametrize("status", [302, 403, 500])
def test_a_ui_that_may_not_be_read_lists_nothing(status: int) -> None:
    """Catches: an error page taken for a list without running jobs would end all tasks."""
    with serving_ui({1: [7]}, status) as port:
        ui = SparkUi(lambda: ("127.0.0.1", port))
        with pytest.raises(LookupError):
            ui.running()
        ui.disconnect()


def test_the_ui_is_found_among_what_the_driver_listens_on() -> None:
    class Driver(DriverProcess):
        """This process, which listens as a driver does."""

        def arguments(self) -> list[str]:
            return ["java", f"-Dspark.ui.port={port}"]

    with serving_ui({1: [7]}) as port:
        found = running_jobs.find_ui(Driver(os.getpid(), "0"))
    assert found == ("127.0.0.1", port)


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
