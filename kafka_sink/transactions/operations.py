"""The operations that the protocol asks of Kafka, and their results: plain values.

The protocol's functions are generators (``TransactionSteps``). Each step yields a tuple of operations that
may run at the same time, and is sent their results in the same order. The code that runs the generators
retries retriable errors and requests whose response was lost, so each operation may be repeated.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple, TypeVar

from msgspec import Meta

from kafka_sink.model import TopicPartition

Result = TypeVar("Result")
# DescribeTransactions' names for two states: a transaction was begun and not ended; and there has been none
# since the id was taken over.
OPEN, NO_TRANSACTION = "Ongoing", "Empty"
# The last epoch that clients get of a producer id. Ending a transaction at this epoch gives the transactional
# id another producer id, with epoch 0 (KAFKA-18660).
LAST_EPOCH = 32_766
# The names for a transaction that was ended or is being ended. With protocol 2 the first raises the epoch.
COMMITTED = frozenset({"PrepareCommit", "CompleteCommit"})
ABORTED = frozenset({"PrepareAbort", "CompleteAbort", "PrepareEpochFence"})


class ProducerEpoch(NamedTuple):
    """The producer that may write under a transactional id: brokers reject every other epoch."""

    producer_id: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
    epoch: Annotated[int, Meta(ge=0, le=(1 << 15) - 1)]


class OffsetKey(NamedTuple):
    """Where progress is recorded: an offset of a group without members."""

    group: str
    partition: TopicPartition


def epochs_behind(owner: ProducerEpoch, now: ProducerEpoch) -> int | None:
    """How many epochs of one transactional id lie between these two, or None if that cannot be known."""
    if now.producer_id == owner.producer_id:
        return now.epoch - owner.epoch
    return 1 if owner.epoch == LAST_EPOCH and now.epoch == 0 else None


@dataclass(frozen=True, slots=True)
class InitProducer:
    """Take over a transactional id: fence its owner and abort its transaction. Result: ProducerEpoch.

    ``expected``: do so only if the id's epoch is this one (KIP-360). If it was raised from this one, by such
    a request or by the end of a transaction, and not again since, the result is the raised epoch. The result
    is Failed if another producer has taken the id over, or if the coordinator was replaced since the raise,
    because it keeps the previous epoch only in memory.
    """

    transactional_id: str
    expected: ProducerEpoch | None = None


@dataclass(frozen=True, slots=True)
class Describe:
    """Result: a mapping from each id to Described, without the ids that Kafka does not know.

    ``afresh``: the coordinators of the ids are looked up again first. A coordinator that was frozen or cut
    off and then replaced answers from memory until it learns of it. ``once_ended``: a transaction that is
    being ended is described only after its markers are written.
    """

    transactional_ids: tuple[str, ...]
    afresh: bool = False
    once_ended: bool = False


@dataclass(frozen=True, slots=True)
class Described:
    """A transactional id as its coordinator describes it.

    ``state`` is Kafka's name for the state of the transaction. ``started_ms`` is by the broker's clock, -1 if
    no transaction is open. ``ends_raise_epoch``: the end of a transaction also raises the epoch, as with
    protocol 2.
    """

    state: str
    producer: ProducerEpoch
    started_ms: int = -1
    partitions: int = 0
    ends_raise_epoch: bool = True


@dataclass(frozen=True, slots=True)
class RecordOffsets:
    """Put offsets into a transaction: partitions and their metadata texts. Result: None, or Failed."""

    transactional_id: str
    producer: ProducerEpoch
    group: str
    entries: tuple[tuple[TopicPartition, str], ...]


@dataclass(frozen=True, slots=True)
class EndTransaction:
    """End a transaction. Result: the ProducerEpoch of the next transaction, or Failed.

    It raises the epoch, except for a task's commit with protocol 1 (see ``of_task``). Success proves that
    this very transaction was ended in this way, now or earlier: the coordinator appends that to its log,
    which only the current coordinator can do, or finds it there. Failed proves nothing, because a former
    coordinator may answer from memory. An abort needs no open transaction. ``afresh`` is as in Describe.

    ``of_task``: the transaction is a task's, and its id gets another epoch before its next transaction in any
    case. With protocol 1 a commit of it leaves the epoch, so that the id's description continues to prove the
    commit: raising the epoch takes another request there, which clears the state.
    """

    transactional_id: str
    producer: ProducerEpoch
    commit: bool
    afresh: bool = False
    of_task: bool = False


@dataclass(frozen=True, slots=True)
class FetchOffsets:
    """Fetch everything that groups have committed. Result: a mapping from OffsetKey to the metadata text.

    If an offset is pending in a transaction, the result has the value before it, or nothing if there was
    none. If the step has a RecordOffsets of the same group before it, the result comes from the coordinator
    that accepted those offsets. ``keys``: fetch only these offsets. A client must list them if it does not
    know how many the group has.
    """

    groups: tuple[str, ...]
    keys: tuple[OffsetKey, ...] = ()


@dataclass(frozen=True, slots=True)
class FetchStableOffsets:
    """Fetch the offsets of these keys. Result: as that of FetchOffsets.

    The text is None for an offset that stays pending in an open transaction for a while.

    Keys must be listed: if brokers are asked for all offsets of a group, they leave out a pending offset that
    had no value before, even if stable offsets are required (OffsetMetadataManager.fetchAllOffsets).
    """

    keys: tuple[OffsetKey, ...]


@dataclass(frozen=True, slots=True)
class ListOpen:
    """Result: the ids of this prefix's tasks that have an open transaction.

    With protocol 2 it also contains ids whose task has taken them over and has sent nothing yet, and may
    begin a transaction. With protocol 1 every unused id is in that state, so these are left out.
    """

    prefix: str


@dataclass(frozen=True, slots=True)
class ListIds:
    """Result: all ids that brokers know and that look like this sink's, in any state."""


