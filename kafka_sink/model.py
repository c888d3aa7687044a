"""Immutable values that all layers share, without I/O."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import count, repeat
from typing import NamedTuple, overload

from kafka_sink.counts import TaskCounts

NO_LEADER = -1
# Clusters have hundreds.
MAX_BROKERS = 5_000
UNKNOWN_EPOCH = -1
NO_TIMESTAMP = -1


class TopicPartition(NamedTuple):
    topic: str
    partition: int

    def __str__(self) -> str:
        return f"{self.topic}-{self.partition}"


class CompressionType(IntEnum):
    """Codec ids, as in bits 0-2 of a V2 batch's attributes."""

    NONE = 0
    GZIP = 1
    SNAPPY = 2
    LZ4 = 3
    ZSTD = 4

    # Enum's own runs Python code for every look into a dictionary.
    __hash__ = int.__hash__


@dataclass(frozen=True, slots=True)
class Node:
    """A broker's address. Bootstrap addresses have ids below zero, as in Kafka's own clients."""

    id: int
    host: str
    port: int
    rack: str | None = None

    def __str__(self) -> str:
        return f"{self.host}:{self.port} (id {self.id})"


class PartitionMetadata(NamedTuple):
    """A partition's metadata; ``leader`` is NO_LEADER during an election."""

    topic: str
    partition: int
    leader: int = NO_LEADER
    leader_epoch: int = UNKNOWN_EPOCH


class Partitions(Sequence[PartitionMetadata]):
    """The partitions 0, 1 ... of a topic, in 8 bytes each; a PartitionMetadata is made when it is asked for.

    ``leaders`` and ``epochs`` are arrays of int32, and must not be changed.
    """

    __slots__ = ("epochs", "leaders", "topic")

    def __init__(self, topic: str, leaders: Iterable[int], epochs: Iterable[int]) -> None:
        self.topic = topic
        self.leaders = array("i", leaders)
        self.epochs = array("i", epochs)

    def with_leader(self, partition: int, leader: int, epoch: int) -> Partitions:
        """The same but for one partition's leader."""
        changed = Partitions(self.topic, self.leaders, self.epochs)
        changed.leaders[partition], changed.epochs[partition] = leader, epoch
        return changed

    def __len__(self) -> int:
        return len(self.leaders)

    @overload
    def __getitem__(self, index: int) -> PartitionMetadata: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[PartitionMetadata, ...]: ...

    def __getitem__(self, index: int | slice) -> PartitionMetadata | tuple[PartitionMetadata, ...]:
        if isinstance(index, slice):
            return tuple(self[at] for at in range(*index.indices(len(self))))
        at = index if index >= 0 else len(self) + index
        return PartitionMetadata(self.topic, at, self.leaders[at], self.epochs[at])

    def __iter__(self) -> Iterator[PartitionMetadata]:
        return map(PartitionMetadata, repeat(self.topic), count(), self.leaders, self.epochs)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Partitions):
            return NotImplemented
        mine, theirs = (self.topic, self.leaders, self.epochs), (other.topic, other.leaders, other.epochs)
        return mine == theirs

    def __hash__(self) -> int:
        return hash((self.topic, self.leaders.tobytes(), self.epochs.tobytes()))

    def __repr__(self) -> str:
        return f"Partitions({self.topic!r}, {list(self.leaders)!r}, {list(self.epochs)!r})"


@dataclass(frozen=True, slots=True)
class TopicMetadata:
    """One topic's metadata. ``topic_id`` is 16 bytes, or None if the broker sends none."""

    name: str
    topic_id: bytes | None
    partitions: Partitions

    @classmethod
    def of(cls, name: str, topic_id: bytes | None, infos: Iterable[PartitionMetadata]) -> TopicMetadata:
        pairs = [(one.leader, one.leader_epoch) for one in infos]
        partitions = Partitions(name, (leader for leader, _ in pairs), (epoch for _, epoch in pairs))
        return cls(name, topic_id, partitions)


class RecordErrors(NamedTuple):
    """which records of a batch the broker rejects, by their place in it, and why the first (KIP-467)."""

    places: Sequence[int] = ()
    reason: str | None = None


NO_RECORD_ERRORS = RecordErrors()


class PartitionResult(NamedTuple):
    """What a task wrote to one partition; offsets are -1 if the broker did not return them.

    A tuple: thousands of them travel in a commit message, and the driver unpickles those of all tasks.

    ``offset_ranges`` are inclusive (first, last) pairs in ascending order; adjacent ranges are merged.
    """

    topic: str
    partition: int
    records: int
    batches: int
    bytes: int
    offset_ranges: tuple[tuple[int, int], ...]
    log_append_time_ms: int = NO_TIMESTAMP
    raw_bytes: int = 0


@dataclass(frozen=True, slots=True)
class EndedTransactions:
    """How many transactions a write has committed, aborted or recovered, and for how long they had been open.

    ``oldest_ms`` is the longest time of one: from the first row by the coordinating broker's clock to the end
    by the driver's. Where no broker says when one began, it counts as 0 ms.
    """

    count: int = 0
    oldest_ms: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskResult(TaskCounts):
    """Result of one Spark task, sent in its commit message: its counts, and what is not added up.

    ``partitions`` include unconfirmed rows and dead letters. ``flush_ms``: how long the task waited for its
    last responses. ``metrics`` have Kafka's names (docs/metrics.md). ``skip_reasons``: skipped rows by the
    name of the error. ``arrow_batch_bytes_max``: about the bytes of keys, values and headers in the largest
    Arrow batch that Spark handed over.
    """

    partitions: tuple[PartitionResult, ...] = ()
    elapsed_ms: float = 0.0
    flush_ms: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=dict)
    skip_reasons: Mapping[str, int] = field(default_factory=dict)
    arrow_batch_bytes_max: int = 0


@dataclass(frozen=True, slots=True)
class MetadataUpdate:
    """One Metadata response; ``errors`` are the error codes of topics without metadata."""

    nodes: tuple[Node, ...]
    topics: tuple[TopicMetadata, ...]
    errors: Mapping[str, int] = field(default_factory=dict)
    cluster_id: str | None = None
