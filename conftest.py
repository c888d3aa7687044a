"""Fixtures for every test: real brokers and a Spark session, each started once, when first asked for."""

from __future__ import annotations

import gc
import itertools
import logging
import os
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

from kafka_sink.driver import driver_log
from kafka_sink.spark_application import KEPT, SparkApplication, planning_for
from local_kafka import LocalBroker
from local_kafka.jars import find_jars
from local_kafka.schema_registry import LocalRegistry
from tests.matrix.released_kafka import LAST_OF_3, jars_of
from tests.support import jvms, lanes, processor_time, quick
from tests.support.broker_settings import SETTINGS
from tests.support.effort import tries
from tests.support.ports import free_port
from tests.support.strategy import forced
from tests.support.surroundings import Environ, Modules, replaced_modules
from tests.support.waiting import until

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROOT = Path(__file__).resolve().parent
LOCAL_KAFKA = str(ROOT / "packages" / "local_kafka")
STRATEGIES = ("incremental", "full")
_TOPICS = itertools.count()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--allocation-strategy",
        choices=STRATEGIES,
        help="run everything under this buffer.memory.allocation.strategy (default: incremental, and tests "
        "that use the fixture allocation_strategy under both)",
    )
    parser.addoption(
        "--not-run", help="what to print at the end about checks and tests that are not in this run"
    )


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if config.getoption("--not-run"):
        terminalreporter.write_line(f"Not run: {config.getoption('--not-run')}")


def pytest_configure(config: pytest.Config) -> None:
    forced.install()
    quick.forbid_programs(config)
    # Hypothesis bounds an example by wall time, which depends on the machine's load and not on the code.
    settings.register_profile(
        "any-machine", deadline=None, max_examples=tries(50), suppress_health_check=[HealthCheck.too_slow]
    )
    settings.load_profile("any-machine")
    os.environ.setdefault("JAVA_TOOL_OPTIONS", jvms.OPTIONS)
    # Spark's workers import the package. Without bytecode files each of them compiles it again, in 0.3 s.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    strategy = config.getoption("--allocation-strategy")
    if strategy:
        os.environ[forced.VARIABLE] = strategy
    # With xdist, workers run the tests, and the process that distributes them reports.
    if not config.getoption("numprocesses", default=None):
        config.pluginmanager.register(processor_time.Meter(), "processor-time")
        # Nothing that collecting tests makes is garbage, and searching it takes a third of the time.
        gc.disable()
    if config.getoption("durations") is not None and not hasattr(config, "workerinput"):
        summary = processor_time.Summary(config.getoption("durations"))
        config.pluginmanager.register(summary, "processor-time-summary")
    # Only the process that distributes the tests to workers reports for all of them.
    if config.getoption("numprocesses", default=None):
        config.pluginmanager.register(lanes.Progress(config), "lanes-progress")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    # None leaves the decision to pytest's own rules.
    return quick.is_left_out(collection_path, config) or None


def pytest_collection_finish() -> None:
    # Later looks for garbage leave all that alone.
    gc.freeze()
    gc.enable()


# This hook runs first: pytest-randomly has shuffled by then, and other hooks see the ids that xdist uses.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    quick.mark(config, items)
    lanes.share_out(items, in_worker=hasattr(config, "workerinput"))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "allocation_strategy" in metafunc.fixturenames:
        chosen = metafunc.config.getoption("--allocation-strategy")
        metafunc.parametrize("allocation_strategy", [chosen] if chosen else STRATEGIES, indirect=True)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(
    item: pytest.Item, nextitem: pytest.Item | None
) -> Generator[None, object, object]:
    """With workers, end a group's shared fixtures with its last test: idle brokers take processor time."""
    done = yield
    if hasattr(item.config, "workerinput"):
        lanes.end_shared(item, nextitem)
    replaced = replaced_modules()
    assert not replaced, f"{item.nodeid} left other module objects than it found: {', '.join(replaced)}"
    return done


@pytest.fixture
def allocation_strategy(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The strategy that every producer made in this test's process gets."""
    strategy: str = request.param
    monkeypatch.setenv(forced.VARIABLE, strategy)
    return strategy


@pytest.fixture(scope="session")
def _programs() -> None:
    """Every fixture that starts a JVM, a broker, Spark or a browser requests this one, and so does each that
    serves to start other programs. `make quick` leaves out all tests that request it, directly or not."""


@pytest.fixture(scope="session")
def project_environment(_programs: None) -> dict[str, str]:
    """The environment for subprocesses and Spark: this Python, and this checkout first on the path."""
    environ = dict(os.environ)
    given = environ.get("PYTHONPATH", "").split(os.pathsep)
    path = [str(ROOT), LOCAL_KAFKA, forced.FOLDER, *filter(None, given)]
    environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(path))
    # Workers otherwise take whatever python3 is on PATH, which need not have pyarrow.
    environ["PYSPARK_PYTHON"] = environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    environ["SPARK_LOCAL_IP"] = "127.0.0.1"
    environ.setdefault(jvms.SPARK_VARIABLE, jvms.of_spark())
    return environ


@pytest.fixture(autouse=True)
def _nothing_outlives_its_test() -> Iterator[None]:
    """Workers of a real job end. Here producers at rest would go on from test to test. So would the variable
    by which a worker that fails asks PySpark for a short traceback."""
    yield
    os.environ.pop("SPARK_HIDE_TRACEBACK", None)
    # Most tests need none, and are not to load it.
    cache = sys.modules.get("kafka_sink.task.producer_cache")
    if cache is not None:
        cache.PRODUCERS.close()


