"""The one durable record of a batch: which transactions make it up, and what was written before.

It is the metadata of committed offsets, which holds less than 4,096 bytes each (offset.metadata.max.bytes),
so it is cut into chunks. Every chunk carries the decision's number: of two decisions' chunks, those of the
later number count, and all of one decision's chunks were written by one transaction.
"""

from __future__ import annotations

import base64
import json
import uuid
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from hashlib import sha256

from kafka_sink.errors import ProtocolError, TransactionError
from kafka_sink.printable import printable
from kafka_sink.transactions.operations import ProducerEpoch
from kafka_sink.transactions.scope import Scope

_CHUNK_BYTES = 3500
_FORMAT = "kc1"
# Writers under one prefix whose progress a decision keeps: applications for ever, queries by recency.
_MAX_WRITERS = 64
# Each begins the name of a writer of its kind, so that no txnAppId is mistaken for another kind.
_QUERY, _APPLICATION, _UNNAMED_JOB = "query ", "application ", "job "


@dataclass(frozen=True, slots=True)
class BatchIdentity:
    """What is written once: micro-batch ``number`` of a query, or version ``number`` of an application."""

    writer: str
    number: int

    @classmethod
    def of_query(cls, query_id: str, batch_id: int) -> BatchIdentity:
        """A micro-batch. A checkpoint that is deleted gives its query another id."""
        return cls(_QUERY + query_id, batch_id)

    @classmethod
    def of_application(cls, app_id: str, topic: str, version: int) -> BatchIdentity:
        """A job with txnAppId and txnVersion."""
        return cls(f"{_APPLICATION}{app_id}/{topic}", version)

    @classmethod
    def of_unnamed_job(cls) -> BatchIdentity:
        """A job without txnAppId. Nothing looks its progress up again."""
        return cls(_UNNAMED_JOB + uuid.uuid4().hex, 0)

    @property
    def is_of_query(self) -> bool:
        """Whether it is a micro-batch."""
        return self.writer.startswith(_QUERY)

    def mark(self, task: int, producer: ProducerEpoch) -> str:
        """What a task's transaction records; visible once that is committed.

        It names the transaction: a batch that is written a second time must not be taken for committed by
        the marks of the first.
        """
        writer = sha256(self.writer.encode()).hexdigest()[:16]
        return f"{writer}:{self.number}:{task}:{producer.producer_id}:{producer.epoch}"

    def __str__(self) -> str:
        return f"batch {self.number} of {self.writer}"


@dataclass(frozen=True, slots=True)
class RowsDigest:
    """What a task was given: rows, their bytes, and a checksum of a sample of them in order."""

    rows: int = 0
    size: int = 0
    checksum: int = 0


@dataclass(frozen=True, slots=True)
class Part:
    """One task's transaction in a batch."""

    task: int
    slot: int
    producer: ProducerEpoch
    digest: RowsDigest


@dataclass(frozen=True, slots=True)
class Decision:
    """All of ``parts`` must be committed; tasks without rows have none. ``number`` counts decisions.

    Marks are offsets of ``topic``, which had ``partitions`` then: Scope's of the run that decided.
    ``progress`` has the last number written of each writer that used the prefix; ``before`` is the one of
    this batch's writer before it, -1 where there was none.
    """

    number: int
    batch: BatchIdentity
    tasks: int
    parts: tuple[Part, ...]
    topic: str
    partitions: int
    progress: Mapping[str, int] = field(default_factory=dict)
    before: int = -1

    def covers(self, batch: BatchIdentity) -> bool:
        """Whether this batch, or a later one of its writer, was decided."""
        return self.progress.get(batch.writer, -1) >= batch.number

    def progress_before(self) -> Mapping[str, int]:
        """What ``progress`` was without this batch."""
        return {**self.progress, self.batch.writer: self.before}

    def digest_of(self, task: int) -> RowsDigest:
        """What the task had been given."""
        return next((part.digest for part in self.parts if part.task == task), RowsDigest())


