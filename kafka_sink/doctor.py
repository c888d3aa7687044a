"""``kafka-chunked-doctor``: checks whether a job could fail, and reports the reasons and remedies.

This module imports no library, so that it can report one that is missing.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from importlib import metadata
from typing import Any, NamedTuple, TextIO

from kafka_sink.clock import CONNECT_BOUND_MS
from kafka_sink.driver.command_line import Finding, Level, given_options, note, ok, parser_of, problem
from kafka_sink.driver.planning_client import PlanningClient
from kafka_sink.driver.topic_preparation import TopicPreparation, named_topics
from kafka_sink.errors import KafkaSinkError, MissingTopicError
from kafka_sink.libraries import OF_DRIVER, OF_TASKS, others_may_write
from kafka_sink.network import apis, requests
from kafka_sink.options import SinkOptions, parse
from kafka_sink.options.table import SPECS
from kafka_sink.printable import printable, printable_list
from kafka_sink.version import __version__

__all__ = ["Finding", "Level", "check", "examine", "main"]

_DESCRIPTION = """\
Looks for what would make a job fail, and says why and what to do.

Run it with the driver's Python, where the job would start. It looks at Python, Java, the libraries, the
Python of Spark's workers and the local folders. To let it try the brokers, the login and the topic, too, give
it the job's options:

  kafka-chunked-doctor --bootstrap-servers HOST:PORT --option topic=NAME

It writes nothing to Kafka, and creates no topic. It ends with 1 if it has found a problem, otherwise with 0.
"""
_JAVA = 17
# Spark 3.5 also runs on older versions of Java.
_JAVA_OF_3 = 8
_PYSPARK = (3, 5)
_WITH_DATA_SOURCES = (4, 0)
_THROUGH_MAP_IN_ARROW = "kafka_sink.write and kafka_sink.foreach_batch"
_TIMEOUT_S = 60
# This runs in the workers' Python and prints what the driver compares.
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
# The bound for each address and each broker after one has responded.
_ONE_BROKER_MS = 3000.0


def version_of(distribution: str) -> str | None:
    """Return the installed version, or None."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def examine(
    environ: Mapping[str, str],
    options: Mapping[str, str],
    spark: Any = None,
    *,
    installed: Callable[[str], str | None] = version_of,
    path: Sequence[str] = sys.path,
) -> Iterator[Finding]:
    """Return all findings, in the order of a job's start. No broker is asked if ``options`` is empty.

    ``spark``: a SparkSession to check also. ``installed`` and ``path``: this Python's libraries.
    """
    yield ok(f"kafka-chunked {__version__}, Python {_dotted(sys.version_info[:2])} ({sys.executable})")
    yield from _libraries(installed)
    version = spark_version(environ, installed, path)
    yield from _spark(version, environ, installed)
    if version is not None:
        yield _java(environ, _JAVA if _numbers(version) >= _WITH_DATA_SOURCES else _JAVA_OF_3)
        yield from _workers(environ, version)
        yield from _driver_python(environ)
        yield _folders(environ)
    yield from _shared_import_folders()
    if options:
        yield from _job(options, environ, spark)
    else:
        yield note("no broker was asked: add --bootstrap-servers HOST:PORT and the job's other options")


def _libraries(installed: Callable[[str], str | None]) -> Iterator[Finding]:
    missing = [name for name in OF_TASKS.values() if installed(name) is None]
    if missing:
        yield problem(f"missing libraries: {_pip(sys.executable, missing)}")
    optional = [name for name in OF_DRIVER.values() if installed(name) is None]
    if optional:
        yield note(f"only /metrics of the live view needs: {_pip(sys.executable, optional)}")


def spark_version(
    environ: Mapping[str, str],
    installed: Callable[[str], str | None] = version_of,
    path: Sequence[str] = sys.path,
) -> str | None:
    """Return the version of the PySpark that this Python imports, or else of the Spark in SPARK_HOME."""
    own = installed("pyspark")
    if own is not None:
        return own
    folders = [os.path.join(folder, "pyspark") for folder in path]
    if environ.get("SPARK_HOME"):
        folders.append(os.path.join(environ["SPARK_HOME"], "python", "pyspark"))
    for folder in folders:
        try:
            with open(os.path.join(folder, "version.py"), encoding="utf-8") as file:
                match = re.search(r"""__version__[^=]*=\s*["']([^"']+)""", file.read())
        except OSError:
            continue
        if match:
            return match[1]
    return None


