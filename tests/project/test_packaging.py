"""The wheel and the sdist, and what a user has after installing them."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
import zipimport
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock, call

import pytest
from packaging.metadata import Metadata

from local_kafka import LocalBroker
from tests.support.commands import printed_by, run
from tests.support.fake_broker import FakeCluster
from tests.support.topics import read_topic

ROOT = Path(__file__).resolve().parents[2]


def build(source: Path, folder: Path, *targets: str) -> Path:
    """As pip builds, without pip."""
    hatch = [sys.executable, "-m", "hatchling", "build", "-d", str(folder), *targets]
    subprocess.run(hatch, check=True, cwd=source, capture_output=True, timeout=200)
    return folder


@pytest.fixture(scope="module")
def built(_programs: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(ROOT, tmp_path_factory.mktemp("built"))


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    return next(built.glob("*.whl"))


@pytest.fixture(scope="module")
def sdist(built: Path) -> Path:
    return next(built.glob("*.tar.gz"))


@pytest.fixture(scope="module")
def wheel_of_the_sdist(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel-of-the-sdist")
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--wheel-dir", str(folder), str(sdist)], check=True, timeout=200)
    return next(folder.glob("*.whl"))


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_the_wheel_has_all_that_runs_and_nothing_else(wheel: Path) -> None:
    files = contents(wheel)
    (metadata,) = (text.decode() for name, text in files.items() if name.endswith("METADATA"))
    (entry_points,) = (text.decode() for name, text in files.items() if name.endswith("entry_points.txt"))
    tops = {top for name in files if not (top := name.split("/")[0]).endswith(".dist-info")}
    assert tops == {"kafka_sink", "pyspark_kafka_chunked.py", "pyspark_kafka_chunked_underscore.py"}
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "kafka_sink").rglob("*.py")}
    assert sources | {"kafka_sink/py.typed"} <= set(files)
    assert "Requires-Python: >=3.10" in metadata
    assert "[pysail.datasources]\nkafka-chunked = kafka_sink.spark.datasource:KafkaChunked" in entry_points
    assert "[console_scripts]\nkafka-chunked-doctor = kafka_sink.doctor:main" in entry_points
    # pip must never replace the PySpark of a cluster.
    needed = [line for line in metadata.splitlines() if line.startswith("Requires-Dist: ")]
    assert "Requires-Dist: pyarrow>=18" in needed
    assert not [line for line in needed if "pyspark" in line and "extra ==" not in line]


def test_a_scan_of_the_wheel_finds_no_weakness_but_those_with_a_reason(wheel: Path, tmp_path: Path) -> None:
    """By ruff's rules of bandit. Exceptions for all files have their reasons in pyproject.toml."""
    shutil.unpack_archive(wheel, tmp_path, "zip")
    everywhere = ["S101", "S603", "S607"]
    given = (ROOT / "pyproject.toml").read_text()
    for rule in everywhere:
        assert re.search(rf'"{rule}"[^#\n]*# \w+', given), f"{rule} has no reason"
    ruff = [sys.executable, "-m", "ruff", "check", "--isolated", "--no-cache", "--select", "S"]
    ruff += ["--ignore", ",".join(everywhere), str(tmp_path)]
    scan = subprocess.run(ruff, capture_output=True, text=True, timeout=100, check=False)
    assert scan.returncode == 0, scan.stdout
    lines = [line for path in tmp_path.rglob("*.py") for line in path.read_text().splitlines()]
    excepted = [line for line in lines if re.search(r"# noqa: .*\bS\d{3}", line)]
    assert excepted
    assert [line for line in excepted if not re.search(r"# noqa: [A-Z]+\d+(, [A-Z]+\d+)* - \w", line)] == []


def test_sdist_builds_the_same_wheel_as_the_clone(wheel: Path, wheel_of_the_sdist: Path) -> None:
    assert contents(wheel_of_the_sdist) == contents(wheel)


