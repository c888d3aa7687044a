"""What the protocol asks of Kafka, and the results: plain values.

Protocol code is generators (``Steps``): they yield a tuple of operations that may run at the same time, and
are sent their results in the same order. Their caller retries errors that may pass and requests whose
response was lost; each of these operations may be repeated.
"""

from __future__ import annotations

import json
import os
import posixpath
import re
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from kafka_sink.errors import ConfigurationError
from kafka_sink.model import TopicPartition

Result = TypeVar("Result")
# DescribeTransactions' names for a transaction that was begun and not ended, and for none since the id was
# taken over.
OPEN, NO_TRANSACTION = "Ongoing", "Empty"
# The last epoch that clients get of a producer id. The end of a transaction under it gives the transactional
# id another producer id, with epoch 0 (KAFKA-18660).
LAST_EPOCH = 32_766
# And for one that was ended, or is being ended. Protocol 2 raises the epoch with the first of each.
COMMITTED = frozenset({"PrepareCommit", "CompleteCommit"})
ABORTED = frozenset({"PrepareAbort", "CompleteAbort", "PrepareEpochFence"})


class ProducerEpoch(NamedTuple):
    """Who may write under a transactional id: any other epoch is fenced."""

    producer_id: int
    epoch: int


class OffsetKey(NamedTuple):
    """Where progress is recorded: an offset that a group without members has committed."""

    group: str
    partition: TopicPartition


def epochs_behind(owner: ProducerEpoch, now: ProducerEpoch) -> int | None:
    """How many epochs of one transactional id lie between these; None where that cannot be told."""
    if now.producer_id == owner.producer_id:
        return now.epoch - owner.epoch
    return 1 if owner.epoch == LAST_EPOCH and now.epoch == 0 else None


@dataclass(frozen=True, slots=True)
class InitProducer:
    """Take over a transactional id: fences its owner and aborts its transaction. Result: ProducerEpoch.

    ``of``: only from that epoch (KIP-360). Where its owner has raised it by such a request, or by the end of
    a transaction, and nobody has since, the result is the epoch that this one got. Failed where another
    has taken the id over, or the coordinator was replaced since, as the raise is in its memory only.
    """

    transactional_id: str
    of: ProducerEpoch | None = None


@dataclass(frozen=True, slots=True)
class Describe:
    """Result: a mapping from id to Described, without the ids that Kafka does not know.

    ``afresh``: their coordinators are looked for again first. One that was frozen or cut off, and replaced,
    answers from memory until it learns of it. ``once_ended``: a transaction that is being ended is described
    only after its markers are written.
    """

    transactional_ids: tuple[str, ...]
    afresh: bool = False
    once_ended: bool = False


@dataclass(frozen=True, slots=True)
class Described:
    """``state`` as Kafka names it; ``started_ms`` by the broker's clock, -1 where nothing is open.

    ``ends_raise_epoch``: the end of a transaction does so in the same step, as with protocol 2.
    """

    state: str
    producer: ProducerEpoch
    started_ms: int = -1
    partitions: int = 0
    ends_raise_epoch: bool = True


@dataclass(frozen=True, slots=True)
class RecordOffsets:
    """Put offsets of one group into a transaction; ``entries`` pair a partition with its metadata text.

    Result: None, or Failed.
    """

    transactional_id: str
    producer: ProducerEpoch
    group: str
    entries: tuple[tuple[TopicPartition, str], ...]


@dataclass(frozen=True, slots=True)
class EndTransaction:
    """Result: the ProducerEpoch that the next transaction has, or Failed. Raises the epoch, but not for
    a task's commit under protocol 1: see ``of_task``.

    Success proves that this very transaction was ended so, now or before: Kafka appends to a log for it,
    which only the present coordinator can do, or finds it there. Failed proves nothing: a former coordinator
    says so from memory. An abort needs no open transaction. ``afresh`` as in Describe.

    ``of_task``: of a task, whose id gets another epoch before its next transaction in any case. Under
    protocol 1 a commit then leaves the epoch, so that the id's description goes on proving it: raising it
    takes another request there, which clears the state. All rows were acknowledged before, so a late Produce
    of this epoch can only repeat one of them, which its sequence gives away.
    """

    transactional_id: str
    producer: ProducerEpoch
    commit: bool
    afresh: bool = False
    of_task: bool = False


@dataclass(frozen=True, slots=True)
class FetchOffsets:
    """All that groups have committed by now. Result: a mapping from OffsetKey to the metadata text.

    For an offset that is pending in a transaction, this is the value before it, or nothing if there was none.
    Behind a RecordOffsets of the same group in a step, the result is of the coordinator that took those.
    ``keys``: only these offsets, which a client that does not know how many there are in the group must name.
    """

    groups: tuple[str, ...]
    keys: tuple[OffsetKey, ...] = ()


@dataclass(frozen=True, slots=True)
class FetchStableOffsets:
    """The offsets of these keys. Result: as of FetchOffsets, but None for what a transaction that was not
    ended has had pending for a moment.

    Keys must be named: asked for all offsets of a group, brokers leave out a pending one that had no value
    before, however stable the result must be (OffsetMetadataManager.fetchAllOffsets).
    """

    keys: tuple[OffsetKey, ...]


