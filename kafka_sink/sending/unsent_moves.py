"""Keyless rows that were never sent leave muted partitions.

A task ends once all of its rows are acknowledged. Rows that it gave to a partition before it noticed that the
broker is frozen would wait for that broker, although any other partition will do.
"""

from __future__ import annotations

import logging
from collections.abc import Container, Sequence

from kafka_sink.accumulator.batch_queues import PartitionQueue
from kafka_sink.accumulator.record_accumulator import RecordAccumulator
from kafka_sink.breaker.interface import SendPolicy
from kafka_sink.metadata.cluster_metadata import ClusterMetadata
from kafka_sink.model import TopicPartition
from kafka_sink.network.client import NetworkClient
from kafka_sink.sending.batch_completion import BatchCompletion

_log = logging.getLogger(__name__)
# Partitions that one line of the log names.
_MAX_NAMED = 5


class UnsentMoves:
    """Used by the sender's thread."""

    def __init__(
        self,
        accumulator: RecordAccumulator,
        completion: BatchCompletion,
        cluster: ClusterMetadata,
        network: NetworkClient,
        policy: SendPolicy,
    ) -> None:
        self._accumulator = accumulator
        self._completion = completion
        self._cluster = cluster
        self._network = network
        self._policy = policy

    def move(self, queues: Sequence[PartitionQueue], muted: Container[TopicPartition]) -> bool:
        """Move what may move from the queues of muted partitions; return whether that was anything."""
        targets: dict[str, Sequence[TopicPartition]] = {}

        def targets_of(partition: TopicPartition) -> Sequence[TopicPartition]:
            topic = partition.topic
            if topic not in targets:
                targets[topic] = self._targets(topic, muted)
            return targets[topic]

        moved = self._accumulator.move_unsent(queues, targets_of)
        if not moved:
            return False
        batches = [batch for of_partition in moved.values() for batch in of_partition]
        rows = sum(batch.record_count for batch in batches if not batch.letters)
        letters = sum(batch.record_count for batch in batches if batch.letters)
        self._completion.deliveries.count(moved=rows)
        what = [f"{rows} rows without a key"] if rows or not letters else []
        what += [f"{letters} dead letters"] if letters else []
        names = ", ".join(str(partition) for partition in list(moved)[:_MAX_NAMED])
        more = f" and {len(moved) - _MAX_NAMED} more" if len(moved) > _MAX_NAMED else ""
        _log.warning(
            "%s that were never sent move from %s%s to other partitions: %s",
            " and ".join(what),
            names,
            more,
            self._policy.explain(next(iter(moved))) or "their target is muted",
        )
        return True

    def _targets(self, topic: str, muted: Container[TopicPartition]) -> list[TopicPartition]:
        """Partitions that take rows now; those of connected brokers where there are any."""
        metadata = self._cluster.topic(topic)
        infos = () if metadata is None else metadata.partitions
        led = [(TopicPartition(topic, info.partition), info.leader) for info in infos if info.leader >= 0]
        available = [(partition, leader) for partition, leader in led if partition not in muted]
        connected = [partition for partition, leader in available if self._network.is_connected(leader)]
        return connected or [partition for partition, _ in available]