def test_the_sdist_has_the_tests_and_what_they_need(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    wanted = "LICENSE README.md Makefile conftest.py constraints.txt mkdocs.yml .ci/run docs/install.md"
    wanted += " tests/project/test_packaging.py benchmarks/__main__.py tools/setup_venv.sh"
    wanted += " packages/local_kafka/pyproject.toml"
    assert set(wanted.split()) <= names
    assert not [name for name in names if "__pycache__" in name or name.startswith(".venv")]


def test_an_index_would_take_both(wheel: Path, sdist: Path) -> None:
    """PyPI checks uploads with this very class, in its strict way."""
    with tarfile.open(sdist) as archive:
        member = next(one for one in archive.getmembers() if one.name.endswith("/PKG-INFO"))
        file = archive.extractfile(member)
        assert file is not None
        information = file.read()
    (of_wheel,) = (text for name, text in contents(wheel).items() if name.endswith(".dist-info/METADATA"))
    assert information == of_wheel
    metadata = Metadata.from_email(of_wheel, validate=True)
    assert metadata.license_expression == "Apache-2.0"
    assert metadata.license_files == ["LICENSE"]
    assert metadata.description_content_type == "text/markdown"
    assert metadata.description == (ROOT / "README.md").read_text(encoding="utf-8")
    assert {"msk", "kerberos"} <= set(metadata.provides_extra or ())
    known = {f"Programming Language :: Python :: 3.{minor}" for minor in range(10, 14)}
    assert known <= set(metadata.classifiers or ())


@pytest.mark.usefixtures("wheel", "sdist", "wheel_of_the_sdist")
def test_building_leaves_nothing_in_the_clone() -> None:
    """Catches: the wheel itself, which ``pip wheel`` puts into the current folder unless told otherwise."""
    assert not [*ROOT.glob("*.whl"), *ROOT.glob("*.tar.gz"), *ROOT.glob("*.egg-info")]
    assert not (ROOT / "build" / "lib").exists(), "the documentation's site may be there"
    pages = "".join((ROOT / name).read_text() for name in ("README.md", "docs/install.md"))
    for command in re.findall(r"pip wheel[^`\n]*", pages):
        assert "--wheel-dir dist" in command


@pytest.fixture(scope="module")
def installed(wheel_of_the_sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new environment. The sdist's wheel is installed there, so that this tries both; the libraries are
    those of the tests' environment."""
    target = tmp_path_factory.mktemp("environment") / "installed"
    run([sys.executable, "-m", "venv", "--without-pip", target])
    interpreter = target / "bin" / "python"
    install = ["install", "--quiet", "--no-deps", "--no-index", wheel_of_the_sdist]
    run([sys.executable, "-m", "pip", "--python", interpreter, *install])
    (site_packages,) = target.glob("lib/python*/site-packages")
    (site_packages / "libraries.pth").write_text(f"{sysconfig.get_path('purelib')}\n", encoding="utf-8")
    return target


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("kafka-chunked-doctor", "cluster fake: 1 broker"),
        ("kafka-chunked-transactions list", "exactly-once needs brokers of Apache Kafka 3.8"),
    ],
)
def test_programs_run_nothing_that_was_planted_in_the_current_folder(
    installed: Path, project_environment: dict[str, str], tmp_path: Path, command: str, said: str
) -> None:
    """Catches: `python -m` in a folder where anybody may write ran its json.py before any line of ours."""
    evidence = tmp_path / "was-run"
    planted = f"open({str(evidence)!r}, 'w').close()\nraise SystemExit('planted')\n"
    for name in ("json", "argparse", "kafka_sink", "numpy", "kafka"):
        (tmp_path / f"{name}.py").write_text(planted)
    tmp_path.chmod(0o777)
    program, *arguments = command.split()
    python, path = installed / "bin" / "python", installed / "bin" / program
    environ = {**project_environment, "PYTHONPATH": "", "PYSPARK_PYTHON": str(python)}
    shown = run([path, "--help"], environ, folder=tmp_path).stdout
    assert shown.startswith(f"usage: {program}")
    with FakeCluster({"t": 1}) as cluster:
        arguments += ["--bootstrap-servers", cluster.bootstrap_servers]
        done = run([path, *arguments], environ, folder=tmp_path, code=None)
    assert said in done.stdout + done.stderr
    assert "planted" not in done.stdout + done.stderr
    assert not evidence.exists()


