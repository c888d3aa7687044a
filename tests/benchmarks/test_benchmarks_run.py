"""Each benchmark runs on tiny input; nothing is timed here."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from benchmarks.__main__ import BENCHMARKS

Done = subprocess.CompletedProcess[str]


@pytest.fixture(scope="module")
def runs(
    request: pytest.FixtureRequest, project_environment: dict[str, str]
) -> Iterator[Mapping[str, Future[Done]]]:
    """Those that this run of the tests asks for, two at a time: mostly they wait for a JVM to start."""

    def run(name: str) -> Done:
        command = [sys.executable, "-m", f"benchmarks.{name}", "--smoke"]
        return subprocess.run(
            command, env=project_environment, capture_output=True, text=True, timeout=250, check=False
        )

    here = [item for item in request.session.items if item.path == Path(__file__)]
    names = [item.callspec.params["name"] for item in here if isinstance(item, pytest.Function)]
    with ThreadPoolExecutor(2) as pool:
        yield {name: pool.submit(run, name) for name in names}  # type: ignore[arg-type]


@pytest.mark.parametrize("name", BENCHMARKS)
def test_it_runs(name: str, runs: Mapping[str, Future[Done]]) -> None:
    done = runs[name].result()
    assert done.returncode == 0, done.stderr[-3000:]
