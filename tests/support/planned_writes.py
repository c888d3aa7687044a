"""Writes as planning makes them, and the results that their tasks committed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kafka_sink.coordinator.address import PlannedCoordinator
from kafka_sink.model import PartitionResult, TaskResult
from kafka_sink.options import parse
from kafka_sink.rows.column_plan import ColumnPlan
from kafka_sink.spark.write import PlannedWrite, TaskCommitted

PLAN = ColumnPlan.of([("value", "string")], "t")


def planned(coordinator: PlannedCoordinator | None = None, **options: str) -> PlannedWrite:
    raw = {"kafka.bootstrap.servers": "h:1", "topic": "t"}
    raw |= {name.replace("_", "."): value for name, value in options.items()}
    return PlannedWrite(parse(raw).options, PLAN, coordinator or PlannedCoordinator(), name="0123")


class Context:
    """A Spark task with these local properties."""

    taskAttemptId = partitionId = stageId = staticmethod(lambda: 3)  # noqa: N815 - Spark's names

    def __init__(self, properties: Mapping[str, str], attempt: int = 0) -> None:
        self.getLocalProperty = properties.get
        self.attemptNumber = lambda: attempt


def committed(
    *ranges: tuple[int, int], partition: int = 0, query: str = "", records: int | None = None
) -> TaskCommitted:
    count = sum(last - first + 1 for first, last in ranges) if records is None else records
    written = PartitionResult("t", partition, count, 1, 10 * count, tuple(ranges), raw_bytes=20 * count)
    result = TaskResult(
        partitions=(written,),
        records=count,
        batches=1,
        raw_bytes=20 * count,
        sent_bytes=10 * count,
        requests=1,
    )
    return TaskCommitted(result, query=query)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]
