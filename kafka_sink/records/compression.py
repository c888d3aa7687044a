"""The compression codecs. No codec keeps a context per partition.

lz4 and snappy frames are made of independent blocks, so a batch compresses block by block while it
fills. zstd and gzip batches are compressed once, at close. Blocks are cut at fixed raw offsets, so equal rows
give equal bytes, but for LZ4 blocks whose search was made coarser by the blocks before them.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence

import lz4.block
import pyarrow as pa
from zlib_ng import zlib_ng

from kafka_sink.model import CompressionType

GZIP_DEFAULT_LEVEL = -1
LZ4_DEFAULT_LEVEL = 9
ZSTD_DEFAULT_LEVEL = 3
# The largest window, and gzip's framing (RFC 1952).
_GZIP_WINDOW_BITS = 31
# Compressed bytes that are given to a decompressor at once.
_SLICE = 4096


class BlockCodec:
    """A frame of independently compressed blocks: prologue, blocks, epilogue.

    No ABC: their isinstance takes a quarter of a microsecond, several times for each batch.
    """

    block_size: int
    # Bytes of a block's framing, and by how much incompressible rows make its body larger.
    block_overhead: int
    prologue: bytes
    epilogue: bytes

    def compress_block(self, raw: bytes | memoryview) -> tuple[bytes, bytes | memoryview]:
        """Framing and body of one block of at most ``block_size`` raw bytes."""
        raise NotImplementedError


class WholeCodec:
    """Compresses a batch's records section in one go, from the raw bytes that wait for it."""

    def __init__(self, compress: Callable[[bytes | bytearray], bytes]) -> None:
        self.compress = compress


class Lz4Codec(BlockCodec):
    """LZ4 frame with independent 64 KiB blocks; brokers reject linked ones."""

    block_size = 64 * 1024
    block_overhead = 4
    # Magic, FLG (version 1, independent blocks, no checksums), BD (64 KiB), header checksum.
    prologue = bytes.fromhex("04224d18") + bytes([0x60, 0x40, 0x82])
    epilogue = b"\0\0\0\0"
    STORED = 0x80000000
    # Rows with digests, random ids or base64 hold matches only where the text around them repeats. A coarser
    # search finds these as well, in 0.4 to 0.6 of the time. In other rows it misses matches (a tenth of the
    # size in prose and code). So one full block of 64 is compressed in both ways, unless it shrinks well.
    # 3 takes longer for the same size; 5, 7 and 8 lose 3 % on short digests.
    _COARSE = 6
    _TRIAL_EVERY = 64
    _SHRINKS_WELL = 0.4
    _LARGER_AT_MOST = 1.02

    def __init__(self, level: int) -> None:
        self._level = level
        # Of the fast compressor.
        self._acceleration = 1
        # Of several threads' blocks now and then one may count twice.
        self._full_blocks = 0

    def compress_block(self, raw: bytes | memoryview) -> tuple[bytes, bytes | memoryview]:
        if self._level == LZ4_DEFAULT_LEVEL:
            # Java's default level also means the fast compressor, not level 9 of the high one.
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
        """Choose how the next blocks are searched, once in a while; this one took ``size`` bytes."""
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
    """Snappy in xerial framing, the form that Kafka's clients read; 32 KiB blocks as in Java."""

    block_size = 32 * 1024
    # Noise with short repetitions grew by 8 bytes at most when measured.
    block_overhead = 4 + 12
    prologue = b"\x82SNAPPY\0" + struct.pack(">ii", 1, 1)
    epilogue = b""

    def __init__(self) -> None:
        self._codec = pa.Codec("snappy")

    def compress_block(self, raw: bytes | memoryview) -> tuple[bytes, bytes | memoryview]:
        packed = self._codec.compress(raw, asbytes=True)
        return struct.pack(">i", len(packed)), packed


def gzip_codec(level: int) -> WholeCodec:
    """Gzip (RFC 1952) through zlib-ng, whose levels mean what zlib's mean at several times the speed."""
    return WholeCodec(lambda raw: zlib_ng.compress(raw, level, _GZIP_WINDOW_BITS))


def zstd_codec(level: int) -> WholeCodec:
    """Zstandard, one frame; the context (about 1 MiB) is shared by all batches of the thread."""
    import threading

    import zstandard

    contexts = threading.local()

    def compress(raw: bytes | bytearray) -> bytes:
        if not hasattr(contexts, "compressor"):
            contexts.compressor = zstandard.ZstdCompressor(level=level)
        packed: bytes = contexts.compressor.compress(raw)
        return packed

    return WholeCodec(compress)


def codec_for(compression: CompressionType, level: int | None) -> BlockCodec | WholeCodec | None:
    """The codec of an option's value; None if records stay uncompressed. ``level`` None is the default."""
    if compression is CompressionType.LZ4:
        return Lz4Codec(LZ4_DEFAULT_LEVEL if level is None else level)
    if compression is CompressionType.SNAPPY:
        return SnappyCodec()
    if compression is CompressionType.GZIP:
        return gzip_codec(GZIP_DEFAULT_LEVEL if level is None else level)
    if compression is CompressionType.ZSTD:
        return zstd_codec(ZSTD_DEFAULT_LEVEL if level is None else level)
    return None


def decompressed(
    body: Sequence[memoryview], compression: CompressionType, raw_size: int
) -> Iterator[bytes | memoryview]:
    """The raw records of a batch body that this module compressed, a block or so at a time, in order.

    The batch knows their ``raw_size``. A piece may end in the middle of a record.
    """
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
    """Reads bytes of views one after the other."""

    def __init__(self, views: Sequence[memoryview]) -> None:
        self._views = list(reversed(views))

    def take(self, size: int) -> bytes | memoryview:
        """The next ``size`` bytes, which must be there."""
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
    """Short slices, as all that a decompressor makes of one is in memory at once."""
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
