"""Metadata of one topic, and a task whose client is the test. Times are arguments."""

from __future__ import annotations

import math

from kafka_sink.cluster.metadata import ClusterMetadata
from kafka_sink.cluster.topic_state import MetadataSnapshot
from kafka_sink.coordinator.metadata import (
    MetadataChannel,
)
from kafka_sink.coordinator.schema import Message
from kafka_sink.model import (
    Node,
    PartitionMetadata,
    TopicMetadata,
)
from kafka_sink.options import SinkOptions
from tests.support.topic_metadata import topic_of

UNKNOWN, NOT_AUTHORIZED = 3, 29
NODES = (Node(1, "one", 9092), Node(2, "two", 9092, "a-rack"))
ID = bytes(range(16))
OPTIONS = SinkOptions(
    bootstrap_servers=(),
    metadata_max_age_ms=300_000,
    metadata_max_idle_ms=300_000,
    retry_backoff_ms=100,
    retry_backoff_max_ms=1000,
)


def metadata(name: str, leader: int = 1, epoch: int = 0, topic_id: bytes = ID) -> TopicMetadata:
    return topic_of(name, topic_id, (PartitionMetadata(name, 0, leader, epoch),))


class Cache(ClusterMetadata):
    """Records the messages that it is pushed."""

    def __init__(self) -> None:
        super().__init__(OPTIONS, random=lambda: 0.5)
        self.taken: list[MetadataSnapshot] = []
        self.held_until_ms = -math.inf
        self.shared = False

    def import_snapshot(self, snapshot: MetadataSnapshot, now_ms: float) -> int:
        self.taken.append(snapshot)
        return 1

    def pause_requests(self, until_ms: float) -> None:
        self.held_until_ms = until_ms

    def resume_requests(self, now_ms: float) -> None:
        self.held_until_ms = now_ms

    def share_refreshes(self, shared: bool) -> None:
        self.shared = shared


class Task:
    """The channel of a task; the test is its client."""

    def __init__(self, idle_ms: float = 300_000) -> None:
        self.now_ms = 0.0
        self.cache = Cache()
        self.woken = 0
        self.channel = MetadataChannel(self.cache, lambda: self.now_ms, idle_ms)
        self.channel.wake = self._wake
        self.channel.on_connected(0)

    def _wake(self) -> None:
        self.woken += 1

    def send(self) -> Message | None:
        return self.channel.next_message(self.now_ms)
