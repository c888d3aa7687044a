"""Memory for compression does not grow with the partitions that have open batches."""

from __future__ import annotations

import random
import threading
from unittest.mock import Mock, patch

import lz4.block
import pytest
import zstandard

from kafka_sink.cluster.partition import BatchState, ProducerBatch
from kafka_sink.memory.pool import BufferPool
from kafka_sink.model import CompressionType, TopicPartition
from kafka_sink.options import parse
from kafka_sink.records.compression import BlockCodec, WholeCodec, codec_for
from tests.support.allocators import incremental_allocator
from tests.support.queues import partition_of


@patch.object(zstandard, "ZstdCompressor", wraps=zstandard.ZstdCompressor)
def test_zstd_context_is_shared_by_the_batches_of_a_thread(made: Mock) -> None:
    codec = codec_for(CompressionType.ZSTD, None)
    allocator = incremental_allocator(BufferPool(4 << 20, clock_ms=lambda: 0.0), 16_384)
    batches = []
    for partition in range(200):
        buffer = allocator.open(1_000, 0)
        batch = ProducerBatch(
            buffer, codec, CompressionType.ZSTD, 1.0, 0, partition_of(TopicPartition("t", partition)), 0.0
        )
        batch.held = True
        batch.append(memoryview(b"row" * 300), 1, 0)
        batch.move_to(BatchState.CLOSED)
        batches.append(batch)
    assert not made.called, "an open batch holds no context"

    def seal_all() -> None:
        for batch in batches[:100]:
            batch.seal()

    # The task's thread seals what is full, the sender's what it drains.
    other = threading.Thread(target=seal_all)
    other.start()
    other.join()
    for batch in batches[100:]:
        batch.seal()
    assert made.call_count == 2


def _lz4(raw: bytes, acceleration: int) -> bytes:
    packed: bytes = lz4.block.compress(raw, mode="fast", acceleration=acceleration, store_size=False)
    return packed


def test_lz4_searches_coarsely_only_where_that_loses_little() -> None:
    draw = random.Random(1)
    digests = b"".join(b'{"digest":"%040x","ok":true},' % draw.getrandbits(160) for _ in range(2000))[:65536]
    words = [draw.randbytes(draw.randint(2, 9)) for _ in range(3000)]
    prose = b" ".join(draw.choice(words) for _ in range(20_000))[:65536]
    shrinking = b"".join(b'{"id":%09d,"event":"click"}' % number for number in range(4000))[:65536]
    assert len(_lz4(digests, 6)) <= 1.02 * len(_lz4(digests, 1))
    assert len(_lz4(prose, 6)) > 1.05 * len(_lz4(prose, 1))

    codec = codec_for(CompressionType.LZ4, None)
    assert isinstance(codec, BlockCodec)

    def packed(raw: bytes) -> bytes:
        return bytes(codec.compress_block(raw)[1])

    assert packed(digests) == _lz4(digests, 1)
    assert [packed(digests) for _ in range(63)] == [_lz4(digests, 6)] * 63
    # A part of a block is compressed as blocks are, and decides nothing.
    assert packed(shrinking[:1000]) == _lz4(shrinking[:1000], 6)
    # Other rows come: the next trial finds out.
    assert packed(prose) == _lz4(prose, 6)
    assert [packed(prose) for _ in range(63)] == [_lz4(prose, 1)] * 63
    for _ in range(65):
        assert packed(shrinking) == _lz4(shrinking, 1)
    high = codec_for(CompressionType.LZ4, 12)
    assert isinstance(high, BlockCodec)
    assert len({bytes(high.compress_block(digests)[1]) for _ in range(3)}) == 1


@pytest.mark.parametrize("level", [-131_072, -5, 22])
def test_zstd_takes_every_level_of_the_library(level: int) -> None:
    options = parse({"kafka.bootstrap.servers": "host:1", "kafka.compression.zstd.level": str(level)}).options
    codec = codec_for(CompressionType.ZSTD, options.compression_zstd_level)
    assert isinstance(codec, WholeCodec)
    raw = b'{"id":1,"event":"click"}' * 1000
    assert zstandard.ZstdDecompressor().decompress(codec.compress(raw)) == raw
