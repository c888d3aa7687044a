"""Writes where Spark's Python may start no process, open no port, and so on, as in places without jars.

The table in docs/clusters.md lists the rules, and what is lost under each. A run takes a minute of processor
time for each rule, so only `make full` runs them.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from local_kafka import LocalBroker
from tests.support import restricted_job
from tests.support.commands import run
from tests.support.ports import free_port
from tests.support.restricted import prohibitions
from tests.support.strategy import forced
from tests.support.topics import read_to_end

ROOT = Path(__file__).resolve().parents[2]
JOB = Path(restricted_job.__file__)
FOLDER = Path(prohibitions.__file__).parent
RULES = ("processes", "ports", "folders", "local-dirs", "proc", "coordinator")
NUMBERS = sorted(str(number).encode() for number in range(restricted_job.ROWS))
_TIMEOUT_S = 280


@dataclass
class Run:
    """``took``: the seconds of each write, by the end of its topic's name. ``log``: Spark's, and its
    workers'."""

    took: dict[str, float]
    log: str

    def warnings(self) -> list[int]:
        """How many lines each write logged that are not only informative."""
        return [
            sum("kafka-chunked" in line and " INFO " not in line for line in part.splitlines())
            for part in self.log.split("created topic")
        ]

    def refused(self) -> set[str]:
        # Processes write their lines at the same time, so that two may become one. "processes" comes before
        # "proc" among the rules, and so is not taken for it.
        return set(re.findall(f"{prohibitions.REFUSED} ({'|'.join(RULES)})", self.log))


def written_under(rules: tuple[str, ...], broker: LocalBroker, environ: dict[str, str], folder: Path) -> Run:
    """All kinds of write in one application, by its driver and by a client of Spark Connect."""
    (folder / "input").mkdir()
    for number in range(restricted_job.FILES):
        rows = NUMBERS[number :: restricted_job.FILES]
        (folder / "input" / f"{number}.txt").write_bytes(b"\n".join(rows))
    servers, port, name = broker.bootstrap_servers, str(free_port()), f"restricted-{'-'.join(rules)}"
    environ = {
        **environ,
        prohibitions.FORBIDDEN: ",".join(rules),
        prohibitions.BROKERS: ",".join(address.rpartition(":")[2] for address in servers.split(",")),
        "PYTHONPATH": f"{FOLDER}:{environ['PYTHONPATH']}",
    }
    command = [sys.executable, str(JOB), servers, name, str(folder), port]
    with (
        (folder / "log").open("w") as log,
        subprocess.Popen(
            command,
            env=environ,
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        ) as driver,
    ):
        assert driver.stdout is not None
        printed = driver.stdout.readline()
        assert printed, (folder / "log").read_text()[-5000:]
        took = json.loads(printed)
        # The client's folder and environment are not the server's, as if it ran on another host.
        (folder / "client").mkdir()
        known = {key: environ[key] for key in (prohibitions.FORBIDDEN, "PYTHONPATH", "PATH")}
        command[3] = f"{name}-connect"
        done = run([*command, "client"], known, folder=folder / "client")
        took |= {f"connect-{kind}": seconds for kind, seconds in json.loads(done.stdout).items()}
        driver.communicate(timeout=_TIMEOUT_S)
    return Run(took, (folder / "log").read_text())


@pytest.mark.skipif(not forced.is_full(), reason="make full runs it")
@pytest.mark.parametrize("rules", [*((rule,) for rule in RULES), RULES], ids=",".join)
def test_writes_need_no_option_and_warn_at_most_once(
    rules: tuple[str, ...], broker: LocalBroker, project_environment: dict[str, str], tmp_path: Path
) -> None:
    ran = written_under(rules, broker, project_environment, tmp_path)
    for kind in ran.took:
        values = read_to_end(broker.bootstrap_servers, f"restricted-{'-'.join(rules)}-{kind}")
        assert sorted(values) == NUMBERS, kind
    assert max(ran.warnings()) <= 1, ran.log
    # Without the folders of Spark there is no coordinator, so the other rules have less to refuse.
    assert rules == RULES or ran.refused() == set(rules) - {"local-dirs"}, ran.took


def test_the_documentation_has_each_rule() -> None:
    rows = (ROOT / "docs" / "clusters.md").read_text().splitlines()
    shown = [row for row in rows if row.startswith("| `")]
    assert [row.split("`")[1] for row in shown if row.split("`")[1] in RULES] == list(RULES)
