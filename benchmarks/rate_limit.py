"""The rate limit of a job with uneven tasks on a standalone cluster of two workers: rows written over time.

    python -m benchmarks.rate_limit [--smoke]

Eight tasks, of which two have most of the rows, on two worker hosts with two cores each, so that tasks start
and end all the time. The rows that the broker has are counted twenty times a second.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from pathlib import Path
from typing import Any

from confluent_kafka import Consumer, TopicPartition

from benchmarks import charts
from benchmarks.sampler import Sampler
from benchmarks.surroundings import RESULTS, spark_session
from kafka_sink.local_broker import LocalBroker
from tests.support.standalone_cluster import StandaloneCluster

TOPIC = "limited"
PARTITIONS = 4
# Of the eight tasks, in parts of all rows.
SHARES = (0.35, 0.05, 0.05, 0.05, 0.35, 0.05, 0.05, 0.05)
LIMIT = 5_000
_CONDITIONS = (
    "8 tasks, two of which have 70 % of the rows, on 2 workers of a standalone cluster; Kafka 4.3.0 on "
    "the same machine, {cores} cores"
)


class Curve(Sampler):
    """(seconds since the start, rows that the broker has)."""

    def __init__(self, bootstrap: str) -> None:
        super().__init__("rows", 0.05)
        self.points: list[tuple[float, int]] = []
        self._begun_s = time.monotonic()
        self._consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": "rate-limit", "log_level": 0})

    def sample(self) -> None:
        ends = (
            self._consumer.get_watermark_offsets(TopicPartition(TOPIC, partition), timeout=10)[1]
            for partition in range(PARTITIONS)
        )
        rows = sum(ends)
        self.points.append((time.monotonic() - self._begun_s, rows))


def write(spark: Any, bootstrap: str, rows: int, limit: int) -> None:
    ends = [0]
    for share in SHARES:
        ends.append(ends[-1] + int(rows * share))
    starts, lasts = ends[:-1], [end - 1 for end in ends[1:]]
    # A union of ranges would be one task: Spark 4.3 keeps the partition that all of them have.
    ids = f"explode(sequence(array{tuple(starts)}[id], array{tuple(lasts)}[id])) as id"
    frame = spark.range(0, len(SHARES), 1, len(SHARES)).selectExpr(ids)
    (
        frame.selectExpr("cast(id as string) as key", "repeat('x', 100) as value")
        .write.format("kafka-chunked")
        .mode("append")
        .option("kafka.bootstrap.servers", bootstrap)
        .option("topic", TOPIC)
        .option("max.rows.per.second", str(limit))
        .save()
    )


def rates(points: list[tuple[float, int]], window_s: float) -> list[tuple[float, float]]:
    """(end of the window, rows per second in it) for windows that begin with each point."""
    found = []
    last = 0
    for start, rows in points:
        while last < len(points) and points[last][0] < start + window_s:
            last += 1
        if last == len(points):
            break
        at, later = points[last]
        found.append((at, (later - rows) / (at - start)))
    return found


def active(points: list[tuple[float, int]]) -> list[tuple[float, int]]:
    """From the first row to the last, in seconds since then."""
    begin = next(place for place, (_, rows) in enumerate(points) if rows)
    end = next(place for place, (_, rows) in enumerate(points) if rows == points[-1][1])
    kept = points[max(0, begin - 1) : end + 1]
    return [(at - kept[0][0], rows) for at, rows in kept]


def plot(found: dict[str, Any], file: Path) -> None:
    made, [[axes]] = charts.figure(
        "One job's rate limit", [_CONDITIONS.format(cores=found["cores"])], (9, 4.4)
    )
    points = found["points"]
    for window_s, colour, width in ((1.0, charts.LIGHT, 1.0), (10.0, charts.OURS, 2.5)):
        shown = rates(points, window_s)
        label = f"over {window_s:.0f} s"
        axes.plot([at for at, _ in shown], [rate for _, rate in shown], color=colour, lw=width, label=label)
    limit = found["limit"]
    axes.axhline(limit, color=charts.ALERT, ls="--", label=f"max.rows.per.second = {limit:,}")
    axes.set_ylim(0, limit * 1.5)
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.set_xlabel("seconds since the first row")
    axes.set_ylabel("rows per second at the broker")
    axes.legend(loc="lower right")
    charts.save(made, file)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--smoke", action="store_true")
    smoke = parser.parse_args().smoke
    seconds = 3 if smoke else 40
    with LocalBroker() as broker, StandaloneCluster(workers=2, cores=2) as cluster:
        broker.create_topic(TOPIC, PARTITIONS)
        spark = spark_session(cluster.url)
        try:
            with Curve(broker.bootstrap_servers) as curve:
                write(spark, broker.bootstrap_servers, LIMIT * seconds, LIMIT)
                curve.sample()
        finally:
            spark.stop()
    points = active(curve.points)
    window = 1.0 if smoke else 10.0
    over = [rate for _, rate in rates(points, window)] or [0.0]
    taken = points[-1][0] - points[0][0]
    figures = {
        "limit": LIMIT,
        "rows": points[-1][1],
        "seconds": taken,
        "rate": points[-1][1] / taken,
        "window_s": window,
        "slowest_window": min(over),
        "fastest_window": max(over),
        "python": platform.python_version(),
        "cores": os.cpu_count(),
    }
    print(json.dumps(figures, indent=1))
    figures["points"] = [(round(at, 3), rows) for at, rows in points]
    if not smoke:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "rate_limit.json").write_text(json.dumps(figures, indent=1) + "\n")
        plot(figures, RESULTS / "rate_limit.png")


if __name__ == "__main__":
    main()
