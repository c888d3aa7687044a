"""A Spark application as planning sees it: a driver's JVM, for which ``sleep`` stands in, and its folder."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any
from unittest import mock

from kafka_sink.coordinator import launcher, writes
from kafka_sink.coordinator.live import messages
from kafka_sink.driver import driver_process
from kafka_sink.driver.driver_process import HostProcess
from kafka_sink.spark_application import SparkApplication, planning_for

# How long planning and commit wait for a coordinator that is only slow, as all processes are on a busy
# machine.
_PATIENT_MS = 60_000.0
_PATIENCE = (
    *((launcher, name) for name in ("_START_MS", "_LOCK_MS", "_LIVE_VIEW_MS")),
    *((messages, name) for name in ("_DRIVER_TIMEOUT_MS", "_SHORT_TIMEOUT_MS")),
    (writes, "_DRIVER_TIMEOUT_MS"),
)


class Application:
    """A context manager; ``folder`` becomes SPARK_LOCAL_DIRS and must be empty. ``arguments``: the driver's,
    in place of those of the process that stands in for it. ``found``: what planning finds."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.arguments: list[str] | None = None
        self.driver = subprocess.Popen(["sleep", "600"])
        self.found: HostProcess | None = self._driver()
        self._patches: list[Any] = [
            mock.patch.object(driver_process, "find_driver_process", side_effect=lambda: self.found),
            mock.patch.dict(os.environ, {"SPARK_LOCAL_DIRS": str(folder), "SPARK_LOCAL_IP": "127.0.0.1"}),
            *(mock.patch.object(module, name, _PATIENT_MS) for module, name in _PATIENCE),
        ]
        self._started = launcher._started
        self._before = len(self._started)

    def _driver(self) -> HostProcess:
        application = self

        class Driver(HostProcess):
            def arguments(self) -> list[str]:
                return super().arguments() if application.arguments is None else application.arguments

        with planning_for(SparkApplication("", self.driver.pid, {})):
            found = driver_process.find_driver_process()
        assert found is not None
        return Driver(found.pid, found.started)

    @property
    def processes(self) -> list[subprocess.Popen[bytes]]:
        """Coordinators that were started in it, dead ones too."""
        return self._started[self._before :]

    def __enter__(self) -> Application:
        for patch in self._patches:
            patch.start()
        return self

    def __exit__(self, *_: object) -> None:
        for patch in self._patches:
            patch.stop()
        self.driver.kill()
        self.driver.wait()
        for process in self.processes:
            process.kill()
            process.wait()