def _spark(
    version: str | None, environ: Mapping[str, str], installed: Callable[[str], str | None]
) -> Iterator[Finding]:
    """Report which Spark was found and which features work there."""
    if version is None:
        yield note(
            "no PySpark was found. On a cluster run the doctor with the Python of its drivers, and with "
            f"SPARK_HOME set. To install one here: {_pip(sys.executable, ['pyspark'])}"
        )
        return
    numbers = _numbers(version)
    libraries = f"PySpark {version}, PyArrow {installed('pyarrow')}"
    if numbers < _PYSPARK:
        yield problem(f"PySpark {version} is too old: use {_dotted(_PYSPARK)} or newer")
    elif numbers < _WITH_DATA_SOURCES:
        yield ok(
            f"{libraries}, which has no data sources in Python: use kafka_sink.write, and "
            "kafka_sink.foreach_batch for streams"
        )
    else:
        yield ok(f"{libraries}: format('kafka-chunked'), {_THROUGH_MAP_IN_ARROW}")
    if numbers >= _PYSPARK and installed("pandas") is None:
        say = problem if numbers < _WITH_DATA_SOURCES else note
        yield say(
            f"PySpark asks for pandas on the driver, for {_THROUGH_MAP_IN_ARROW}: "
            f"{_pip(sys.executable, ['pandas'])}"
        )
    if "/pyspark/" not in environ.get("SPARK_HOME", "/pyspark/") and installed("pyspark") is not None:
        yield note(
            f"SPARK_HOME is {environ['SPARK_HOME']}: its Spark runs, not that of the installed PySpark"
        )


