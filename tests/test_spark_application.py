"""What is remembered for as long as a Spark application lives."""

from __future__ import annotations

import math
import os
import stat
import tempfile
import time
from contextlib import suppress
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
        assert spark_application.claim("c")
        assert spark_application.claim("c") is False


def test_workers_know_their_application_by_the_environment() -> None:
    environ = {"SPARK_LOCAL_DIRS": "/spark/blockmgr"}
    assert spark_application.local_dirs(environ) == "/spark/blockmgr"
    with planning_for(of("/of/the/driver")):
        assert spark_application.local_dirs(environ) == "/of/the/driver"


def test_a_note_is_for_this_user_alone_and_one_of_the_future_does_not_count(tmp_path: Path) -> None:
    with planning_for(of(str(tmp_path))):
        spark_application.note("a", "text")
        assert spark_application.noted_within("a", 60, str) == "text"
        assert spark_application.noted_within("a", 60, int) is None, "of another version"
        (marker,) = tmp_path.iterdir()
        assert stat.S_IMODE(marker.stat().st_mode) == 0o600
        # The clock was set back.
        os.utime(marker, (time.time() + 3600,) * 2)
        assert not spark_application.happened_within("a", 60)


def test_the_first_folder_that_can_be_written_to_has_the_markers(tmp_path: Path) -> None:
    with planning_for(of(f"/proc/none,{tmp_path}")):
        assert spark_application.first_time("a")
        assert not spark_application.first_time("a")
        spark_application.note("b", "text")
        assert spark_application.noted_within("b", 60, str) == "text"
    assert len(list(tmp_path.iterdir())) == 2


def test_an_event_that_is_recorded_while_the_one_before_is_taken_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches: the removal of an event that was recorded after the read."""
    status_of = os.fstat

    with planning_for(of(str(tmp_path))):
        spark_application.note("a", "first")
        with monkeypatch.context() as patch:

            def record_meanwhile(descriptor: int) -> os.stat_result:
                patch.undo()
                spark_application.note("a", "next")
                return status_of(descriptor)

            patch.setattr(os, "fstat", record_meanwhile)
            assert spark_application.take_noted("a", 60, str) == "first"
        assert spark_application.take_noted("a", 60, str) == "next"
        assert spark_application.take_noted("a", 60, str) is None
    assert not list(tmp_path.iterdir())


def test_a_failed_note_leaves_nothing_and_does_not_prevent_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches: a draft that stayed, as on a full disk, so that the next note of the thread also failed."""

    def fail(*_: object) -> None:
        raise OSError

    with planning_for(of(str(tmp_path))):
        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", fail)
            spark_application.note("a", "first")
        assert not list(tmp_path.iterdir())
        spark_application.note("a", "next")
        assert len(list(tmp_path.iterdir())) == 1


def _opened(descriptor: str) -> str:
    with suppress(OSError):
        return os.readlink(f"/proc/self/fd/{descriptor}")
    return ""


def test_a_folder_in_the_place_of_a_marker_leaks_no_descriptor(tmp_path: Path) -> None:
    with planning_for(of(str(tmp_path))):
        spark_application.note("a")
        (marker,) = tmp_path.iterdir()
        marker.unlink()
        marker.mkdir()
        assert not spark_application.happened_within("a", 60)
    # Threads of other tests may open and close descriptors meanwhile.
    assert str(marker) not in set(map(_opened, os.listdir("/proc/self/fd")))


@pytest.mark.parametrize("folders", ["", "/proc/none,/proc/nor/this"])
def test_markers_are_kept_in_the_process_without_a_folder(
    folders: str, in_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches: a warning for every micro-batch, an error without any temporary folder, and files that nobody
    deletes in the working directory."""
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", list)
    monkeypatch.setattr(tempfile, "tempdir", None)
    with planning_for(of(folders)):
        assert spark_application.claim("a") is None, "another process may have been the first"
        assert spark_application.first_time("a")
        assert not spark_application.first_time("a")
        assert not spark_application.happened_within("b", math.inf)
        spark_application.note("b", "text")
        assert spark_application.noted_within("b", 60, str) == "text"
        spark_application.forget("b")
        assert spark_application.noted_within("b", 60, str) is None
    with planning_for(of("/proc/another/application")):
        assert spark_application.first_time("a")
    assert not list(in_tmp_path.iterdir())


def test_few_markers_are_kept_in_the_process() -> None:
    with planning_for(of("")):
        for number in range(1000):
            spark_application.note(f"{number}")
        assert spark_application.happened_within("999", math.inf)
        assert not spark_application.happened_within("0", math.inf)
    assert len(spark_application.KEPT) < 300
