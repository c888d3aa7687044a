"""The one durable record of a batch: its transactions, and what its writer had written before.

A decision is stored as the metadata of committed offsets. An offset holds less than 4,096 bytes of metadata
(offset.metadata.max.bytes), so a decision is cut into chunks. Every chunk carries the decision's number. If
chunks of two decisions are found, those with the higher number count; all chunks of one decision were written
by one transaction.
"""

from __future__ import annotations

import base64
import re
import uuid
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import IntEnum
from hashlib import sha256
from itertools import chain
from typing import Annotated

import msgspec
from msgspec import Meta

from kafka_sink.errors import ProtocolError, TransactionError
from kafka_sink.printable import printable
from kafka_sink.transactions.operations import OffsetKey, ProducerEpoch, Scope

_CHUNK_BYTES = 3500
# This changes whenever the content of a decision or its meaning changes.
_FORMAT = "kc6"
# At most this many runs of consecutive numbers are remembered for a writer. A query has one run, and so do
# daily versions within a month.
_MAX_RUNS = 100
_CHECKSUM_MASK = (1 << 64) - 1
# The bounds of numbers in a decision, which ``decode`` checks (see there).
_INT32_MAX, _INT64_MAX = (1 << 31) - 1, (1 << 63) - 1
_Count32 = Annotated[int, Meta(ge=0, le=_INT32_MAX)]
_Count64 = Annotated[int, Meta(ge=0, le=_INT64_MAX)]
_CountOrUnknown = Annotated[int, Meta(ge=-1, le=_INT64_MAX)]
_Runs = Annotated[tuple[tuple[_Count64, _Count64], ...], Meta(max_length=_MAX_RUNS)]
# The name of each writer begins with its kind, so that no txnAppId is mistaken for a query's id.
_QUERY, _APPLICATION, _UNNAMED_JOB = "query ", "application ", "job "


@dataclass(frozen=True, slots=True)
class BatchIdentity:
    """A batch that is written once: micro-batch ``number`` of a query, or that version of an application."""

    writer: str
    number: _Count64

    @classmethod
    def of_query(cls, query_id: str, batch_id: int) -> BatchIdentity:
        """A micro-batch. If a checkpoint is deleted, its query gets another id."""
        return cls(_QUERY + query_id, batch_id)

    @classmethod
    def of_application(cls, app_id: str, topic: str, version: int) -> BatchIdentity:
        """A job with txnAppId and txnVersion."""
        return cls(f"{_APPLICATION}{app_id}/{topic}", version)

    @classmethod
    def of_unnamed_job(cls) -> BatchIdentity:
        """A job without txnAppId. No later run looks up its progress."""
        return cls(_UNNAMED_JOB + uuid.uuid4().hex, 0)

    @property
    def is_of_query(self) -> bool:
        return self.writer.startswith(_QUERY)

    @property
    def is_of_application(self) -> bool:
        return self.writer.startswith(_APPLICATION)

    @property
    def is_named(self) -> bool:
        """Whether another run may write the same batch."""
        return not self.writer.startswith(_UNNAMED_JOB)

    def progress_marker(self, part: Part) -> str:
        """The text that a task records in its transaction. It is visible once the transaction is committed.

        It identifies the transaction: if a batch is written a second time, the markers of the first time must
        not make the second one look committed.
        """
        writer = sha256(self.writer.encode()).hexdigest()[:16]
        return f"{writer}:{self.number}:{part.task}:{part.producer.producer_id}:{part.producer.epoch}"

    def __str__(self) -> str:
        # Other applications may have written the name: see the comment above ``_MAX_BODY_BYTES``.
        return f"batch {self.number} of {printable(self.writer)}"


