"""A cluster that tests describe by the leaders of its partitions, and a Breaker as a sender uses it."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from typing import cast

from kafka_sink.breaker import FailureRateCircuitBreaker, PartitionCircuitBreaker, ProducerStatusContext
from kafka_sink.breaker.breaker import Breaker
from kafka_sink.breaker.manager import CircuitBreakManager
from kafka_sink.cluster.partition import Partition
from kafka_sink.cluster.producer_metadata import ProducerMetadata
from kafka_sink.model import PartitionMetadata, TopicMetadata, TopicPartition
from kafka_sink.outcomes import has_response
from tests.support.brokers import Brokers, batch_of
from tests.support.queues import partition_of
from tests.support.topic_metadata import topic_of

A0, A1, A2 = (TopicPartition("a", number) for number in range(3))
B0 = TopicPartition("b", 0)
P0, P1, P2, P3 = (TopicPartition("t", number) for number in range(4))


def numbers(infos: Iterable[PartitionMetadata]) -> list[int]:
    return [info.partition for info in infos]


def run_pass(gate: Breaker, now_ms: float) -> Container[TopicPartition]:
    """Call the breaker as a pass of the sender does; return the partitions that are muted then."""
    if gate.is_due(now_ms):
        gate.run(now_ms)
    return gate.avoided


class IdleBreaker(PartitionCircuitBreaker):
    """A user's class that keeps its manager and mutes nothing."""

    def configure(self, configs: Mapping[str, str]) -> None:
        """This class has no options."""

    def set_circuit_break_manager(self, circuit_break_manager: CircuitBreakManager) -> None:
        self.manager = circuit_break_manager

    def on_send(self, context: ProducerStatusContext) -> bool:
        return False

    def on_complete(
        self, context: ProducerStatusContext, topic_partition: TopicPartition, exception: Exception | None
    ) -> bool:
        return False


class Cluster:
    """``leaders``: by topic, the leader of each partition (-1: none). ``looks``: at all of a topic's.

    ``stale``: topics to be fetched again.
    """

    def __init__(self, **leaders: list[int]) -> None:
        self.leaders = leaders
        self.brokers = Brokers(*sorted({node for led in leaders.values() for node in led if node >= 0}))
        self.version = self.looks = 0
        self.stale: list[str] = []
        self.partitions: dict[TopicPartition, Partition] = {}

    def partition(self, name: TopicPartition) -> Partition:
        return self.partitions.setdefault(name, partition_of(name))

    def manager(self, retry_interval_ms: float = 2_000.0) -> CircuitBreakManager:
        return CircuitBreakManager(cast(ProducerMetadata, self), retry_interval_ms, self.partition)

    def send(self, gate: Breaker, partition: TopicPartition, rows: int, now_ms: float) -> None:
        """Send one batch, as ResponseHandler.send does."""
        found = self.leader(partition)
        assert found is not None
        batch = batch_of(self.partition(partition), rows)
        self.brokers.send_batches(found.leader, [batch], now_ms)
        gate.on_sent(self.brokers[found.leader], [batch], now_ms)

    def answer(
        self, gate: Breaker, partition: TopicPartition, cause: Exception | None, rows: int, now_ms: float
    ) -> None:
        """The oldest request of the partition's broker ends, as in ResponseHandler."""
        found = self.leader(partition)
        assert found is not None
        broker = self.brokers[found.leader]
        batch = batch_of(self.partition(partition), rows)
        broker.sent[0].new_rows = rows
        if not has_response(cause):
            gate.on_failure(broker.on_failure())
        else:
            gate.on_response(broker, broker.on_response(now_ms), now_ms)
        gate.on_complete(broker, [batch], cause, now_ms)
        if cause is None:
            batch.queue.on_acknowledged(batch, -1, broker.request_sent_ms, now_ms)

    def move(self, partition: TopicPartition, node: int) -> None:
        self.leaders[partition.topic][partition.partition] = node
        self.version += 1

    def mark_stale(self, topic: str, now_ms: float) -> None:
        self.stale.append(topic)

    def names(self) -> tuple[str, ...]:
        return tuple(self.leaders)

    def topic(self, name: str) -> TopicMetadata | None:
        self.looks += 1
        found = self.leaders.get(name)
        if found is None:
            return None
        return topic_of(name, None, tuple(PartitionMetadata(name, i, n) for i, n in enumerate(found)))

    def leader(self, partition: TopicPartition) -> PartitionMetadata | None:
        found = self.leaders.get(partition.topic, [])
        if partition.partition >= len(found):
            return None
        return PartitionMetadata(partition.topic, partition.partition, found[partition.partition])


class Bench:
    """A breaker class on a clock of the test's own; brokers 1, 2, 3 lead partitions 0, 1, 2, and 1 also 3."""

    def __init__(self, breaker: PartitionCircuitBreaker | None = None, **configs: str) -> None:
        if breaker is None:
            breaker = FailureRateCircuitBreaker()
            breaker.configure({name.replace("_", "."): text for name, text in configs.items()})
        self.cluster = Cluster(t=[1, 2, 3, 1])
        self.manager, self.brokers = self.cluster.manager(), self.cluster.brokers
        self.task_mutes = self.manager.task_mutes
        self.gate = Breaker(breaker, self.manager)
        self.now = 0.0

    def at(self, now: float) -> Container[TopicPartition]:
        self.now = now
        return run_pass(self.gate, now)

    def send(self, partition: TopicPartition, rows: int = 100) -> None:
        self.cluster.send(self.gate, partition, rows, self.now)

    def answer(self, partition: TopicPartition, cause: Exception | None = None, rows: int = 100) -> None:
        self.cluster.answer(self.gate, partition, cause, rows, self.now)

    def batch(
        self, partition: TopicPartition, cause: Exception | None = None, rows: int = 100, ms: float = 10.0
    ) -> bool:
        """Send a batch that is answered this much later; return whether its partition is muted then."""
        self.send(partition, rows)
        self.at(self.now + ms)
        self.answer(partition, cause, rows)
        return self.manager.is_muted(partition)

    def next_ms(self) -> float:
        """How long a sender would wait."""
        return self.gate.delay_ms(self.now)

    def pass_time(self, ms: float, step: float = 10.0) -> None:
        """Broker 3 answers at once."""
        until = self.now + ms
        while self.now < until:
            self.batch(P2, ms=min(step, until - self.now))
            self.at(self.now)

    def until_muted(self, node: int, patience: float) -> float:
        """Brokers 2 and 3 answer; the milliseconds until the node is muted, or the patience."""
        start = self.now
        while self.now < start + patience and not self.manager.is_muted(node):
            self.batch(P1)
            self.batch(P2)
            self.at(self.now)
        return self.now - start

    def answer_probes(self, *nodes: int) -> None:
        """The given brokers respond to requests without rows; the other brokers do not."""
        for node in self.task_mutes.brokers_to_probe():
            self.gate.on_probe(node, self.now)
            if node in nodes:
                self.gate.on_probe_done(node, None, self.now)
