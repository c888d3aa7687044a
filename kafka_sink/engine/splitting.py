"""Splits a batch into smaller ones, as Kafka's ProducerBatch.split does, or takes records out of it.

The batch is read and its pieces are compressed block by block. Then the pieces take over the batch's memory,
so that a split never waits for memory. During the split, the compressed bytes of the pieces exist in addition
to the batch, and with gzip and zstd also the raw bytes of one piece, as when a batch is sealed. A split is
rare and bounded by one batch, so this code handles records one by one.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from math import ceil, inf

from kafka_sink import varint
from kafka_sink.cluster.partition import BatchState, ProducerBatch
from kafka_sink.cluster.records_builder import SAFETY
from kafka_sink.cluster.topic_limits import INITIAL_RATIO
from kafka_sink.engine.accumulator import RecordAccumulator
from kafka_sink.errors import KafkaSinkError
from kafka_sink.memory.buffer import PieceBuffer, put_pieces
from kafka_sink.model import CompressionType
from kafka_sink.records import batch_header
from kafka_sink.records.batch_header import NO_SEQUENCE
from kafka_sink.records.compression import decompressed

_log = logging.getLogger(__name__)
# A record: its timestamp delta, its bytes after the offset delta, and its size in bytes.
Record = tuple[int, bytes, int]
# The bytes of records that are added to a piece at once.
_GROUP_BYTES = 65_536


@dataclass(slots=True)
class TakenRecords:
    """Copies of records that were taken out of a batch, with room for ``remaining_bytes`` more.

    Record i is ``bodies[ends[i - 1]:ends[i]]``, beginning with the length of its key. ``timestamps_ms`` are
    milliseconds since the epoch.
    """

    base_timestamp: int
    remaining_bytes: int
    bodies: bytearray = field(default_factory=bytearray)
    ends: list[int] = field(default_factory=list)
    timestamps_ms: list[int] = field(default_factory=list)

    def add(self, record: Record) -> bool:
        """Take a record. Return False for the first record that does not fit, and for all after it."""
        timestamp, body, size = record
        self.remaining_bytes -= size
        if self.ends and self.remaining_bytes < 0:
            return False
        self.bodies += body
        self.ends.append(len(self.bodies))
        self.timestamps_ms.append(self.base_timestamp + timestamp)
        return True


def split(accumulator: RecordAccumulator, batch: ProducerBatch) -> None:
    """Replace a batch by smaller ones with consecutive sequences, none larger than the topic's brokers are
    known to take. The sender has taken the batch, and it was surely not written."""
    size, count = batch.size, batch.record_count
    pieces = split_batch(batch, batch.queue.limits.largest_batch)
    if _log.isEnabledFor(logging.DEBUG):
        _log.debug(
            "%s: split a batch of %d bytes and %d records into %d of %s bytes",
            batch.topic_partition,
            size,
            count,
            len(pieces),
            [piece.size for piece in pieces],
        )
    for piece in pieces:
        piece.is_movable = batch.is_movable
    if batch.sequence is not NO_SEQUENCE:
        batch.queue.on_split(batch, pieces)
    accumulator.deliveries.count(splits=1)
    accumulator.reenqueue_split(batch, pieces)


def is_too_large(batch: ProducerBatch) -> bool:
    """Whether to split a batch before it is sent, because it is larger than its brokers are known to take."""
    limit = batch.queue.limits.learnt
    if limit is None or batch.size <= limit:
        return False
    return batch.record_count > 1 and not batch.possibly_written


def split_batch(batch: ProducerBatch, size_limit: int) -> list[ProducerBatch]:
    """Split a batch into two or more sealed pieces of about the same size, which have its memory. The batch
    has lost its records: it can only be released. A piece has at most ``size_limit`` bytes on the wire if its
    rows compress as well as the whole batch."""
    shrinks = 1.0
    if batch.compression is not CompressionType.NONE:
        shrinks = batch.observed_ratio * SAFETY
    limit = max(1, int((size_limit - batch_header.SIZE) / shrinks))
    pieces = BatchSplit(batch, limit)
    for record in _records_of(batch):
        pieces.add(record)
    return pieces.placed()


def take_out(
    batch: ProducerBatch, positions: Collection[int], max_bytes: int
) -> tuple[list[ProducerBatch], TakenRecords]:
    """Take the records at these positions out of a batch. Return a sealed piece with the other records, and
    the records that were taken.

    At least one record is taken, and more up to ``max_bytes``. Further records at these positions stay in the
    piece, which its broker then rejects again. No piece is returned if no record is left. Otherwise the piece
    has the batch's memory, and the batch, which has lost its records, can only be released.
    """
    wanted = frozenset(positions)
    taken = TakenRecords(batch.base_timestamp, max_bytes)
    pieces = BatchSplit(batch, least=1)
    for position, record in enumerate(_records_of(batch)):
        if position not in wanted or not taken.add(record):
            pieces.add(record)
    return pieces.placed(), taken


def _records_of(batch: ProducerBatch) -> Iterator[Record]:
    """The batch's records. Raises KafkaSinkError if the bytes contain another number: rows would be lost."""
    body, decoded = batch.buffer.views(batch_header.SIZE), 0
    for record in _records(decompressed(body, batch.compression, batch.raw_bytes)):
        decoded += 1
        yield record
    if decoded != batch.record_count:
        raise KafkaSinkError(
            f"{batch.topic_partition}: a batch of {batch.record_count} records decodes to {decoded}"
        )


