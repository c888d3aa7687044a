"""What the page says at three in the morning: is something wrong, since when, who suffers, what to do?

Metrics as tasks report them, without brokers. KAFKA_CHUNKED_STATES=folder keeps the pictures.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from selenium import webdriver

from kafka_sink.coordinator.live.application import ApplicationMetrics
from kafka_sink.coordinator.live.http_server import HttpServer, Response
from kafka_sink.coordinator.live.messages import (
    AboutJob,
    BrokerReport,
    DeadLetterCount,
    DriverWaits,
    MuteReport,
    TaskReport,
)
from kafka_sink.coordinator.live.messages import TaskIdentity as Identity
from kafka_sink.coordinator.live.view import as_json, page
from tests.support.live_view_page import Page
from tests.support.looping import call, looping
from tests.support.task_reports import CLUSTER, Board, final, report

OPTIONS = {"topic": "orders", "kafka.compression.type": "lz4", "kafka.linger.ms": "50"}
EXACTLY = {**OPTIONS, "delivery.guarantee": "exactly-once"}
BATCH = Identity("6f1d22aa", 1, 0, 0, "worker-1", application="nightly", about=AboutJob("orders", OPTIONS))
STREAM = replace(BATCH, write="c/41", query="0f3c9a1e", batch=41, about=AboutJob("clicks", EXACTLY))
MINUTE = 60


def broker(node: int, task: int, requests: int, oldest_ms: float = 8.0) -> BrokerReport:
    latency = 4.0 * requests * (1 + task)
    address = f"10.0.0.{node}:9092"
    return BrokerReport(address, requests, 0, 1, latency, (requests,), 0, oldest_ms)


class Night(Board):
    """A board with a clock: tasks that have reported each second for a while."""

    def __init__(self) -> None:
        self.second = 0
        super().__init__(ApplicationMetrics(self.wall_s))

    def wall_s(self) -> float:
        return 1_790_000_000.0 + self.second

    def run(self, seconds: int, tasks: int = 4, rate: int = 360, **changes: Any) -> None:
        """``changes``: of each report; a function gets the task's number and the second."""
        for _ in range(seconds):
            self.second += 1
            for task in range(tasks):
                self.report(self.task(task, rate, changes), self.now_ms)
            self.metrics.sample(self.now_ms)

    def task(self, task: int, rate: int, changes: Mapping[str, Any]) -> TaskReport:
        of: Identity = changes.get("of", BATCH)
        identity = replace(of, task=of.task + task, partition=task, about=None if task else of.about)
        sent = rate * self.second
        brokers = {node: broker(node, task, self.second) for node in range(3)}
        given = {name: one(task, self.second) if callable(one) else one for name, one in changes.items()}
        given.pop("of", None)
        given.setdefault("brokers", brokers)
        buffer = {"total": 67_108_864, "used": 1 << 22, "allocated": 1 << 23}
        gauges = {f"buffer_{name}_bytes": size for name, size in buffer.items()}
        given.setdefault("elapsed_ms", self.now_ms)
        return report(sent, identity, gauges=gauges, **given)

    @property
    def now_ms(self) -> float:
        return 1_000.0 * self.second

    def pause(self, seconds: int) -> None:
        self.run(seconds, tasks=0)

    def wait(
        self, step: str, awaited: str = "", age_ms: float = 0, left_ms: float = 0, cause: str = ""
    ) -> None:
        """What the query's driver waits for."""
        waits = DriverWaits(CLUSTER, "c", step, awaited, age_ms, left_ms, cause)
        self.metrics.on_driver_waits(waits, self.now_ms)


# What makes a state, what the verdict says of it, and what the page's title begins with.
STATES: dict[str, tuple[Callable[[Night], None], str, str]] = {}


def state(says: str, title: str) -> Callable[[Callable[[Night], None]], Callable[[Night], None]]:
    def add(make: Callable[[Night], None]) -> Callable[[Night], None]:
        STATES[make.__name__.replace("_", " ")] = make, says, title
        return make

    return add


@state("Nothing is wrong: 1,440 rows/s", "nightly")
def fine(night: Night) -> None:
    night.run(4 * MINUTE)


@state(
    "broker 1 muted for 40 s: 30,400 rows wait, the first for 1 min 20 s more until the job fails",
    "broker 1 muted",
)
def frozen(night: Night) -> None:
    def mute(task: int, second: int) -> tuple[MuteReport, ...]:
        age_ms = 1_000.0 * (second - 150)
        why = "3 requests without a response, the first since 5 s"
        return (MuteReport("1", why, age_ms, 40 * second, 120_000 - age_ms, (f"orders-{task}", "orders-7")),)

    night.run(150)
    night.run(40, mutes=mute)


@state(
    "broker 1 (10.0.0.1:9092) does not respond: last acknowledgement 43 s ago. Restart it",
    "broker 1 (10.0.0.1:9092) does not respond",
)
def silent(night: Night) -> None:
    """Catches: a page that turned green at request.timeout.ms, when the connection was closed."""

    def brokers(task: int, second: int) -> dict[int, BrokerReport]:
        silence_ms = 1_000.0 * (second - 120)
        frozen = broker(1, task, 120, silence_ms)
        if silence_ms > 30_000:
            frozen = frozen._replace(in_flight=0)
        return {0: broker(0, task, second), 1: frozen, 2: broker(2, task, second)}

    night.run(2 * MINUTE)
    night.run(43, brokers=brokers)