@dataclass(frozen=True, slots=True)
class ListOpen:
    """Result: the ids that a task with this prefix has an open transaction under. With transaction protocol 2
    also those that may begin one, as a task has taken the id over and sent nothing yet; with protocol 1 each
    id that is not in use looks so."""

    prefix: str


@dataclass(frozen=True, slots=True)
class ListIds:
    """Result: all ids that brokers know and that look like this sink's, whatever their state. Others' may,
    too."""


@dataclass(frozen=True, slots=True)
class LookUp:
    """Find the coordinators that the next steps need, while the other operations of this step run. Nothing
    waits for them. Result: None."""

    groups: tuple[str, ...] = ()
    transactional_ids: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Failed:
    """Kafka's error: the transaction is not, or no longer, the asker's."""

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
Steps = Generator[tuple[Operation, ...], tuple[Any, ...], Result]


def init_producer(transactional_id: str, *groups: str) -> Steps[ProducerEpoch]:
    """Take over a transactional id. The next steps use these ``groups``."""
    result, _ = yield (InitProducer(transactional_id), LookUp(groups))
    return ProducerEpoch(*result)


def describe(
    *transactional_ids: str, afresh: bool = False, once_ended: bool = False
) -> Steps[Mapping[str, Described]]:
    """One Describe; asks nothing where there are no ids."""
    if not transactional_ids:
        return {}
    (result,) = yield (Describe(transactional_ids, afresh, once_ended),)
    return dict(result)


def fetch_offsets(*groups: str) -> Steps[Mapping[OffsetKey, str]]:
    (result,) = yield (FetchOffsets(groups),)
    return dict(result)


def fetch_stable_offsets(*keys: OffsetKey) -> Steps[Mapping[OffsetKey, str | None]]:
    """One FetchStableOffsets; asks nothing where there are no keys."""
    if not keys:
        return {}
    (result,) = yield (FetchStableOffsets(keys),)
    return dict(result)


@dataclass(frozen=True, slots=True)
class Scope:
    """Progress is recorded as offsets of ``topic``, which has ``partitions``; no rows are written for it.

    ``target`` is the topic that all rows go to, "" if rows name their topics.
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

        The ids are bounded, as Spark bounds both.
        """
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


# A regular expression, of RE2 as of Python, for the ids of any prefix.
ANY_ID_PATTERN = "^.+-(driver|task-[0-9]+-[0-9]+)$"


def task_id_pattern(prefix: str) -> str:
    """As ``ANY_ID_PATTERN``, for the ids of one prefix's tasks."""
    return f"^{re.escape(prefix)}-task-[0-9]+-[0-9]+$"


def prefix_of(transactional_id: str) -> str:
    """Of an id that the pattern fits."""
    return re.sub("-(driver|task-[0-9]+-[0-9]+)$", "", transactional_id)


# A file that Spark writes into a checkpoint before it plans the first batch: the query's id, for ever.
_METADATA = "metadata"


class Location(NamedTuple):
    """As Hadoop's Path splits and normalises it. ``scheme`` and ``authority`` may be empty."""

    scheme: str
    authority: str
    path: str

    @classmethod
    def of(cls, text: str) -> Location:
        """Take any text, as Path does: no quoting counts. Hadoop looks file systems up without case."""
        before, colon, rest = text.partition(":")
        scheme = before.lower() if colon and "/" not in before else ""
        path, authority = rest if scheme else text, ""
        if path.startswith("//") and len(path) > 2:
            authority, slash, below = path[2:].partition("/")
            path = slash + below
        path = posixpath.normpath(path) if path else ""
        # POSIX gives two slashes a meaning of their own.
        return cls(scheme, authority.lower(), "/" + path.lstrip("/") if path.startswith("/") else path)

    @property
    def is_local(self) -> bool:
        """Whether it may be on this host: Spark's default file system decides where there is no scheme."""
        return self.scheme in ("", "file") and self.authority in ("", "localhost")


def query_id(text: str, *, is_required: bool = True) -> str | None:
    """The id of the query whose checkpoint this is, if it is on this host; None for others.

    Raises ConfigurationError where the id cannot be read from a folder that is here, and, if it is required,
    where nothing says for certain which file system the location is on.
    """
    location = Location.of(text)
    if location.is_local:
        try:
            with open(posixpath.join(location.path, _METADATA), encoding="utf-8") as file:
                return str(json.load(file)["id"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            why = f"its file '{_METADATA}' cannot be read here: {error}"
            if is_required:
                raise ConfigurationError(_unknown(text, why)) from None
            # Where the place stood for the query, a run that can read the file would write its batch again.
            if os.path.isdir(location.path) and not isinstance(error, FileNotFoundError):
                raise ConfigurationError(f"Option 'checkpointLocation' = {text}: {why}") from None
    elif is_required and (not location.scheme or (location.scheme == "hdfs" and not location.authority)):
        raise ConfigurationError(_unknown(text, "it leaves its file system to a default"))
    return None


def _unknown(text: str, why: str) -> str:
    return (
        f"Option 'checkpointLocation' = {text} cannot name the query's transactional ids, as {why}. Write it "
        "in full, such as hdfs://namenode:8020/checkpoints/orders, or set transactional.id.prefix"
    )
