"""What is remembered for as long as a Spark application lives."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kafka_sink import spark_application
from kafka_sink.spark_application import SparkApplication, planning_for


def of(local_dirs: str) -> SparkApplication:
    return SparkApplication(local_dirs, None, {})


def test_once_per_application(tmp_path: Path) -> None:
    with planning_for(of(f"{tmp_path},/elsewhere")):
        assert spark_application.first_time("a")
        assert spark_application.first_time("b")
        assert not spark_application.first_time("a")
    with planning_for(of("")):
        assert spark_application.first_time("a")
        assert spark_application.first_time("a")


def test_workers_know_their_application_by_the_environment() -> None:
    environ = {"SPARK_LOCAL_DIRS": "/spark/blockmgr"}
    assert spark_application.local_dirs(environ) == "/spark/blockmgr"
    with planning_for(of("/of/the/driver")):
        assert spark_application.local_dirs(environ) == "/of/the/driver"


def test_a_note_is_for_this_user_alone_and_one_of_the_future_does_not_count(tmp_path: Path) -> None:
    with planning_for(of(str(tmp_path))):
        spark_application.note("a", "text")
        assert spark_application.noted_within("a", 60) == "text"
        (marker,) = tmp_path.iterdir()
        assert stat.S_IMODE(marker.stat().st_mode) == 0o600
        # The clock was set back.
        os.utime(marker, (time.time() + 3600,) * 2)
        assert not spark_application.happened_within("a", 60)


@pytest.mark.parametrize("second", ["{}", "/proc/nor/this"])
def test_once_per_application_where_sparks_first_folder_cannot_be_written_to(
    second: str, tmp_path: Path, temporary_folder: Callable[[str], None]
) -> None:
    """Catches: a warning for every micro-batch."""
    temporary_folder(str(tmp_path))
    with planning_for(of(f"/proc/none,{second.format(tmp_path)}")):
        assert spark_application.first_time("a")
        assert not spark_application.first_time("a")
        assert not spark_application.happened_within("b", 60)
        spark_application.note("b")
        assert spark_application.happened_within("b", 60)
    with planning_for(of("/proc/another/application")):
        assert spark_application.first_time("a")
        assert not spark_application.happened_within("b", 60)


def test_notes_are_dropped_without_a_usable_folder(temporary_folder: Callable[[str], None]) -> None:
    temporary_folder("/nor/here")
    for folder in ("", "/nowhere/at/all"):
        with planning_for(of(folder)):
            spark_application.note("x")
            assert not spark_application.happened_within("x", 60)