@pytest.fixture(autouse=True)
def _no_marker_outlives_its_test() -> Iterator[None]:
    """Without a folder of Spark, a process keeps markers itself. A later test's brokers may have the same
    ports."""
    yield
    KEPT.clear()


@pytest.fixture
def application(tmp_path: Path) -> Iterator[Path]:
    """Spark's local folder of an application that plans and commits within the test. Its driver's process is
    not found."""
    with planning_for(SparkApplication(str(tmp_path), 2**22 + 1, {})):
        yield tmp_path


@pytest.fixture
def environ(monkeypatch: pytest.MonkeyPatch) -> Environ:
    """Sets variables for one test, and removes the variables that are None."""

    def give(**variables: str | None) -> None:
        for name, value in variables.items():
            monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)

    return give


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Modules:
    """Puts substitutes in the place of packages for one test; None: the package is not installed."""

    def give(**packages: object) -> None:
        for name, package in packages.items():
            monkeypatch.setitem(sys.modules, name, package)

    return give


@pytest.fixture
def temporary_folder(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Names another folder for temporary files than the system's."""
    return partial(monkeypatch.setattr, tempfile, "tempdir")


@pytest.fixture
def in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The test's own folder, which is also the working directory of this process."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def in_task(monkeypatch: pytest.MonkeyPatch) -> Callable[[object], None]:
    """Gives the test the context of a Spark task."""
    from pyspark import TaskContext

    return lambda context: monkeypatch.setattr(TaskContext, "get", lambda: context)


@pytest.fixture
def bare_logging(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logging as in Spark's workers, which set up no handler (pytest adds its own to every logger)."""
    monkeypatch.setattr(driver_log, "LOGGER", logging.Logger("kafka_sink"))


@pytest.fixture(scope="session")
def kafka_jars(_programs: None) -> Path:
    """The folder with the jars of the newest Kafka, which are downloaded if they are not in the cache."""
    return find_jars()


@pytest.fixture(scope="session")
def broker(_programs: None) -> Iterator[LocalBroker]:
    """One real broker for the whole run; tests use topics of their own, and a test that stops it starts it
    again."""
    with LocalBroker(properties=SETTINGS) as running:
        yield running


@pytest.fixture
def topic(broker: LocalBroker, request: pytest.FixtureRequest) -> str:
    """A topic of the test's own, with three partitions, or the number in its module's ``PARTITIONS``."""
    name = f"{request.module.__name__.rpartition('test_')[2].replace('_', '-')}-{next(_TOPICS)}"
    broker.create_topic(name, getattr(request.module, "PARTITIONS", 3))
    return name


@pytest.fixture(scope="session")
def registry(_programs: None) -> Iterator[LocalRegistry]:
    """One real schema registry for the whole run; tests use subjects of their own."""
    with LocalRegistry() as running:
        yield running


@pytest.fixture(scope="session")
def old_broker(_programs: None) -> Iterator[LocalBroker]:
    """A broker like ``broker``, but of the last Kafka with transaction protocol 1."""
    with LocalBroker(kafka_home=jars_of(LAST_OF_3), properties=SETTINGS) as running:
        yield running


@pytest.fixture(scope="session")
def cluster3(_programs: None) -> Iterator[LocalBroker]:
    """Three real brokers for the whole run; a test that stops or freezes one brings it back."""
    # A broker that was killed may register again when its session is over, by default after 9 s.
    sessions = {"broker.session.timeout.ms": 5000, "broker.heartbeat.interval.ms": 1000}
    with LocalBroker(brokers=3, properties=SETTINGS | sessions) as running:
        yield running


@pytest.fixture(autouse=True)
def _all_of_the_three_brokers_serve_the_next_test(request: pytest.FixtureRequest) -> Iterator[None]:
    """A broker that was frozen for longer than its session is registered again some time after it thaws."""
    yield
    if "cluster3" in request.fixturenames:
        # Most runs do without this, which takes 0.2 s.
        from confluent_kafka.admin import AdminClient

        admin = AdminClient({"bootstrap.servers": request.getfixturevalue("cluster3").bootstrap_servers})
        until(lambda: len(admin.list_topics(timeout=30).brokers) == 3, "three brokers", poll_s=0.1)


@pytest.fixture(scope="session")
def live_view_port() -> int:
    """The port of the live view in the tests' Spark. An application has one view, on the port that was
    requested first, whichever test requests it: so the session's own setting contains the port."""
    return free_port()


@pytest.fixture(scope="session")
def spark(
    project_environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory, live_view_port: int
) -> Iterator[SparkSession]:
    """A local[2] session whose workers import this checkout; no register call is made."""
    from pyspark.sql import SparkSession

    own = ("PYTHONPATH", "PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON", "SPARK_LOCAL_IP", jvms.SPARK_VARIABLE)
    for name in own:
        os.environ[name] = project_environment[name]
    session = (
        SparkSession.builder.master("local[2]")
        .appName("kafka-chunked tests")
        .config("spark.ui.enabled", "false")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.kafka-chunked.ui.port", str(live_view_port))
        .config("spark.sql.warehouse.dir", str(tmp_path_factory.mktemp("warehouse")))
        .config("spark.log.level", "ERROR")
        .getOrCreate()
    )
    try:
        yield session
    finally:
        session.stop()
