"""A job on a cluster whose executors are JVMs of their own, on addresses of their own."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from confluent_kafka import Consumer, TopicPartition

from kafka_sink.transactions import __main__ as transactions
from tests.support import standalone_job
from tests.support.security.secured_broker import Secured, given, secured_broker
from tests.support.standalone_cluster import StandaloneCluster
from tests.support.standalone_job import ROWS, TASKS
from tests.support.topics import log_end, read_to_end, read_topic
from tests.support.waiting import until

JOB = Path(__file__).parents[1] / "support" / "standalone_job.py"
NUMBERS, ONCE = "standalone-numbers", "speculation-once"


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    with secured_broker(tmp_path_factory.mktemp("secured")) as running:
        yield running


@pytest.fixture(scope="module")
def cluster(
    secured: Secured, project_environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[StandaloneCluster]:
    """Two executors' hosts, where the job has run. At the end, nothing of them may be left."""
    with StandaloneCluster(workers=2, cores=2, environ=project_environment) as running:
        run_job(running.url, secured, project_environment, tmp_path_factory.mktemp("job"))
        yield running
        folder = running.folder
        assert processes_of(folder), "nothing is found where everything runs"
    until(lambda: not processes_of(folder), "the end of the cluster's processes", poll_s=0.1)
    assert not folder.exists()


def run_job(master: str, secured: Secured, environ: dict[str, str], folder: Path) -> None:
    """One application for all tests, as its JVMs are slow to start."""
    servers = secured.broker.bootstrap_servers
    options = {
        "numbers": given(secured) | {"topic": NUMBERS},
        "speculated": {
            "kafka.bootstrap.servers": servers,
            "topic": ONCE,
            "transactional.id.prefix": ONCE,
            "delivery.guarantee": "exactly-once",
        },
    }
    log = folder / "log"
    with (
        log.open("wb") as out,
        subprocess.Popen(
            [sys.executable, str(JOB), master, str(folder)],
            stdin=subprocess.PIPE,
            stdout=out,
            stderr=out,
            env=environ,
        ) as job,
    ):
        try:
            assert job.stdin is not None
            secured.broker.create_topic(NUMBERS, 4)
            secured.broker.create_topic(ONCE, 2)
            job.stdin.write(json.dumps(options).encode())
            job.stdin.close()
            # Task 0's rows, and some of the other's first attempt.
            await_end_above(servers, ONCE, ROWS // TASKS, job, log)
            (folder / "go").touch()
            assert job.wait(200) == 0, log.read_text(errors="replace")[-3000:]
        finally:
            job.kill()


def test_both_executors_write_and_every_row_arrives_once(
    secured: Secured, cluster: StandaloneCluster
) -> None:
    """To a secured cluster: what proves who they are reaches executors, too."""
    found = read_topic(secured.broker, NUMBERS)
    assert sorted(int(row.value or b"-1") for row in found) == list(range(standalone_job.NUMBERS))
    assert {row.key for row in found} == {host.encode() for host in cluster.hosts}


@pytest.mark.usefixtures("cluster")
def test_of_an_attempt_that_spark_speculates_against_readers_see_nothing(secured: Secured) -> None:
    """The copy of a task won while rows of the first attempt were in the topic."""
    servers = secured.broker.bootstrap_servers
    out = io.StringIO()
    asked = ["list", "--bootstrap-servers", servers, "--prefix", f"{ONCE}-job", "--topic", ONCE]
    assert transactions.main(asked, out) == 0
    assert "\n0 transactions open" in out.getvalue()
    committed, written = (
        Counter(int(value) for value in read_to_end(servers, ONCE, 2, isolation))
        for isolation in ("read_committed", "read_uncommitted")
    )
    assert committed == dict.fromkeys(range(ROWS), 1)
    assert written > committed, "the first attempt had written nothing"
    assert min(written - committed) >= ROWS // TASKS, "task 1's alone"


def await_end_above(servers: str, topic: str, rows: int, job: subprocess.Popen[bytes], log: Path) -> None:
    """Until there are more rows in the topic than this, also such of open transactions."""
    consumer = Consumer(
        {"bootstrap.servers": servers, "group.id": "e", "isolation.level": "read_uncommitted"}
    )
    places = [TopicPartition(topic, partition) for partition in range(2)]

    def said() -> str:
        return log.read_text(errors="replace")[-3000:]

    def is_above() -> bool:
        assert job.poll() is None, said()
        return sum(log_end(consumer, place) for place in places) > rows

    try:
        until(is_above, said, within_s=600, poll_s=0.05)
    finally:
        consumer.close()


def processes_of(folder: Path) -> list[str]:
    """Command lines that name the folder: workers and executors do."""
    # Wide: executors name it far behind.
    listed = subprocess.run(["ps", "-ewwo", "pid=,args="], capture_output=True, text=True, check=True)
    own = str(os.getpid())
    return [line for line in listed.stdout.splitlines() if str(folder) in line and line.split()[0] != own]
