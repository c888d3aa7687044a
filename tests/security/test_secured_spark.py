"""Spark jobs on a secured cluster, in one driver of their own: what they write, what they leave behind of the
secrets that they were given, and what the driver's log says about a failure."""

from __future__ import annotations

import contextlib
import json
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

import pytest

from kafka_sink.spark.reading import SPARK_FAILED
from tests.support.commands import run
from tests.support.security.secured_broker import (
    KEY_PASSWORD,
    PASSWORD,
    USER,
    Secured,
    given,
    plain_jaas,
)
from tests.support.topics import read_topic

pytestmark = pytest.mark.timeout(600)

SUPPORT = Path(__file__).parents[1] / "support"
EXAMPLE = Path(__file__).parents[2] / "examples" / "secured.py"
WRONG_PASSWORD = "wrong-password-5521"


@dataclass(frozen=True)
class Driver:
    """A driver that has ended; ``seen``: command lines and environments of its processes."""

    code: int
    output: str
    folder: Path
    seen: frozenset[str]
    key: str


@pytest.fixture(scope="module")
def driver(
    secured: Secured, tmp_path_factory: pytest.TempPathFactory, project_environment: dict[str, str]
) -> Driver:
    """Watched while it runs a job with a wrong password, a stream, the example and writes that fail. Its
    options come through stdin as no secret belongs in a command line."""
    folder = tmp_path_factory.mktemp("jobs")
    usual = given(secured) | {"topic.create": "true", "topic.partitions": "3", "coordinator.enabled": "true"}
    refused = plain_jaas(password=WRONG_PASSWORD, module="scram.ScramLoginModule")
    login = tmp_path_factory.mktemp("login") / "login.json"
    login.touch(mode=0o600)
    login.write_text(json.dumps({"username": USER, "password": PASSWORD}), encoding="utf-8")
    example = [str(EXAMPLE), secured.bootstrap("SASL"), str(login), secured.trust, "secured-example"]
    failing = [str(SUPPORT / "failing_job.py"), secured.broker.bootstrap_servers, str(folder / "checkpoint")]
    jobs: list[dict[str, object]] = [
        {"kind": "batch", "options": usual | {"topic": "refused", "kafka.sasl.jaas.config": refused}},
        {"kind": "stream", "options": usual | {"topic": "secured-stream"}},
        {"kind": "script", "arguments": example},
        {"kind": "script", "arguments": failing},
    ]
    (folder / "local").mkdir()
    environ = {**project_environment, "SPARK_LOCAL_DIRS": str(folder / "local")}
    seen: set[str] = set()
    stop = threading.Event()
    watcher = threading.Thread(target=_watch, args=(str(folder), seen, stop))
    watcher.start()
    try:
        job = json.dumps({"jobs": jobs, "folder": str(folder)})
        command = [sys.executable, SUPPORT / "security" / "secured_job.py"]
        # A busy machine takes ten times as long.
        done = run(command, environ, given=job, code=2, timeout_s=560)
    finally:
        stop.set()
        watcher.join()
    output = done.stdout + done.stderr
    (folder / "output").write_text(output)
    return Driver(done.returncode, output, folder, frozenset(seen), usual["kafka.ssl.keystore.key"])


@pytest.mark.parametrize(("topic", "rows"), [("secured-stream", 300), ("secured-example", 1_000)])
def test_jobs_write_to_a_secured_cluster(secured: Secured, driver: Driver, topic: str, rows: int) -> None:
    assert driver.code == 2, f"the wrong password fails, and writes that are to: {driver.output[-3000:]}"
    assert sorted(int(row.value or b"-1") for row in read_topic(secured.broker, topic)) == list(range(rows))


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


def test_the_sentence_that_helps_is_one_line_that_stands_out(driver: Driver) -> None:
    """Catches: 16 lines of traceback and a bare SQLSTATE behind the sentence, 200 lines of tasks, and 109 of
    a stream's Java frames."""
    log = driver.output
    assert "short_tracebacks.py" not in log

    def part(name: str) -> str:
        return log[log.index(f"begin {name}") : log.index(f"end {name}")]

    planning = part("planning").splitlines()
    (line,) = [one for one in planning if " ERROR kafka-chunked" in one]
    assert "Required attribute 'value' not found" in line
    assert len(planning) <= 4, "lines up to the one that helps"
    task = part("task").splitlines()
    partition = "Invalid partition: column 'partition' has 7 in a row for topic 'last-line'"
    (line,) = [one for one in task if " ERROR kafka-chunked" in one]
    assert "kafka-chunked: aborted, 1 of 1 tasks did not finish: task 0 on " in line
    assert partition in line
    assert task.index(line) >= len(task) - 3
    assert "ArrowInvalid" not in log
    for name, cause in (("cast", "CAST_INVALID_INPUT"), ("udf", "ZeroDivisionError")):
        above, said, _ = part(name).partition(SPARK_FAILED)
        assert said
        assert cause in above
    (line,) = [one for one in log.splitlines() if " ERROR kafka-chunked, micro-batch " in one]
    assert partition in line
    assert line.endswith("or set errors.tolerance=all to skip such rows")


def _watch(mark: str, seen: set[str], stop: threading.Event) -> None:
    """Of processes with the mark in their environment, and of coordinators."""
    known: set[tuple[str, str]] = set()
    while not stop.wait(0.1):
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                command = (process / "cmdline").read_text(errors="replace")
                if (process.name, command) in known:
                    continue
                environ = (process / "environ").read_text(errors="replace")
                known.add((process.name, command))
                if mark in environ or "kafka_sink" in command:
                    seen |= {command, environ}
