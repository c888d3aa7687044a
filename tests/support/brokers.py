"""Brokers at exact times: real Broker objects, whose connections behave as a test says."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import cast

from kafka_sink.cluster.broker import Broker, SentRequest, update_unreachable
from kafka_sink.cluster.partition import Partition, ProducerBatch
from kafka_sink.model import Node, TopicPartition
from kafka_sink.network.broker_connection import BrokerConnection
from kafka_sink.network.broker_protocol import Request
from kafka_sink.network.client import NetworkClient
from tests.support.queues import partition_of


class Connection:
    """A connection that is ready, unless a test says otherwise."""

    def __init__(self, node_id: int) -> None:
        self.node = Node(node_id, f"host{node_id}", 9092)
        self.is_ready, self.is_gone = True, False
        self.protocol = SimpleNamespace(produce_version=12, api_versions={})
        self.in_flight = 0
        self.throttled_until_ms = 0.0

    def accepts(self, now_ms: float) -> bool:
        return now_ms >= self.throttled_until_ms

    def api_version(self, api_key: int) -> int:
        return 12


class Network:
    def __init__(self) -> None:
        self.connections: dict[int, BrokerConnection] = {}
        self.sent: list[Request] = []

    def is_ready(self, connection: BrokerConnection, now_ms: float) -> bool:
        return connection.is_ready

    def send(self, connection: BrokerConnection, request: Request, now_ms: float) -> None:
        request.sent_ms = request.written_ms = now_ms
        self.sent.append(request)


class _Batch:
    def __init__(self, queue: Partition, rows: int) -> None:
        self.topic_partition = queue.id
        self.queue = queue
        self.record_count = rows
        self.buffer = SimpleNamespace(size=100)


def batch_of(queue: Partition, rows: int) -> ProducerBatch:
    """A batch of a hundred bytes."""
    return cast(ProducerBatch, _Batch(queue, rows))


def batch(partition: TopicPartition) -> ProducerBatch:
    return batch_of(partition_of(partition), 1)


def _nothing(*_: object) -> None: ...


class Brokers(dict[int, Broker]):
    """The brokers by id, each made at its first use."""

    def __init__(self, *ids: int) -> None:
        super().__init__()
        self.network = Network()
        for node_id in ids:
            self.of(node_id)

    def of(self, node_id: int) -> Broker:
        if node_id not in self:
            made = Connection(node_id)
            self.network.connections[node_id] = cast(BrokerConnection, made)
            self[node_id] = Broker(node_id, cast(NetworkClient, self.network))
            self[node_id].node = made.node
        return self[node_id]

    def led_by(self, leader: Callable[[TopicPartition], int]) -> Callable[[Partition], Broker]:
        """Partitions' leaders, as RecordAccumulator.ready looks them up."""
        return lambda partition: self.of(leader(partition.id))

    def broker(self, node_id: int) -> Broker:
        """The brokers as ClusterMetadata lists them."""
        return self.of(node_id)

    def send(self, node_id: int, partitions: Iterable[TopicPartition], now_ms: float) -> SentRequest:
        return self.send_batches(node_id, [batch(partition) for partition in partitions], now_ms)

    def send_batches(self, node_id: int, batches: Iterable[ProducerBatch], now_ms: float) -> SentRequest:
        found = list(batches)
        rows = sum(one.record_count for one in found)
        request = Request(0, 12, [], 30_000, _nothing, _nothing, records=rows)
        sent = SentRequest(request, found, {})
        self.of(node_id).send(sent, now_ms)
        return sent

    def throttle(self, node_id: int, until_ms: float) -> None:
        connection = self.of(node_id).connection
        assert connection is not None
        connection.throttled_until_ms = until_ms

    def connected(self, node_id: int, setup_ms: float, now_ms: float) -> None:
        self.of(node_id).setup_ms, self.of(node_id).probed_ms = setup_ms, now_ms

    def unreachable(self, node_id: int, now_ms: float, *, failing: bool) -> None:
        """Batches wait for a connection to this one, and to no other."""
        connection = cast(Connection, self.of(node_id).connection)
        connection.is_gone = failing
        update_unreachable(self.values(), [self.of(node_id)], now_ms)
