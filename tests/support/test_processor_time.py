"""The processor time of processes that tests have started."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.support.processor_time import of_running_descendants

BUSY = """
import subprocess, sys, time
if len(sys.argv) == 1:
    subprocess.run([sys.executable, __file__, "work"])
while time.process_time() < 0.3:
    pass
print("done", flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_process_that_runs_counts_and_so_do_its_children(tmp_path: object) -> None:
    script = f"{tmp_path}/busy.py"
    with open(script, "w", encoding="utf-8") as file:
        file.write(BUSY)
    before = of_running_descendants(os.getpid())
    with subprocess.Popen([sys.executable, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == b"done\n"  # the child, which waits for input that both share
        during = of_running_descendants(os.getpid())
        process.stdin.close()
    assert during - before >= 0.25
