"""The names that one query or job uses in Kafka, all from its transactional.id.prefix."""

from __future__ import annotations

import re
from dataclasses import dataclass

from kafka_sink.model import TopicPartition
from kafka_sink.transactions.operations import OffsetKey


@dataclass(frozen=True, slots=True)
class Scope:
    """Progress is recorded as offsets of ``topic``, which has ``partitions``; nothing is written to it."""

    prefix: str
    topic: str
    partitions: int

    @property
    def driver_id(self) -> str:
        """The transactional id whose transactions are the decisions."""
        return f"{self.prefix}-driver"

    def task_id(self, task: int, slot: int) -> str:
        """The transactional id of a task attempt. ``task`` is Spark's partition, ``slot`` its attempt number.

        The ids are bounded, as Spark bounds both.
        """
        return f"{self.prefix}-task-{task}-{slot}"

    def decision_key(self, chunk: int) -> OffsetKey:
        """Where a decision's chunk is recorded."""
        return self._key("decision", chunk)

    def mark_key(self, task: int) -> OffsetKey:
        """Where a task's transaction records that it was committed."""
        return self._key("tasks", task)

    def _key(self, family: str, index: int) -> OffsetKey:
        number, partition = divmod(index, self.partitions)
        group = f"{self.prefix}-{family}" + (f"-{number}" if number else "")
        return OffsetKey(group, TopicPartition(self.topic, partition))

    def decision_groups(self, chunks: int) -> tuple[str, ...]:
        """The groups that hold this many chunks."""
        last = max(chunks - 1, 0) // self.partitions
        return tuple(self.decision_key(number * self.partitions).group for number in range(last + 1))


# A regular expression, of RE2 as of Python, for the ids of any prefix.
ANY_ID_PATTERN = "^.+-(driver|task-[0-9]+-[0-9]+)$"


def task_id_pattern(prefix: str) -> str:
    """As ``ANY_ID_PATTERN``, for the ids of one prefix's tasks."""
    return f"^{re.escape(prefix)}-task-[0-9]+-[0-9]+$"


def prefix_of(transactional_id: str) -> str:
    """Of an id that the pattern fits."""
    return re.sub("-(driver|task-[0-9]+-[0-9]+)$", "", transactional_id)
