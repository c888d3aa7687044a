"""``python -m kafka_sink.doctor``: looks for what would make a job fail, and says why and what to do.

Run it with the driver's Python, where the job would start: it looks at Python, Java, the libraries, the
Python of Spark's workers and the folders, and, with ``--option kafka.bootstrap.servers=...``, at options,
connection, login and topic. It writes nothing to Kafka, and creates no topic.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from importlib import metadata
from typing import TYPE_CHECKING, TextIO

from kafka_sink.errors import KafkaSinkError
from kafka_sink.libraries import OF_DRIVER, OF_TASKS
from kafka_sink.version import __version__

if TYPE_CHECKING:
    from kafka_sink.options import SinkOptions

_PYTHON = (3, 10)
_JAVA = 17
_PYSPARK = (4, 1)
_TIMEOUT_S = 60
# Runs in the workers' Python. Prints what the driver compares.
_PROBE = """
import importlib.util, json, sys
def version(name):
    try:
        from importlib.metadata import version
        return version(name)
    except Exception:
        return None
missing = [name for name in {modules!r} if importlib.util.find_spec(name) is None]
print(json.dumps([sys.version_info[:2], version("pyspark"), missing]))
"""
_OWN_MODULES = ("kafka_sink", "pyspark_kafka_chunked")


class Level(Enum):
    """How bad a finding is. A job fails on a PROBLEM."""

    OK = "ok"
    NOTE = "note"
    PROBLEM = "PROBLEM"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    level: Level
    text: str


def examine(environ: Mapping[str, str], options: Mapping[str, str]) -> Iterator[Finding]:
    """All findings, in the order of a job's start. Without ``options``, no broker is asked."""
    yield _python()
    yield from _libraries()
    yield _java(environ)
    yield from _workers(environ)
    yield _folders(environ)
    if options:
        yield from _job(options)
    else:
        yield Finding(
            Level.NOTE,
            "no broker was asked: add --option kafka.bootstrap.servers=HOST:PORT and the job's other options",
        )


def _python() -> Finding:
    version = sys.version_info[:2]
    if version < _PYTHON:
        return Finding(
            Level.PROBLEM, f"Python {_dotted(version)} is too old: use {_dotted(_PYTHON)} or newer"
        )
    return Finding(Level.OK, f"kafka-chunked {__version__}, Python {_dotted(version)} ({sys.executable})")


def _libraries() -> Iterator[Finding]:
    missing = [name for name in OF_TASKS.values() if _version(name) is None]
    if missing:
        yield Finding(Level.PROBLEM, f"missing libraries: {_pip(sys.executable, missing)}")
    optional = [name for name in OF_DRIVER.values() if _version(name) is None]
    if optional:
        yield Finding(
            Level.NOTE,
            f"only the local broker and /metrics of the live view need: {_pip(sys.executable, optional)}",
        )
    pyspark = _version("pyspark")
    if pyspark is None:
        return
    if _numbers(pyspark) < _PYSPARK:
        yield Finding(
            Level.PROBLEM,
            f"PySpark {pyspark} is too old: Python sinks that take Arrow batches need {_dotted(_PYSPARK)}",
        )
    else:
        yield Finding(Level.OK, f"PySpark {pyspark}, PyArrow {_version('pyarrow')}")
    if "/pyspark/" not in os.environ.get("SPARK_HOME", "/pyspark/"):
        yield Finding(
            Level.NOTE,
            f"SPARK_HOME is {os.environ['SPARK_HOME']}: its Spark runs, not that of the installed PySpark",
        )


