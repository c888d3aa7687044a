"""RecordsBuilder: the bytes of one record batch, from the first row to the header."""

from __future__ import annotations

from dataclasses import dataclass, field

from kafka_sink.memory.buffer import Memory
from kafka_sink.model import CompressionType
from kafka_sink.records import batch_header
from kafka_sink.records.batch_header import NO_SEQUENCE, ProducerSequence
from kafka_sink.records.compression import BlockCodec, WholeCodec
from kafka_sink.records.encoder import Records

# The factor by which an estimate of compressed bytes may be too low.
SAFETY = 1.05
_NO_HEADER = bytes(batch_header.SIZE)


def projected_size(codec: BlockCodec | None, ratio: float, body: int, tail: int) -> int:
    """The bytes that a buffer with ``body`` bytes needs once ``tail`` raw bytes were added.

    Full blocks of ``codec`` shrink as estimated. The last block stays raw, and so do all bytes if there is no
    codec.
    """
    if codec is None:
        return body + tail
    blocks, rest = divmod(tail, codec.block_size)
    compressed = int(blocks * codec.block_size * min(1.0, ratio * SAFETY))
    return body + compressed + rest + (blocks + 1) * codec.block_overhead + len(codec.epilogue)


@dataclass(slots=True, eq=False)
class RecordsBuilder:
    """Encoded rows that become one record batch of Kafka's format V2 (MemoryRecordsBuilder in Kafka).

    The buffer contains [header][body][raw tail]. With a block codec the body is compressed, and the tail is
    at most one block. With a whole-batch codec everything is tail until the batch is compressed. Without
    compression body and tail are the same.
    """

    buffer: Memory
    codec: BlockCodec | WholeCodec | None
    compression: CompressionType
    # The expected compression ratio. It is fixed when the batch opens, so that the end of a batch depends
    # only on the rows before it.
    ratio: float
    base_timestamp: int
    max_timestamp: int = field(init=False)
    record_count: int = field(init=False, default=0)
    raw_bytes: int = field(init=False, default=0)
    # The producer's id and epoch and the base sequence.
    sequence: ProducerSequence = field(init=False, default=NO_SEQUENCE)
    # The sequence in the buffer's header; None before the header is written.
    _header_sequence: ProducerSequence | None = field(init=False, default=None)
    # The codec, if it compresses blocks while the batch fills.
    _blocks: BlockCodec | None = field(init=False, default=None)
    _tail_at: int = field(init=False)

    def __post_init__(self) -> None:
        self.max_timestamp = self.base_timestamp
        self.buffer.write_growing(_NO_HEADER)
        if isinstance(self.codec, BlockCodec):
            self._blocks = self.codec
            self.buffer.write_growing(self.codec.prologue)
        self._tail_at = self.buffer.size

    def add(self, records: Records, count: int, max_timestamp: int) -> None:
        """Add ``count`` encoded records."""
        blocks = self._blocks
        if blocks is None:
            self.buffer.write_growing(records[:])
        else:
            self._append_blocks(blocks, records)
        self.raw_bytes += len(records)
        self.record_count += count
        self.max_timestamp = max(self.max_timestamp, max_timestamp)

    def _append_blocks(self, codec: BlockCodec, records: Records) -> None:
        """Compress every block that becomes full and keep the rest raw. Blocks end at fixed raw offsets."""
        size = codec.block_size
        tail = self.buffer.size - self._tail_at
        if tail + len(records) >= size:
            first = size - tail if tail else 0
            packed: list[bytes | memoryview] = []
            if tail:
                packed += codec.compress_block(b"".join([*self.buffer.views(self._tail_at), records[:first]]))
            for at in range(first, len(records) - size + 1, size):
                packed += codec.compress_block(records[at : at + size])
            records = records[len(records) - (tail + len(records)) % size :]
            self.buffer.truncate(self._tail_at)
            # Blocks end in the middle of chunks, so one write of all blocks costs less than one for each.
            self.buffer.write_growing(b"".join(packed))
            self._tail_at = self.buffer.size
        if len(records):
            self.buffer.write_growing(records[:])

    def compress(self) -> None:
        """Compress the raw tail and return unused memory."""
        if self.codec is not None:
            tail = b"".join(self.buffer.views(self._tail_at))
            self.buffer.truncate(self._tail_at)
            if isinstance(self.codec, WholeCodec):
                self.buffer.write_growing(self.codec.compress(tail))
            else:
                block = self.codec.compress_block(tail) if tail else ()
                self.buffer.write_growing(b"".join((*block, self.codec.epilogue)))
        self.buffer.trim()

    def write_header(self, *, transactional: bool = False) -> list[memoryview]:
        """Write the header into its reserved place, unless a header with this sequence is already there.

        Returns the bytes of the whole batch.
        """
        views = self.buffer.views()
        if self._header_sequence == self.sequence:
            return views
        header = bytearray()
        if len(views[0]) < batch_header.SIZE:
            # The header crosses two chunks: a piece of a split batch may begin near the end of a chunk.
            header += bytes(batch_header.SIZE)
        batch_header.write(
            [memoryview(header), *self.buffer.views(batch_header.SIZE)] if header else views,
            self.buffer.size,
            self.compression | batch_header.TRANSACTIONAL if transactional else self.compression,
            self.record_count,
            self.base_timestamp,
            self.max_timestamp,
            self.sequence,
        )
        if header:
            self.buffer.patch(header)
        self._header_sequence = self.sequence
        return views

    @property
    def size(self) -> int:
        """The bytes written so far. Once the batch is compressed, these are its bytes on the wire."""
        return self.buffer.size

    def projected_size_with(self, added: int) -> int:
        """The bytes that header, body and raw tail are expected to have after ``added`` more raw bytes."""
        size, blocks = self.buffer.size, self._blocks
        if blocks is None:
            return size + added
        return projected_size(blocks, self.ratio, self._tail_at, size - self._tail_at + added)

    def raw_bytes_within(self, limit: int) -> int:
        """The number of raw bytes for which ``projected_size_with`` surely stays within ``limit``. It may be
        negative."""
        blocks, tail = self._blocks, self.buffer.size - self._tail_at
        remaining = limit - projected_size(blocks, self.ratio, self._tail_at, 0) - tail
        if blocks is None:
            return remaining
        # Full blocks shrink, but the last block stays raw.
        size = blocks.block_size
        packed = int(size * min(1.0, self.ratio * SAFETY)) + blocks.block_overhead
        return max(remaining, (remaining + tail - size) // packed * size - tail)

    @property
    def observed_ratio(self) -> float:
        """Compressed bytes per raw byte of a compressed batch."""
        return (self.buffer.size - batch_header.SIZE) / self.raw_bytes if self.raw_bytes else 1.0