@dataclass(frozen=True, slots=True)
class RowsDigest:
    """Summary of the rows of a task or batch: their number, their bytes, and a checksum.

    The checksum is the sum, modulo 2^64, of a checksum of each row. It depends neither on the order of rows
    nor on how they are split into tasks.
    """

    rows: _Count64 = 0
    size: _Count64 = 0
    # The bounds of msgspec end at 2^63: ``decode`` checks the upper bound itself.
    checksum: Annotated[int, Meta(ge=0)] = 0

    @classmethod
    def total(cls, digests: Iterable[RowsDigest]) -> RowsDigest:
        rows = size = checksum = 0
        for digest in digests:
            rows, size, checksum = rows + digest.rows, size + digest.size, checksum + digest.checksum
        return cls(rows, size, checksum & _CHECKSUM_MASK)


@dataclass(frozen=True, slots=True)
class WrittenNumbers:
    """The numbers that one writer has written: batches of a query, or versions of an application.

    ``runs`` are pairs (first, last) of consecutive numbers in ascending order, at most ``_MAX_RUNS``. If a
    number up to ``forgotten`` is in none of them, it is not known whether it was written. ``last`` is the
    number that was written last, or None before the first; ``digest`` is the digest of its rows, and
    ``target``, as in Scope, is their topic.
    """

    last: _Count64 | None = None
    digest: RowsDigest = RowsDigest()
    runs: _Runs = ()
    forgotten: _CountOrUnknown = -1
    target: str = ""

    @property
    def highest(self) -> int:
        """The highest number that was written, or -1 if nothing was written."""
        return self.runs[-1][1] if self.runs else -1

    def __contains__(self, number: int) -> bool:
        return any(first <= number <= last for first, last in self.runs)

    def plus(self, number: int, digest: RowsDigest, target: str = "") -> WrittenNumbers:
        """These numbers and another one, which was written after them."""
        runs = list(self.runs)
        if number not in self:
            runs = _joined(sorted([*runs, (number, number)]))
        forgotten = self.forgotten
        if len(runs) > _MAX_RUNS:
            # The lowest run goes, but never the one with the new number, which will be looked up again.
            lowest = next(run for run in runs if not run[0] <= number <= run[1])
            runs.remove(lowest)
            forgotten = max(forgotten, lowest[1])
        return WrittenNumbers(number, digest, tuple(runs), forgotten, target)

    def __str__(self) -> str:
        named = ", ".join(str(first) if first == last else f"{first} to {last}" for first, last in self.runs)
        return named or "nothing"


