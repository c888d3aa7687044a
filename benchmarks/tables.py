"""The tables of docs/benchmarks.md, made from the same results as the plots.

``python -m benchmarks.tables`` prints them. A test compares them with the page.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks import arrow_profile, slow_brokers
from benchmarks.throughput import Job, medians

_RESULTS = Path(__file__).with_name("results")
_OURS, _JVM = "kafka-chunked", "JVM sink"
# The tables by the names of the results, as the page has them.
_SIZES = {"20": "20 B", "110": "110 B", "1000": "1 kB", "10000": "10 kB", "100000": "100 kB"}


def _steady(jobs: list[dict[str, Any]]) -> Job:
    """The median of all rounds but the first, which warms up."""
    return medians([Job(**job) for job in jobs[1:]])


def _read(name: str) -> Any:
    return json.loads((_RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def throughput() -> Iterator[str]:
    found = {name: _steady(jobs) for name, jobs in _read("throughput")[0]["jobs"].items()}
    yield "| | rows/s | of the tuned JVM sink | processor seconds for a million rows |"
    yield "|---|---|---|---|"
    reference = found["JVM sink, tuned"].rows_per_s
    for name, job in found.items():
        yield f"| {name} | {job.rows_per_s:,.0f} | {job.rows_per_s / reference:.2f} | {job.spark_s:.2f} |"


def shapes() -> Iterator[str]:
    yield "| | rows/s | JVM sink's rows/s | ratio | processor time, ratio |"
    yield "|---|---|---|---|---|"
    for one in _read("throughput_shapes"):
        ours, jvm = (_steady(one["jobs"][name]) for name in (_OURS, _JVM))
        yield (
            f"| {one['case']['name']} | {ours.rows_per_s:,.0f} | {jvm.rows_per_s:,.0f} | "
            f"{ours.rows_per_s / jvm.rows_per_s:.2f} | {ours.spark_s / jvm.spark_s:.2f} |"
        )


def value_sizes() -> Iterator[str]:
    found: Mapping[str, Mapping[str, Job]] = {
        size: {name: _steady(jobs) for name, jobs in by_name.items()}
        for size, by_name in _read("value_sizes").items()
    }
    yield "| | " + " | ".join(_SIZES[size] for size in found) + " |"
    yield "|---|" + "---|" * len(found)
    for name in next(iter(found.values())):
        cells = []
        for jobs in found.values():
            job, reference = jobs[name], jobs["JVM sink, tuned"]
            cells.append(
                f"{job.rows_per_s / reference.rows_per_s:.2f}, {job.spark_s / reference.spark_s:.2f}"
            )
        yield f"| {name} | " + " | ".join(cells) + " |"


def formats() -> Iterator[str]:
    yield "| | bytes | rows/s | µs of processor time a row | of Spark's function |"
    yield "|---|---|---|---|---|"
    for title, jobs in _read("formats")["jobs"].items():
        format_name = title.partition(",")[0]
        steady = {name: _steady(found["jobs"]) for name, found in jobs.items()}
        reference = steady.get(f"to_{format_name}, JVM sink")
        yield f"| **{title}** | | | | |"
        for name, job in steady.items():
            share = f" {job.spark_s / reference.spark_s:.2f}" if reference else ""
            size = f"{jobs[name]['bytes']:.0f}"
            yield f"| {name} | {size} | {job.rows_per_s:,.0f} | {job.spark_s:.2f} |{share} |"


def far_brokers() -> Iterator[str]:
    yield from slow_brokers.lines(_read("slow_brokers"))


def profile() -> Iterator[str]:
    yield from arrow_profile.table(_read("arrow_profile"))


TABLES = {
    "arrow_profile": profile,
    "throughput": throughput,
    "throughput_shapes": shapes,
    "value_sizes": value_sizes,
    "formats": formats,
    "slow_brokers": far_brokers,
}


if __name__ == "__main__":
    for name, lines in TABLES.items():
        print(f"{name}\n\n" + "\n".join(lines()) + "\n")
