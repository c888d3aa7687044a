"""Reports of tasks and of the driver, and their totals as an HTTP client gets them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from kafka_sink.coordinator.live.application import ApplicationMetrics
from kafka_sink.coordinator.live.messages import (
    BrokerReport,
    DeadLetterCount,
    MuteReport,
    TaskIdentity,
    TaskReport,
    WriteEnded,
)
from kafka_sink.counts import NAMES, TopicMetrics

CLUSTER = "broker:9092"
TASK = TaskIdentity("w", 7, 3, 0, "host", application="app")


def of(task: int = TASK.task, **changes: Any) -> TaskIdentity:
    """A task of the write."""
    return replace(TASK, task=task, **changes)


def report(records: int, identity: TaskIdentity = TASK, **changes: Any) -> TaskReport:
    """A task that has written this many rows of 10 bytes to topic t."""
    made = TaskReport(
        CLUSTER,
        identity,
        elapsed_ms=1000.0,
        counters={"records": records, "sent_bytes": 10 * records, "batches": 1},
        topics={"t": TopicMetrics(records, 10 * records, 20 * records, 1)} if records else {},
    )
    return replace(made, **changes)


def final(records: int, **changes: Any) -> WriteEnded:
    made = WriteEnded(
        CLUSTER,
        "w",
        "committed",
        tasks=1,
        counters={"records": records, "sent_bytes": 10 * records, "batches": 1},
        topics={"t": TopicMetrics(records, 10 * records, 20 * records, 1)},
    )
    return replace(made, **changes)


def broker(requests: int, buckets: tuple[int, ...]) -> BrokerReport:
    return BrokerReport("b:9092", requests, 0, 2, 50.0, buckets, 5.0, 7_000.0)


def full_report() -> TaskReport:
    return report(
        5,
        counters=dict.fromkeys(NAMES, 3),
        brokers={-1: broker(3, (1, 2))},
        mutes=(MuteReport("1", "why", 5.0, 7, 9.0, ("t-0", "t-1")),),
        dead_letters=(DeadLetterCount("t", "E", 4),),
        transaction_ms=4.0,
        done=True,
    )


class Board:
    def __init__(self, metrics: ApplicationMetrics | None = None) -> None:
        self.metrics = metrics or ApplicationMetrics(lambda: 1_000.0)

    def report(self, report: TaskReport, now_ms: float = 0.0) -> None:
        self.metrics.on_report(report, now_ms)

    def end(self, ended: WriteEnded, now_ms: float = 0.0) -> None:
        self.metrics.on_write_ended(ended, now_ms)

    def shown(self, now_ms: float = 0.0) -> Mapping[str, Any]:
        decoded: Mapping[str, Any] = json.loads(json.dumps(self.metrics.snapshot(now_ms)))
        return decoded

    def cluster(self, now_ms: float = 0.0) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self.shown(now_ms)["clusters"][0]
        return found

    def total(self, name: str = "records") -> int:
        return int(self.cluster()["counters"].get(name, 0))

    def topic(self, name: str = "t") -> int:
        return next(int(one["records"]) for one in self.shown()["topics"] if one["topic"] == name)

    def job(self, now_ms: float = 0.0) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self.shown(now_ms)["jobs"][0]
        return found

    def rows(self) -> tuple[int, int, int]:
        """The totals of the cluster, the topic and the job."""
        return self.total(), self.topic(), self.job()["counters"]["records"]

    def texts(self) -> list[str]:
        """The events, the latest first."""
        return [one["text"] for one in self.shown()["events"]]
