"""The processor time of processes that tests have started."""

from __future__ import annotations

import subprocess
import sys

from tests.support.processor_time import of_running_descendants

BUSY = """
import os, sys, time
if os.fork() == 0:
    os.fork()
    while time.process_time() < 0.15:
        pass
    print("done", flush=True)
sys.stdin.read()
"""


def test_a_process_that_runs_counts_and_so_do_its_children() -> None:
    command = [sys.executable, "-c", BUSY]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as root:
        assert root.stdin is not None
        assert root.stdout is not None
        assert [root.stdout.readline() for _ in range(2)] == [b"done\n"] * 2
        # Processes of earlier tests are not counted: they may end at this moment.
        used_s = of_running_descendants(root.pid)
        root.stdin.close()
    assert used_s >= 0.25
