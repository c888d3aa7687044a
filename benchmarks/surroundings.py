"""Where the benchmarks' figures go, and how other processes find what stands in this checkout."""

from __future__ import annotations

import compileall
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"


def environment(python: str = sys.executable) -> dict[str, str]:
    """For a process that runs a module of this checkout; Spark's workers are this ``python``."""
    path = [str(ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    # An installed package has bytecode files. Without them, each worker compiles the package for 0.3 s.
    compileall.compile_dir(ROOT / "kafka_sink", quiet=1)
    return {
        **{name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"},
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(path)),
        "PYSPARK_PYTHON": python,
        "PYSPARK_DRIVER_PYTHON": python,
        "SPARK_LOCAL_IP": "127.0.0.1",
    }


def prepare_workers() -> None:
    """Lets the workers of a session that is made afterwards import the sink and the benchmarks' functions."""
    os.environ.update(environment())
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
