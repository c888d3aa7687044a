"""Client metrics as a real broker's plugin sees them (KIP-714), beside what the producer has counted."""

from __future__ import annotations

import base64
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from unittest import mock
from zipfile import ZipFile

import pyarrow as pa
import pytest

from kafka_sink.options import parse
from kafka_sink.rows.column_plan import ColumnPlan
from kafka_sink.task.producer import Producer
from local_kafka import LocalBroker
from tests.support.telemetry import Pushed, read
from tests.support.waiting import repeat_until, until

SOURCE = Path(__file__).parent.parent / "support" / "TelemetryReceiver.java"
TOPIC = "telemetry"
# The broker's id is 0.
REQUIRED = {
    "connection.creation.rate",
    "connection.creation.total",
    "node.request.latency.avg:node-0",
    "node.request.latency.max:node-0",
    "produce.throttle.time.avg",
    "produce.throttle.time.max",
    "record.queue.time.avg",
    "record.queue.time.max",
}
BATCH = pa.record_batch({"value": pa.array([b"x" * 50] * 1000, pa.binary())})


@dataclass
class Push:
    instance_id: str
    terminating: bool
    metrics: Pushed


@dataclass
class Receiver:
    """A broker with a plugin that receives metrics."""

    broker: LocalBroker
    file: Path

    def subscribe(self, interval_ms: int, metrics: str = "*") -> None:
        """All clients push these metrics from now on, in the interval."""
        tool = "org.apache.kafka.tools.ClientMetricsCommand"
        given = ("--metrics", metrics, "--interval", str(interval_ms), "--name", "all", "--alter")
        self.broker.run_tool(tool, "--bootstrap-server", self.broker.bootstrap_servers, *given)

    def pushes(self, client_id: str) -> list[Push]:
        """Of this client, so far."""
        lines = self.file.read_text().splitlines(keepends=True) if self.file.exists() else []
        words = [line.split() for line in lines if line.endswith("\n") and line.split()[0] == client_id]
        return [
            Push(instance_id, terminating == "true", read(base64.b64decode("".join(metrics))))
            for _, instance_id, terminating, *metrics in words
        ]

    def values(self, client_id: str) -> dict[str, float]:
        """The last one of each metric of this client."""
        return {name: value for push in self.pushes(client_id) for name, value in push.metrics.values.items()}

    def options(self, client_id: str, **more: str) -> dict[str, str]:
        given = {"bootstrap.servers": self.broker.bootstrap_servers, "client_id": client_id, **more}
        return {"topic": TOPIC} | {f"kafka.{name.replace('_', '.')}": value for name, value in given.items()}


@pytest.fixture(scope="module")
def receiver(broker: LocalBroker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Receiver]:
    folder = tmp_path_factory.mktemp("telemetry")
    kafka = Path(broker.classpath).parent
    javac = Path(broker.java).resolve().with_name("javac")
    subprocess.run([javac, "-cp", broker.classpath, "-d", folder / "classes", SOURCE], check=True)
    (folder / "jars").mkdir()
    for jar in kafka.glob("*.jar"):
        (folder / "jars" / jar.name).symlink_to(jar)
    with ZipFile(folder / "jars" / "receiver.jar", "w") as plugin:
        for one in (folder / "classes").iterdir():
            plugin.write(one, one.name)
    properties = {"metric.reporters": "TelemetryReceiver", "telemetry.file": folder / "pushed"}
    # These jars are never seen again. What a start leaves for later ones would push out that of other jars.
    no_cache = mock.patch.dict(os.environ, {"XDG_CACHE_HOME": os.devnull})
    with no_cache, LocalBroker(kafka_home=folder / "jars", properties=properties) as running:
        running.create_topic(TOPIC, 3)
        found = Receiver(running, folder / "pushed")
        found.subscribe(100)
        yield found
        # Else it would write down the classes that it has loaded, for a next start that never comes.
        running.kill(0)


