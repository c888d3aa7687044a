"""Some rounds of kills in every run; ``make exactly-once`` runs many. In a process of its own, as they
fork."""

from __future__ import annotations

import subprocess
import sys

import pytest

_TIMEOUT_S = 280


def rounds(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tests.exactly_once", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )


@pytest.mark.chaos
@pytest.mark.timeout(300)
def test_no_row_is_lost_or_doubled_whichever_process_is_killed(project_environment: dict[str, str]) -> None:
    done = rounds(project_environment, "--rounds", "5", "--seed", "1", "--minutes", "2")
    assert done.returncode == 0, done.stdout + done.stderr