def _records(blocks: Iterable[bytes | memoryview]) -> Iterator[Record]:
    """Decode records. A record may cross the ends of blocks."""
    raw = bytearray()
    for block in blocks:
        raw += block
        at = 0
        while (record := _record_at(raw, at)) is not None:
            yield record
            at += record[2]
        del raw[:at]


def _record_at(raw: bytearray, at: int) -> Record | None:
    """The record at this place; None if the rest of it, or of its length, is in the next block."""
    try:
        length, body = varint.read_signed(raw, at)
    except IndexError:
        return None
    end = body + length
    if end > len(raw):
        return None
    timestamp, place = varint.read_signed(raw, body + 1)
    _, place = varint.read_signed(raw, place)
    return timestamp, bytes(raw[place:end]), end - at


class BatchSplit:
    """Distributes records to ``least`` or more new batches of at most ``limit`` raw bytes each."""

    def __init__(self, parent: ProducerBatch, limit: float = inf, least: int = 2) -> None:
        self._parent = parent
        self._limit = limit
        self._least = least
        self._left = parent.raw_bytes
        self._pieces: list[_Piece] = []
        self._target = 0.0

    def add(self, record: Record) -> None:
        if not self._pieces or self._is_full(self._pieces[-1], record[2]):
            self._seal_last()
            # The raw bytes of this piece if all remaining pieces become equally large.
            pieces = max(ceil(self._left / self._limit), 1 if self._pieces else self._least)
            self._target = self._left / pieces
            self._pieces.append(_Piece(self._parent, record[0]))
        self._pieces[-1].add(record)
        self._left -= record[2]

    def _is_full(self, piece: _Piece, added: int) -> bool:
        # A record belongs to the piece that its middle falls into, so that two pieces are about two halves.
        return piece.taken + added / 2 >= self._target or piece.raw_bytes + added > self._limit

    def _seal_last(self) -> None:
        if self._pieces:
            self._pieces[-1].seal()
            self._pieces[-1].batch.ordinal = (*self._parent.ordinal, len(self._pieces) - 1)

    def placed(self) -> list[ProducerBatch]:
        self._seal_last()
        if self._pieces:
            self._parent.buffer = put_pieces(self._parent.buffer, [piece.buffer for piece in self._pieces])
        return [piece.batch for piece in self._pieces]


class _Piece:
    """A new batch that is being filled. ``taken`` counts the bytes that its records have in the parent."""

    def __init__(self, parent: ProducerBatch, base: int) -> None:
        self.taken = 0
        self._base = self._latest = base
        self._count = 0
        self._encoded = bytearray()
        self._parent_base = parent.base_timestamp
        self.buffer = PieceBuffer()
        self.batch = ProducerBatch(
            self.buffer,
            parent.codec,
            parent.compression,
            INITIAL_RATIO,
            parent.base_timestamp + base,
            parent.queue,
            parent.created_ms,
            dead_letters=parent.dead_letters,
            held=True,
        )
        self.batch.was_sent = parent.was_sent

    @property
    def raw_bytes(self) -> int:
        return self.batch.raw_bytes + len(self._encoded)

    def add(self, record: Record) -> None:
        timestamp, rest, size = record
        offset = self.batch.record_count + self._count
        head = b"\0" + varint.signed(timestamp - self._base) + varint.signed(offset)
        self._encoded += varint.signed(len(head) + len(rest))
        self._encoded += head
        self._encoded += rest
        self._count += 1
        self._latest = max(self._latest, timestamp)
        self.taken += size
        if len(self._encoded) >= _GROUP_BYTES:
            self._flush()

    def _flush(self) -> None:
        latest = self._parent_base + self._latest
        self.batch.append(memoryview(self._encoded), self._count, latest)
        self._encoded, self._count = bytearray(), 0

    def seal(self) -> None:
        self._flush()
        self.batch.move_to(BatchState.CLOSED)
        self.batch.seal()
        self.batch.held = False
