"""Spark jobs on a secured cluster: batch, streaming, topic creation, with and without the coordinator.

And what they leave behind of the secrets that they were given.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from tests.support.commands import run
from tests.support.security.secured_broker import (
    KEY_PASSWORD,
    PASSWORD,
    USER,
    Secured,
    given,
    plain_jaas,
    secured_broker,
)
from tests.support.topics import read_topic

JOB = Path(__file__).parents[1] / "support" / "security" / "secured_job.py"
WRONG_PASSWORD = "wrong-password-5521"


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    with secured_broker(tmp_path_factory.mktemp("secured")) as running:
        yield running


@dataclass(frozen=True)
class Driver:
    """A driver that has ended; ``seen``: command lines and environments of its processes."""

    code: int
    output: str
    folder: Path
    seen: frozenset[str] = frozenset()
    key: str = ""


def run_jobs(jobs: list[dict[str, object]], folder: Path, environ: dict[str, str]) -> Driver:
    """A driver of its own, its options through stdin as no secret belongs in a command line."""
    local = folder / "local"
    local.mkdir(exist_ok=True)
    job = {"jobs": jobs, "master": "local[2]", "folder": str(folder)}
    environ = {**environ, "SPARK_LOCAL_DIRS": str(local)}
    done = run([sys.executable, JOB], environ, given=json.dumps(job), code=None)
    (folder / "output").write_text(done.stdout + done.stderr)
    return Driver(done.returncode, done.stdout + done.stderr, folder)


KINDS = [("batch", "true"), ("stream", "false")]


def topic_of(kind: str, coordinator: str) -> str:
    return f"spark-{kind}-{coordinator}"


@pytest.fixture(scope="module")
def driver(
    secured: Secured, tmp_path_factory: pytest.TempPathFactory, project_environment: dict[str, str]
) -> Driver:
    """Watched while it runs a job with a wrong password, then one of each kind, then the example."""
    usual = given(secured) | {"topic.create": "true", "topic.partitions": "3"}
    refused = plain_jaas(password=WRONG_PASSWORD, module="scram.ScramLoginModule")
    wrong = {"topic": "refused", "kafka.sasl.jaas.config": refused}
    jobs: list[dict[str, object]] = [{"kind": "batch", "options": usual | wrong}]
    for kind, coordinator in KINDS:
        own = {"topic": topic_of(kind, coordinator), "coordinator.enabled": coordinator}
        jobs.append({"kind": kind, "options": usual | own})
    login = tmp_path_factory.mktemp("login") / "login.json"
    login.touch(mode=0o600)
    login.write_text(json.dumps({"username": USER, "password": PASSWORD}), encoding="utf-8")
    arguments = [secured.bootstrap("SASL"), str(login), secured.trust, "secured-example"]
    jobs.append({"kind": "example", "arguments": arguments})
    seen: set[str] = set()
    stop = threading.Event()
    watcher = threading.Thread(target=_watch_children, args=(os.getpid(), seen, stop))
    watcher.start()
    try:
        ended = run_jobs(jobs, tmp_path_factory.mktemp("jobs"), project_environment)
    finally:
        stop.set()
        watcher.join()
    return replace(ended, seen=frozenset(seen), key=usual["kafka.ssl.keystore.key"])


@pytest.mark.parametrize(("kind", "coordinator"), KINDS)
def test_jobs_write_to_a_secured_cluster(
    secured: Secured, driver: Driver, kind: str, coordinator: str
) -> None:
    assert driver.code == 1, f"only the wrong password fails: {driver.output[-3000:]}"
    topic = topic_of(kind, coordinator)
    assert sorted(int(row.value or b"-1") for row in read_topic(secured.broker, topic)) == list(range(300))


def test_the_example_writes_to_a_secured_cluster(secured: Secured, driver: Driver) -> None:
    assert driver.code == 1, f"only the wrong password fails: {driver.output[-3000:]}"
    rows = read_topic(secured.broker, "secured-example")
    assert sorted(int(row.value or b"-1") for row in rows) == list(range(1_000))


def test_a_wrong_password_fails_the_job_when_it_is_planned(driver: Driver) -> None:
    before, refused, _ = driver.output.partition("refuses the credentials for SASL SCRAM-SHA-512")
    assert refused, driver.output[-3000:]
    assert "Task" not in before, "it was found by a task only"


def test_no_secret_is_left_anywhere(driver: Driver) -> None:
    """Output, logs, event log, local folders, command lines and environments of all children."""
    assert driver.seen, "no process was looked at"
    written = {str(path): path.read_bytes() for path in driver.folder.rglob("*") if path.is_file()}
    assert any("events" in path for path in written), "there is no event log"
    for secret in (PASSWORD, WRONG_PASSWORD, KEY_PASSWORD, driver.key.splitlines()[3]):
        for form in {secret, secret.replace("\\", "\\\\").replace('"', '\\"')}:
            for path, data in written.items():
                assert form.encode() not in data, (path, data[max(0, data.find(form.encode()) - 200) :][:300])
            assert not any(form in text for text in driver.seen)


def _watch_children(root: int, seen: set[str], stop: threading.Event) -> None:
    while not stop.wait(0.1):
        for pid in _descendants(root):
            for name in ("cmdline", "environ"):
                try:
                    seen.add(Path(f"/proc/{pid}/{name}").read_text(errors="replace"))
                except OSError:
                    pass


def _descendants(root: int) -> set[int]:
    parents: dict[int, int] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        parents[int(folder.name)] = int(fields[1])
    found: set[int] = set()
    frontier = {root}
    while frontier:
        frontier = {pid for pid, parent in parents.items() if parent in frontier} - found
        found |= frontier
    # The coordinator has a session and a parent of its own.
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if b"kafka_sink" in (folder / "cmdline").read_bytes():
                found.add(int(folder.name))
        except OSError:
            pass
    return found
