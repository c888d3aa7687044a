"""The sentence that helps is the last line of the driver's log, whatever Spark and Python print after it.

Of a real driver: ``tests/security/test_secured_spark.py``.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from kafka_sink import spark_application
from kafka_sink.driver import last_line
from kafka_sink.spark_application import SparkApplication, planning_for
from tests.support.waiting import until


class Driver:
    """``sleep`` stands in for the driver's JVM."""

    def __init__(self, log: Path) -> None:
        self.log = log
        with log.open("ab") as stderr:
            self.process = subprocess.Popen(["sleep", "600"], stderr=stderr)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[Driver]:
    started = Driver(tmp_path / "log")
    try:
        with planning_for(SparkApplication(str(tmp_path), started.process.pid, {})):
            yield started
    finally:
        started.end()
        for waiting in last_line.STARTED:
            waiting.wait()


def test_the_last_failure_comes_behind_all_that_the_driver_prints(driver: Driver) -> None:
    last_line.leave("a stream", "an earlier failure")
    last_line.leave("", "what to do")
    waiting = last_line.STARTED[-1]
    until(lambda: str(driver.log) in opened_by(waiting.pid))
    with driver.log.open("a") as log:
        log.write("a traceback\n")
    driver.end()
    waiting.wait()
    assert driver.log.read_text().splitlines() == ["a traceback", "what to do"]


def test_a_write_that_is_committed_later_takes_the_line_back(driver: Driver) -> None:
    last_line.leave("", "what to do")
    waiting = last_line.STARTED[-1]
    last_line.take_back("another stream")
    assert waiting.poll() is None
    last_line.take_back("")
    assert waiting.wait() == -signal.SIGTERM
    driver.end()
    assert driver.log.read_text() == ""


def test_a_pid_that_another_process_has_by_now_is_left_alone(driver: Driver) -> None:
    spark_application.note(last_line.NOTE, json.dumps([driver.process.pid, "another start", ""]))
    last_line.take_back("")
    assert driver.process.poll() is None


def opened_by(pid: int) -> list[str]:
    found = []
    for one in Path(f"/proc/{pid}/fd").iterdir():
        # A process that starts opens and closes files meanwhile.
        with contextlib.suppress(FileNotFoundError):
            found.append(os.readlink(one))
    return found
