from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from local_kafka.errors import LocalBrokerError
from local_kafka.processes import SupervisedProcesses
from tests.support.commands import alive
from tests.support.waiting import until

SLEEP = ["sleep", "600"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "supervised"
    made.mkdir()
    return made


def test_starts_signals_and_polls(folder: Path) -> None:
    processes = SupervisedProcesses(folder)
    try:
        pid = processes.start("a", SLEEP, log=folder / "log", cwd=folder)
        assert alive(pid)
        assert processes.is_running("a")
        with pytest.raises(LocalBrokerError, match="already running"):
            processes.start("a", SLEEP, log=folder / "log", cwd=folder)
        processes.signal("a", signal.SIGTERM)
        until(lambda: not processes.is_running("a"))
        processes.signal("a", signal.SIGTERM)  # has ended: nothing happens
        again = processes.start("a", SLEEP, log=folder / "log", cwd=folder)
        assert again != pid
    finally:
        processes.close()
    assert not alive(again)
    assert not folder.exists()


def test_what_cannot_start_is_an_error_and_the_rest_goes_on(folder: Path) -> None:
    processes = SupervisedProcesses(folder)
    try:
        with pytest.raises(LocalBrokerError, match="FileNotFoundError"):
            processes.start("a", ["/no/such/program"], log=folder / "log", cwd=folder)
        with pytest.raises(LocalBrokerError, match="KeyError"):
            processes.is_running("b")
        assert processes.start("c", SLEEP, log=folder / "log", cwd=folder) > 0
    finally:
        processes.close()


def test_a_frozen_process_ends_too(folder: Path) -> None:
    processes = SupervisedProcesses(folder)
    pid = processes.start("a", SLEEP, log=folder / "log", cwd=folder)
    processes.signal("a", signal.SIGSTOP)
    processes.close()
    assert not alive(pid)


def test_a_killed_supervisor_leaves_nothing_after_close(folder: Path) -> None:
    processes = SupervisedProcesses(folder)
    pid = processes.start("a", SLEEP, log=folder / "log", cwd=folder)
    os.kill(processes.supervisor_pid, signal.SIGKILL)
    with pytest.raises(LocalBrokerError, match="supervisor is gone"):
        processes.is_running("a")
    processes.close()
    until(lambda: not alive(pid))


PARENT = """
import os, signal, sys, time
from pathlib import Path
from local_kafka.processes import SupervisedProcesses
signal.signal(signal.SIGINT, signal.default_int_handler)  # in a shell's background job, too
folder = Path(sys.argv[1])
processes = SupervisedProcesses(folder)
pids = [processes.start(name, ["sleep", "600"], log=folder / "log", cwd=folder) for name in "ab"]
if sys.argv[2] == "fork" and os.fork() == 0:
    os.close(1)  # a forked sibling holds the command pipe open, as multiprocessing's would
    time.sleep(600)
print(*pids, processes.supervisor_pid, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("kind", ["plain", "fork"])
def test_everything_ends_with_the_parent(
    folder: Path, project_environment: dict[str, str], how: signal.Signals, kind: str
) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(folder), kind],
        env=project_environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    assert parent.stdout is not None
    pids = [int(word) for word in parent.stdout.readline().split()]
    try:
        assert len(pids) == 3
        assert all(alive(pid) for pid in pids)
        parent.send_signal(how)
        parent.wait(30)
        until(lambda: not any(alive(pid) for pid in pids))
        until(lambda: not folder.exists())
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(parent.pid, signal.SIGKILL)  # and what it forked
        parent.wait()
        parent.stdout.close()
