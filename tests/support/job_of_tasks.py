"""Several tasks and a coordinator at exact times. Messages pass as JSON, without sockets."""

from __future__ import annotations

from random import Random

from kafka_sink.breaker import FailureRateCircuitBreaker
from kafka_sink.breaker.breaker import Breaker
from kafka_sink.coordinator.breaker import BreakerChannel
from kafka_sink.coordinator.breaker_service import BreakerService
from kafka_sink.coordinator.schema import MemoryBudget, Message, decode, deliver, encode
from kafka_sink.model import Target, TopicPartition
from kafka_sink.options import parse
from tests.support.breaker_cluster import Cluster, run_pass
from tests.support.fake_outbox import FakeOutbox

INTERVAL = 2_000.0
P0, P1, P2 = (TopicPartition("t", partition) for partition in range(3))
BREAKER = "kafka.producer.circuit.breaker."


def named(count: int, topic: str = "t") -> list[TopicPartition]:
    return [TopicPartition(topic, number) for number in range(count)]


def service(out: FakeOutbox, budget: MemoryBudget | None = None, /, **breaker: str) -> BreakerService:
    """A service with the default breaker class, unless ``breaker`` sets another one."""
    given = {
        "trigger.message.count": "100",
        **{name.replace("_", "."): text for name, text in breaker.items()},
    }
    options = {f"{BREAKER}{name}": text for name, text in given.items()}
    parsed = parse({"kafka.bootstrap.servers": "h:1", "topic": "t", **options}).options
    return BreakerService(parsed, out, budget, Random(1))


class Task:
    """One task's breaker and channel. ``waiting``: partitions with a queued batch.

    ``probed``: brokers that got a request without rows. ``answering``: brokers that respond at once.
    """

    def __init__(self, job: Job, number: int) -> None:
        self.job = job
        self.number = number
        breaker = FailureRateCircuitBreaker()
        breaker.configure({"trigger.message.count": "100"})
        # The same leaders for all, but each task's own connections to them.
        self.cluster = Cluster(**job.cluster.leaders)
        self.cluster.leaders, self.brokers = job.cluster.leaders, self.cluster.brokers
        self.manager = self.cluster.manager(INTERVAL)
        self.gate = Breaker(breaker, self.manager)
        # This is None before its first metadata.
        self.cluster_id: str | None = "kafka"
        self.exchange = BreakerChannel(
            self.manager, self._call_breaker, lambda: self.cluster_id, lambda: job.random.random()
        )
        self.gate.share(self.exchange)
        self.waiting: set[TopicPartition] = set()
        self.sent: list[tuple[float, TopicPartition]] = []
        self.probed: list[tuple[float, int]] = []
        self.answering: set[int] = set()

    def _call_breaker(self) -> None:
        self.gate.call()

    def node(self, partition: TopicPartition) -> int:
        info = self.job.cluster.leader(partition)
        assert info is not None
        return info.leader

    def send(self, partition: TopicPartition, records: int = 100) -> None:
        now = self.job.now
        self.sent.append((now, partition))
        self.cluster.send(self.gate, partition, records, now)

    def answer(self, partition: TopicPartition, cause: Exception | None = None, records: int = 100) -> None:
        self.cluster.answer(self.gate, partition, cause, records, self.job.now)

    def batch(self, partition: TopicPartition, cause: Exception | None = None) -> None:
        self.send(partition)
        self.answer(partition, cause)

    def fail(self, partition: TopicPartition, cause: Exception, times: int = 3) -> None:
        for _ in range(times):
            self.batch(partition, cause)

    def run_pass(self) -> None:
        mutes = run_pass(self.gate, self.job.now)
        for node in self.gate.task_mutes.brokers_to_probe():
            self.probed.append((self.job.now, node))
            self.gate.on_probe(node, self.job.now)
            if node in self.answering:
                self.gate.on_probe_done(node, None, self.job.now)
        for partition in sorted(self.waiting):
            if partition in mutes and self.gate.task_mutes.may_probe(partition):
                self.send(partition)
                self.waiting.discard(partition)

    def muted(self) -> set[Target]:
        return set(self.manager.task_mutes.mutes)


class Job:
    """Broker n leads partition n - 1. Time advances in steps of 10 ms."""

    def __init__(self, tasks: int, **breaker: str) -> None:
        self.now = 1_000.0
        self.random = Random(1)
        self.cluster = Cluster(t=[1, 2, 3])
        self.out = FakeOutbox()
        self.service = service(self.out, **breaker)
        self.tasks = [Task(self, number) for number in range(tasks)]
        self.connected: set[int] = set()
        # Their clients send nothing, as if their processes were stalled.
        self.paused: set[int] = set()
        for number in range(tasks):
            self.connect(number)

    def connect(self, number: int) -> None:
        self.connected.add(number)
        self.tasks[number].exchange.on_connected(self.now)
        self.service.on_joined(number, self.now)

    def lose(self, number: int) -> None:
        self.connected.discard(number)
        self.service.on_gone(number, self.now)
        self.tasks[number].exchange.on_lost(self.now)

    def restart(self) -> None:
        for number in list(self.connected):
            self.lose(number)
        self.out = FakeOutbox()
        self.service = service(self.out)

    def prober(self) -> int | None:
        found = (one.prober for one in self.service.mutes.values() if one.prober in self.connected)
        return next(found, None)

    def say(self, number: int, message: Message) -> None:
        deliver(self.service, number, decode(encode(message)), self.now)

    def tell(self, number: int, message: Message) -> None:
        if number in self.connected:
            deliver(self.tasks[number].exchange, message, self.now)

    def step(self) -> None:
        self.now += 10
        for task in self.tasks:
            task.run_pass()
            while (
                task.number not in self.paused and (said := task.exchange.next_message(self.now)) is not None
            ):
                if task.number in self.connected:
                    self.say(task.number, said)
        if self.service.next_change_ms(self.now) <= 10:
            self.service.on_time(self.now)
        for number, reported in self.out.taken():
            self.tell(number, reported)

    def run(self, ms: float) -> None:
        until = self.now + ms
        while self.now < until:
            self.step()

    def mutes(self) -> list[set[Target]]:
        return [task.muted() for task in self.tasks]


def started(tasks: int, **breaker: str) -> Job:
    """A job whose tasks have a coordinator."""
    job = Job(tasks, **breaker)
    job.run(100)
    return job


def frozen(job: Job) -> None:
    """Broker 1 is silent for task 0, and responds to no other that is asked: it is muted for all."""
    first = job.tasks[0]
    first.batch(P0)
    job.run(10)
    first.send(P0)
    for _ in range(70):
        job.step()
        first.batch(P1)
    assert first.muted() == {1}
    job.run(250)