def next_decision(
    scope: Scope, previous: Decision | None, batch: BatchIdentity, tasks: int, parts: Iterable[Part]
) -> Decision:
    """The decision for a batch that was not decided.

    Raises TransactionError where more writers share the prefix than a decision keeps the progress of.
    """
    progress = {} if previous is None else dict(previous.progress)
    before = progress.pop(batch.writer, -1)
    if previous is not None and previous.batch == batch:
        before = previous.before
    progress = {name: last for name, last in progress.items() if not name.startswith(_UNNAMED_JOB)}
    if len(progress) >= _MAX_WRITERS and not batch.writer.startswith(_UNNAMED_JOB):
        # The least recently written one. A query asks for its own last batches only, when it is restarted.
        oldest = next((name for name in progress if name.startswith(_QUERY)), None)
        if oldest is None:
            raise TransactionError(
                f"{batch} is not committed: {_MAX_WRITERS} other applications write under its prefix, no "
                "more can be remembered. Give some of them a transactional.id.prefix of their own"
            )
        del progress[oldest]
    # Last, so that the order is that of writing.
    progress[batch.writer] = batch.number
    number = 1 if previous is None else previous.number + 1
    ordered = tuple(sorted(parts, key=lambda part: part.task))
    return Decision(number, batch, tasks, ordered, scope.topic, scope.partitions, progress, before)


def repaired(previous: Decision, parts: Iterable[Part]) -> Decision:
    """The same batch, in which tasks whose transactions were lost were written again."""
    merged = {part.task: part for part in previous.parts} | {part.task: part for part in parts}
    ordered = tuple(merged[task] for task in sorted(merged))
    return replace(previous, number=previous.number + 1, parts=ordered)


def encode(decision: Decision, partitions: int) -> list[str]:
    """As chunks of text, each short enough for an offset's metadata."""
    body = {
        "writer": decision.batch.writer,
        "number": decision.batch.number,
        "tasks": decision.tasks,
        "topic": decision.topic,
        "partitions": decision.partitions,
        "progress": dict(decision.progress),
        "before": decision.before,
        "parts": [
            [part.task, part.slot, *part.producer, part.digest.rows, part.digest.size, part.digest.checksum]
            for part in decision.parts
        ],
    }
    packed = base64.b85encode(zlib.compress(json.dumps(body, separators=(",", ":")).encode())).decode()
    pieces = [packed[at : at + _CHUNK_BYTES] for at in range(0, len(packed), _CHUNK_BYTES)]
    head = f"{_FORMAT} {decision.number} {partitions} {len(pieces)}"
    return [f"{head} {index} {piece}" for index, piece in enumerate(pieces)]


@dataclass(frozen=True, slots=True)
class Head:
    """What each chunk says of its decision; ``partitions`` is Scope's."""

    number: int
    partitions: int
    chunks: int


def newest_head(texts: Iterable[str]) -> Head | None:
    """The head of the latest decision among these chunks. Raises ProtocolError for other text."""
    return max((_parse(text)[0] for text in texts), key=lambda head: head.number, default=None)


def decode(texts: Iterable[str]) -> Decision | None:
    """The latest decision among these chunks. Raises ProtocolError where some of it are missing."""
    parsed = [_parse(text) for text in texts]
    if not parsed:
        return None
    head = max((head for head, _, _ in parsed), key=lambda head: head.number)
    pieces = {index: piece for one, index, piece in parsed if one.number == head.number}
    if sorted(pieces) != list(range(head.chunks)):
        raise ProtocolError(f"of decision {head.number} only {len(pieces)} of {head.chunks} chunks are there")
    packed = "".join(pieces[index] for index in range(head.chunks))
    try:
        body = json.loads(zlib.decompress(base64.b85decode(packed)))
        parts = tuple(
            Part(task, slot, ProducerEpoch(producer_id, epoch), RowsDigest(rows, size, checksum))
            for task, slot, producer_id, epoch, rows, size, checksum in body["parts"]
        )
        batch = BatchIdentity(str(body["writer"]), int(body["number"]))
        progress, before = dict(body["progress"]), int(body["before"])
        where = str(body["topic"]), int(body["partitions"])
        return Decision(head.number, batch, int(body["tasks"]), parts, *where, progress, before)
    except (ValueError, KeyError, TypeError, zlib.error) as error:
        raise ProtocolError(f"decision {head.number} cannot be read: {error!r}") from error


def _parse(text: str) -> tuple[Head, int, str]:
    fields = text.split(" ", 5)
    if len(fields) != 6 or fields[0] != _FORMAT:
        shown = printable(text, 40)
        raise ProtocolError(f"'{shown}' is no decision of this sink: does something else use its groups?")
    number, partitions, chunks, index = (int(one) for one in fields[1:5])
    return Head(number, partitions, chunks), index, fields[5]


def written_scope(scope: Scope, head: Head) -> Scope:
    """The scope as it was when a decision was recorded: its topic may have got partitions since."""
    return replace(scope, partitions=head.partitions)