def _java(environ: Mapping[str, str]) -> Finding:
    home = environ.get("JAVA_HOME")
    path = os.path.join(home, "bin", "java") if home else shutil.which("java", path=environ.get("PATH"))
    remedy = f"install Java {_JAVA} or newer, and set JAVA_HOME to it"
    if not path:
        return Finding(Level.PROBLEM, f"there is no Java, which Spark needs: {remedy}")
    try:
        done = subprocess.run(
            [path, "-version"], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
        found = (done.stderr + done.stdout).split('"')
    except (OSError, subprocess.TimeoutExpired) as error:
        return Finding(Level.PROBLEM, f"Java at {path} does not start ({error}): {remedy}")
    version = found[1] if len(found) > 2 else ""
    major = version.removeprefix("1.").split(".")[0].split("-")[0]
    if not major.isdecimal() or int(major) < _JAVA:
        return Finding(
            Level.PROBLEM, f"Java {version or 'of unknown version'} at {path} is too old: {remedy}"
        )
    return Finding(Level.OK, f"Java {version} ({path})")


def _workers(environ: Mapping[str, str]) -> Iterator[Finding]:
    """The Python that Spark starts for tasks and for planning."""
    named = environ.get("PYSPARK_PYTHON")
    python = shutil.which(named or "python3", path=environ.get("PATH"))
    if named is None and python is not None:
        yield Finding(
            Level.NOTE,
            f"PYSPARK_PYTHON is not set, so Spark's workers take python3 from PATH ({python}). Set it to be "
            "sure: os.environ['PYSPARK_PYTHON'] = sys.executable, before the session is made",
        )
    if python is None:
        what = f"PYSPARK_PYTHON, {named}, does not exist" if named else "there is no python3 on PATH"
        yield Finding(
            Level.PROBLEM,
            f"Spark's workers have no Python, as {what}: set PYSPARK_PYTHON to {sys.executable}",
        )
        return
    modules = [*_OWN_MODULES, *OF_TASKS]
    try:
        done = subprocess.run(
            [python, "-c", _PROBE.format(modules=modules)],
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
            cwd=tempfile.gettempdir(),
            env=dict(environ),
        )
        version, pyspark, missing = json.loads(done.stdout.splitlines()[-1])
    except (OSError, subprocess.TimeoutExpired) as error:
        why = f"no end within {_TIMEOUT_S} s" if isinstance(error, subprocess.TimeoutExpired) else error
        yield Finding(Level.PROBLEM, f"the workers' Python, {python}, does not run: {why}")
        return
    except (ValueError, IndexError):
        last = (done.stderr.strip().splitlines() or [f"it ended with code {done.returncode}"])[-1]
        yield Finding(
            Level.PROBLEM,
            f"the workers' Python, {python}, does not run: {last}. Set PYSPARK_PYTHON to {sys.executable}",
        )
        return
    yield _of_workers(python, tuple(version), pyspark, missing)


def _of_workers(
    python: str, version: tuple[int, ...], pyspark: str | None, missing: Sequence[str]
) -> Finding:
    own = [name for name in missing if name in _OWN_MODULES]
    libraries = [OF_TASKS[name] for name in missing if name in OF_TASKS]
    if version != sys.version_info[:2]:
        text = (
            f"is {_dotted(version)} and the driver's is {_dotted(sys.version_info[:2])}: Spark refuses UDFs "
            "and data sources that the driver registers (PYTHON_VERSION_MISMATCH). Set PYSPARK_PYTHON to "
            f"{sys.executable}"
        )
    elif own:
        text = (
            "has no kafka-chunked, so Spark says DATA_SOURCE_NOT_FOUND: install it there, set PYSPARK_PYTHON "
            f"to {sys.executable}, or ship the wheel by --py-files and call kafka_sink.register(spark)"
        )
        if libraries:
            text += f". It lacks libraries, too, which --py-files does not bring: {_pip(python, libraries)}"
    elif libraries:
        text = f"lacks libraries: {_pip(python, libraries)}"
    elif pyspark != _version("pyspark"):
        text = f"has PySpark {pyspark}, and the driver {_version('pyspark')}: install the same version"
    else:
        return Finding(Level.OK, f"Spark's workers: Python {_dotted(version)} with all libraries ({python})")
    return Finding(Level.PROBLEM, f"the workers' Python, {python}, {text}")


def _folders(environ: Mapping[str, str]) -> Finding:
    named = environ.get("SPARK_LOCAL_DIRS")
    for folder in (named or tempfile.gettempdir()).split(","):
        try:
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            return Finding(
                Level.PROBLEM,
                f"Spark cannot write to {folder} ({error.strerror}): set SPARK_LOCAL_DIRS to one that it "
                "may write to",
            )
    return Finding(Level.OK, f"Spark's local folders can be written ({named or tempfile.gettempdir()})")


def _job(options: Mapping[str, str]) -> Iterator[Finding]:
    from kafka_sink.options import parse

    try:
        parsed = parse(dict(options))
    except KafkaSinkError as error:
        yield Finding(Level.PROBLEM, f"options: {error}")
        return
    yield from (Finding(Level.NOTE, warning) for warning in parsed.warnings)
    try:
        _reach(parsed.options)
    except KafkaSinkError as error:
        yield Finding(Level.PROBLEM, f"brokers, login and topic: {error}")
    else:
        yield Finding(Level.OK, "brokers, login and topic: usable")


def _reach(options: SinkOptions) -> None:
    """As planning does, but nothing is created."""
    from kafka_sink.planning_client import CONNECT_BOUND_MS, PlanningClient
    from kafka_sink.topic_preparation import TopicPreparation

    asked = replace(options, topic_create=False, allow_auto_create_topics=False)
    with PlanningClient(asked, min(CONNECT_BOUND_MS, asked.max_block_ms)) as client:
        TopicPreparation(asked, client, "topic", asked.topic).run()
        letters = asked.errors_deadletterqueue_topic_name
        if letters is not None:
            TopicPreparation(asked, client, "errors.deadletterqueue.topic.name", letters).run()


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _pip(python: str, distributions: Sequence[str]) -> str:
    return f"{python} -m pip install {' '.join(distributions)}"


def _numbers(version: str) -> tuple[int, ...]:
    parts = version.split(".")[:2]
    return tuple(int(part) for part in parts if part.isdecimal())


def _dotted(version: Sequence[int]) -> str:
    return ".".join(map(str, version))


def main(arguments: Sequence[str] | None = None, out: TextIO = sys.stdout) -> int:
    """0 if no job would fail on what was looked at, otherwise 1."""
    parser = argparse.ArgumentParser(
        prog="python -m kafka_sink.doctor",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an option of the job, such as kafka.bootstrap.servers=HOST:PORT; may be given again",
    )
    parser.add_argument(
        "--options-file",
        metavar="FILE",
        help="a JSON object of options, for passwords, which a command line would show to others",
    )
    args = parser.parse_args(arguments)
    options: dict[str, str] = {}
    if args.options_file:
        try:
            with open(args.options_file, encoding="utf-8") as file:
                for name, value in json.load(file).items():
                    options[name] = value if isinstance(value, str) else json.dumps(value)
        except (OSError, ValueError, AttributeError) as error:
            # Not the text of the file, which may hold passwords.
            reason = error.strerror if isinstance(error, OSError) else "it is not a JSON object"
            parser.error(f"--options-file {args.options_file}: {reason}")
    for pair in args.option:
        name, separator, value = pair.partition("=")
        if not separator:
            parser.error(f"--option {pair!r} lacks '=': write NAME=VALUE")
        options[name] = value
    problems = 0
    for finding in examine(os.environ, options):
        problems += finding.level is Level.PROBLEM
        print(f"{finding.level.value:>8}  {finding.text}", file=out, flush=True)
    count = {0: "nothing", 1: "1 problem"}.get(problems, f"{problems} problems")
    print(f"{count} found that would fail a job", file=out)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