def one_micro_batch(night: Night) -> None:
    night.run(20, 2, of=STREAM)
    night.run(1, 2, of=STREAM, done=True)
    night.end(final(2 * 360 * 21, write="c/41", query="0f3c9a1e", batch=41, tasks=2), night.now_ms)


@state(
    "query clicks, starting micro-batch 42: waits for broker 1 (10.0.0.1:9092) to begin a transaction, 14 s, "
    "fails in 46 s. Restart it",
    "query clicks, starting micro-batch 42",
)
def between(night: Night) -> None:
    one_micro_batch(night)
    night.pause(15)
    night.wait("starting", "broker 1 (10.0.0.1:9092) to begin a transaction", 14_000.0, 46_000.0)


@state("query clicks aborted 20 s ago: no transaction within 60 s", "query clicks aborted")
def not_started(night: Night) -> None:
    """Catches: "aborted 35 s ago", when the micro-batch before was committed."""
    between(night)
    night.wait("starting", cause="no transaction within 60 s")
    night.pause(20)


@state("Nothing is wrong: ", "nightly")
def stream(night: Night) -> None:
    for batch in range(41, 50):
        of = replace(STREAM, write=f"c/{batch}", batch=batch, task=10 * batch)
        counters = {"records": 5_000, "sent_bytes": 50_000}
        of_each: dict[str, Any] = {"of": of, "counters": counters, "topics": {}}
        night.run(3, 2, **of_each, elapsed_ms=2_000.0)
        night.run(1, 2, **of_each, elapsed_ms=3_000.0, done=True)
        ended = final(10_000, write=of.write, query="0f3c9a1e", batch=batch, tasks=2)
        night.end(replace(ended, last_task=10 * batch + 1), night.now_ms)
        night.pause(8)


@state(
    "query clicks: 6 transactions open, nothing done for 1 min 10 s, readers wait",
    "query clicks: 6 transactions open",
)
def stuck(night: Night) -> None:
    night.run(2 * MINUTE, 6, of=STREAM, transaction_ms=lambda _, second: 1_000.0 * second)
    night.run(1, 6, of=STREAM, done=True, transaction_ms=121_000.0)
    night.pause(70)


@state(
    "query clicks, committing micro-batch 41: waits for broker 2 (10.0.0.2:9092) to end a transaction, "
    "1 min 10 s, fails in 50 s; 6 transactions open, readers wait. Restart it",
    "query clicks, committing micro-batch 41",
)
def stuck_at_a_broker(night: Night) -> None:
    stuck(night)
    night.wait("committing", "broker 2 (10.0.0.2:9092) to end a transaction", 70_000.0, 50_000.0)


@state("68 dead letters, most of topic orders: RecordTooLargeError", "68 dead letters")
def dead_letters(night: Night) -> None:
    def counted(task: int, second: int) -> tuple[DeadLetterCount, ...]:
        too_large = DeadLetterCount("orders", "RecordTooLargeError", second // 9 + 1)
        return too_large, DeadLetterCount("bills", "InvalidRowError", task)

    def counters(_: int, second: int) -> dict[str, int]:
        return {"records": 360 * second, "skipped": second // 9 + 1}

    night.run(90)
    night.run(60, dead_letters=counted, counters=counters)


@state("Nothing is wrong: 1,436 of 1,500 rows/s, the rate limit", "nightly")
def limited(night: Night) -> None:
    about = AboutJob("backfill", {**OPTIONS, "max.rows.per.second": "1500"})
    night.run(2 * MINUTE, 4, 359, of=replace(BATCH, about=about), state="limit", state_ms=800.0)


@state("write orders aborted 2 min 0 s ago: task 3 on worker-7: ", "write orders aborted")
def failed(night: Night) -> None:
    cause = (
        "task 3 on worker-7: of 41,200 rows 40,000 are written: topic 'orders' may not be written to "
        "(TOPIC_AUTHORIZATION_FAILED): let user 'night' write to it, or set another topic"
    )
    night.run(MINUTE)
    night.metrics.on_attempt_failed(BATCH.write, cause)
    night.run(20)
    night.end(final(70_000, write=BATCH.write, outcome="aborted", cause=cause, tasks=3), night.now_ms)
    night.pause(2 * MINUTE)


@state("query clicks waits for rows; its last micro-batch ended 4 min 0 s ago", "nightly")
def idle(night: Night) -> None:
    one_micro_batch(night)
    night.pause(4 * MINUTE)


@contextmanager
def serving(night: Night) -> Iterator[str]:
    async def data() -> Response:
        return as_json(night.metrics.snapshot(night.now_ms))

    listening = socket.create_server(("127.0.0.1", 0))
    with looping() as loop:
        server = call(loop, lambda: HttpServer(listening, {"/": page, "/metrics.json": data}, ()))
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}/"
        finally:
            call(loop, server.close)


@pytest.mark.parametrize("name", STATES)
def test_the_page_says_what_is_wrong(name: str, browser: webdriver.Chrome, tmp_path: Path) -> None:
    make, says, title = STATES[name]
    night = Night()
    make(night)
    folder = Path(os.environ.get("KAFKA_CHUNKED_STATES", tmp_path))
    with serving(night) as url:
        shown = Page(browser, url)
        shown.eventually(lambda: shown.text("verdict").startswith(says), 10)
        assert browser.title.startswith(title)
        shown.picture(folder / f"{name}.png")
        shown.picture(folder / f"{name}-phone.png", 390)
        assert shown.errors() == []
