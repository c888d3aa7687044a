"""Batch size limits that are kept for the next producers of the application."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kafka_sink import spark_application
from kafka_sink.spark_application import SparkApplication, planning_for
from kafka_sink.task.kept_limits import KeptLimits

KEPT = KeptLimits("a")
pytestmark = pytest.mark.usefixtures("application")


def test_a_limit_is_forgotten_after_an_hour(application: Path) -> None:
    KEPT.write({"t": 450})
    assert KEPT.read() == {"t": 450}
    assert not KeptLimits("b").read()
    for marker in application.iterdir():
        noted = marker.stat().st_mtime
        os.utime(marker, (noted, noted - 3_601))
    assert not KEPT.read()


def test_a_marker_without_limits_is_ignored() -> None:
    for value in ["", [], 7, {"t": "9"}, {"t": True}, {"t": 0}, None]:
        spark_application.note("batch size limits of 'a'", value)
        assert not KEPT.read(), value


def test_without_a_folder_the_process_keeps_limits() -> None:
    with planning_for(SparkApplication("", None, {})):
        KEPT.write({"t": 450})
        assert KEPT.read() == {"t": 450}
