"""Splits a refused batch into smaller ones, as Kafka's ProducerBatch.split does, or without some records.

A split is rare and bounded by one batch, so this code handles records one by one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from kafka_sink.accumulator.batch_buffer import BatchBuffer, BufferAllocator
from kafka_sink.accumulator.lease import Lease
from kafka_sink.accumulator.producer_batch import BatchState, ProducerBatch
from kafka_sink.dead_letters.refused_rows import Header
from kafka_sink.records import batch_header, varint
from kafka_sink.records.compression import CompressionRatios, decompress

# A record's timestamp delta, its bytes after the offset delta, and how many bytes it has in all.
Record = tuple[int, memoryview, int]


@dataclass(frozen=True, slots=True)
class TakenRecords:
    """Records that were taken out of a batch: each from its key's length on, and its timestamp (milliseconds
    since the epoch)."""

    bodies: list[memoryview]
    timestamps_ms: list[int]


def content_of(body: memoryview) -> tuple[bytes | None, bytes | None, tuple[Header, ...]]:
    """Key, value and headers of one such record."""
    key, at = _bytes(body, 0)
    value, at = _bytes(body, at)
    count, at = varint.read(body, at)
    headers: list[Header] = []
    for _ in range(count):
        name, at = _bytes(body, at)
        content, at = _bytes(body, at)
        headers.append((name or b"", content))
    return key, value, tuple(headers)


def split_batch(batch: ProducerBatch, batch_size: int, allocator: BufferAllocator) -> list[ProducerBatch]:
    """Sealed pieces in order, each with at least one record.

    A piece holds up to ``batch_size`` raw bytes, or half the batch where that would be the batch again.
    Raises BufferExhaustedError and holds no memory where there is not enough for all pieces.
    """
    records = _records_of(batch)
    limit = batch_size - batch_header.SIZE
    total = sum(size for _, _, size in records)
    if total <= limit:
        limit = -(-total // 2)
    return _pieces(batch, list(_groups(records, limit)), allocator)


def take_out(
    batch: ProducerBatch, positions: Collection[int], allocator: BufferAllocator, max_bytes: int
) -> tuple[list[ProducerBatch], TakenRecords]:
    """A sealed piece of the batch without the records at these positions, and those records.

    One such record is taken at least, and more up to ``max_bytes``. The others stay in the piece, which its
    broker then refuses again. There is no piece where no record is left. Raises BufferExhaustedError and
    holds no memory where there is not enough.
    """
    records = _records_of(batch)
    dropped = _first_within(records, sorted(positions), max_bytes)
    left = [record for position, record in enumerate(records) if position not in dropped]
    pieces = _pieces(batch, [left] if left else [], allocator)
    taken = [records[position] for position in dropped]
    return pieces, TakenRecords(
        [body for _, body, _ in taken], [batch.base_timestamp + delta for delta, _, _ in taken]
    )


def _first_within(records: list[Record], positions: Sequence[int], max_bytes: int) -> dict[int, None]:
    """The first of these positions whose records take ``max_bytes`` together, and one at least; in order."""
    found: dict[int, None] = {}
    for position in positions:
        max_bytes -= records[position][2]
        if found and max_bytes < 0:
            break
        found[position] = None
    return found


def _records_of(batch: ProducerBatch) -> list[Record]:
    raw = decompress(b"".join(batch.buffer.views(batch_header.SIZE)), batch.compression, batch.raw_bytes)
    return _records(memoryview(raw), batch.record_count)


def _pieces(
    batch: ProducerBatch, groups: Sequence[list[Record]], allocator: BufferAllocator
) -> list[ProducerBatch]:
    pieces: list[ProducerBatch] = []
    try:
        for group in groups:
            pieces.append(_piece(batch, group, allocator))
            pieces[-1].ordinal = (*batch.ordinal, len(pieces) - 1)
    except BaseException:
        for piece in pieces:
            piece.buffer.release()
        raise
    return pieces


def _groups(records: list[Record], limit: int) -> Iterator[list[Record]]:
    group: list[Record] = []
    size = 0
    for record in records:
        if group and size + record[2] > limit:
            yield group
            group, size = [], 0
        group.append(record)
        size += record[2]
    yield group


def _records(raw: memoryview, count: int) -> list[Record]:
    found = []
    at = 0
    for _ in range(count):
        begin = at
        length, at = varint.read(raw, at)
        end = at + length
        timestamp, place = varint.read(raw, at + 1)
        _, place = varint.read(raw, place)
        found.append((timestamp, raw[place:end], end - begin))
        at = end
    return found


def _bytes(data: memoryview, at: int) -> tuple[bytes | None, int]:
    """Bytes after their length, and the position after them; None for the length -1."""
    length, at = varint.read(data, at)
    return (None, at) if length < 0 else (bytes(data[at : at + length]), at + length)


def _piece(parent: ProducerBatch, group: list[Record], allocator: BufferAllocator) -> ProducerBatch:
    base = group[0][0]
    encoded = bytearray()
    for offset, (timestamp, rest, _) in enumerate(group):
        head = b"\0" + varint.scalar(timestamp - base) + varint.scalar(offset)
        encoded += varint.scalar(len(head) + len(rest)) + head + rest
    # The estimated ratio has just proved wrong, so the reservation assumes that nothing shrinks.
    buffer = allocator.open_overflow(batch_header.SIZE + len(encoded) + 64)
    try:
        return _filled(parent, group, encoded, buffer)
    except BaseException:
        buffer.release()
        raise


def _filled(
    parent: ProducerBatch, group: list[Record], encoded: bytearray, buffer: BatchBuffer
) -> ProducerBatch:
    base = group[0][0]
    piece = ProducerBatch(
        parent.partition,
        buffer,
        parent.codec,
        parent.compression,
        CompressionRatios.INITIAL,
        parent.base_timestamp + base,
        parent.created_ms,
    )
    piece.letters = parent.letters
    lease = Lease()
    lease.add(piece)
    piece.append(
        memoryview(encoded), len(group), parent.base_timestamp + max(timestamp for timestamp, _, _ in group)
    )
    piece.move_to(BatchState.CLOSED)
    piece.seal()
    lease.end(piece)
    return piece
