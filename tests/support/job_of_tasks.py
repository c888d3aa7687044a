"""Several tasks and a coordinator at exact times. Messages pass as JSON, without sockets."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from kafka_sink.breaker import FailureRateCircuitBreaker
from kafka_sink.breaker.manager import CircuitBreakManager
from kafka_sink.breaker.producer_breaker import ProducerBreaker
from kafka_sink.breaker.states import Target
from kafka_sink.coordinator.breaker.channel import BreakerChannel
from kafka_sink.coordinator.breaker.group import BreakerGroup
from kafka_sink.coordinator.breaker.handler import BreakerHandler
from kafka_sink.coordinator.breaker.votes import PartitionVotes
from kafka_sink.coordinator.transport.handlers import Push, ServerMessage
from kafka_sink.model import TopicPartition
from tests.support.breaker_cluster import Cluster
from tests.support.brokers import Brokers

INTERVAL = 2_000.0
P0, P1, P2 = (TopicPartition("t", partition) for partition in range(3))


def sent(body: Mapping[str, Any]) -> Mapping[str, Any]:
    """What comes out at the other end."""
    found: Mapping[str, Any] = json.loads(json.dumps(dict(body)))
    return found


class Task:
    """One task's breaker and channel. ``waiting``: partitions with a queued batch.

    ``probed``: brokers that got a request without rows. ``answering``: those that respond at once.
    """

    def __init__(self, job: Job, number: int) -> None:
        self.job = job
        self.number = number
        breaker = FailureRateCircuitBreaker()
        breaker.configure({"trigger.message.count": "100"})
        self.manager = CircuitBreakManager(job.cluster, INTERVAL)
        # Each task knows its own.
        self.brokers = Brokers(*job.cluster.brokers)
        self.manager.probes._brokers = self.brokers
        self.gate = ProducerBreaker(breaker, self.manager)
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
        self.brokers.send(self.node(partition), [partition], now)
        self.gate.on_send(self.brokers[self.node(partition)], [(partition, records)], now)

    def answer(self, partition: TopicPartition, cause: Exception | None = None, records: int = 100) -> None:
        now = self.job.now
        broker = self.brokers[self.node(partition)]
        broker.responded(now)
        self.gate.on_complete(broker, [(partition, records)], cause, now)

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
        return set(self.manager.local.mutes)


class Job:
    """Broker n leads partition n - 1. Time advances in steps of 10 ms.

    ``per_host``: so many tasks share a relay; 0: each is connected by itself.
    """

    per_host = 0

    def __init__(self, tasks: int) -> None:
        self.now = 1_000.0
        self.cluster = Cluster(t=[1, 2, 3])
        self.handler = BreakerHandler(INTERVAL, PartitionVotes(100, 50), 500.0, lambda: 0.5)
        self.tasks = [Task(self, number) for number in range(tasks)]
        self.connected: set[int] = set()
        # Their clients send nothing, as between tasks.
        self.paused: set[int] = set()
        # By peer number.
        self.groups: dict[int, BreakerGroup] = {}
        for number in range(tasks):
            self.connect(number)

    def group_of(self, number: int) -> tuple[int, BreakerGroup] | None:
        """Of a task: its relay's peer number and group. There its number is one higher."""
        if not self.per_host:
            return None
        peer = 1_000 + number // self.per_host
        return peer, self.groups.setdefault(peer, BreakerGroup(lambda: 0.5))

    def connect(self, number: int) -> None:
        self.connected.add(number)
        self.tasks[number].exchange.on_connected(self.now)

    def lose(self, number: int) -> None:
        self.connected.discard(number)
        found = self.group_of(number)
        if found is None:
            self.handler.on_disconnect(number, self.now)
        else:
            found[1].on_task_left(number + 1, self.now)
        self.tasks[number].exchange.on_lost(self.now)

    def restart(self, handler: BreakerHandler) -> None:
        """The coordinator is killed, and another one takes its place. Relays end with their connections."""
        for number in list(self.connected):
            self.lose(number)
        self.groups.clear()
        self.handler = handler

    def prober(self) -> int | None:
        """The task that has a lease."""
        owners = list(self.handler.leases.owners.values())
        if not owners or not self.per_host:
            return owners[0] if owners else None
        owners = list(self.groups[owners[0]]._owners.values())
        return owners[0] - 1 if owners else None

    def replace_relay(self, number: int) -> None:
        """The relay of a task is killed; its tasks connect again by another one."""
        found = self.group_of(number)
        assert found is not None
        del self.groups[found[0]]
        self.handler.on_disconnect(found[0], self.now)
        for one in self.connected.intersection(range(len(self.tasks))):
            if self.group_of(one) == self.group_of(number):
                self.tasks[one].exchange.on_lost(self.now)
                self.tasks[one].exchange.on_connected(self.now)

    def _deliver(self, outgoing: Sequence[ServerMessage]) -> None:
        for one in outgoing:
            body = sent(one.body)
            if one.task in self.groups:
                if isinstance(one, Push):
                    self.groups[one.task].on_push(body, self.now)
                else:
                    self.groups[one.task].on_reply(body, 0.0, self.now)
            elif isinstance(one, Push):
                self._give(one.task, None, body)
            else:
                self._give(one.task, one.request, body)

    def _give(self, number: int, request: int | None, body: Mapping[str, Any]) -> None:
        if number in self.connected:
            exchange = self.tasks[number].exchange
            if request is None:
                exchange.on_push(body, self.now)
            else:
                exchange.on_reply(body, True, self.now)

    def _take(self, task: Task) -> None:
        found = self.group_of(task.number)
        while (body := task.exchange.next_message(self.now)) is not None:
            if task.number not in self.connected:
                continue
            if found is None:
                self._deliver(self.handler.on_message(task.number, 1, sent(body), self.now))
            else:
                assert found[1].on_task(task.number + 1, 1, sent(body), self.now)

    def step(self) -> None:
        self.now += 10
        for task in self.tasks:
            task.run_pass()
            if task.number not in self.paused:
                self._take(task)
        for peer, group in self.groups.items():
            if (report := group.next_message(self.now)) is not None:
                self._deliver(self.handler.on_message(peer, 1, sent(report), self.now))
        if self.handler.next_change_ms(self.now) <= 10:
            self._deliver(self.handler.on_time(self.now))
        for group in self.groups.values():
            while group.outgoing:
                one = group.outgoing.popleft()
                self._give(one.task - 1, one.request, sent(one.body))

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
