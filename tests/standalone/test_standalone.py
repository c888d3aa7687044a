"""Jobs on a cluster whose executors are JVMs of their own, on addresses of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.security.secured_broker import Secured, given, secured_broker
from tests.support.standalone_cluster import StandaloneCluster
from tests.support.topics import read_topic

JOB = Path(__file__).parents[1] / "support" / "numbers_job.py"


@pytest.fixture
def secured(tmp_path: Path) -> Iterator[Secured]:
    with secured_broker(tmp_path) as running:
        yield running


def test_both_executors_write_and_every_row_arrives_once(
    secured: Secured, project_environment: dict[str, str]
) -> None:
    """To a secured cluster: what proves who they are reaches executors, too."""
    topic, rows, broker = "standalone-numbers", 20_000, secured.broker
    broker.create_topic(topic, 4)
    with StandaloneCluster(workers=2, cores=2, environ=project_environment) as cluster:
        command = [sys.executable, str(JOB), cluster.url, broker.bootstrap_servers, topic, str(rows), "8"]
        done = subprocess.run(
            command,
            input=json.dumps(given(secured)),
            env=project_environment,
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        folder = cluster.folder
        assert processes_of(folder), "nothing is found where everything runs"
    found = read_topic(broker, topic)
    assert sorted(int(row.value or b"-1") for row in found) == list(range(rows))
    assert {row.key for row in found} == {host.encode() for host in cluster.hosts}
    deadline = time.monotonic() + 20
    while (left := processes_of(folder)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left == [], "processes outlive the cluster"
    assert not folder.exists()


def processes_of(folder: Path) -> list[str]:
    """Command lines that name the folder: workers and executors do."""
    # Wide: executors name it far behind.
    listed = subprocess.run(["ps", "-ewwo", "pid=,args="], capture_output=True, text=True, check=True)
    own = str(os.getpid())
    return [line for line in listed.stdout.splitlines() if str(folder) in line and line.split()[0] != own]
