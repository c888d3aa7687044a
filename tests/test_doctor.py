"""The doctor names what would fail a job, and says what to do; it prints no secret."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Callable
from functools import partial
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

from kafka_sink import doctor
from kafka_sink.doctor import examine, main, of_session
from kafka_sink.driver import topic_preparation
from kafka_sink.driver.command_line import Finding, Level
from kafka_sink.kafka_errors import CLUSTER_AUTHORIZATION_FAILED, TOPIC_AUTHORIZATION_FAILED
from kafka_sink.network.apis import CREATE_TOPICS, DESCRIBE_CONFIGS
from kafka_sink.options import parse
from tests.support import fake_state
from tests.support.fake_broker import FakeCluster
from tests.support.fake_replies import error
from tests.support.ports import refusing_port
from tests.support.surroundings import Environ

HERE = {**os.environ, "PYSPARK_PYTHON": sys.executable, "PYTHONPATH": os.getcwd()}
ROOT = Path(__file__).parents[1]
HERE.pop("PYSPARK_DRIVER_PYTHON", None)


def found(environ: dict[str, str], options: dict[str, str] | None = None) -> list[Finding]:
    return list(examine(environ, options or {}))


def texts(level: Level, environ: dict[str, str], options: dict[str, str] | None = None) -> str:
    return "\n".join(one.text for one in found(environ, options) if one.level is level)


problems, notes = partial(texts, Level.PROBLEM), partial(texts, Level.NOTE)


def program(folder: Path, script: str, name: str = "python") -> str:
    """One that anybody can run."""
    file = folder / name
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(0o755)
    return str(file)


def python_that_prints(folder: Path, line: str) -> str:
    return program(folder, f"cat <<'END'\n{line}\nEND")


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment in which all is well, whose workers' Python and Java answer at once."""
    folder = tmp_path_factory.mktemp("here")
    (folder / "bin").mkdir()
    program(folder / "bin", "echo 'openjdk version \"17.0.2\" 2022' >&2", "java")
    answer = json.dumps([sys.version_info[:2], metadata.version("pyspark"), []])
    return {**HERE, "JAVA_HOME": str(folder), "PYSPARK_PYTHON": python_that_prints(folder, answer)}


@pytest.mark.usefixtures("_programs")
def test_doctor_reports_no_problem_here() -> None:
    assert problems(HERE) == ""
    assert "no broker was asked" in notes(HERE)


def test_doctor_reports_the_spark_version_and_its_entry_points(tmp_path: Path) -> None:
    environ = {"PATH": HERE["PATH"], "PYSPARK_PYTHON": python_that_prints(tmp_path, "[[3, 12], null, []]")}
    only = "no data sources in Python: use kafka_sink.write, and kafka_sink.foreach_batch for streams"
    for pyspark, pandas, text, is_problem in (
        ("3.4.1", "2.3.3", "PySpark 3.4.1 is too old: use 3.5 or newer", True),
        ("3.5.9", "2.3.3", only, False),
        ("3.5.9", None, "PySpark asks for pandas on the driver", True),
        ("4.0.1", None, "PySpark asks for pandas on the driver", False),
        ("4.0.1", "2.3.3", "format('kafka-chunked'), kafka_sink.write and kafka_sink.foreach_batch", False),
        (None, None, "no PySpark was found", False),
    ):
        versions = {"pyspark": pyspark, "pandas": pandas}
        seen = examine(environ, {}, installed=lambda name, of=versions: of.get(name, "1.0"), path=[])  # type: ignore[misc]
        assert [one.level is Level.PROBLEM for one in seen if text in one.text] == [is_problem], text


def test_the_spark_of_spark_home_is_found(tmp_path: Path) -> None:
    folder = tmp_path / "python" / "pyspark"
    folder.mkdir(parents=True)
    (folder / "version.py").write_text('__version__: str = "3.5.1"\n')
    assert doctor.spark_version({"SPARK_HOME": str(tmp_path)}, lambda name: None, []) == "3.5.1"
    assert doctor.spark_version({}, lambda name: None, []) is None