def test_readmes_quickstart_runs_in_a_new_environment_without_a_register_call(
    installed: Path, broker: LocalBroker, project_environment: dict[str, str], tmp_path: Path
) -> None:
    interpreter = installed / "bin" / "python"
    environ = {**project_environment, "PYTHONPATH": ""}
    del environ["PYSPARK_PYTHON"], environ["PYSPARK_DRIVER_PYTHON"]
    where = run(
        [interpreter, "-c", "import kafka_sink; print(kafka_sink.__file__)"], environ, folder=tmp_path
    )
    assert where.stdout.startswith(str(installed))
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    quickstart = "\n".join(blocks)
    assert "127.0.0.1:9092" in quickstart
    assert "register" not in quickstart
    script = tmp_path / "quickstart.py"
    script.write_text(quickstart.replace("127.0.0.1:9092", broker.bootstrap_servers), encoding="utf-8")
    printed = run([interpreter, script], environ, folder=tmp_path).stdout
    assert sorted(re.findall(r"^greetings \d (.*)$", printed, re.MULTILINE)) == [
        "b'alice' b'hello'",
        "b'bob' b'hi'",
    ]
    found = sorted((row.key, row.value) for row in read_topic(broker, "greetings"))
    assert found == [(b"alice", b"hello")] * 2 + [(b"bob", b"hi")] * 2 + [(b"carol", b"good morning")]


SHIPPED = """
import sys
from pyspark.sql import SparkSession
import kafka_sink
spark = SparkSession.builder.getOrCreate()
kafka_sink.register(spark)
rows = spark.range(100).selectExpr("cast(id AS string) AS value")
(rows.write.format("kafka-chunked").mode("append").option("kafka.bootstrap.servers", sys.argv[1])
 .option("topic", "shipped").save())
print("driver", kafka_sink.__file__)
print("worker", spark.sparkContext.parallelize([0], 1).map(lambda _: kafka_sink.__file__).first())
"""


def test_a_wheel_named_zip_can_be_shipped_with_the_job(
    wheel: Path, broker: LocalBroker, project_environment: dict[str, str], tmp_path: Path
) -> None:
    import pyspark

    shipped, job = tmp_path / "kafka_chunked.zip", tmp_path / "job.py"
    shutil.copy(wheel, shipped)
    job.write_text(SHIPPED, encoding="utf-8")
    submit = [Path(pyspark.__file__).parent / "bin" / "spark-submit", "--master", "local[1]"]
    submit += ["--conf", "spark.ui.enabled=false", "--py-files", shipped]
    environ = {**project_environment, "PYTHONPATH": ""}
    done = run([*submit, job, broker.bootstrap_servers], environ, folder=tmp_path)
    # Not those that this environment has installed: neither the driver's nor the tasks'.
    for where in ("driver", "worker"):
        assert re.search(
            rf"^{where} .*kafka_chunked\.zip/kafka_sink/__init__\.py$", done.stdout, re.MULTILINE
        )
    assert "100 rows acknowledged" in done.stderr
    assert "coordinator" not in done.stderr


def test_importing_the_package_loads_nothing_heavy(
    project_environment: dict[str, str], tmp_path: Path
) -> None:
    code = """
        import sys
        import kafka_sink
        assert kafka_sink.__version__
        print({"pyspark", "numpy", "pyarrow", "kafka", "confluent_kafka"} & set(sys.modules))
    """
    assert printed_by(code, project_environment, tmp_path) == "set()"


WITHOUT = """
import importlib, pkgutil, sys
sys.modules["{absent}"] = None
import {imported}
for module in pkgutil.walk_packages({imported}.__path__, "{imported}."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
print({imported}.__file__)
"""


