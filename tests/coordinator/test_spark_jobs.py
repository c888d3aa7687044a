"""The end of a job, as Spark's monitoring REST API shows it."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler

import pytest

from kafka_sink.clock import monotonic_ms
from kafka_sink.coordinator.spark_jobs import (
    MAX_STAGES,
    SparkJobs,
    find_ui,
    listening_address,
    running_stages,
)
from tests.support.http_server import Server
from tests.support.waiting import until


def _nothing(stage: int) -> None:
    raise AssertionError(f"{stage} has not ended")


class Watched(SparkJobs):
    """Stages that are watched in virtual time, without a thread."""

    def __init__(self, *stages: int) -> None:
        self.now_ms = 0.0
        super().__init__(lambda: None, lambda: self.now_ms)
        for stage in stages:
            self.watch(stage, "w")


def test_a_stage_ends_with_the_job_that_had_it_and_not_before() -> None:
    jobs = Watched(7, 8)
    assert jobs.observe(()) == [], "its job is not listed yet"
    assert jobs.observe({5, 7, 8}) == []
    assert jobs.observe({8, 9}) == [7]
    assert jobs.observe({9}) == [8]
    assert not jobs.stages


def test_a_stage_whose_job_is_never_listed_is_watched_for_a_minute_and_leaves_nothing() -> None:
    """Catches: the UI was asked for ever, as Spark drops events under load."""
    jobs = Watched(7)
    jobs.now_ms = 60_000.0
    assert jobs.observe(()) == []
    assert list(jobs.stages) == [7]
    jobs.now_ms = 60_001.0
    assert jobs.observe(()) == []
    assert not jobs.stages
    jobs.watch(7, "w")
    assert jobs.observe({7}) == []
    assert jobs.observe(()) == [7]


def test_watched_stages_are_bounded_and_nothing_is_left_of_a_write_that_is_over() -> None:
    """Catches: each micro-batch was looked for three times a second, for a minute after its end."""
    jobs = Watched(*range(MAX_STAGES + 5))
    assert list(jobs.stages) == list(range(5, MAX_STAGES + 5))
    jobs.unwatch("w")
    assert not jobs.stages, "so the thread sleeps"


class Ui(Server):
    """Spark's monitoring REST API, as far as the coordinator asks it. ``running``: the stages of each job."""

    def __init__(self, *running: list[int], status: int = 200) -> None:
        super().__init__()
        self.running = list(running)
        self.status = status
        self.address = "127.0.0.1", int(self.url.rpartition(":")[2])
        self.respond = self._respond

    def _respond(self, handler: BaseHTTPRequestHandler) -> tuple[int, dict[str, str], bytes]:
        jobs = [{"jobId": job, "stageIds": stages} for job, stages in enumerate(self.running)]
        found = jobs if handler.path.endswith("/app-1/jobs?status=running") else [{"id": "app-1"}]
        return self.status, {}, json.dumps(found).encode()


@contextmanager
def watching(
    ui: Ui, on_end: Callable[[int], None], clock: Callable[[], float] = monotonic_ms, interval_s: float = 0.01
) -> Iterator[SparkJobs]:
    jobs = SparkJobs(lambda: ui.address, clock, interval_s=interval_s)
    jobs.on_ended = on_end
    jobs.start()
    yield jobs
    jobs.close()
    until(lambda: not any(one.name == "kafka-chunked-jobs" for one in threading.enumerate()))


def test_a_stage_that_is_watched_for_less_than_an_interval_costs_no_request() -> None:
    checks, now_ms = list[float](), 0.0

    def clock() -> float:
        checks.append(now_ms)
        return now_ms

    with Ui() as ui, watching(ui, _nothing, clock, interval_s=0.001) as jobs:
        jobs.watch(9, "w")
        until(lambda: len(checks) >= 4)
        assert not ui.requests
        now_ms = 1.0
        until(lambda: ui.requests)


def test_the_end_of_a_job_is_reported() -> None:
    ended = list[int]()
    with Ui([6, 7]) as ui, watching(ui, ended.append) as jobs:
        jobs.watch(7, "w")
        # The second list is asked for once the first was looked at.
        until(lambda: sum("/jobs?" in path for _, path, _, _ in ui.requests) >= 2)
        assert not ended
        ui.running.clear()
        until(lambda: ended == [7])


@pytest.mark.parametrize("status", [302, 403, 500])
def test_a_ui_that_may_not_be_read_lists_nothing(status: int) -> None:
    """Catches: an error page taken for a list without running jobs would end all tasks."""
    with Ui([7], status=status) as ui, pytest.raises(LookupError):
        running_stages(ui.address)


def test_the_ui_is_found_among_what_the_driver_listens_on() -> None:
    """Only at its ports: Spark logs an error for each HTTP request at its RPC port."""
    with Ui([7]) as ui:
        port = ui.address[1]
        assert find_ui(os.getpid(), port) == find_ui(os.getpid(), port - 16) == ui.address
        assert not find_ui(os.getpid(), 0)
        assert find_ui(os.getpid(), port + 1) != ui.address
        assert find_ui(os.getpid(), port - 17) != ui.address


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
    assert listening_address(text) == address