def test_the_workers_python_is_checked(here: dict[str, str], tmp_path: Path) -> None:
    version = list(sys.version_info[:2])
    pyspark = metadata.version("pyspark")
    for answer, text in (
        ([[3, 9], pyspark, []], "PYTHON_VERSION_MISMATCH"),
        ([version, pyspark, ["kafka_sink", "numpy"]], "DATA_SOURCE_NOT_FOUND"),
        ([version, pyspark, ["lz4", "zlib_ng"]], "python -m pip install lz4 zlib-ng"),
        ([version, None, ["kafka_sink", "lz4"]], "-m pip install lz4"),
        ([version, "4.0.0", []], "has PySpark 4.0.0, and the driver"),
    ):
        python = python_that_prints(tmp_path, json.dumps(answer))
        assert text in problems({**here, "PYSPARK_PYTHON": python})
    assert "does not run" in problems({**here, "PYSPARK_PYTHON": python_that_prints(tmp_path, "no JSON")})
    broken = problems({**here, "PYSPARK_PYTHON": "/bin/false"})
    assert broken.endswith(
        f"/bin/false, does not run: it ended with code 1. Set PYSPARK_PYTHON to {sys.executable}"
    )
    without_python = {**here, "PATH": str(tmp_path / "empty"), "JAVA_HOME": here.get("JAVA_HOME", "")}
    del without_python["PYSPARK_PYTHON"]
    assert "there is no python3 on PATH" in problems(without_python)
    assert not any("PYSPARK_PYTHON is not set" in one.text for one in found(without_python)), "said once"
    assert "does not exist" in problems({**here, "PYSPARK_PYTHON": "/nowhere/python"})


def test_a_python_of_the_driver_with_which_spark_cannot_find_the_sink_is_named(
    here: dict[str, str], tmp_path: Path
) -> None:
    """Catches: PYSPARK_DRIVER_PYTHON=jupyter, with which Spark finds no installed data source."""
    notebook = program(tmp_path, 'echo "jupyter: error: unrecognized arguments: -c" >&2; exit 2', "jupyter")
    named = problems({**here, "PYSPARK_DRIVER_PYTHON": notebook})
    assert "jupyter: error: unrecognized arguments" in named
    assert "DATA_SOURCE_NOT_FOUND" in named
    assert "os.environ.pop('PYSPARK_DRIVER_PYTHON', None)" in named
    assert "there is no such program" in problems({**here, "PYSPARK_DRIVER_PYTHON": "/nowhere/jupyter"})
    lacking = python_that_prints(tmp_path, json.dumps([[3, 12], None, ["kafka_sink", "lz4"]]))
    assert "it lacks kafka_sink, lz4" in problems({**here, "PYSPARK_DRIVER_PYTHON": lacking})

    complete = {**here, "PYSPARK_DRIVER_PYTHON": python_that_prints(tmp_path, '[[3, 12], "4.3.0", []]')}
    assert problems(complete) == ""
    assert "on executors with it" in notes(complete)
    assert not any("DRIVER" in one.text for one in found({**HERE, "PYSPARK_DRIVER_PYTHON": sys.executable}))


def test_the_doctor_imports_nothing_that_another_user_planted(
    tmp_path: Path, environ: Environ, temporary_folder: Callable[[str], None]
) -> None:
    """Catches: the workers' Python, started in the system's temporary folder, imported /tmp/json.py."""
    shared, evidence = tmp_path / "shared", tmp_path / "was-run"
    shared.mkdir()
    (shared / "json.py").write_text(f"open({str(evidence)!r}, 'w').close()\nraise ImportError\n")
    shared.chmod(0o777)
    environ(TMPDIR=str(shared))
    temporary_folder(str(shared))
    assert problems(HERE) == ""
    assert not evidence.exists()


def test_a_folder_that_anybody_may_write_to_and_python_imports_from_is_named(
    here: dict[str, str], in_tmp_path: Path
) -> None:
    """Spark's workers are started by ``-m``, which puts the driver's folder first.

    Catches, too: the Python of that name in the folder that the doctor starts it in, not in the job's.
    """
    python_that_prints(in_tmp_path, json.dumps([[3, 9], None, []]))
    assert "PYTHON_VERSION_MISMATCH" in problems({**here, "PYSPARK_PYTHON": "./python"})
    in_tmp_path.chmod(0o777)
    said = notes(here)
    assert f"imports from {in_tmp_path}" in said
    assert "in your own folder" in said
    in_tmp_path.chmod(0o755)
    assert not any("imports from" in one.text for one in found(here))


