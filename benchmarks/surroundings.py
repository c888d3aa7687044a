"""Where the benchmarks' figures go, and how other processes find what stands in this checkout."""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"


def environment(python: str = sys.executable) -> dict[str, str]:
    """For a process that runs a module of this checkout; Spark's workers are this ``python``."""
    path = [str(ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(path)),
        "PYSPARK_PYTHON": python,
        "PYSPARK_DRIVER_PYTHON": python,
        "SPARK_LOCAL_IP": "127.0.0.1",
    }


def prepare_workers() -> None:
    """Lets the workers of a session that is made afterwards import the sink and the benchmarks' functions."""
    os.environ.update(environment())
