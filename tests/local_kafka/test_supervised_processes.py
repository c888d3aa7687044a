from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from local_kafka.errors import LocalBrokerError
from local_kafka.processes import SupervisedProcesses
from tests.support.commands import alive, start
from tests.support.waiting import until


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "supervised"
    made.mkdir()
    return made


@pytest.fixture
def processes(folder: Path) -> Iterator[SupervisedProcesses]:
    running = SupervisedProcesses(folder)
    yield running
    running.close()


def test_starts_signals_and_polls(processes: SupervisedProcesses, folder: Path) -> None:
    pid = sleeping(processes, folder)
    assert alive(pid)
    assert processes.is_running("a")
    with pytest.raises(LocalBrokerError, match="already running"):
        sleeping(processes, folder)
    processes.signal("a", signal.SIGTERM)
    until(lambda: not processes.is_running("a"))
    processes.signal("a", signal.SIGTERM)  # has ended: nothing happens
    with pytest.raises(LocalBrokerError, match="FileNotFoundError"):
        processes.start("b", ["/no/such/program"], log=folder / "log", cwd=folder)
    with pytest.raises(LocalBrokerError, match="KeyError"):
        processes.is_running("c")
    again = sleeping(processes, folder)
    assert again != pid
    # A frozen process ends, too.
    processes.signal("a", signal.SIGSTOP)
    processes.close()
    assert not alive(again)
    assert not folder.exists()


def sleeping(processes: SupervisedProcesses, folder: Path) -> int:
    return processes.start("a", ["sleep", "600"], log=folder / "log", cwd=folder)


def test_a_killed_supervisor_leaves_nothing_after_close(processes: SupervisedProcesses, folder: Path) -> None:
    pid = sleeping(processes, folder)
    os.kill(processes.supervisor_pid, signal.SIGKILL)
    with pytest.raises(LocalBrokerError, match="supervisor is gone"):
        processes.is_running("a")
    processes.close()
    until(lambda: not alive(pid))


PARENT = """
import os, sys, time
from pathlib import Path
from local_kafka.processes import SupervisedProcesses
folder = Path(sys.argv[1])
processes = SupervisedProcesses(folder)
pids = [processes.start(name, ["sleep", "600"], log=folder / "log", cwd=folder) for name in "ab"]
if sys.argv[2] == "fork" and os.fork() == 0:
    os.close(1)  # a forked sibling holds the command pipe open, as multiprocessing's would
    time.sleep(600)
print(*pids, processes.supervisor_pid, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize(
    ("how", "kind"),
    [(signal.SIGKILL, "fork"), (signal.SIGTERM, "fork"), (signal.SIGINT, "plain")],
)
def test_supervised_processes_end_with_their_parent(
    folder: Path, project_environment: dict[str, str], how: signal.Signals, kind: str
) -> None:
    command = [sys.executable, "-c", PARENT, folder, kind]
    parent = start(command, project_environment, start_new_session=True)
    assert parent.stdout is not None
    pids = [int(word) for word in parent.stdout.readline().split()]
    try:
        assert len(pids) == 3
        assert all(alive(pid) for pid in pids)
        parent.send_signal(how)
        parent.wait(60)
        until(lambda: not any(alive(pid) for pid in pids))
        until(lambda: not folder.exists())
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(parent.pid, signal.SIGKILL)  # and what it forked
        parent.communicate()
