"""``python -m benchmarks [NAME ...] [options of theirs]``: benchmarks in turn, each a process of its own.

``python -m benchmarks --redraw [NAME ...]`` measures nothing, and draws the plots again from the figures in
``benchmarks/results``. ``SPARK41_PYTHON`` may name an interpreter with pyspark 4.1.1, the last one whose own
Kafka sink can be had whole: comparisons with that sink run there. ``ENGINES_PYTHON`` may name an interpreter
with Ray and arrow-kafka-pyo3, which ``arrow_clients`` uses for them.
"""

from __future__ import annotations

import importlib
import itertools
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.surroundings import RESULTS, ROOT, kept


@dataclass(frozen=True, slots=True)
class Benchmark:
    """``with_jvm_sink``: it runs on the PySpark of Spark's JVM sink. ``with_beside``: it also measures the
    PySpark of another interpreter. ``with_engines``: it measures clients of the interpreter of Ray's
    libraries. ``is_drawn``: its figures in results/ hold all that its plot shows."""

    with_jvm_sink: bool = False
    with_beside: bool = False
    with_engines: bool = False
    is_drawn: bool = False


BENCHMARKS = {
    "mixed_memory": Benchmark(),
    "partition_growth": Benchmark(is_drawn=True),
    "coordinator": Benchmark(is_drawn=True),
    "many_topics": Benchmark(with_jvm_sink=True, is_drawn=True),
    "many_partitions": Benchmark(with_jvm_sink=True, is_drawn=True),
    "throughput": Benchmark(with_jvm_sink=True, with_beside=True, is_drawn=True),
    "throughput_shapes": Benchmark(with_jvm_sink=True, is_drawn=True),
    "value_sizes": Benchmark(with_jvm_sink=True, is_drawn=True),
    "slow_brokers": Benchmark(with_jvm_sink=True, is_drawn=True),
    "streaming": Benchmark(with_jvm_sink=True, with_beside=True, is_drawn=True),
    "frozen_broker": Benchmark(with_jvm_sink=True, is_drawn=True),
    "muted_together": Benchmark(),
    "exactly_once": Benchmark(is_drawn=True),
    "formats": Benchmark(with_jvm_sink=True, is_drawn=True),
    "arrow_clients": Benchmark(with_engines=True, is_drawn=True),
    "arrow_profile": Benchmark(is_drawn=True),
}
DRAWN = tuple(name for name, one in BENCHMARKS.items() if one.is_drawn)


def redraw(names: Sequence[str], folder: Path = RESULTS) -> None:
    """Draws the plots of the benchmarks that have figures."""
    for name in names:
        if figures := kept(name):
            importlib.import_module(f"benchmarks.{name}").plot(figures, folder / f"{name}.png")
            print(f"drew {name}.png", flush=True)


def run(name: str, options: Sequence[str]) -> int:
    """The benchmark's exit code."""
    benchmark = BENCHMARKS[name]
    command = [sys.executable, "-m", f"benchmarks.{name}", *options]
    if benchmark.with_jvm_sink and (spark41 := os.environ.get("SPARK41_PYTHON")):
        command[0] = spark41
        if benchmark.with_beside:
            command += ["--beside", sys.executable]
    if benchmark.with_engines and (engines := os.environ.get("ENGINES_PYTHON")):
        command += ["--beside", engines]
    return subprocess.run(command, cwd=ROOT, check=False).returncode


def main() -> int:
    words = sys.argv[1:]
    is_redraw = "--redraw" in words
    if is_redraw:
        words.remove("--redraw")
    names = list(itertools.takewhile(lambda word: not word.startswith("-"), words))
    known = DRAWN if is_redraw else tuple(BENCHMARKS)
    unknown = set(names) - set(known)
    if unknown:
        print(f"no benchmark named {', '.join(sorted(unknown))}; there are: {', '.join(known)}")
        return 2
    if is_redraw:
        redraw(names or known)
        return 0
    for name in names or known:
        print(f"== {name} ==", flush=True)
        if code := run(name, words[len(names) :]):
            return code
    return 0


if __name__ == "__main__":
    sys.exit(main())
