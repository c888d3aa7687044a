"""A Spark application as planning sees it: a driver's JVM, for which ``sleep`` stands in, and its folder."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any
from unittest import mock

from kafka_sink.coordinator.figures import channel as figures_channel
from kafka_sink.coordinator.process import launcher, planning
from kafka_sink.driver import driver_process


class CoordinatorProcesses:
    """A coordinator: its supervisor and the process that serves, which signals reach together."""

    def __init__(self, supervisor: subprocess.Popen[bytes]) -> None:
        self.supervisor = supervisor
        self.pid = supervisor.pid

    def send_signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float = 30.0) -> int:
        code = self.supervisor.wait(timeout)
        until = time.monotonic() + timeout
        # Nobody here may wait for its child, which is another's by now.
        while self._members(1):
            assert time.monotonic() < until, "the process that serves lives on"
            time.sleep(0.01)
        return code

    def poll(self) -> int | None:
        return self.supervisor.poll()

    @property
    def server(self) -> int:
        """The pid of the process that serves."""
        until = time.monotonic() + 30.0
        while not (found := self._members(2)):
            assert time.monotonic() < until, "the supervisor has no child"
            time.sleep(0.02)
        return found[0]

    def _members(self, column: int) -> list[int]:
        """Living processes of this group (column 1) or of this parent (column 2)."""
        command = ["ps", "-ewwo", "pid=,pgid=,ppid=,stat="]
        listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        fields = [line.split() for line in listed.splitlines()]
        mine = [one for one in fields if one[column] == str(self.pid)]
        # A zombie with threads (l) still has its files open.
        return [int(one[0]) for one in mine if one[3][0] != "Z" or "l" in one[3]]


# How long planning and commit wait for a coordinator that is only slow, as on a busy machine all are.
_PATIENT_MS = 60_000.0
_PATIENCE = (
    *((launcher, name) for name in ("_LOCK_MS", "_NEW_READS_MS", "_READS_MS", "_LIVE_VIEW_MS")),
    *((figures_channel, name) for name in ("_DRIVER_TIMEOUT_MS", "_SHORT_TIMEOUT_MS")),
    *((planning, name) for name in ("_NEW_SILENCE_MS", "_SILENCE_MS", "PLANNING_RESPONSE_MS")),
)


class Application:
    """A context manager; ``folder`` becomes SPARK_LOCAL_DIRS and must be empty."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.driver = subprocess.Popen(["sleep", "600"])
        driver = driver_process.process(self.driver.pid)
        self._patches: list[Any] = [
            mock.patch.object(driver_process, "find_driver_process", return_value=driver),
            mock.patch.dict(os.environ, {"SPARK_LOCAL_DIRS": str(folder), "SPARK_LOCAL_IP": "127.0.0.1"}),
            *(mock.patch.object(module, name, _PATIENT_MS) for module, name in _PATIENCE),
        ]
        self._before = len(launcher._started)

    @property
    def processes(self) -> list[CoordinatorProcesses]:
        """Coordinators that were started in it, dead ones too."""
        return [CoordinatorProcesses(one) for one in launcher._started[self._before :]]

    def __enter__(self) -> Application:
        for patch in self._patches:
            patch.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        for patch in self._patches:
            patch.stop()
        self.driver.kill()
        self.driver.wait()
        for process in self.processes:
            process.kill()
            process.wait()
