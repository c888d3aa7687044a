"""``python -m tests.matrix``: every claimed pair of Python and PySpark, and every claimed broker, tried once.

Each Python gets a virtual environment of its own under ``--environments``, with the wheel installed as a user
would. Pythons that are not on this machine are left out, and the table says so, and so are brokers that
others wrote for which there is no toolchain. Brokers are tried with the Python that runs this, and the
checkout.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from local_kafka import LocalBroker
from local_kafka.jars import KAFKA_VERSION
from tests.matrix.environments import ENVIRONMENTS, Environment, InstallError, build_wheel, prepare
from tests.matrix.other_brokers import OTHERS, NotHereError
from tests.matrix.released_kafka import WITH_KRAFT, WITH_ZOOKEEPER, Release, ReleasedKafka, jars_of

_ROOT = Path(__file__).resolve().parents[2]
_JOB_SECONDS = 900
_NOT_HERE = "not here"


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
    parser.add_argument(
        "--only",
        metavar="TEXT",
        default="",
        help="those whose name contains this: brokers, others, pythons, kfake, 'Kafka 2.1', 'pyspark~=4.2'",
    )
    arguments = parser.parse_args()
    rows = [
        *_brokers(arguments.only),
        *_others(arguments.only, arguments.environments),
        *_pythons(arguments.only, arguments.environments),
    ]
    print(f"\nPythons against Kafka {KAFKA_VERSION}; brokers with Python {sys.version.split()[0]}\n")
    print(_table(rows))
    failed = False
    for row in rows:
        for check, problem in row.problems.items():
            if problem and problem != _NOT_HERE:
                failed = True
                print(f"\n{row.subject}, {check}: {problem}")
    return 1 if failed or not rows else 0


def _brokers(only: str) -> Iterator[Row]:
    brokers: list[tuple[str, Callable[[], AbstractContextManager[ReleasedKafka | LocalBroker]]]] = [
        *((release.version, partial(ReleasedKafka, release)) for release in WITH_ZOOKEEPER),
        *((release.version, partial(_with_kraft, release)) for release in WITH_KRAFT),
        (KAFKA_VERSION, LocalBroker),
    ]
    for version, start in brokers:
        if only not in ("", "brokers") and only not in f"Kafka {version}":
            continue
        print(f"Apache Kafka {version} ...", file=sys.stderr, flush=True)
        with start() as kafka:
            transactions = tuple(int(one) for one in version.split(".")) >= (3, 8)
            offers = ("admin", "transactions") if transactions else ("admin",)
            yield _tried(f"Kafka {version}", sys.executable, kafka.bootstrap_servers, str(_ROOT), offers)


def _with_kraft(release: Release) -> LocalBroker:
    return LocalBroker(kafka_home=jars_of(release))


def _others(only: str, folder: Path) -> Iterator[Row]:
    folder.mkdir(exist_ok=True)
    for broker in OTHERS:
        if only not in ("", "others") and only not in broker.name:
            continue
        print(f"{broker.name} ...", file=sys.stderr, flush=True)
        try:
            with broker.start(folder) as bootstrap:
                yield _tried(broker.name, sys.executable, bootstrap, str(_ROOT), broker.offers)
        except NotHereError:
            yield Row(broker.name, {"all": _NOT_HERE})


def _pythons(only: str, root: Path) -> Iterator[Row]:
    chosen = [one for one in ENVIRONMENTS if only in ("", "pythons") or only in str(one)]
    if not chosen:
        return
    with tempfile.TemporaryDirectory() as folder, LocalBroker() as kafka:
        wheel = build_wheel(Path(folder))
        for environment in chosen:
            print(f"{environment} ...", file=sys.stderr, flush=True)
            yield _in_environment(environment, wheel, root, kafka.bootstrap_servers)


def _in_environment(environment: Environment, wheel: Path, root: Path, bootstrap: str) -> Row:
    try:
        python = prepare(environment, wheel, root)
    except InstallError as error:
        return Row(str(environment), {"install": str(error)})
    if python is None:
        return Row(str(environment), {"all": _NOT_HERE})
    return _tried(str(environment), str(python), bootstrap, "", ("admin", "transactions"))


def _tried(subject: str, python: str, bootstrap: str, path: str, offers: Sequence[str]) -> Row:
    """Run the job with this Python; every check that it did not report failed with its last words.

    ``path`` is PYTHONPATH: the checkout, or nothing where the wheel is installed. ``offers``: as of job.py.
    """
    environ = {**os.environ, "PYSPARK_PYTHON": python, "PYSPARK_DRIVER_PYTHON": python}
    environ |= {"PYTHONPATH": path, "SPARK_LOCAL_IP": "127.0.0.1"}
    command = [python, str(_ROOT / "tests/matrix/job.py"), bootstrap]
    lines, last_words = _run([*command, *offers], environ)
    versions = next((line["versions"] for line in lines if "versions" in line), "")
    checks = [line for line in lines if "check" in line]
    problems = {str(line["check"]): str(line["problem"]) for line in checks}
    if not any("ended" in line for line in lines):
        problems["job"] = last_words or "it ended early"
    row = Row(f"{subject} ({versions})", problems, sum(line["seconds"] for line in checks))
    failed = [check for check, problem in problems.items() if problem]
    print(f"{row.subject}: {', '.join(failed) or 'ok'}, {row.seconds:.0f} s", file=sys.stderr, flush=True)
    return row


def _run(command: list[str], environ: dict[str, str]) -> tuple[list[dict[str, Any]], str]:
    """The lines that the job printed, and the end of its stderr."""
    with tempfile.TemporaryDirectory() as folder:
        job = subprocess.Popen(
            command,
            env=environ,
            cwd=folder,
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
