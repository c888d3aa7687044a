"""Where the benchmarks' figures go, and how other processes find what stands in this checkout."""

from __future__ import annotations

import compileall
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"


def environment(python: str = sys.executable) -> dict[str, str]:
    """For a process that runs a module of this checkout; Spark's workers are this ``python``."""
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
        # On a cluster: tasks would else all run on the executor that registers first.
        "spark.scheduler.minRegisteredResourcesRatio": "1.0",
        "spark.scheduler.maxRegisteredResourcesWaitingTime": "60s",
    }
    if with_jvm_sink:
        used["spark.jars"] = ",".join(peers.jvm_sink_jars())
    return SparkSession.builder.master(master).config(map={**used, **settings}).getOrCreate()
