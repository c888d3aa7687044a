"""``python -m tests.matrix``: every claimed pair of Python and PySpark, and every claimed broker, tried once.

Each Python gets a virtual environment of its own under ``--environments``; Pythons that are not on this
machine are left out, and the table says so. Brokers are tried with the Python that runs this.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kafka_sink.local_broker import LocalBroker
from kafka_sink.local_broker.jars import KAFKA_VERSION
from tests.matrix.released_kafka import RELEASES, ReleasedKafka

_ROOT = Path(__file__).resolve().parents[2]
# The oldest and the newest PySpark of each minor version on the oldest and the newest Python.
ENVIRONMENTS = (
    ("3.10", "pyspark==4.1.1"),
    ("3.10", "pyspark==4.2.1"),
    ("3.11", "pyspark==4.1.1"),
    ("3.12", "pyspark>=4.3"),
    ("3.13", "pyspark==4.2.1"),
    ("3.13", "pyspark>=4.3"),
    ("3.14", "pyspark>=4.3"),
)
_JOB_SECONDS = 900
_CHECKS = 4


@dataclass(frozen=True)
class Row:
    """One line of the table. ``problems`` by check; "not here" where it could not be tried."""

    subject: str
    problems: dict[str, str]
    seconds: float = 0.0


def main() -> int:
    """0 where everything that could be tried held."""
    parser = argparse.ArgumentParser(prog="python -m tests.matrix", description=__doc__)
    parser.add_argument("--environments", type=Path, default=_ROOT / ".venv-matrix")
    parser.add_argument("--only", choices=("brokers", "pythons"))
    arguments = parser.parse_args()
    rows: list[Row] = []
    if arguments.only != "pythons":
        for release in RELEASES:
            print(f"Apache Kafka {release.version} ...", file=sys.stderr, flush=True)
            with ReleasedKafka(release) as kafka:
                rows.append(_tried(f"Kafka {release.version}", sys.executable, kafka.bootstrap_servers))
    if arguments.only != "brokers":
        with LocalBroker() as kafka:
            for python, pyspark in ENVIRONMENTS:
                print(f"Python {python} with {pyspark} ...", file=sys.stderr, flush=True)
                rows.append(_in_environment(arguments.environments, python, pyspark, kafka.bootstrap_servers))
    print(f"\nPythons against Kafka {KAFKA_VERSION}; brokers with Python {sys.version.split()[0]}\n")
    print(_table(rows))
    for row in rows:
        for check, problem in row.problems.items():
            if problem and problem != "not here":
                print(f"\n{row.subject}, {check}: {problem}")
    failed = [row for row in rows if any(p and p != "not here" for p in row.problems.values())]
    return 1 if failed else 0


def _in_environment(folder: Path, python: str, pyspark: str, bootstrap: str) -> Row:
    subject = f"Python {python}, {pyspark}"
    program = _python(python)
    if program is None:
        return Row(subject, {"all": "not here"})
    venv = folder / f"{python}-{pyspark.replace('>=', '-from-').replace('==', '-')}"
    if not (venv / ".installed").exists():
        setup = subprocess.run(
            [str(_ROOT / "tools/setup_venv.sh"), program, str(venv), pyspark],
            cwd=_ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        if setup.returncode:
            return Row(subject, {"install": (setup.stderr or setup.stdout)[-1500:]})
        (venv / ".installed").touch()
    return _tried(subject, str(venv / "bin/python"), bootstrap)


def _python(version: str) -> str | None:
    """A ``pythonX.Y`` that starts: on PATH, or among pyenv's versions."""
    name = f"python{version}"
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    candidates = [shutil.which(name), *map(str, sorted(pyenv.glob(f"{version}.*/bin/{name}")))]
    for found in candidates:
        if found and subprocess.run([found, "--version"], capture_output=True, check=False).returncode == 0:
            return found
    return None


def _tried(subject: str, python: str, bootstrap: str) -> Row:
    """Run the job with this Python; every check that it did not report failed with its last words."""
    environ = {**os.environ, "PYSPARK_PYTHON": python, "PYSPARK_DRIVER_PYTHON": python}
    environ["PYTHONPATH"] = str(_ROOT)
    environ["SPARK_LOCAL_IP"] = "127.0.0.1"
    lines, last_words = _run([python, str(_ROOT / "tests/matrix/job.py"), bootstrap], environ)
    problems = {str(line["check"]): str(line["problem"]) for line in lines}
    if len(problems) < _CHECKS:
        problems["job"] = last_words or "it ended early"
    return Row(subject, problems, sum(line["seconds"] for line in lines))


def _run(command: list[str], environ: dict[str, str]) -> tuple[list[dict[str, Any]], str]:
    """The lines that the job printed, and the end of its stderr."""
    job = subprocess.Popen(
        command,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = job.communicate(timeout=_JOB_SECONDS)
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
            job.wait()
    return [json.loads(line) for line in out.splitlines() if line.startswith("{")], err[-1500:]


def _table(rows: list[Row]) -> str:
    checks = list(
        dict.fromkeys(check for row in rows for check in row.problems if check not in ("all", "job"))
    )
    lines = ["| | " + " | ".join(checks) + " | seconds |", "|---|" + "---|" * (len(checks) + 1)]
    for row in rows:
        if "all" in row.problems:
            cells = [row.problems["all"]] * len(checks)
        else:
            cells = ["FAILED" if row.problems.get(check, "not reached") else "ok" for check in checks]
        lines.append(f"| {row.subject} | {' | '.join(cells)} | {row.seconds:.0f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
