"""Each benchmark runs on tiny input; nothing is timed here."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.__main__ import BENCHMARKS

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.mark.parametrize("name", BENCHMARKS)
def test_it_runs(name: str, project_environment: dict[str, str]) -> None:
    command = [sys.executable, str(FOLDER / f"{name}.py"), "--smoke"]
    done = subprocess.run(
        command, env=project_environment, capture_output=True, text=True, timeout=250, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
