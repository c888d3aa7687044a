"""Spark's own archives are not read again at each start of a worker; a user's are."""

from __future__ import annotations

import importlib
import platform
import resource
import subprocess
import sys
import zipfile
import zipimport
from collections.abc import Iterator
from pathlib import Path

import pytest

from kafka_sink.spark import worker


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
    before = zip_finders()
    assert {"pyspark", "users"} <= before
    worker.forget_spark_archives(reads_at_once=True)
    assert zip_finders() == before - {"pyspark", "py4j-0.10.9.9-src", "spark-core_2.13-4.1.1"}
    assert importlib.reload(sys.modules["found_in_pyspa.inner"]).VALUE == 7, "imports from them go on"


@pytest.mark.usefixtures("on_path")
def test_from_python_3_12_on_nothing_is_done() -> None:
    before = dict(sys.path_importer_cache)
    worker.forget_spark_archives(reads_at_once=False)
    assert sys.path_importer_cache == before


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
    run = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=True)
    faults, left = map(int, run.stdout.split())
    pages = 20 * _BATCH // resource.getpagesize()
    assert faults < pages / 10
    assert left < _BATCH
