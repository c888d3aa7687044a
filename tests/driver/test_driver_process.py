"""The driver's process, found from a planning worker."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from kafka_sink.driver import driver_process
from kafka_sink.driver.driver_process import HostProcess
from kafka_sink.spark_application import SparkApplication, planning_for


def test_the_driver_is_the_nearest_ancestor_that_is_no_python() -> None:
    script = "from kafka_sink.driver.driver_process import find_driver_process as f; print(f().pid)"
    nested = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {script!r}], check=True)"
    shell = subprocess.Popen(
        ["sh", "-c", '"$0" -c "$1"; true', sys.executable, nested],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    printed, _ = shell.communicate(timeout=240)
    assert int(printed) == shell.pid


def test_a_process_is_known_by_its_start_too() -> None:
    with planning_for(SparkApplication("", os.getpid(), {})):
        found = driver_process.find_driver_process()
    assert found is not None
    assert found.is_alive()
    assert not HostProcess(os.getpid(), "another time").is_alive()
    with planning_for(SparkApplication("", 2**22 + 1, {})):
        assert driver_process.find_driver_process() is None
