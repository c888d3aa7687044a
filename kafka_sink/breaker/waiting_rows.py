"""Which muted targets a task has rows for: the coordinator grants probes by it."""

from __future__ import annotations

import math
from collections.abc import Iterable

from kafka_sink.breaker.local_mutes import LocalMutes
from kafka_sink.breaker.muted_partitions import MutedPartitions
from kafka_sink.breaker.states import Target
from kafka_sink.model import TopicPartition
from kafka_sink.timing_bounds import HELD_MS


class WaitingRows:
    """Remembers when batches waited for muted targets and when rows could have gone there."""

    def __init__(self, mutes: LocalMutes, partitions: MutedPartitions) -> None:
        self._mutes = mutes
        self._partitions = partitions
        # When a batch was last seen to wait for a target.
        self._held_ms: dict[Target, float] = {}
        # When the task last had rows of a topic that may go to any partition. Its thread writes this.
        self._free_rows_ms: dict[str, float] = {}

    def note_free_rows(self, topics: Iterable[str]) -> None:
        """The task has rows of these topics that may go to any partition. The task's thread."""
        for topic in topics:
            self._free_rows_ms[topic] = self._mutes.now_ms

    def note_held(self, targets: Iterable[Target]) -> None:
        """A batch waits for these targets."""
        for target in targets:
            self._held_ms[target] = self._mutes.now_ms

    def note_waiting(self, partitions: Iterable[TopicPartition]) -> None:
        """Batches of these partitions could go, but their brokers take none now.

        So a partition on trial has rows enough, and needs no new ones.
        """
        if self._mutes.table.mutes:
            for partition in partitions:
                self.note_held(self._partitions.covering(partition))

    def is_held(self, target: Target) -> bool:
        """Whether a batch waits for a target."""
        return self._mutes.now_ms - self._held_ms.get(target, -math.inf) <= HELD_MS

    def held(self) -> list[Target]:
        """Muted targets that batches of this task wait for."""
        return [target for target in self._mutes.table.mutes if self.is_held(target)]

    def wanted(self) -> list[Target]:
        """Muted partitions that no batch of this task waits for, but that its rows could go to."""
        partitions = [target for target in self._mutes.table.mutes if isinstance(target, TopicPartition)]
        return [one for one in partitions if self._has_free_rows(one) and not self.is_held(one)]

    def _has_free_rows(self, target: TopicPartition) -> bool:
        return self._mutes.now_ms - self._free_rows_ms.get(target.topic, -math.inf) <= HELD_MS

    def forget(self, target: Target) -> None:
        """A target is no longer muted."""
        self._held_ms.pop(target, None)
