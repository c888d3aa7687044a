"""The wheel, and what a user has after installing it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from kafka_sink.local_broker import LocalBroker

ROOT = Path(__file__).resolve().parents[2]


def python(code: str, environ: dict[str, str], folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *args],
        env=environ,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--wheel-dir", str(folder), str(ROOT)], check=True, timeout=200)
    return next(folder.glob("*.whl"))


def test_the_wheel_has_all_that_runs_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata = archive.read(next(name for name in names if name.endswith("METADATA"))).decode()
    assert {
        "pyspark_kafka_chunked.py",
        "kafka_sink/py.typed",
        "kafka_sink/local_broker/supervisor.py",
    } <= set(names)
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {
        "kafka_sink",
        "pyspark_kafka_chunked.py",
    }
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "kafka_sink").rglob("*.py")}
    assert sources <= set(names)
    assert "Requires-Python: >=3.10" in metadata
    assert "Requires-Dist: pyspark>=4.1" in metadata


WRITE = """
import sys
import kafka_sink
assert kafka_sink.__file__.startswith(sys.argv[2]), kafka_sink.__file__
from pyspark.sql import SparkSession
spark = (SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false")
         .config("spark.driver.bindAddress", "127.0.0.1").config("spark.driver.host", "127.0.0.1")
         .getOrCreate())
rows = spark.createDataFrame([("a", "x")], "key string, value string")
(rows.write.format("kafka-chunked").mode("append").option("kafka.bootstrap.servers", sys.argv[1])
 .option("topic", "installed").save())
print("written")
"""


def test_an_installed_wheel_is_found_without_a_register_call(
    wheel: Path, broker: LocalBroker, project_environment: dict[str, str], tmp_path: Path
) -> None:
    target = tmp_path / "installed"
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        "--target",
        str(target),
    ]
    subprocess.run([*pip, str(wheel)], check=True, timeout=200)
    environ = {**project_environment, "PYTHONPATH": str(target)}
    done = python(WRITE, environ, tmp_path, broker.bootstrap_servers, str(target))
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith("written")


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
    submit = [str(Path(pyspark.__file__).parent / "bin" / "spark-submit"), "--master", "local[1]"]
    done = subprocess.run(
        [
            *submit,
            "--conf",
            "spark.ui.enabled=false",
            "--py-files",
            str(shipped),
            str(job),
            broker.bootstrap_servers,
        ],
        env={**project_environment, "PYTHONPATH": ""},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
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
heavy = {"pyspark", "numpy", "pyarrow", "kafka", "confluent_kafka"} & set(sys.modules)
sys.exit(str(heavy) if heavy else 0)
"""
    done = python(code, project_environment, tmp_path)
    assert done.returncode == 0, done.stderr


def test_production_images_may_leave_the_local_broker_out(
    project_environment: dict[str, str], tmp_path: Path
) -> None:
    shutil.copy(ROOT / "pyspark_kafka_chunked.py", tmp_path)
    shutil.copytree(
        ROOT / "kafka_sink", tmp_path / "kafka_sink", ignore=shutil.ignore_patterns("local_broker")
    )
    code = """
import importlib, pkgutil, kafka_sink, pyspark_kafka_chunked
assert kafka_sink.__file__.startswith(__import__("os").getcwd()), kafka_sink.__file__
for module in pkgutil.walk_packages(kafka_sink.__path__, "kafka_sink."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
print(pyspark_kafka_chunked.DefaultSource.name())
"""
    environ = {**project_environment, "PYTHONPATH": str(tmp_path)}
    done = python(code, environ, tmp_path)
    assert done.stdout.strip() == "kafka-chunked", done.stderr


def test_register_hands_over_the_data_source() -> None:
    from types import SimpleNamespace

    import kafka_sink
    from kafka_sink.spark.datasource import KafkaChunkedDataSource

    registered: list[type] = []
    session = SimpleNamespace(
        dataSource=SimpleNamespace(register=registered.append), createDataFrame=lambda *_: None
    )
    kafka_sink.register(session)  # type: ignore[arg-type]  # all of a session that is used
    assert registered == [KafkaChunkedDataSource]


def test_sparks_lookup_finds_the_sink() -> None:
    import pyspark_kafka_chunked
    from kafka_sink.spark.datasource import KafkaChunkedDataSource

    assert pyspark_kafka_chunked.DefaultSource is KafkaChunkedDataSource
    assert pyspark_kafka_chunked.DefaultSource.name() == "kafka-chunked"


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


def test_a_sink_that_cannot_be_imported_says_so_only_when_used(
    project_environment: dict[str, str], tmp_path: Path
) -> None:
    done = python(BROKEN, project_environment, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "cannot be imported" in done.stdout
    assert "PYSPARK_PYTHON" in done.stdout


def test_even_without_pyspark_the_lookup_module_does_not_raise(
    project_environment: dict[str, str], tmp_path: Path
) -> None:
    code = """
import sys
sys.modules["pyspark"] = None
import pyspark_kafka_chunked as module
assert not hasattr(module, "DefaultSource")
"""
    done = python(code, project_environment, tmp_path)
    assert done.returncode == 0, done.stderr


def test_the_licence_and_the_version_are_there() -> None:
    from kafka_sink import __version__

    assert "Apache License" in (ROOT / "LICENSE").read_text()
    assert __version__ in (ROOT / "CHANGELOG.md").read_text()
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
