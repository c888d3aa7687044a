"""A job on a cluster whose executors are JVMs of their own, on addresses of their own."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kafka_sink.transactions import __main__ as transactions
from tests.support import standalone_job
from tests.support.security.secured_broker import Secured, given, secured_broker
from tests.support.standalone_cluster import StandaloneCluster
from tests.support.standalone_job import ROWS, TASKS
from tests.support.topics import log_ends, read_to_end, read_topic
from tests.support.waiting import until

JOB = Path(__file__).parents[1] / "support" / "standalone_job.py"
NUMBERS, ONCE = "standalone-numbers", "speculation-once"


@pytest.fixture(scope="module")
def secured(_programs: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    with secured_broker(tmp_path_factory.mktemp("secured")) as running:
        yield running


@dataclass
class Run:
    """``done``: what the job has written at its end; its driver lives on."""

    cluster: StandaloneCluster
    log: Path
    done: dict[str, Any]


@pytest.fixture(scope="module")
def run(
    secured: Secured, project_environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Run]:
    """Two executors' hosts, where the job has run. At the end, nothing of them may be left."""
    folder = tmp_path_factory.mktemp("job")
    with StandaloneCluster(workers=2, cores=2, environ=project_environment) as running:
        with job_done(running.url, secured, project_environment, folder) as done:
            yield Run(running, folder / "log", done)
        folder = running.folder
        assert processes_of(folder), "nothing is found where everything runs"
    until(lambda: not processes_of(folder), "the end of the cluster's processes", poll_s=0.1)
    assert not folder.exists()


@contextmanager
def job_done(
    master: str, secured: Secured, environ: dict[str, str], folder: Path
) -> Iterator[dict[str, Any]]:
    """One application for all tests, as its JVMs are slow to start."""
    servers = secured.broker.bootstrap_servers
    once = {"transactional.id.prefix": ONCE, "delivery.guarantee": "exactly-once"}
    options = {
        "numbers": given(secured) | {"topic": NUMBERS},
        "speculated": {"kafka.bootstrap.servers": servers, "topic": ONCE, **once},
    }
    secured.broker.create_topic(NUMBERS, 4)
    secured.broker.create_topic(ONCE, 2)
    log, done = folder / "log", folder / "done"
    command = [sys.executable, str(JOB), master, str(folder)]
    with (
        log.open("wb") as out,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=out, stderr=out, env=environ) as job,
    ):

        def said() -> str:
            return log.read_text(errors="replace")[-3000:]

        def while_it_runs(condition: Callable[[], object]) -> bool:
            assert job.poll() is None, said()
            return bool(condition())

        try:
            assert job.stdin is not None
            job.stdin.write(json.dumps(options).encode() + b"\n")
            job.stdin.flush()
            # Task 0's rows, and some of the other's first attempt, in an open transaction.
            enough = partial(while_it_runs, lambda: sum(log_ends(servers, ONCE)) > ROWS // TASKS)
            until(enough, said, within_s=600, poll_s=0.05)
            (folder / "go").touch()
            until(partial(while_it_runs, done.exists), said, within_s=200, poll_s=0.05)
            yield json.loads(done.read_text())
        finally:
            job.kill()


def test_executors_both_write_and_every_row_arrives_once(secured: Secured, run: Run) -> None:
    """To a secured cluster: what proves who they are reaches executors, too."""
    found = read_topic(secured.broker, NUMBERS)
    assert sorted(int(row.value or b"-1") for row in found) == list(range(standalone_job.NUMBERS))
    assert {row.key for row in found} == {host.encode() for host in run.cluster.hosts}


@pytest.mark.usefixtures("run")
def test_rows_of_an_attempt_that_lost_to_speculation_stay_invisible(secured: Secured) -> None:
    """The copy of a task won while rows of the first attempt were in the topic."""
    servers = secured.broker.bootstrap_servers
    out = io.StringIO()
    asked = ["list", "--bootstrap-servers", servers, "--prefix", f"{ONCE}-job", "--topic", ONCE]
    assert transactions.main(asked, out) == 0
    assert "\n0 transactions open" in out.getvalue()
    committed, written = (
        Counter(int(value) for value in read_to_end(servers, ONCE, isolation))
        for isolation in ("read_committed", "read_uncommitted")
    )
    assert committed == dict.fromkeys(range(ROWS), 1)
    assert written > committed, "the first attempt had written nothing"
    assert min(written - committed) >= ROWS // TASKS, "task 1's alone"


def test_workers_share_what_the_daemon_imported_and_nothing_is_left_of_a_driver_that_was_killed(
    run: Run,
) -> None:
    for log in (run.log, *run.cluster.folder.glob("*.work/*/*/stderr")):
        assert "kafka_sink.daemon: " not in log.read_text(errors="replace"), "it has given way to Spark's own"
    seen = run.done["workers"]
    assert all(loaded for _, loaded, *_ in seen)
    assert all("kafka_sink.daemon" in parent for _, _, parent, *_ in seen)
    workers = {worker for worker, *_ in seen}
    assert len({first for *_, first, _ in seen}) == len(workers), "workers share a random generator"
    assert len({second for *_, second in seen}) == len(workers), "workers share numpy's random generator"
    coordinators = coordinators_under(run.done["jvm"])
    assert len(coordinators) == 1
    # Its Python lives on and waits for nothing: the JVM stays as a zombie.
    os.kill(run.done["jvm"], signal.SIGKILL)
    until(lambda: not processes().keys() & set(coordinators), within_s=60)


def processes() -> dict[int, tuple[int, str]]:
    """Parent and command of every process."""
    # Wide: executors name their folder far behind.
    shown = subprocess.run(["ps", "-ewwo", "pid=,ppid=,stat=,args="], capture_output=True, text=True)
    fields = (line.split(None, 3) for line in shown.stdout.splitlines())
    return {int(one[0]): (int(one[1]), one[3]) for one in fields if len(one) == 4 and one[2][0] != "Z"}


def coordinators_under(ancestor: int) -> list[int]:
    known = processes()

    def is_under(pid: int) -> bool:
        while pid in known and pid != ancestor:
            pid = known[pid][0]
        return pid == ancestor

    return [pid for pid, (_, args) in known.items() if "-m kafka_sink.coordinator" in args and is_under(pid)]


def processes_of(folder: Path) -> list[str]:
    """Command lines that name the folder: workers and executors do."""
    return [args for pid, (_, args) in processes().items() if str(folder) in args and pid != os.getpid()]