@dataclass(frozen=True, slots=True)
class LookUp:
    """Find the coordinators that the next steps need, while this step runs. Result: None, at once."""

    groups: tuple[str, ...] = ()
    transactional_ids: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Failed:
    """An error of Kafka: the transaction does not belong, or no longer belongs, to this producer."""

    error: str


Operation = (
    InitProducer
    | Describe
    | RecordOffsets
    | EndTransaction
    | FetchOffsets
    | FetchStableOffsets
    | ListOpen
    | ListIds
    | LookUp
)
TransactionSteps = Generator[tuple[Operation, ...], tuple[Any, ...], Result]


def init_producer(transactional_id: str) -> TransactionSteps[ProducerEpoch]:
    (result,) = yield (InitProducer(transactional_id),)
    return ProducerEpoch(*result)


def describe(
    *transactional_ids: str, afresh: bool = False, once_ended: bool = False
) -> TransactionSteps[Mapping[str, Described]]:
    """Run one Describe, or nothing if there are no ids."""
    if not transactional_ids:
        return {}
    (result,) = yield (Describe(transactional_ids, afresh, once_ended),)
    return dict(result)


def fetch_offsets(*groups: str) -> TransactionSteps[Mapping[OffsetKey, str]]:
    (result,) = yield (FetchOffsets(groups),)
    return dict(result)


def fetch_stable_offsets(*keys: OffsetKey) -> TransactionSteps[Mapping[OffsetKey, str | None]]:
    """Run one FetchStableOffsets, or nothing if there are no keys."""
    if not keys:
        return {}
    (result,) = yield (FetchStableOffsets(keys),)
    return dict(result)


@dataclass(frozen=True, slots=True)
class Scope:
    """The names of one writer in Kafka, and the topic for which it records its progress.

    Progress is recorded as offsets of ``topic``, which has ``partitions``.
    ``target`` is the topic that all rows go to, or "" if rows name their topics.
    """

    prefix: str
    topic: str
    partitions: int
    target: str = ""

    @property
    def driver_id(self) -> str:
        return f"{self.prefix}-driver"

    def task_id(self, task: int, slot: int) -> str:
        """The transactional id of a task attempt. ``task`` is Spark's partition, ``slot`` its attempt number.
        The number of ids is bounded, because Spark bounds both."""
        return f"{self.prefix}-task-{task}-{slot}"

    def decision_key(self, chunk: int) -> OffsetKey:
        return self._key("decision", chunk)

    def marker_key(self, task: int) -> OffsetKey:
        return self._key("tasks", task)

    def _key(self, family: str, index: int) -> OffsetKey:
        number, partition = divmod(index, self.partitions)
        group = f"{self.prefix}-{family}" + (f"-{number}" if number else "")
        return OffsetKey(group, TopicPartition(self.topic, partition))

    def decision_groups(self, chunks: int) -> tuple[str, ...]:
        last = max(chunks - 1, 0) // self.partitions
        return tuple(self.decision_key(number * self.partitions).group for number in range(last + 1))


# A regular expression, valid for RE2 and for Python, that matches the ids of every prefix.
ANY_ID_PATTERN = "^.+-(driver|task-[0-9]+-[0-9]+)$"


def task_id_pattern(prefix: str) -> str:
    """The pattern for the ids of one prefix's tasks, in the form of ``ANY_ID_PATTERN``."""
    return f"^{re.escape(prefix)}-task-[0-9]+-[0-9]+$"


def prefix_of(transactional_id: str) -> str:
    """The prefix of an id that matches ``ANY_ID_PATTERN``."""
    return re.sub("-(driver|task-[0-9]+-[0-9]+)$", "", transactional_id)
