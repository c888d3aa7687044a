"""A cluster that tests describe by the leaders of its partitions, and how a sender uses a Breaker."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from typing import cast

from kafka_sink.breaker import PartitionCircuitBreaker, ProducerStatusContext
from kafka_sink.breaker.breaker import Breaker, CircuitBreakManager
from kafka_sink.breaker.failure_rate import has_response
from kafka_sink.cluster.metadata import ClusterMetadata
from kafka_sink.cluster.partition import Partition
from kafka_sink.model import PartitionMetadata, TopicMetadata, TopicPartition
from tests.support.brokers import Brokers, batch_of
from tests.support.queues import partition_of

A0, A1, A2 = (TopicPartition("a", number) for number in range(3))
B0 = TopicPartition("b", 0)


def numbers(infos: Iterable[PartitionMetadata]) -> list[int]:
    return [info.partition for info in infos]


def run_pass(gate: Breaker, now_ms: float) -> Container[TopicPartition]:
    """What a pass of the sender does with it; return what is muted then."""
    if gate.is_busy or now_ms >= gate.due_ms:
        gate.run(now_ms)
    return gate.mutes


class IdleBreaker(PartitionCircuitBreaker):
    """A user's class that keeps its manager and mutes nothing."""

    def configure(self, configs: Mapping[str, str]) -> None:
        """Nothing to configure."""

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
        return CircuitBreakManager(cast(ClusterMetadata, self), retry_interval_ms, self.partition)

    def send(self, gate: Breaker, partition: TopicPartition, rows: int, now_ms: float) -> None:
        """One batch, as ResponseHandler.send does."""
        found = self.leader(partition)
        assert found is not None
        batch = batch_of(self.partition(partition), rows)
        self.brokers.send_batches(found.leader, [batch], now_ms)
        gate.due_ms = min(gate.due_ms, now_ms + gate.prompt_ms)
        if gate.is_busy:
            gate.on_send(self.brokers[found.leader], [batch], now_ms)

    def answer(
        self, gate: Breaker, partition: TopicPartition, cause: Exception | None, rows: int, now_ms: float
    ) -> None:
        """The oldest request of the partition's broker ends, as in ResponseHandler."""
        found = self.leader(partition)
        assert found is not None
        broker = self.brokers[found.leader]
        batch = batch_of(self.partition(partition), rows)
        broker.sent[0].request.records = rows
        if not has_response(cause):
            broker.failed()
        else:
            gate.is_busy |= broker.responded(now_ms, gate.prompt_ms)[1]
        if cause is not None or gate.is_busy:
            gate.on_complete(broker, [batch], cause, now_ms)
        if cause is None:
            batch.home.acknowledged(batch, -1, broker.request_sent_ms, now_ms)

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
        return TopicMetadata.of(name, None, tuple(PartitionMetadata(name, i, n) for i, n in enumerate(found)))

    def leader(self, partition: TopicPartition) -> PartitionMetadata | None:
        found = self.leaders.get(partition.topic, [])
        if partition.partition >= len(found):
            return None
        return PartitionMetadata(partition.topic, partition.partition, found[partition.partition])
