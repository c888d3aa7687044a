"""The processor time of processes that tests have started."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.support.processor_time import of_running_descendants

BUSY = """
import os, sys, time
os.fork()
while time.process_time() < 0.15:
    pass
print("done", flush=True)
sys.stdin.read()
"""


def test_a_process_that_runs_counts_and_so_do_its_children() -> None:
    before = of_running_descendants(os.getpid())
    command = [sys.executable, "-c", BUSY]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as both:
        assert both.stdin is not None
        assert both.stdout is not None
        assert [both.stdout.readline() for _ in range(2)] == [b"done\n"] * 2
        during = of_running_descendants(os.getpid())
        both.stdin.close()
    assert during - before >= 0.25
