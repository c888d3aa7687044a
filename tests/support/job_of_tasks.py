"""Several tasks and a coordinator at exact times. Messages pass as JSON, without sockets."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from kafka_sink.breaker import FailureRateCircuitBreaker
from kafka_sink.breaker.mute_control import MuteControl
from kafka_sink.breaker.producer_breaker import ProducerBreaker
from kafka_sink.breaker.states import Target
from kafka_sink.coordinator.breaker.channel import BreakerChannel
from kafka_sink.coordinator.breaker.handler import BreakerHandler
from kafka_sink.coordinator.breaker.votes import PartitionVotes
from kafka_sink.coordinator.transport.handlers import Push, ServerMessage
from kafka_sink.model import TopicPartition
from tests.support.breaker_cluster import Cluster

INTERVAL = 2_000.0
P0, P1, P2 = (TopicPartition("t", partition) for partition in range(3))


class Task:
    """One task's breaker and channel. ``waiting``: partitions with a queued batch.

    ``probed``: brokers that got a request without rows. ``answering``: those that respond at once.
    """

    def __init__(self, job: Job, number: int) -> None:
        self.job = job
        self.number = number
        breaker = FailureRateCircuitBreaker()
        breaker.configure({"trigger.message.count": "100"})
        self.control = MuteControl(job.cluster, INTERVAL)
        self.manager = self.control.manager
        self.gate = ProducerBreaker(breaker, self.control, str)
        self.exchange = BreakerChannel(lambda: None, 500.0)
        self.gate.share(self.exchange)
        self.waiting: set[TopicPartition] = set()
        self.sent: list[tuple[float, TopicPartition]] = []
        self.probed: list[tuple[float, int]] = []
        self.answering: set[int] = set()

    def node(self, partition: TopicPartition) -> int:
        info = self.job.cluster.leader(partition)
        assert info is not None
        return info.leader

    def send(self, partition: TopicPartition, records: int = 100) -> None:
        now = self.job.now
        self.sent.append((now, partition))
        self.gate.on_request(self.node(partition), now)
        self.gate.on_send(self.node(partition), partition, records, now)

    def answer(self, partition: TopicPartition, cause: Exception | None = None, records: int = 100) -> None:
        now = self.job.now
        self.gate.on_request_done(self.node(partition), now)
        self.gate.on_complete(self.node(partition), partition, records, cause, now)

    def batch(self, partition: TopicPartition, cause: Exception | None = None) -> None:
        self.send(partition)
        self.answer(partition, cause)

    def fail(self, partition: TopicPartition, cause: Exception, times: int = 3) -> None:
        """Batches that fail one after the other."""
        for _ in range(times):
            self.batch(partition, cause)

    def run_pass(self) -> None:
        mutes = self.gate.muted(self.job.now)
        for node in self.gate.brokers_to_probe():
            self.probed.append((self.job.now, node))
            self.gate.on_probe(node, self.job.now)
            if node in self.answering:
                self.gate.on_probe_done(node, None, self.job.now)
        for partition in sorted(self.waiting):
            if partition in mutes and self.gate.may_probe(partition):
                self.send(partition)
                self.waiting.discard(partition)

    def muted(self) -> set[Target]:
        return set(self.control.targets())


class Job:
    """Broker n leads partition n - 1. Time advances in steps of 10 ms."""

    def __init__(self, tasks: int) -> None:
        self.now = 1_000.0
        self.cluster = Cluster(t=[1, 2, 3])
        self.handler = BreakerHandler(INTERVAL, PartitionVotes(100, 50), 500.0, lambda: 0.5)
        self.tasks = [Task(self, number) for number in range(tasks)]
        self.connected: set[int] = set()
        # Their clients send nothing, as between tasks.
        self.paused: set[int] = set()
        for number in range(tasks):
            self.connect(number)

    def connect(self, number: int) -> None:
        self.connected.add(number)
        self.tasks[number].exchange.on_connected(self.now)

    def lose(self, number: int) -> None:
        self.connected.discard(number)
        self.handler.on_disconnect(number, self.now)
        self.tasks[number].exchange.on_lost(self.now)

    def _deliver(self, outgoing: list[ServerMessage]) -> None:
        for one in outgoing:
            body: Mapping[str, Any] = json.loads(json.dumps(dict(one.body)))
            if one.task not in self.connected:
                continue
            exchange = self.tasks[one.task].exchange
            if isinstance(one, Push):
                exchange.on_push(body, self.now)
            else:
                exchange.on_reply(body, one.last, self.now)

    def step(self) -> None:
        self.now += 10
        for task in self.tasks:
            task.run_pass()
            if task.number in self.paused:
                continue
            while (body := task.exchange.next_message(self.now)) is not None:
                if task.number in self.connected:
                    message = json.loads(json.dumps(body))
                    self._deliver(list(self.handler.on_message(task.number, 1, message, self.now)))
        if self.handler.next_change_ms(self.now) <= 10:
            self._deliver(list(self.handler.on_time(self.now)))

    def run(self, ms: float) -> None:
        until = self.now + ms
        while self.now < until:
            self.step()

    def mutes(self) -> list[set[Target]]:
        return [task.muted() for task in self.tasks]


def frozen(job: Job) -> None:
    """Broker 1 is silent for task 0 only."""
    first = job.tasks[0]
    first.batch(P0)
    job.run(10)
    first.send(P0)
    for _ in range(70):
        job.step()
        first.batch(P1)
    assert first.muted() == {1}