def test_the_sink_and_the_kafka_for_trials_do_without_each_other(
    project_environment: dict[str, str], tmp_path: Path
) -> None:
    for imported, absent in (("kafka_sink", "local_kafka"), ("local_kafka", "kafka_sink")):
        code = WITHOUT.format(imported=imported, absent=absent)
        assert printed_by(code, project_environment, tmp_path).startswith(str(ROOT))


def test_the_kafka_for_trials_has_a_wheel_of_its_own(tmp_path: Path) -> None:
    folder = ROOT / "packages" / "local_kafka"
    (wheel,) = build(folder, tmp_path, "-t", "wheel").glob("*.whl")
    names = set(contents(wheel))
    sources = {str(path.relative_to(folder)) for path in (folder / "local_kafka").glob("*.py")}
    assert sources | {"local_kafka/jars.sha256", "local_kafka/py.typed"} <= names
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {"local_kafka"}
    assert [name for name in names if name.endswith("LICENSE")]


def session_that(knows: bool | None) -> Mock:
    """``knows``: whether Spark found it; None for Spark Connect."""
    exists = AttributeError if knows is None else lambda name: knows and name == "kafka-chunked"
    manager = "_jsparkSession.sessionState.return_value.dataSourceManager.return_value"
    return Mock(**{f"{manager}.dataSourceExists.side_effect": exists})


@pytest.mark.parametrize(("knows", "times"), [(False, 1), (None, 1), (True, 0)])
def test_register_hands_over_the_data_source_once_where_spark_has_not_found_it(
    knows: bool | None, times: int
) -> None:
    """Catches: Spark's warning that it "replaced a statically registered data source"."""
    import kafka_sink
    from kafka_sink.spark.datasource import KafkaChunkedDataSource

    session = session_that(knows)
    kafka_sink.register(session)
    kafka_sink.register(session)
    assert session.dataSource.register.mock_calls == [call(KafkaChunkedDataSource)] * times
    assert session.createDataFrame.call_count == 2, "it is activated"


def test_a_package_that_was_shipped_is_registered_in_the_place_of_one_that_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches: planning with the installed version, while tasks run the one of --py-files."""
    from kafka_sink.spark import session as own

    shipped = tmp_path / "kafka_chunked.zip"
    with zipfile.ZipFile(shipped, "w") as archive:
        archive.writestr("kafka_sink/__init__.py", "")
    loader = zipimport.zipimporter(str(shipped))
    monkeypatch.setattr(own, "__spec__", SimpleNamespace(loader=loader))
    session = session_that(knows=True)
    own.register(session)
    assert session.dataSource.register.call_count == 1


BROKEN = """
import sys
sys.modules["kafka_sink.spark.datasource"] = None  # as if an import in there failed
import pyspark_kafka_chunked as module
from pyspark.sql.datasource import DataSource
assert issubclass(module.DefaultSource, DataSource) and module.DefaultSource.name() == "kafka-chunked"
from pyspark.cloudpickle import dumps, loads
assert loads(dumps(module.DefaultSource)) is module.DefaultSource
try:
    module.DefaultSource({})
except ImportError as error:
    print(error)
