"""The examples for Ray Data and Daft: with stand-ins for the engines, and with the real ones where they are
installed (``make engines``)."""

from __future__ import annotations

import importlib.util
import runpy
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from tests.support.commands import run
from tests.support.fake_broker import FakeCluster
from tests.support.scripted_cluster import TOPIC, rows, written
from tests.support.surroundings import Modules

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
EngineModules = Callable[[str, dict[str, Any]], None]


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    with FakeCluster({TOPIC: 1}) as running:
        yield running


@pytest.fixture
def install(modules: Modules) -> EngineModules:
    """Puts a module with these names in the place of an engine's."""

    def put(module: str, names: dict[str, Any]) -> None:
        stand_in = ModuleType(module)
        vars(stand_in).update(names)
        modules(**{module: stand_in})

    return put


@dataclass
class WriteResult:
    result: Any
    bytes_written: int
    rows_written: int


def ray_sink(install: EngineModules) -> Any:
    block = SimpleNamespace(for_block=lambda table: SimpleNamespace(to_arrow=lambda: table))
    install("ray", {"data": None})
    install("ray.data", {"Datasink": object})
    install("ray.data.block", {"BlockAccessor": block})
    return runpy.run_path(str(EXAMPLES / "ray_sink.py"))["KafkaDatasink"]


def daft_sink(install: EngineModules) -> Any:
    install("daft", {"Schema": SimpleNamespace(from_pyarrow_schema=lambda schema: schema)})
    install("daft.io.sink", {"DataSink": object, "WriteResult": WriteResult})
    install("daft.recordbatch", {"MicroPartition": SimpleNamespace(from_pydict=pa.table)})
    return runpy.run_path(str(EXAMPLES / "daft_sink.py"))["KafkaSink"]


def options(cluster: FakeCluster, **more: str) -> dict[str, str]:
    return {"kafka.bootstrap.servers": cluster.bootstrap_servers, "topic": TOPIC, **more}


def test_tasks_of_ray_and_of_daft_write_and_their_drivers_add_up(
    cluster: FakeCluster, install: EngineModules
) -> None:
    sink = ray_sink(install)(options(cluster))
    returned = [sink.write([pa.table(rows(0, 3)), pa.table(rows(3, 2))], None), sink.write([], None)]
    sink.on_write_complete(SimpleNamespace(write_returns=returned))
    assert sink.rows == 5
    assert written(cluster) == list(range(5))
    sink = daft_sink(install)(options(cluster))
    parts = [SimpleNamespace(to_arrow=lambda: pa.table(rows(5, 4)), size_bytes=lambda: 40)]
    results = [*sink.write(iter(parts)), *sink.write(iter(()))]
    assert results == [WriteResult(4, 40, 4), WriteResult(0, 0, 0)]
    assert sink.finalize(results).to_pydict() == {"rows": [4]}
    assert sink.schema().names == ["rows"]
    assert written(cluster) == list(range(9))


@pytest.mark.parametrize("engine", [ray_sink, daft_sink])
def test_exactly_once_is_refused(cluster: FakeCluster, install: EngineModules, engine: Any) -> None:
    """Catches: the second task of a write whose rows count as written before."""
    with pytest.raises(ValueError, match="at least once"):
        engine(install)(options(cluster, **{"delivery.guarantee": "exactly-once"}))


@pytest.mark.parametrize("engine", ["ray", "daft"])
def test_with_the_real_library(
    cluster: FakeCluster, engine: str, project_environment: dict[str, str]
) -> None:
    if importlib.util.find_spec(engine) is None:
        pytest.skip(f"{engine} is not installed")
    command = [sys.executable, str(EXAMPLES / f"{engine}_sink.py"), cluster.bootstrap_servers, TOPIC]
    assert f"1,000 orders are in {TOPIC}." in run(command, project_environment).stdout
    assert sorted(written(cluster)) == list(range(1_000))
