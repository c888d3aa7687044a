"""Spark jobs on a secured cluster: batch, streaming, topic creation, with and without the coordinator.

And what they leave behind of the secrets that they were given.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.security.secured_broker import PASSWORD, Secured, plain_jaas, secured_broker
from tests.support.standalone_cluster import StandaloneCluster
from tests.support.topics import read_topic

JOB = Path(__file__).parents[1] / "support" / "security" / "secured_job.py"
KEY_PASSWORD = "key-word-7319"


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    with secured_broker(tmp_path_factory.mktemp("secured")) as running:
        yield running


def given(secured: Secured, **more: str) -> dict[str, str]:
    """Mechanism, key and password all in one job."""
    chain = secured.client.chain_pem.decode()
    key = secured.client.key_pem(KEY_PASSWORD).decode()
    return {
        **secured.options("SASL"),
        "kafka.sasl.mechanism": "SCRAM-SHA-512",
        "kafka.sasl.jaas.config": plain_jaas(module="scram.ScramLoginModule"),
        "kafka.ssl.keystore.type": "PEM",
        "kafka.ssl.keystore.key": key,
        "kafka.ssl.keystore.certificate.chain": chain,
        "kafka.ssl.key.password": KEY_PASSWORD,
        "topic.create": "true",
        "topic.partitions": "3",
        **more,
    }


def run(
    jobs: list[tuple[str, dict[str, str]]],
    folder: Path,
    environ: dict[str, str],
    *,
    master: str = "local[2]",
) -> tuple[int, str]:
    """A driver of its own, its options through stdin as no secret belongs in a command line."""
    import json

    local = folder / "local"
    local.mkdir(exist_ok=True)
    listed = [{"kind": kind, "options": options} for kind, options in jobs]
    job = {"jobs": listed, "master": master, "folder": str(folder)}
    done = subprocess.run(
        [sys.executable, str(JOB)],
        input=json.dumps(job),
        env={**environ, "SPARK_LOCAL_DIRS": str(local)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    (folder / "output").write_text(done.stdout + done.stderr)
    return done.returncode, done.stdout + done.stderr


KINDS = [(kind, coordinator) for kind in ("batch", "stream") for coordinator in ("true", "false")]


def topic_of(kind: str, coordinator: str) -> str:
    return f"spark-{kind}-{coordinator}"


@pytest.fixture(scope="module")
def written(
    secured: Secured, tmp_path_factory: pytest.TempPathFactory, project_environment: dict[str, str]
) -> tuple[int, str]:
    """Code and output of one driver that runs a job of each kind."""
    jobs = [
        (kind, given(secured, topic=topic_of(kind, coordinator), **{"coordinator.enabled": coordinator}))
        for kind, coordinator in KINDS
    ]
    return run(jobs, tmp_path_factory.mktemp("jobs"), project_environment)


@pytest.mark.parametrize(("kind", "coordinator"), KINDS)
def test_jobs_write_to_a_secured_cluster(
    secured: Secured, written: tuple[int, str], kind: str, coordinator: str
) -> None:
    code, output = written
    assert code == 0, output[-3000:]
    topic = topic_of(kind, coordinator)
    assert sorted(int(row.value or b"-1") for row in read_topic(secured.broker, topic)) == list(range(300))


def test_executors_of_their_own_write_to_a_secured_cluster(
    secured: Secured, tmp_path: Path, project_environment: dict[str, str]
) -> None:
    with StandaloneCluster(workers=2, cores=1, environ=project_environment) as cluster:
        options = given(secured, topic="spark-standalone")
        code, output = run([("batch", options)], tmp_path, project_environment, master=cluster.url)
        assert code == 0, output[-3000:]
    found = read_topic(secured.broker, "spark-standalone")
    assert sorted(int(row.value or b"-1") for row in found) == list(range(300))


@pytest.mark.parametrize("fails", [False, True])
def test_no_secret_is_left_anywhere(
    secured: Secured, tmp_path: Path, project_environment: dict[str, str], fails: bool
) -> None:
    """Output, logs, event log, local folders, command lines and environments of all children."""
    wrong = "wrong-password-5521"
    options = given(secured, topic=f"secrets-{fails}".lower())
    if fails:
        options["kafka.sasl.jaas.config"] = plain_jaas(password=wrong, module="scram.ScramLoginModule")
    seen: set[str] = set()
    stop = threading.Event()
    watcher = threading.Thread(target=_watch_children, args=(os.getpid(), seen, stop))
    watcher.start()
    try:
        code, output = run([("batch", options)], tmp_path, project_environment)
    finally:
        stop.set()
        watcher.join()
    assert (code != 0) is fails, output[-3000:]
    if fails:
        assert "refuses the credentials for SASL SCRAM-SHA-512" in output
        assert "Task" not in output.partition("refuses the credentials")[0], "it was found by a task only"
    assert seen, "no process was looked at"
    written = {str(path): path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert any("events" in path for path in written), "there is no event log"
    key = options["kafka.ssl.keystore.key"].splitlines()[3]
    for secret in (PASSWORD, wrong, KEY_PASSWORD, key):
        for form in {secret, secret.replace("\\", "\\\\").replace('"', '\\"')}:
            for path, data in written.items():
                assert form.encode() not in data, (path, data[max(0, data.find(form.encode()) - 200) :][:300])
            assert not any(form in text for text in seen)


def _watch_children(root: int, seen: set[str], stop: threading.Event) -> None:
    while not stop.is_set():
        for pid in _descendants(root):
            for name in ("cmdline", "environ"):
                try:
                    seen.add(Path(f"/proc/{pid}/{name}").read_text(errors="replace"))
                except OSError:
                    pass
        time.sleep(0.1)


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
