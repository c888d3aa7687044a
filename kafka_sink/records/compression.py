"""The compression codecs. None of them keeps a context for each partition.

lz4 and snappy frames consist of independent blocks, so a batch is compressed block by block while it fills.
zstd and gzip batches are compressed as a whole when they are closed. Blocks end at fixed offsets of the raw
records, so equal rows give equal bytes. But LZ4's search may be coarser after earlier blocks.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Iterator, Sequence

import lz4.block
import pyarrow as pa
from zlib_ng import zlib_ng

from kafka_sink.model import CompressionType

GZIP_DEFAULT_LEVEL = -1
LZ4_DEFAULT_LEVEL = 9
ZSTD_DEFAULT_LEVEL = 3
# 15 bits for the largest window, plus 16 for gzip's framing (RFC 1952).
_GZIP_WINDOW_BITS = 31
# How many compressed bytes a decompressor is given at once.
_SLICE = 4096


class BlockCodec:
    """A codec for frames of independently compressed blocks: prologue, blocks, epilogue. It is not an ABC,
    whose isinstance takes 0.25 us, several times for each batch."""

    block_size: int
    # The bytes of a block's framing, plus the bytes by which compression may enlarge incompressible rows.
    block_overhead: int
    prologue: bytes
    epilogue: bytes

    def begin(self) -> None:
        """Forget the blocks of earlier tasks: a new task begins."""

    def compress_block(self, raw: bytes | memoryview) -> tuple[bytes, bytes | memoryview]:
        """Return the framing and the body of one block of at most ``block_size`` raw bytes."""
        raise NotImplementedError


class WholeCodec:
    """A codec that compresses all records of a batch at once, when the batch is closed."""

    def __init__(self, compress: Callable[[bytes | bytearray], bytes]) -> None:
        self.compress = compress


class Lz4Codec(BlockCodec):
    """The LZ4 frame format with independent blocks of 64 KiB. Brokers reject linked blocks."""

    block_size = 64 * 1024
    block_overhead = 4
    # Magic, FLG (version 1, independent blocks, no checksums), BD (64 KiB), header checksum.
    prologue = bytes.fromhex("04224d18") + bytes([0x60, 0x40, 0x82])
    epilogue = b"\0\0\0\0"
    STORED = 0x80000000
    # In rows with digests, random ids or base64, matches are found only where the text around these repeats.
    # A coarser search finds those matches as well, in 0.4 to 0.6 of the time. In other rows it misses matches
    # and gives a tenth more bytes for prose and code. So one of 64 full blocks is compressed in both ways,
    # unless the rows shrink well. As acceleration, 3 takes longer than 6 for the same size; 5, 7 and 8 lose 3
    # % on short digests.
    _COARSE = 6
    _TRIAL_EVERY = 64
    _SHRINKS_WELL = 0.4
    _LARGER_AT_MOST = 1.02

    def __init__(self, level: int) -> None:
        self._level = level
        self.begin()

    def begin(self) -> None:
        # The acceleration parameter of LZ4's fast compressor.
        self._acceleration = 1
        # Threads count without a lock: if a count is lost, only the moment of the next trial changes.
        self._full_blocks = 0

    def compress_block(self, raw: bytes | memoryview) -> tuple[bytes, bytes | memoryview]:
        if self._level == LZ4_DEFAULT_LEVEL:
            # In Java, the default level also selects the fast compressor, and not level 9 of the high one.
            packed = lz4.block.compress(raw, mode="fast", acceleration=self._acceleration, store_size=False)
            if len(raw) == self.block_size:
                self._adapt(raw, len(packed))
        else:
            packed = lz4.block.compress(
                raw, mode="high_compression", compression=self._level, store_size=False
            )
        if len(packed) >= len(raw):
            return struct.pack("<I", len(raw) | self.STORED), raw
        return struct.pack("<I", len(packed)), packed

    def _adapt(self, raw: bytes | memoryview, size: int) -> None:
        """Choose the search for the next blocks, once in 64 full blocks. This block took ``size`` bytes."""
        self._full_blocks += 1
        if self._full_blocks % self._TRIAL_EVERY != 1:
            return
        if size <= self._SHRINKS_WELL * len(raw):
            self._acceleration = 1
            return
        other = self._COARSE if self._acceleration == 1 else 1
        tried = len(lz4.block.compress(raw, mode="fast", acceleration=other, store_size=False))
        fine, coarse = (size, tried) if other == self._COARSE else (tried, size)
        self._acceleration = self._COARSE if coarse <= self._LARGER_AT_MOST * fine else 1


class SnappyCodec(BlockCodec):
    """Snappy in xerial framing, which Kafka's clients read, with blocks of 32 KiB as in Java."""

    block_size = 32 * 1024
    # 4 bytes of framing. In measurements, noise with short repetitions grew by at most 8 bytes.
    block_overhead = 4 + 12
    prologue = b"\x82SNAPPY\0" + struct.pack(">ii", 1, 1)
    epilogue = b""

    def __init__(self) -> None:
        self._codec = pa.Codec("snappy")

    def compress_block(self, raw: bytes | memoryview) -> tuple[bytes, bytes | memoryview]:
        packed = self._codec.compress(raw, asbytes=True)
        return struct.pack(">i", len(packed)), packed