def _joined(runs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    joined = runs[:1]
    for first, last in runs[1:]:
        if first == joined[-1][1] + 1:
            joined[-1] = (joined[-1][0], last)
        else:
            joined.append((first, last))
    return joined


class Outcome(IntEnum):
    """How a part ended, as far as it was recorded.

    Brokers forget the proof before they forget the decision. An operator may also set it: ``driver.resolve``.
    """

    UNRECORDED = 0
    COMMITTED = 1
    LOST = 2


@dataclass(frozen=True, slots=True)
class Part:
    """One task's transaction in a batch."""

    task: _Count32
    slot: _Count32
    producer: ProducerEpoch
    digest: RowsDigest
    outcome: Outcome = Outcome.UNRECORDED

    def id_in(self, scope: Scope) -> str:
        return scope.task_id(self.task, self.slot)


@dataclass(frozen=True, slots=True)
class LastDecision:
    """The part of a decision that the next one builds on; ``number`` is 0 if nothing was decided. ``written``
    is everything that ``writer`` had written by then."""

    number: int = 0
    writer: str = ""
    written: WrittenNumbers = WrittenNumbers()


@dataclass(frozen=True, slots=True)
class Decision:
    """A decided batch: all of its ``parts`` must be committed. Tasks without rows have no part.

    ``number`` counts decisions. ``topic`` and ``partitions`` are those of the Scope of the run that decided:
    the progress markers of parts without an outcome are offsets of that topic. ``target``, as in Scope, is
    the topic that the rows went to. ``before`` is what the batch's writer had written without this batch,
    which can still be lost.

    ``began_ms`` is a time before the first transaction of the parts without an outcome began, by its task's
    clock, or the time of the take-over if there is no such part; -1 if it is not known. No progress marker is
    older.
    """

    number: _Count64
    batch: BatchIdentity
    tasks: _Count32
    parts: tuple[Part, ...]
    topic: str
    partitions: Annotated[int, Meta(ge=1, le=_INT32_MAX)]
    before: WrittenNumbers = WrittenNumbers()
    began_ms: _CountOrUnknown = -1
    target: str = ""

    @property
    def is_lost(self) -> bool:
        """Whether readers see nothing of the batch and never will, as if it had not been decided."""
        return bool(self.parts) and all(part.outcome is Outcome.LOST for part in self.parts)

    @property
    def written(self) -> WrittenNumbers:
        """The numbers that the writer has written, with this batch unless it is lost, even if it is empty."""
        if self.is_lost:
            return self.before
        digest = RowsDigest.total(part.digest for part in self.parts)
        return self.before.plus(self.batch.number, digest, self.target)

    @property
    def summary(self) -> LastDecision:
        return LastDecision(self.number, self.batch.writer, self.written)

    def covers(self, batch: BatchIdentity) -> bool:
        return batch.writer == self.batch.writer and batch.number in self.written

    def numbers_up_to(self, number: int) -> WrittenNumbers | None:
        """The writer's numbers when this one was the last; None unless it is one of the last two."""
        return next((numbers for numbers in (self.written, self.before) if numbers.last == number), None)

    def marker_key(self, scope: Scope, part: Part) -> OffsetKey:
        """The place of the part's progress marker. The topic may have got partitions since it was written."""
        return replace(scope, topic=self.topic, partitions=self.partitions).marker_key(part.task)

    def digest_of(self, task: int) -> RowsDigest:
        """The digest of the rows that the task had been given."""
        return next((part.digest for part in self.parts if part.task == task), RowsDigest())


def next_decision(
    scope: Scope, last: LastDecision, batch: BatchIdentity, tasks: int, parts: Iterable[Part]
) -> Decision:
    """The decision for a batch that was not decided before. It drops what another writer has written."""
    before = last.written if last.writer == batch.writer else WrittenNumbers()
    ordered = tuple(sorted(parts, key=lambda part: part.task))
    where = scope.topic, scope.partitions
    return Decision(last.number + 1, batch, tasks, ordered, *where, before, target=scope.target)


def repaired(scope: Scope, previous: Decision, parts: Iterable[Part]) -> Decision:
    """The same batch, in which the tasks whose transactions were lost have written again.

    ``scope`` says where the new progress markers are. The run that found parts missing has recorded what
    became of all parts, so the markers of the other parts are never read again.
    """
    merged = {part.task: part for part in previous.parts} | {part.task: part for part in parts}
    ordered = tuple(merged[task] for task in sorted(merged))
    return replace(
        previous,
        number=previous.number + 1,
        parts=ordered,
        topic=scope.topic,
        partitions=scope.partitions,
    )


def recorded(decision: Decision, outcomes: Mapping[int, Outcome]) -> Decision:
    """The same decision, with the outcomes of these tasks' parts."""
    parts = tuple(replace(part, outcome=outcomes.get(part.task, part.outcome)) for part in decision.parts)
    return replace(decision, number=decision.number + 1, parts=parts)


def encode(decision: Decision, partitions: int) -> list[str]:
    """Return the decision as chunks of text, each short enough for an offset's metadata.

    Raises TransactionError if the decision has more transactions than ``decode`` accepts.
    """
    data = msgspec.json.encode(decision)
    if len(data) > _MAX_BODY_BYTES:
        raise TransactionError(
            f"{decision.batch} is not committed: its decision lists {len(decision.parts):,} transactions and "
            f"takes {len(data):,} bytes, but the limit is {_MAX_BODY_BYTES:,}. Write with fewer tasks, for "
            "instance after df.coalesce(10000)"
        )
    packed = base64.b85encode(zlib.compress(data)).decode()
    pieces = [packed[at : at + _CHUNK_BYTES] for at in range(0, len(packed), _CHUNK_BYTES)]
    head = f"{_FORMAT} {decision.number} {partitions} {len(pieces)}"
    return [f"{head} {index} {piece}" for index, piece in enumerate(pieces)]


@dataclass(frozen=True, slots=True)
class Head:
    """What each chunk of a decision begins with; ``partitions`` is the Scope's."""

    number: int
    partitions: int
    chunks: int


# -- reading ------------------------------------------------------------------------------------------
# Every application that may commit offsets for these groups can write any text there. So every number and
# size in a chunk has a bound, and a text that breaks a bound raises ProtocolError.

# The metadata of the groups is read into memory as it is. This holds about 120,000 transactions.
_MAX_BODY_BYTES = 16 << 20
# base85 makes five characters of four bytes, and zlib adds little to bytes that it cannot compress.
_MAX_CHUNKS = _MAX_BODY_BYTES * 5 // 4 // _CHUNK_BYTES + 10
_HEAD = re.compile(r"([0-9]{1,18}) ([0-9]{1,10}) ([0-9]{1,5}) ([0-9]{1,5}) (.*)", re.DOTALL | re.ASCII)
_decoder = msgspec.json.Decoder(Decision)


def newest_head(texts: Iterable[str]) -> Head | None:
    """The head of the latest decision among these chunks. Raises ProtocolError for any other text."""
    return max((_parse(text)[0] for text in texts), key=lambda head: head.number, default=None)


def decode(texts: Iterable[str]) -> Decision | None:
    """The latest decision among these chunks.

    Raises ProtocolError if chunks are missing or contain anything that ``encode`` does not write.
    """
    parsed = [_parse(text) for text in texts]
    if not parsed:
        return None
    head = max((head for head, _, _ in parsed), key=lambda head: head.number)
    pieces = {index: piece for chunk_head, index, piece in parsed if chunk_head.number == head.number}
    if sorted(pieces) != list(range(head.chunks)):
        raise ProtocolError(f"decision {head.number} has only {len(pieces)} of its {head.chunks} chunks")
    try:
        packed = base64.b85decode("".join(pieces[index] for index in range(head.chunks)))
        # Decompression stops at the bound, because a few kilobytes may decompress to gigabytes.
        inflated = zlib.decompressobj()
        data = inflated.decompress(packed, _MAX_BODY_BYTES)
        if not inflated.eof:
            raise ValueError(f"it is cut off, or larger than {_MAX_BODY_BYTES:,} bytes")
        decision = _decoder.decode(data)
        _check(decision, head.number)
        # A field that is missing would get its default, which may mean that nothing was written.
        if msgspec.json.encode(decision) != data:
            raise ValueError("it has other fields than this version writes")
        return decision
    except (ValueError, msgspec.MsgspecError, RecursionError, zlib.error) as error:
        problem = printable(str(error))
    raise ProtocolError(f"decision {head.number} cannot be read: {problem}")


def _check(decision: Decision, number: int) -> None:
    """Raise ValueError for values that no type excludes."""
    digests = [decision.before.digest, *(part.digest for part in decision.parts)]
    if max(digest.checksum for digest in digests) > _CHECKSUM_MASK:
        raise ValueError("a checksum is out of bounds")
    runs = list(chain.from_iterable(decision.before.runs))
    if decision.number != number or runs != sorted(runs):
        raise ValueError("its numbers contradict each other")


def _parse(text: str) -> tuple[Head, int, str]:
    name, _, rest = text.partition(" ")
    fields = _HEAD.fullmatch(rest) if name == _FORMAT else None
    if fields is not None:
        number, partitions, chunks, index = map(int, fields.groups()[:4])
        if 1 <= partitions <= _INT32_MAX and index < chunks <= _MAX_CHUNKS:
            return Head(number, partitions, chunks), index, fields[5]
    raise ProtocolError(
        f"'{printable(text, 40)}' is not a decision that this version of the sink can read. Does another "
        "application, or another version, commit offsets for its groups?"
    )
