"""MESSAGE_TOO_LARGE: splits a batch into smaller ones, as Kafka's ProducerBatch.split does.

A split is rare and bounded by one batch, so this code handles records one by one.
"""

from __future__ import annotations

from collections.abc import Iterator

from kafka_sink.accumulator.batch_buffer import BatchBuffer, BufferAllocator
from kafka_sink.accumulator.lease import Lease
from kafka_sink.accumulator.producer_batch import BatchState, ProducerBatch
from kafka_sink.records import batch_header, varint
from kafka_sink.records.compression import CompressionRatios, decompress

# A record's timestamp delta, its bytes after the offset delta, and how many bytes it has in all.
Record = tuple[int, memoryview, int]


def split_batch(batch: ProducerBatch, batch_size: int, allocator: BufferAllocator) -> list[ProducerBatch]:
    """Sealed pieces in order, each with at least one record.

    A piece holds up to ``batch_size`` raw bytes, or half the batch where that would be the batch again.
    Raises BufferExhaustedError and holds no memory where there is not enough for all pieces.
    """
    raw = decompress(b"".join(batch.buffer.views(batch_header.SIZE)), batch.compression, batch.raw_bytes)
    records = _records(memoryview(raw), batch.record_count)
    limit = batch_size - batch_header.SIZE
    total = sum(size for _, _, size in records)
    if total <= limit:
        limit = -(-total // 2)
    pieces: list[ProducerBatch] = []
    try:
        for group in _groups(records, limit):
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
    lease = Lease()
    lease.add(piece)
    piece.append(
        memoryview(encoded), len(group), parent.base_timestamp + max(timestamp for timestamp, _, _ in group)
    )
    piece.move_to(BatchState.CLOSED)
    piece.seal()
    lease.end(piece)
    return piece
