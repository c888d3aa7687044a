"""Helpers that benchmarks share: command lines and figures, topics' rows, and other processes."""

from __future__ import annotations

import argparse
import compileall
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from local_kafka import KAFKA_VERSION
from tests.support.waiting import retry

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"


def environment(python: str = sys.executable) -> dict[str, str]:
    """The environment of a process that runs a module of this checkout; Spark's workers use ``python``."""
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    path = [str(ROOT), str(ROOT / "packages" / "local_kafka"), *filter(None, given)]
    # An installed package has bytecode files. Without them, each worker compiles the package for 0.3 s.
    compileall.compile_dir(ROOT / "kafka_sink", quiet=1)
    return {
        **{name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"},
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(path)),
        "PYSPARK_PYTHON": python,
        "PYSPARK_DRIVER_PYTHON": python,
        "SPARK_LOCAL_IP": "127.0.0.1",
    }


def spark_session(
    master: str = "local[2]",
    settings: Mapping[str, str] = MappingProxyType({}),
    *,
    with_jvm_sink: bool = False,
) -> SparkSession:
    """A session whose workers can import the sink and the benchmarks' functions."""
    from pyspark.sql import SparkSession

    from benchmarks import peers

    os.environ.update(environment())
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    used = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.log.level": "ERROR",
        # On a cluster, tasks would otherwise all run on the executor that registers first.
        "spark.scheduler.minRegisteredResourcesRatio": "1.0",
        "spark.scheduler.maxRegisteredResourcesWaitingTime": "60s",
    }
    if with_jvm_sink:
        used["spark.jars"] = ",".join(peers.jvm_sink_jars())
    return SparkSession.builder.master(master).config(map={**used, **settings}).getOrCreate()


def parser_of(
    description: str | None, smoke: str = "tiny input", *, with_beside: bool = False
) -> argparse.ArgumentParser:
    """A parser with ``--smoke``, and with the options that ``run_beside`` needs if ``beside`` is given."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--smoke", action="store_true", help=f"{smoke}, no files: does it run at all")
    if with_beside:
        said = "also measure with the PySpark of this interpreter"
        parser.add_argument("--beside", metavar="PYTHON", help=said)
        parser.add_argument("--out", type=Path, help="write the figures here instead of to results/")
    return parser


def machine(kafka: str = "") -> str:
    """The end of a run's conditions; ``kafka`` is a remark about the brokers."""
    return (
        f"Kafka {KAFKA_VERSION} on the same machine{kafka}, {os.cpu_count()} cores, "
        f"Python {platform.python_version()}"
    )


def kept(name: str) -> Any:
    """The figures of an earlier run; None if there are none."""
    file = RESULTS / f"{name}.json"
    return json.loads(file.read_text()) if file.exists() else None


def keep(name: str, found: Any, plot: Callable[[Any, Path], None] | None = None) -> None:
    """Writes a benchmark's figures, and draws them."""
    RESULTS.mkdir(exist_ok=True)
    file = RESULTS / f"{name}.json"
    file.write_text(json.dumps(found, indent=1) + "\n")
    if plot is not None:
        plot(found, file.with_suffix(".png"))


def run_beside(python: str, module: str, *words: object) -> Any:
    """The figures that a benchmark finds in another interpreter."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run.json"
        command = [python, "-m", module, "--out", str(out), *map(str, words)]
        subprocess.run(command, env=environment(python), check=True)
        return json.loads(out.read_text())


def rows_in(bootstrap: str, *topics: str) -> int:
    """Count rows from the topics' end offsets. Waits up to a minute for leaders that are not ready."""
    from confluent_kafka import KafkaException, TopicPartition
    from confluent_kafka.admin import AdminClient, OffsetSpec

    admin = AdminClient({"bootstrap.servers": bootstrap})
    known = admin.list_topics(timeout=60).topics
    places = {TopicPartition(name, p): OffsetSpec.latest() for name in topics for p in known[name].partitions}  # type: ignore[no-untyped-call]

    def ends() -> list[int]:
        return [int(future.result(60).offset) for future in admin.list_offsets(places).values()]

    return sum(retry(ends, KafkaException))


def delete_topic(bootstrap: str, topic: str) -> None:
    from confluent_kafka.admin import AdminClient

    admin = AdminClient({"bootstrap.servers": bootstrap})
    admin.delete_topics([topic])[topic].result(30)
