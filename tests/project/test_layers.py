"""The modules that a process loads. Contracts in pyproject.toml check which module may import which."""

from __future__ import annotations

import subprocess
import sys

import pytest

OF_TASKS = ("breaker", "engine", "memory", "network", "records", "task")


@pytest.mark.parametrize("entry", ["coordinator.server_process", "spark.planning"])
def test_a_process_that_sends_no_rows_loads_nothing_of_a_task(entry: str) -> None:
    """Catches: a package whose __init__ imports what tasks need, which contracts do not see.

    The coordinator starts beside each driver, and each job is planned in a new process. NumPy and PyArrow
    alone take 0.3 s of processor time.
    """
    code = (
        f"import sys, kafka_sink.{entry}\n"
        f"names = {{f'kafka_sink.{{name}}' for name in {OF_TASKS}}} | {{'numpy', 'pyarrow'}}\n"
        "print(*sorted(names & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
