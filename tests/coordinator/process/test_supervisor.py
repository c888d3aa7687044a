"""The supervisor's decisions; what it does to a real process is in test_process.py."""

from __future__ import annotations

import os
import signal
import subprocess

import pytest

from kafka_sink.coordinator.process import supervisor
from kafka_sink.coordinator.process.rendezvous_directory import CommandPipe
from kafka_sink.coordinator.process.supervisor import ServerSupervisor

SETTINGS = {"driver": [os.getpid(), ""], "marker": "/nowhere", "token": "t"}


def test_a_process_that_reports_nothing_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: a coordinator that hangs for the rest of the application."""
    monkeypatch.setattr(supervisor, "WATCH_S", 0.01)
    monkeypatch.setattr(supervisor, "_MAX_SILENT_CHECKS", 3)
    reading, writing = os.pipe()
    with subprocess.Popen(["sleep", "600"], pass_fds=(writing,)) as hanging:
        os.close(writing)
        ServerSupervisor(SETTINGS, [], CommandPipe(0))._watch(hanging.pid, reading)
        os.close(reading)
        assert hanging.wait(60) == -signal.SIGKILL


def test_a_successor_gets_the_clusters_that_were_added_and_not_forgotten() -> None:
    made = ServerSupervisor(SETTINGS, [{"cluster": "a", "options": {}}], CommandPipe(0))
    for key in ("b", "c", "b"):
        made._take({"cluster": key, "options": {"for": key}})
    made._take({"forgotten": "a"})
    made._take({})
    assert [one["cluster"] for one in made._clusters.values()] == ["c", "b"]
    for number in range(100):
        made._take({"cluster": str(number), "options": {}})
    assert list(made._clusters) == [str(number) for number in range(36, 100)]
