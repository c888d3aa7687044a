"""Whose processor time counts as whose."""

from __future__ import annotations

import os
import subprocess
import sys

from benchmarks.processor_time import of_spark
from kafka_sink.coordinator import server_process


def test_the_coordinators_time_counts_apart() -> None:
    """Catches: a coordinator whose module was renamed, which then costs nothing, or counts as a worker."""
    command = [sys.executable, "-c", "import sys; print(flush=True); sys.stdin.read()"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with (
        subprocess.Popen([*command, "-m", server_process.__name__], **pipes) as coordinator,  # type: ignore[call-overload]
        subprocess.Popen(command, **pipes) as worker,  # type: ignore[call-overload]
    ):
        coordinator.stdout.readline(), worker.stdout.readline()
        found = of_spark(os.getpid())
        coordinator.stdin.close(), worker.stdin.close()
    assert coordinator.pid in found.coordinator
    assert worker.pid in found.python
    assert coordinator.pid not in found.python