def test_java_the_workers_python_and_spark_s_folders_are_looked_at(
    here: dict[str, str], tmp_path: Path
) -> None:
    assert "PYSPARK_PYTHON is not set" in notes(
        {n: value for n, value in here.items() if n != "PYSPARK_PYTHON"}
    )
    assert "cannot write to /proc" in problems({**here, "SPARK_LOCAL_DIRS": "/proc"})
    assert "there is no Java" in problems({**here, "JAVA_HOME": "", "PATH": str(tmp_path)})
    (tmp_path / "bin").mkdir()
    java = program(tmp_path / "bin", "echo 'openjdk version \"11.0.2\" 2019' >&2", "java")
    assert "Java 11.0.2" in problems({**here, "JAVA_HOME": str(tmp_path)})
    Path(java).unlink()
    assert "does not start" in problems({**here, "JAVA_HOME": str(tmp_path)})


def test_options_brokers_and_topics_are_tried_and_nothing_is_created(
    here: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches: exit code 0 for a missing topic on a cluster that does not create topics."""
    monkeypatch.setattr(topic_preparation, "TOPIC_PROPAGATION_MS", 300.0)
    with FakeCluster({"there": 1}) as cluster:
        base = {"kafka.bootstrap.servers": cluster.bootstrap_servers, "kafka.max.block.ms": "10000"}
        assert problems(here, base | {"topic": "there"}) == ""
        assert any("brokers and login: usable" in one.text for one in found(here, base)), "no topic was tried"
        never = {"kafka.allow.auto.create.topics": "false"}
        assert "there is no topic 'missing'" in problems(here, base | never | {"topic": "missing"})
        dead_letters = {"errors.tolerance": "all", "errors.deadletterqueue.topic.name": "dead-letters"}
        assert "'dead-letters'" in problems(here, base | never | {"topic": "there"} | dead_letters)
        for option, said in (
            ("topic.create", "a job creates it"),
            ("kafka.allow.auto.create.topics", "brokers create it by themselves"),
        ):
            given = base | {"topic": "missing", option: "true"}
            monkeypatch.setitem(fake_state.BROKER_CONFIGS, "auto.create.topics.enable", "true")
            seen = found(here, given)
            assert found(here, given) == seen, "it has created the topic"
            assert not [one for one in seen if one.level is Level.PROBLEM]
            assert any(said in one.text for one in seen if one.level is Level.NOTE)
            assert any("brokers and login: usable" in one.text for one in seen)
        monkeypatch.setitem(fake_state.BROKER_CONFIGS, "auto.create.topics.enable", "false")
        lacking = "there is no topic 'missing', and brokers do not create topics by themselves"
        assert lacking in problems(here, base | {"topic": "missing"})
        cluster.script(DESCRIBE_CONFIGS, error(CLUSTER_AUTHORIZATION_FAILED))
        assert "may not read whether brokers create topics" in problems(here, base | {"topic": "missing"})
        cluster.script(CREATE_TOPICS, error(TOPIC_AUTHORIZATION_FAILED))
        denied = problems(here, base | {"topic": "missing", "topic.create": "true"})
        assert "Grant User:ANONYMOUS CREATE on the topic or the cluster" in denied
    assert "did you mean" in problems(here, base | {"kafka.acsk": "all"})
    nowhere = {"kafka.bootstrap.servers": "127.0.0.1:1", "kafka.max.block.ms": "300"}
    assert "Connection refused" in problems(here, nowhere)


def test_a_cluster_is_checked_without_a_change(here: dict[str, str]) -> None:
    """Catches: a dead address that others hide, and a broker that cannot be reached at its own address."""
    with FakeCluster({"orders": 3}, brokers=3) as cluster, refusing_port() as port:
        dead = f"127.0.0.1:{port}"
        given = {"kafka.bootstrap.servers": f"{cluster.bootstrap_servers},{dead}", "topic": "orders"}
        given |= {"kafka.max.block.ms": "1000"}
        text = "\n".join(map(str, found(here, given)))
        assert (
            "an address of kafka.bootstrap.servers cannot be used: could not connect to any broker within"
            in text
        )
        assert f"{dead}: connecting by TCP failed: Connection refused" in text
        assert "cluster fake: 3 brokers" in text
        assert "topic 'orders': 3 partitions" in text
        assert "PROBLEM" not in text
        cluster.move_leader("orders", 1, -1)
        cluster.stop(2)
        text = problems(here, given)
    assert "broker 2 cannot be reached at its own address" in text
    assert "topic 'orders': no leader for partitions 1" in text


def test_the_settings_of_a_session_are_checked() -> None:
    """Catches: settings that a program made in code, which planning does not see."""
    settings = {
        "spark.sql.execution.pyspark.udf.idleTimeoutSeconds": "30",
        "spark.sql.execution.pyspark.udf.killOnIdleTimeout": "true",
        "spark.redaction.regex": "nothing",
        "spark.speculation": "true",
        "spark.sql.execution.arrow.compression.codec": "zstd",
        "spark.kafka-chunked.ui.port": "4050",
        "spark.kafka-chunked.kafka.sasl.password": "hunter2",
    }
    session = SimpleNamespace(version="4.3.0", conf=settings)
    given = {
        "kafka.bootstrap.servers": "b:9092",
        "kafka.security.protocol": "SASL_SSL",
        "kafka.sasl.mechanism": "PLAIN",
        "kafka.sasl.username": "u",
        "kafka.sasl.password": "hunter2",
    }
    options = parse(given).options
    seen = list(of_session(session, given, options, {"KAFKA_CHUNKED_COORDINATOR_ENABLED": "false"}))
    text = "\n".join(map(str, seen))
    assert "PROBLEM  spark.sql.execution.pyspark.udf.idleTimeoutSeconds = 30 with killOnIdleTimeout" in text
    assert "Spark may show the secret option 'kafka.sasl.password'" in text
    assert "spark.speculation=true" in text
    assert "kafka_sink.tune(spark, row_bytes=...) sets" in text
    assert "arrow.compression.codec=zstd compresses rows that only go to Python" in text
    assert "spark.kafka-chunked.ui.port=4050 overrides the option 'ui.port'" in text
    assert "KAFKA_CHUNKED_COORDINATOR_ENABLED=false overrides the option 'coordinator.enabled'" in text
    assert "spark.kafka-chunked.kafka.sasl.password has no effect" in text
    assert "hunter2" not in text
    tuned = {"spark.sql.execution.arrow.maxRecordsPerBatch": "400"}
    quiet = list(of_session(SimpleNamespace(version="4.3.0", conf=tuned), given, options, {}))
    assert [one.level for one in quiet] == [Level.OK]


def test_doctor_reports_all_mistakes_in_options_at_once(here: dict[str, str]) -> None:
    wrong = {"kafka.acsk": "all", "kafka.linger.ms": "soon", "max.rows.per.secnd": "5"}
    text = problems(here, {**wrong, "topic": "t", "kafka.bootstrap.servers": "127.0.0.1:1"})
    assert all(f"'{name}'" in text for name in wrong), text
    assert "Connection refused" not in text


def test_the_command_takes_options_prints_json_and_no_secret(tmp_path: Path) -> None:
    out = io.StringIO()
    assert main(["--json", "--bootstrap-servers", "127.0.0.1:1", "--option", "kafka.acsk=all"], out) == 1
    lines = [json.loads(line) for line in out.getvalue().splitlines()]
    assert {"OK", "PROBLEM"} <= {line["level"] for line in lines}
    assert any("kafka.acsk" in line["text"] for line in lines)
    secrets = tmp_path / "options.json"
    secrets.write_text(json.dumps({"kafka.sasl.jaas.config": "hunter2 required password=hunter2;"}))
    out = io.StringIO()
    servers = "kafka.bootstrap.servers=127.0.0.1:1"
    code = main(["--option", servers, "--options-file", str(secrets)], out)
    assert code == 1
    assert "kafka.sasl.jaas.config" in out.getvalue()
    assert "hunter2" not in out.getvalue()
    with pytest.raises(SystemExit):
        main(["--option", "nonsense"], out)