"""
WITHOUT_PYSPARK = """
import sys
sys.modules["pyspark"] = None
import pyspark_kafka_chunked as module
assert not hasattr(module, "DefaultSource")
"""


def test_sparks_lookup_finds_the_sink_and_one_that_cannot_be_imported_says_so_only_when_used(
    project_environment: dict[str, str], tmp_path: Path
) -> None:
    import pyspark_kafka_chunked
    import pyspark_kafka_chunked_underscore
    from kafka_sink.spark.datasource import KafkaChunkedDataSource

    assert pyspark_kafka_chunked.DefaultSource is KafkaChunkedDataSource
    assert pyspark_kafka_chunked.DefaultSource.name() == "kafka-chunked"
    assert pyspark_kafka_chunked_underscore.DefaultSource.name() == "kafka_chunked"
    printed = printed_by(BROKEN, project_environment, tmp_path)
    assert "cannot be imported" in printed
    assert "PYSPARK_PYTHON" in printed
    printed_by(WITHOUT_PYSPARK, project_environment, tmp_path)


def test_the_licence_and_the_version_are_there() -> None:
    from kafka_sink import __version__

    assert "Apache License" in (ROOT / "LICENSE").read_text()
    assert __version__ in (ROOT / "CHANGELOG.md").read_text()
    assert f"version: {__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert f'version: "{__version__}"\n' in (ROOT / "recipe/recipe.yaml").read_text()
    pages = "".join(page.read_text() for page in (ROOT / "docs").glob("*.md"))
    assert set(re.findall(r"kafka_chunked-([\d.]+)-py3", pages)) == {__version__}
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


def test_the_recipe_needs_what_the_wheel_needs() -> None:
    """Catches: a library that pip brings and conda does not."""
    declared = re.search(r"^dependencies = \[(.*?)^\]", (ROOT / "pyproject.toml").read_text(), re.M | re.S)
    run = re.search(r"^  run:\n(.*?)\n\n", (ROOT / "recipe/recipe.yaml").read_text(), re.M | re.S)
    assert declared is not None
    assert run is not None
    # conda-forge calls two of them otherwise.
    names = {"zlib-ng": "python-zlib-ng", "prometheus-client": "prometheus_client"}
    wanted = {
        (names.get(name, name), bound) for name, bound in re.findall(r'"([a-z0-9-]+)>=(.*?)"', declared[1])
    }
    assert set(re.findall(r"- (\S+) >=([0-9.]+)$", run[1], re.M)) == wanted


def links_to(names: set[str], folder: Path) -> None:
    """Puts there what these distributions install, and nothing else of this environment."""
    for name in names:
        distribution = importlib.metadata.distribution(name)
        tops = {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}
        for top in tops:
            link = folder / top
            if not link.exists():
                link.symlink_to(str(distribution.locate_file(top)))


def test_the_wheel_and_its_dependencies_write_a_polars_frame(wheel: Path, tmp_path: Path) -> None:
    """Catches: something of PySpark, or of what it brings, is needed where no Spark is."""
    folder = tmp_path / "installed"
    shutil.unpack_archive(wheel, folder, "zip")
    (metadata,) = folder.glob("*.dist-info/METADATA")
    needs = Metadata.from_email(metadata.read_bytes(), validate=False).requires_dist or []
    names = {one.name for one in needs if one.marker is None or one.marker.evaluate({"extra": ""})}
    # And what cryptography and Polars need themselves.
    links_to(names | {"cffi", "polars", "polars-runtime-32"}, folder)
    with FakeCluster({"t": 1}) as cluster:
        code = f"""
            import sys
            sys.path = [{str(folder)!r}, *(one for one in sys.path if "site-packages" not in one)]
            import kafka_sink, polars
            frame = polars.DataFrame({{"key": ["a", "b"], "value": ["<1>", "<2>"]}})
            options = {{"kafka.bootstrap.servers": {cluster.bootstrap_servers!r}, "topic": "t"}}
            print(kafka_sink.write_arrow(frame, options).rows, kafka_sink.__file__)
        """
        environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        assert printed_by(code, environ, tmp_path) == f"2 {folder}/kafka_sink/__init__.py"
        assert sum(batch.record_count for batch in cluster.batches("t", 0)) == 2


def test_workflows_name_actions_by_commit_and_build_releases_with_pinned_tools() -> None:
    """A tag can be moved by whoever takes an action over."""
    workflows = {path.name: path.read_text() for path in (ROOT / ".github" / "workflows").glob("*.yml")}
    used = [line for text in workflows.values() for line in re.findall(r"uses: (.*)", text)]
    assert len(used) > 5
    assert [one for one in used if not re.fullmatch(r"[\w./-]+@[0-9a-f]{40} # v\d+(\.\d+)+", one)] == []
    release = workflows["release.yml"]
    installs = re.findall(r"pip install (.*)", release)
    assert installs == ["--require-hashes --no-deps -r .github/release-tools.txt"]
    assert re.findall(r"-m build(.*)", release) == [" --no-isolation"]
    assert "uv " not in release
