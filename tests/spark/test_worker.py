"""What a Python worker of Spark keeps, reads again, collects and says of its memory."""

from __future__ import annotations

import importlib
import platform
import resource
import sys
import textwrap
import zipfile
import zipimport
from collections.abc import Iterator
from pathlib import Path

import pytest

from kafka_sink.errors import KafkaSinkError
from kafka_sink.spark import worker
from kafka_sink.spark.worker import explained
from tests.support.commands import printed_by, run


@pytest.fixture
def archives(tmp_path: Path) -> dict[str, Path]:
    made = {}
    for name in ("pyspark", "py4j-0.10.9.9-src", "spark-core_2.13-4.1.1", "users"):
        made[name] = tmp_path / f"{name}.zip"
        with zipfile.ZipFile(made[name], "w") as archive:
            archive.writestr(f"found_in_{name[:5].replace('-', '_')}/__init__.py", "")
            archive.writestr(f"found_in_{name[:5].replace('-', '_')}/inner.py", "VALUE = 7")
    return made


@pytest.fixture
def on_path(archives: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Path]]:
    monkeypatch.setattr(sys, "path", [*map(str, archives.values()), *sys.path])
    monkeypatch.setattr(sys, "path_importer_cache", dict(sys.path_importer_cache))
    importlib.import_module("found_in_pyspa.inner")
    importlib.import_module("found_in_users.inner")
    yield archives
    for name in [name for name in sys.modules if name.startswith("found_in_")]:
        del sys.modules[name]


def zip_finders() -> set[str]:
    return {
        Path(finder.archive).stem
        for finder in sys.path_importer_cache.values()
        if isinstance(finder, zipimport.zipimporter)
    }


@pytest.mark.usefixtures("on_path")
def test_only_sparks_archives_lose_their_finders_folders_in_them_too() -> None:
    before = dict(sys.path_importer_cache)
    worker.forget_spark_archives(reads_at_once=False)
    assert sys.path_importer_cache == before, "from Python 3.12 on nothing is done"
    finders = zip_finders()
    assert {"pyspark", "users"} <= finders
    worker.forget_spark_archives(reads_at_once=True)
    assert zip_finders() == finders - {"pyspark", "py4j-0.10.9.9-src", "spark-core_2.13-4.1.1"}
    assert importlib.reload(sys.modules["found_in_pyspa.inner"]).VALUE == 7, "imports from them go on"


_BATCH = 8 * 1024 * 1024
_PROGRAM = f"""
import resource
from kafka_sink.spark.worker import memory_kept

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        bytes(bytearray({_BATCH}))
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def resident():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize()

before = resident()
with memory_kept():
    faults()
    print(faults())
print(resident() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has these settings")
def test_large_batches_reuse_memory_and_a_task_leaves_none() -> None:
    faults, left = map(int, printed_by(_PROGRAM).split())
    pages = 20 * _BATCH // resource.getpagesize()
    assert faults < pages / 10
    assert left < _BATCH


def test_a_reused_planning_worker_has_little_to_collect() -> None:
    code = """
        import gc, sys
        from unittest import mock
        sys.modules["pyspark.daemon"] = object()
        from pyspark.sql.types import StructType
        from kafka_sink.spark.datasource import KafkaChunkedDataSource
        options = {"kafka.bootstrap.servers": "localhost:1", "topic": "t", "coordinator.enabled": "false"}
        with mock.patch("kafka_sink.spark.planning.looked_up"):
            for _ in range(2):
                KafkaChunkedDataSource(options).streamWriter(StructType().add("value", "string"), False)
                # PySpark imports more after planning, and its daemon collects.
                import pyarrow
                gc.collect()
                print(len(gc.get_objects()) < 2000)
    """
    assert printed_by(code).split() == ["False", "True"]
    # What comes later is still collected, and only workers of the daemon freeze.
    code = """
        import gc, sys, weakref
        from kafka_sink.spark.worker import freeze_when_reused
        freeze_when_reused()
        freeze_when_reused()
        print(gc.get_freeze_count())
        sys.modules["pyspark.daemon"] = object()
        freeze_when_reused()
        freeze_when_reused()
        node = type("Node", (), {})()
        node.itself = node
        gone = weakref.ref(node)
        freeze_when_reused()
        del node
        gc.collect()
        print(gone() is None)
    """
    assert printed_by(code).split() == ["0", "True"]


_TASK = """
    import resource
    from kafka_sink.options import parse
    from kafka_sink.rows.column_plan import ColumnPlan
    from kafka_sink.spark.write import PlannedWrite
    options = parse({"kafka.bootstrap.servers": "127.0.0.1:1", "topic": "t"}).options
    planned = PlannedWrite(options, ColumnPlan.of([("value", "string")], "t"))
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (20 << 20),) * 2)
    planned.write(iter([]))
"""


def test_a_task_that_may_not_load_arrow_names_the_setting(project_environment: dict[str, str]) -> None:
    """Catches: "libarrow.so.2300: failed to map segment from shared object", and nothing else."""
    done = run([sys.executable, "-c", textwrap.dedent(_TASK)], project_environment, code=1)
    assert "spark.executor.pyspark.memory" in done.stderr.splitlines()[-1], done.stderr
    assert "failed to map segment" in done.stderr.splitlines()[-1]
    assert done.stderr.count("Traceback (most recent call last)") == 1


def test_other_errors_of_imports_stay_as_they_are() -> None:
    with pytest.raises(ImportError, match="no such module"), explained():
        raise ImportError("no such module")
    with pytest.raises(KafkaSinkError, match=r"MemoryError.*pythonExecution"), explained():
        raise MemoryError
