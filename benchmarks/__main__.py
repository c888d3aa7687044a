"""``python -m benchmarks [NAME ...] [--smoke | --redraw]``: benchmarks in turn, each a process of its own.

``--redraw`` measures nothing and draws the plots again from the figures in ``benchmarks/results``.

``SPARK41_PYTHON`` may name an interpreter with pyspark 4.1.1, the last Spark whose own Kafka sink can be had
whole: comparisons with that sink run there.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence

from benchmarks.surroundings import RESULTS, ROOT

BENCHMARKS = (
    "encoder",
    "allocation",
    "mixed_memory",
    "partition_growth",
    "metadata_simulation",
    "many_topics",
    "many_partitions",
    "throughput",
    "throughput_shapes",
    "streaming",
    "frozen_broker",
    "muted_together",
    "breaker_cost",
    "moved_leader",
    "tls",
    "exactly_once",
    "rate_limit",
)
WITH_JVM_SINK = (
    "many_topics",
    "many_partitions",
    "throughput",
    "throughput_shapes",
    "streaming",
    "frozen_broker",
    "moved_leader",
    "tls",
)
# Those whose figures in results/ hold all that their plots show. metadata_simulation is run again instead.
DRAWN = (
    "allocation",
    "mixed_memory",
    "partition_growth",
    "many_topics",
    "many_partitions",
    "throughput",
    "throughput_shapes",
    "streaming",
    "frozen_broker",
    "moved_leader",
    "rate_limit",
    "coordinator_scale",
)


def redraw(names: Sequence[str]) -> None:
    """Draws the plots of those that have figures."""
    for name in names:
        figures = RESULTS / f"{name}.json"
        if name in DRAWN and figures.exists():
            plot = importlib.import_module(f"benchmarks.{name}").plot
            plot(json.loads(figures.read_text()), figures.with_suffix(".png"))
            print(f"drew {name}.png", flush=True)


def main() -> int:
    names = [word for word in sys.argv[1:] if not word.startswith("-")]
    flags = [word for word in sys.argv[1:] if word.startswith("-")]
    unknown = set(names) - {*BENCHMARKS, *DRAWN}
    if unknown:
        print(f"no benchmark named {', '.join(sorted(unknown))}; there are: {', '.join(BENCHMARKS)}")
        return 2
    if "--redraw" in flags:
        redraw(names or DRAWN)
        return 0
    spark41 = os.environ.get("SPARK41_PYTHON")
    for name in names or BENCHMARKS:
        print(f"== {name} ==", flush=True)
        command = [sys.executable, "-m", f"benchmarks.{name}", *flags]
        if spark41 and name in WITH_JVM_SINK:
            command[0] = spark41
            if name in ("throughput", "streaming"):
                command += ["--beside", sys.executable]
        done = subprocess.run(command, cwd=ROOT, check=False)
        if done.returncode:
            return done.returncode
    return 0


if __name__ == "__main__":
    sys.exit(main())
