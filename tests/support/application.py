"""A Spark application as planning sees it: a driver's JVM, for which ``sleep`` stands in, and its folder."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from types import TracebackType
from unittest import mock

from kafka_sink.coordinator.driver import launcher
from kafka_sink.coordinator.wire import driver_process
from kafka_sink.coordinator.wire.driver_process import DriverProcess


class Application:
    """A context manager; ``folder`` becomes SPARK_LOCAL_DIRS and is to be empty."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.driver = subprocess.Popen(["sleep", "600"])
        found = driver_process._look(self.driver.pid)
        assert found is not None
        driver = DriverProcess(self.driver.pid, found.started)
        self._patches = [
            mock.patch.object(driver_process, "find_driver_process", return_value=driver),
            mock.patch.dict(os.environ, {"SPARK_LOCAL_DIRS": str(folder), "SPARK_LOCAL_IP": "127.0.0.1"}),
        ]
        self._before = len(launcher._started)

    @property
    def processes(self) -> list[subprocess.Popen[bytes]]:
        """Coordinators that were started in it, dead ones too."""
        return launcher._started[self._before :]

    def __enter__(self) -> Application:
        for patch in self._patches:
            patch.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        for patch in self._patches:
            patch.stop()
        for process in (self.driver, *self.processes):
            process.kill()
            process.wait()
