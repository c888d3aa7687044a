"""Figures as tasks and the driver report them, and as an HTTP client sees them added up."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kafka_sink.coordinator.figures.application_figures import ApplicationFigures
from kafka_sink.coordinator.figures.messages import (
    FinalFigures,
    MuteFigures,
    TaskFigures,
    TaskIdentity,
)
from kafka_sink.counts import NAMES, BrokerFigures, TopicFigures

CLUSTER = "broker:9092"
TASK = TaskIdentity("w", 7, 3, 0, "host", application="app")


def report(records: int, identity: TaskIdentity = TASK, **changes: Any) -> TaskFigures:
    """A task that has written so many rows of 10 bytes to topic t."""
    figures = TaskFigures(
        identity,
        elapsed_ms=1000.0,
        counters={"records": records, "sent_bytes": 10 * records, "batches": 1},
        topics={"t": TopicFigures(records, 10 * records, 20 * records, 1)} if records else {},
    )
    return replace(figures, **changes)


def final(records: int, **changes: Any) -> FinalFigures:
    figures = FinalFigures(
        "w",
        "committed",
        tasks=1,
        counters={"records": records, "sent_bytes": 10 * records, "batches": 1},
        topics={"t": TopicFigures(records, 10 * records, 20 * records, 1)},
    )
    return replace(figures, **changes)


def broker(requests: int, buckets: tuple[int, ...]) -> BrokerFigures:
    return BrokerFigures("b:9092", requests, 0, 2, 50.0, 30.0, buckets, 5.0, 7_000.0)


def full_report() -> TaskFigures:
    return report(
        5,
        counters=dict.fromkeys(NAMES, 3),
        brokers={-1: broker(3, (1, 2))},
        mutes=(MuteFigures("1", "why", 5.0, 7, 9.0, 2, ("t-0", "t-1")),),
        letters={("t", "E"): 4},
        transaction_ms=4.0,
        done=True,
    )


class Board:
    """Figures as an HTTP client sees them."""

    def __init__(self) -> None:
        self.figures = ApplicationFigures(lambda: 1_000.0)

    def report(self, figures: TaskFigures, now_ms: float = 0.0) -> None:
        self.figures.report(CLUSTER, figures, now_ms)

    def end(self, figures: FinalFigures, now_ms: float = 0.0) -> None:
        self.figures.end_write(CLUSTER, figures, now_ms)

    def shown(self, now_ms: float = 0.0) -> Mapping[str, Any]:
        decoded: Mapping[str, Any] = json.loads(json.dumps(self.figures.snapshot(now_ms)))
        return decoded

    def total(self, name: str = "records") -> int:
        return int(self.shown()["clusters"][0]["counters"].get(name, 0))

    def topic(self, name: str = "t") -> int:
        return next(int(one["records"]) for one in self.shown()["topics"] if one["topic"] == name)

    def job(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self.shown()["jobs"][0]
        return found
