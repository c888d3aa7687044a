"""The supervisor's decisions; what it does to a real process is in test_process.py."""

from __future__ import annotations

import os
import signal
import subprocess

from kafka_sink.coordinator.process.supervisor import KnownClusters, watch


def test_a_process_that_reports_nothing_is_ended() -> None:
    """Catches: a coordinator that hangs for the rest of the application."""
    reading, writing = os.pipe()
    with subprocess.Popen(["sleep", "600"], pass_fds=(writing,)) as hanging:
        os.close(writing)
        watch(hanging.pid, reading, lambda line: None, check_s=0.01, max_silent_checks=3)
        os.close(reading)
        assert hanging.wait(60) == -signal.SIGKILL


def test_a_successor_gets_the_clusters_that_were_added_and_not_forgotten() -> None:
    known = KnownClusters([{"cluster": "a", "options": {}}])
    for key in ("b", "c", "b"):
        known.take({"cluster": key, "options": {"for": key}})
    known.take({"forgotten": "a"})
    known.take({})
    assert [one["cluster"] for one in known.lines()] == ["c", "b"]
    for number in range(100):
        known.take({"cluster": str(number), "options": {}})
    assert [one["cluster"] for one in known.lines()] == [str(number) for number in range(36, 100)]