@contextmanager
def producing(raw: dict[str, str]) -> Iterator[Producer]:
    producer = Producer(parse(raw).options)
    try:
        producer.plan = ColumnPlan.of([("value", "binary")], TOPIC).narrowed()
        producer.begin()
        yield producer
    finally:
        producer.close()


def test_pushes_are_the_producers_own_figures(receiver: Receiver) -> None:
    """Sums over all pushes, and the extremes, against what the task counted."""
    with producing(receiver.options("own", client_rack="zone-a", linger_ms="20")) as producer:

        def write() -> None:
            producer.send(BATCH)
            producer.flush()

        repeat_until(lambda: len(receiver.pushes("own")) >= 3, write, "pushes", pause_s=0.02)
        producer.finish()
        metrics = producer.metrics()
        nodes = producer.sender.broker_metrics(0.0)
    until(lambda: receiver.pushes("own")[-1].terminating, "the last push")
    pushes = receiver.pushes("own")
    assert len({push.instance_id for push in pushes}) == 1
    assert [push.terminating for push in pushes] == [False] * (len(pushes) - 1) + [True]
    assert {tuple(push.metrics.resource.items()) for push in pushes} == {(("client_rack", "zone-a"),)}
    assert pushes[0].metrics.sums == {"connection.creation.total": True}

    def greatest(name: str) -> float:
        return max(push.metrics.values[name] for push in pushes if name in push.metrics.values)

    assert sum(push.metrics.values["connection.creation.total"] for push in pushes) == 2
    assert greatest("record.queue.time.max") == pytest.approx(metrics["record-queue-time-max"])
    assert greatest("record.queue.time.avg") <= metrics["record-queue-time-max"]
    ((node, of_node),) = nodes.items()
    assert greatest(f"node.request.latency.max:node-{node}") >= of_node.latency_ms / of_node.requests * 0.5
    assert greatest("produce.throttle.time.max") == 0
    # Windows follow one another without a gap.
    for push, following in pairwise(pushes):
        assert following.metrics.start_s == pytest.approx(push.metrics.end_s)


def test_names_kinds_and_labels_are_those_of_javas_client(receiver: Receiver) -> None:
    server = f"bootstrap.servers={receiver.broker.bootstrap_servers}"
    size = ("--num-records", "1500", "--record-size", "50", "--throughput", "1000")
    given = ("--topic", TOPIC, *size, "--producer-props", server, "client.id=java", "client.rack=zone-a")

    def java_has_pushed() -> bool:
        """On a busy machine it ends before its first push, or after one that lacks what comes with rows."""
        receiver.broker.run_tool("org.apache.kafka.tools.ProducerPerformance", *given)
        return receiver.values("java").keys() >= REQUIRED

    until(java_has_pushed, "pushes of Java's client")
    with producing(receiver.options("beside", client_rack="zone-a")) as producer:
        producer.send(BATCH)
        producer.finish()
        until(lambda: receiver.values("beside").keys() >= REQUIRED, "all required metrics")
    assert receiver.values("beside").keys() <= receiver.values("java").keys()
    ours, javas = receiver.pushes("beside")[-1].metrics, receiver.pushes("java")[-1].metrics
    assert ours.sums.items() <= javas.sums.items()
    assert ours.resource == javas.resource


def test_a_receiver_that_hangs_holds_up_no_task(receiver: Receiver) -> None:
    hang, hung = (receiver.file.with_name(receiver.file.name + end) for end in (".hang", ".hung"))
    hang.touch()
    try:
        with producing(receiver.options("hung")) as producer:
            producer.send(BATCH)
            producer.flush()
            until(lambda: hung.exists() and hung.read_text() == "hung", "a push that hangs")
            started = time.monotonic()
            for _ in range(5):
                producer.send(BATCH)
                producer.flush()
            assert producer.finish().records == 6000
        # A broker handles the requests of a connection one after the other, and a request may take 30 s.
        assert time.monotonic() - started < 25
    finally:
        hang.unlink()
