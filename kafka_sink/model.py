"""Immutable values that all layers share. They do no I/O."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import count, repeat
from typing import NamedTuple

from kafka_sink.counts import TaskCounts

NO_LEADER = -1
# A bound for what a response may list. Clusters have hundreds of brokers.
MAX_BROKERS = 5_000
UNKNOWN_EPOCH = -1
NO_TIMESTAMP = -1
# A broker remembers the last five batches of a producer and partition. With more batches in flight, it could
# not recognise every duplicate.
IDEMPOTENT_IN_FLIGHT = 5


class TopicPartition(NamedTuple):
    topic: str
    partition: int

    def __str__(self) -> str:
        return f"{self.topic}-{self.partition}"


# A broker's id or a partition: what the circuit breaker mutes.
Target = int | TopicPartition


class CompressionType(IntEnum):
    """Codec ids, as in bits 0-2 of a V2 batch's attributes."""

    NONE = 0
    GZIP = 1
    SNAPPY = 2
    LZ4 = 3
    ZSTD = 4

    # Enum's own __hash__ is Python code, which each dictionary lookup would run.
    __hash__ = int.__hash__


@dataclass(frozen=True, slots=True)
class Node:
    """A broker's address. As in Kafka's own clients, bootstrap addresses have negative ids."""

    id: int
    host: str
    port: int
    rack: str | None = None

    def __str__(self) -> str:
        return f"{self.host}:{self.port} (id {self.id})"


class PartitionMetadata(NamedTuple):
    """A partition's metadata. ``leader`` is NO_LEADER during an election."""

    topic: str
    partition: int
    leader: int = NO_LEADER
    leader_epoch: int = UNKNOWN_EPOCH


@dataclass(slots=True, init=False)
class Partitions:
    """The partitions of a topic, numbered from 0, in 8 bytes each.

    Reading an item creates a PartitionMetadata.

    ``leaders`` and ``epochs`` are arrays of int32 that must not be changed.
    """

    topic: str
    leaders: array[int]
    epochs: array[int]

    def __init__(self, topic: str, leaders: Iterable[int], epochs: Iterable[int]) -> None:
        self.topic = topic
        self.leaders = array("i", leaders)
        self.epochs = array("i", epochs)

    def with_leader(self, partition: int, leader: int, epoch: int) -> Partitions:
        """A copy in which one partition has another leader."""
        changed = Partitions(self.topic, self.leaders, self.epochs)
        changed.leaders[partition], changed.epochs[partition] = leader, epoch
        return changed

    def __len__(self) -> int:
        return len(self.leaders)

    def __getitem__(self, partition: int) -> PartitionMetadata:
        return PartitionMetadata(self.topic, partition, self.leaders[partition], self.epochs[partition])

    def __iter__(self) -> Iterator[PartitionMetadata]:
        return map(PartitionMetadata, repeat(self.topic), count(), self.leaders, self.epochs)


@dataclass(frozen=True, slots=True)
class TopicMetadata:
    """One topic's metadata. ``topic_id`` is 16 bytes, or None if the broker sends none."""

    name: str
    topic_id: bytes | None
    partitions: Partitions


class RecordErrors(NamedTuple):
    """The indices of a batch's records that the broker rejected, and the first one's reason (KIP-467)."""

    places: Sequence[int] = ()
    reason: str | None = None


NO_RECORD_ERRORS = RecordErrors()


class PartitionResult(NamedTuple):
    """What a task wrote to one partition.

    It is a tuple because a commit message contains thousands of them, and the driver unpickles those of all
    tasks. ``offset_ranges`` are inclusive (first, last) pairs in ascending order; adjacent ranges are merged.
    No range contains rows whose offsets the broker did not return. After 100,000 ranges in a task, a
    partition's later rows are in none, apart from the last ones.
    """

    topic: str
    partition: int
    records: int
    batches: int
    bytes: int
    offset_ranges: tuple[tuple[int, int], ...]
    log_append_time_ms: int = NO_TIMESTAMP
    raw_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskResult(TaskCounts):
    """The result of one Spark task, sent in its commit message: its counts, and values that are not added up.

    ``partitions`` include unconfirmed rows and dead letters. ``flush_ms`` is how long the task waited for its
    last responses. ``metrics`` have Kafka's names (docs/metrics.md). ``skip_reasons`` has the number of
    skipped rows by the name of the error. ``arrow_batch_bytes_max`` is roughly the size of the keys, values
    and headers in the largest Arrow batch that Spark handed over.
    """

    partitions: tuple[PartitionResult, ...] = ()
    elapsed_ms: float = 0.0
    flush_ms: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=dict)
    skip_reasons: Mapping[str, int] = field(default_factory=dict)
    arrow_batch_bytes_max: int = 0


@dataclass(frozen=True, slots=True)
class MetadataUpdate:
    """The content of one Metadata response. ``errors`` has the codes of topics without metadata, by topic."""

    nodes: tuple[Node, ...]
    topics: tuple[TopicMetadata, ...]
    errors: Mapping[str, int] = field(default_factory=dict)
    cluster_id: str | None = None