def zstd_codec(level: int) -> WholeCodec:
    """Zstandard, in one frame. All batches of a thread share its context, which takes about 1 MiB."""
    import zstandard

    contexts = threading.local()

    def compress(raw: bytes | bytearray) -> bytes:
        if not hasattr(contexts, "compressor"):
            contexts.compressor = zstandard.ZstdCompressor(level=level)
        packed: bytes = contexts.compressor.compress(raw)
        return packed

    return WholeCodec(compress)


def codec_for(compression: CompressionType, level: int | None) -> BlockCodec | WholeCodec | None:
    """The codec for an option's value; None for no compression. ``level`` None selects the default level."""
    if compression is CompressionType.LZ4:
        return Lz4Codec(LZ4_DEFAULT_LEVEL if level is None else level)
    if compression is CompressionType.SNAPPY:
        return SnappyCodec()
    if compression is CompressionType.GZIP:
        # The levels of zlib-ng correspond to zlib's, but are several times as fast.
        gzip_level = GZIP_DEFAULT_LEVEL if level is None else level
        return WholeCodec(lambda raw: zlib_ng.compress(raw, gzip_level, _GZIP_WINDOW_BITS))
    if compression is CompressionType.ZSTD:
        return zstd_codec(ZSTD_DEFAULT_LEVEL if level is None else level)
    return None


def decompressed(
    body: Sequence[memoryview], compression: CompressionType, raw_size: int
) -> Iterator[bytes | memoryview]:
    """The raw records of a batch that this module compressed, in order, in pieces of about a block.
    ``raw_size`` is the size of all raw records. A piece may end in the middle of a record."""
    if compression is CompressionType.LZ4:
        return _lz4_blocks(_Reader(body))
    if compression is CompressionType.SNAPPY:
        return _snappy_blocks(_Reader(body), raw_size)
    if compression is CompressionType.GZIP:
        return _inflated(body)
    if compression is CompressionType.ZSTD:
        import zstandard

        decompress = zstandard.ZstdDecompressor().decompressobj().decompress
        return (decompress(part) for part in _slices(body))
    return iter(body)


class _Reader:
    """Reads a sequence of views as one sequence of bytes."""

    def __init__(self, views: Sequence[memoryview]) -> None:
        self._views = list(reversed(views))

    def take(self, size: int) -> bytes | memoryview:
        """Return the next ``size`` bytes, which must exist."""
        parts = []
        while size:
            view = self._views.pop()
            if len(view) > size:
                self._views.append(view[size:])
                view = view[:size]
            parts.append(view)
            size -= len(view)
        return parts[0] if len(parts) == 1 else b"".join(parts)


def _slices(views: Sequence[memoryview]) -> Iterator[memoryview]:
    """Cut the views into short slices: the decompressed form of a slice is in memory as a whole."""
    for view in views:
        for at in range(0, len(view), _SLICE):
            yield view[at : at + _SLICE]


def _lz4_blocks(reader: _Reader) -> Iterator[bytes | memoryview]:
    reader.take(len(Lz4Codec.prologue))
    while True:
        (size,) = struct.unpack("<I", reader.take(4))
        if not size:
            return
        body = reader.take(size & ~Lz4Codec.STORED)
        if size & Lz4Codec.STORED:
            yield body
        else:
            yield lz4.block.decompress(body, uncompressed_size=Lz4Codec.block_size)


def _snappy_blocks(reader: _Reader, raw_size: int) -> Iterator[bytes]:
    codec = pa.Codec("snappy")
    reader.take(len(SnappyCodec.prologue))
    while raw_size:
        (size,) = struct.unpack(">i", reader.take(4))
        block = min(raw_size, SnappyCodec.block_size)
        yield codec.decompress(reader.take(size), block, asbytes=True)
        raw_size -= block


def _inflated(views: Sequence[memoryview]) -> Iterator[bytes]:
    inflate = zlib_ng.decompressobj(_GZIP_WINDOW_BITS)
    for part in _slices(views):
        yield inflate.decompress(part)
    yield inflate.flush()