def _java(environ: Mapping[str, str], oldest: int) -> Finding:
    home = environ.get("JAVA_HOME")
    path = os.path.join(home, "bin", "java") if home else shutil.which("java", path=environ.get("PATH"))
    remedy = f"install Java {oldest} or newer, and set JAVA_HOME to it"
    if not path:
        return problem(f"there is no Java, which Spark needs: {remedy}")
    try:
        done = subprocess.run(
            [path, "-version"], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
        parts = (done.stderr + done.stdout).split('"')
    except (OSError, subprocess.TimeoutExpired) as error:
        return problem(f"Java at {path} does not start ({error}): {remedy}")
    version = parts[1] if len(parts) > 2 else ""
    major = version.removeprefix("1.").split(".")[0].split("-")[0]
    if not major.isdecimal() or int(major) < oldest:
        return problem(f"Java {version or 'of unknown version'} at {path} is too old: {remedy}")
    return ok(f"Java {version} ({path})")


def _workers(environ: Mapping[str, str], spark: str) -> Iterator[Finding]:
    """Check the Python that Spark starts for tasks and for planning."""
    named = environ.get("PYSPARK_PYTHON")
    python = shutil.which(named or "python3", path=environ.get("PATH"))
    if named is None and python is not None:
        yield note(
            f"PYSPARK_PYTHON is not set, so Spark's workers take python3 from PATH ({python}). Set it to be "
            "sure: os.environ['PYSPARK_PYTHON'] = sys.executable, before the session is made"
        )
    if python is None:
        what = f"PYSPARK_PYTHON, {named}, does not exist" if named else "there is no python3 on PATH"
        yield problem(f"Spark's workers have no Python, as {what}: set PYSPARK_PYTHON to {sys.executable}")
        return
    answer = _ask(python, environ)
    if isinstance(answer, str):
        yield problem(
            f"the workers' Python, {python}, does not run: {answer}. Set PYSPARK_PYTHON to {sys.executable}"
        )
    else:
        yield _of_workers(python, answer, spark)


def _driver_python(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Check PYSPARK_DRIVER_PYTHON.

    If it is set, Spark looks for installed data sources with it, and then also runs such a data source's
    workers with it, even on executors (seen on PySpark 4.3.0). For a data source that the driver registers,
    Spark uses PYSPARK_PYTHON.
    """
    named = environ.get("PYSPARK_DRIVER_PYTHON")
    if named is None or named == environ.get("PYSPARK_PYTHON"):
        return
    python = shutil.which(named, path=environ.get("PATH"))
    answer = _ask(python, environ) if python else "there is no such program"
    why = answer if isinstance(answer, str) else answer.missing and f"it lacks {', '.join(answer.missing)}"
    if why:
        yield problem(
            f"PYSPARK_DRIVER_PYTHON is {named}, with which Spark looks for installed data sources, and that "
            f"fails: {why}. Spark then reports DATA_SOURCE_NOT_FOUND. Unset it before the session is made, "
            "as in os.environ.pop('PYSPARK_DRIVER_PYTHON', None), or call kafka_sink.register(spark) before "
            "the first write"
        )
    else:
        yield note(
            f"PYSPARK_DRIVER_PYTHON is {named}: Spark also runs the sink's tasks on executors with it, "
            "unless kafka_sink.register(spark) was called. Unset it if executors have no Python at this path"
        )


class _Answer(NamedTuple):
    """What a Python reports about itself. ``missing`` contains names of modules."""

    version: Sequence[int]
    pyspark: str | None
    missing: Sequence[str]


def _ask(python: str, environ: Mapping[str, str]) -> _Answer | str:
    """Run the Python and return its answer, or a text with the reason why there is none."""
    try:
        done = subprocess.run(
            [os.path.abspath(python), "-c", _PROBE.format(modules=[*_OWN_MODULES, *OF_TASKS])],
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
            # `-c` puts the current folder first on sys.path. Only root can write to this folder.
            cwd="/",
            env={**environ, "PYTHONSAFEPATH": "1"},
        )
        return _Answer(*json.loads(done.stdout.splitlines()[-1]))
    except subprocess.TimeoutExpired:
        return f"it did not end within {_TIMEOUT_S} s"
    except OSError as error:
        return str(error)
    except (ValueError, IndexError, TypeError):
        return (done.stderr.strip().splitlines() or [f"it ended with code {done.returncode}"])[-1]


def _of_workers(python: str, answer: _Answer, spark: str) -> Finding:
    own = [name for name in answer.missing if name in _OWN_MODULES]
    libraries = [OF_TASKS[name] for name in answer.missing if name in OF_TASKS]
    if tuple(answer.version) != sys.version_info[:2]:
        text = (
            f"is {_dotted(answer.version)} and the driver's is {_dotted(sys.version_info[:2])}: Spark "
            "refuses UDFs and data sources that the driver registers (PYTHON_VERSION_MISMATCH). Set "
            f"PYSPARK_PYTHON to {sys.executable}"
        )
    elif own:
        text = (
            "has no kafka-chunked, so Spark reports DATA_SOURCE_NOT_FOUND: install it there, set "
            f"PYSPARK_PYTHON to {sys.executable}, or ship the wheel with --py-files and call "
            "kafka_sink.register(spark)"
        )
        if libraries:
            text += f". It also lacks libraries, which --py-files does not ship: {_pip(python, libraries)}"
    elif libraries:
        text = f"lacks libraries: {_pip(python, libraries)}"
    # It is None if Spark puts its own PySpark on the path of its workers.
    elif answer.pyspark is not None and answer.pyspark != spark:
        text = f"has PySpark {answer.pyspark}, and the driver {spark}: install the same version"
    else:
        return ok(f"Spark's workers: Python {_dotted(answer.version)} with all libraries ({python})")
    return problem(f"the workers' Python, {python}, {text}")


def _folders(environ: Mapping[str, str]) -> Finding:
    named = environ.get("SPARK_LOCAL_DIRS")
    for folder in (named or tempfile.gettempdir()).split(","):
        try:
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            return problem(
                f"Spark cannot write to {folder} ({error.strerror}): set SPARK_LOCAL_DIRS to a folder "
                "that it can write to"
            )
    return ok(f"Spark's local folders can be written ({named or tempfile.gettempdir()})")


def _shared_import_folders() -> Iterator[Finding]:
    """Check the import folders. Spark starts workers with ``-m``, so the driver's folder is one of them."""
    for folder in dict.fromkeys([os.getcwd(), *map(os.path.abspath, sys.path)]):
        if others_may_write(folder):
            yield note(
                f"Python imports from {folder}, where other users of this host can put a module that then "
                "runs as you: start jobs in your own folder, and remove shared folders from PYTHONPATH"
            )


def _job(options: Mapping[str, str], environ: Mapping[str, str], spark: Any) -> Iterator[Finding]:
    try:
        parsed = parse(options)
    except KafkaSinkError as error:
        yield problem(f"options: {error}")
        yield note("no broker was asked, because of the problems with options")
        return
    yield from (note(warning) for warning in parsed.warnings)
    if spark is not None:
        yield from of_session(spark, options, parsed.options, environ)
    for what, look in ("brokers, login and topic", of_cluster), ("schema registry", registry_findings):
        try:
            yield from look(parsed.options)
        except KafkaSinkError as error:
            yield problem(f"{what}: {error}")


def of_cluster(options: SinkOptions) -> Iterator[Finding]:
    """Connect as planning does, but create nothing. Raises KafkaSinkError if no broker can be used."""
    asked = replace(options, topic_create=False, allow_auto_create_topics=False)
    named, topics = named_topics(asked), list[str]()
    usable = "brokers, login and topic" if named else "brokers and login"
    with closing(PlanningClient(asked, min(CONNECT_BOUND_MS, asked.max_block_ms))) as client:
        # Without a topic, only the brokers and the login are checked.
        for topic, option in named.items() or (("", ""),):
            preparation = TopicPreparation(asked, client, {topic: option} if topic else {})
            try:
                preparation.run()
                topics += [topic] if topic else []
            except MissingTopicError as error:
                usable = "brokers and login"
                yield _of_missing(options, preparation, topic, option, error)
        response: requests.MetadataResponse | None = client.ask(
            client.connect(),
            apis.METADATA,
            lambda version: requests.encode_metadata(version, tuple(topics), False),
            asked.request_timeout_ms,
            len(topics),
        )
    for address in options.bootstrap_servers if len(options.bootstrap_servers) > 1 else ():
        # A job does not notice a dead address, because it starts if one address responds.
        if why := _unreachable(options, address):
            yield note(f"an address of kafka.bootstrap.servers cannot be used: {why}")
    if response is not None:
        yield from _of_brokers(options, response)
    yield ok(f"{usable}: usable")


def _of_brokers(options: SinkOptions, response: requests.MetadataResponse) -> Iterator[Finding]:
    nodes, cluster = response.update.nodes, response.update.cluster_id
    yield ok(f"cluster {cluster}: {len(nodes)} {'broker' if len(nodes) == 1 else 'brokers'}")
    for node in nodes:
        if why := _unreachable(options, (node.host, node.port)):
            yield problem(
                f"broker {node.id} cannot be reached at its own address, so rows for its partitions wait "
                f"until kafka.delivery.timeout.ms: {why}"
            )
    for topic in response.update.topics:
        name, partitions = printable(topic.name), topic.partitions
        yield ok(f"topic '{name}': {len(partitions)} partitions")
        headless = [str(number) for number, partition in enumerate(partitions) if partition.leader < 0]
        if headless:
            yield problem(f"topic '{name}': no leader for partitions {printable_list(headless)}")


def _unreachable(options: SinkOptions, address: tuple[str, int]) -> KafkaSinkError | None:
    """Return the error of a connection to this address alone, or None if it works."""
    alone = replace(options, bootstrap_servers=(address,))
    try:
        with closing(PlanningClient(alone, min(_ONE_BROKER_MS, options.max_block_ms))) as client:
            client.connect()
    except KafkaSinkError as error:
        return error
    return None


def _of_missing(
    options: SinkOptions, preparation: TopicPreparation, topic: str, option: str, error: MissingTopicError
) -> Finding:
    what = f"Option '{option}': there is no topic '{topic}'"
    if not options.topic_create and not options.allow_auto_create_topics:
        return problem(str(error))
    if not options.topic_create:
        automatic = preparation.creates_topics_itself()
        if not automatic:
            why = (
                "brokers do not create topics by themselves (auto.create.topics.enable=false)"
                if automatic is False
                else "this login may not read whether brokers create topics by themselves "
                "(auto.create.topics.enable)"
            )
            return problem(f"{what}, and {why}. Create it, or set topic.create=true")
    refusal = preparation.creation_problem(topic)
    if refusal:
        return problem(f"{what}, and {refusal}")
    by = "a job creates it (topic.create=true)" if options.topic_create else "brokers create it by themselves"
    return note(f"{what}; {by}")


def of_session(
    spark: Any, given: Mapping[str, str], options: SinkOptions, environ: Mapping[str, str]
) -> Iterator[Finding]:
    """Check a session's settings as they are now. Planning sees only the settings with which the driver
    started.

    ``spark``: a SparkSession, which may be one of Spark Connect. ``given``: the job's options, from which
    ``options`` were parsed.
    """
    from kafka_sink import spark_application
    from kafka_sink.coordinator.placement import ADMINISTERED
    from kafka_sink.driver import driver_conf

    def conf(name: str) -> str | None:
        value = spark.conf.get(name, None)
        return None if value is None else str(value)

    yield ok(f"the session runs Spark {spark.version}")
    timeout_problem = driver_conf.idle_timeout_problem(conf, options.delivery_timeout_ms)
    if timeout_problem is not None:
        yield problem(timeout_problem)
    known = {name: value for name in driver_conf.REDACTION_DEFAULTS if (value := conf(name)) is not None}
    shown = driver_conf.shown_by_spark(given, known)
    if shown:
        yield note(driver_conf.redaction_warning(shown))
    yield from (note(text) for text in spark_application.arrow_batch_advice(conf))
    if conf("spark.speculation") == "true" and not options.exactly_once:
        yield note(
            "spark.speculation=true runs copies of slow tasks, and each writes its rows: readers see some "
            "rows twice, unless delivery.guarantee=exactly-once"
        )
    for spec in SPECS:
        own = driver_conf.OWN_PREFIX + spec.name
        variable = "KAFKA_CHUNKED_" + spec.name.upper().replace(".", "_")
        for name, value in ((variable, environ.get(variable)), (own, conf(own))):
            if value and spec.name in ADMINISTERED:
                yield note(f"{name}={value} overrides the option '{spec.name}'")
            elif value:
                # Do not show the value: it may be a password.
                yield problem(f"{name} has no effect: give the option '{spec.name}' to the job")


def registry_findings(options: SinkOptions) -> Iterator[Finding]:
    """Check schemas with the registry as planning does, but register nothing."""
    if not options.has_format:
        return
    from kafka_sink.formats import planning

    for what, error in planning.check_schemas(options):
        if error is None:
            yield ok(f"schema registry: {what}")
        elif error.is_missing and options.auto_register_schemas and not options.use_latest_version:
            yield note(f"schema registry: {what} has no schema yet; a job registers one")
        else:
            yield problem(f"schema registry: {error}")


def check(
    options: Mapping[str, str], environ: Mapping[str, str] = os.environ, spark: Any = None
) -> list[Finding]:
    """Return all findings for a job with these options. In a notebook: ``print(*check(options, spark=spark),
    sep="\\n")``. The settings of a SparkSession are also checked."""
    return list(examine(environ, options, spark))


def _pip(python: str, distributions: Sequence[str]) -> str:
    return f"{python} -m pip install {' '.join(distributions)}"


def _numbers(version: str) -> tuple[int, ...]:
    parts = version.split(".")[:2]
    return tuple(int(part) for part in parts if part.isdecimal())


def _dotted(version: Sequence[int]) -> str:
    return ".".join(map(str, version))


def main(arguments: Sequence[str] | None = None, out: TextIO = sys.stdout) -> int:
    """Return 0 if no problem was found that would fail a job, otherwise 1."""
    parser = parser_of("kafka-chunked-doctor", _DESCRIPTION)
    parser.add_argument("--json", action="store_true", help="print one JSON object for each finding")
    args = parser.parse_args(arguments)
    options = given_options(parser, args)
    problems = 0
    for finding in examine(os.environ, options):
        problems += finding.level is Level.PROBLEM
        line = json.dumps({"level": finding.level.name, "text": finding.text}) if args.json else str(finding)
        print(line, file=out, flush=True)
    if not args.json:
        count = {0: "nothing", 1: "1 problem"}.get(problems, f"{problems} problems")
        print(f"{count} found that would fail a job", file=out)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
