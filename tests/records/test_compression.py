"""Memory for compression does not grow with the partitions that have open batches."""

from __future__ import annotations

import threading

import pytest
import zstandard

from kafka_sink.accumulator.buffer_pool import BufferPool
from kafka_sink.accumulator.chunked_buffer import IncrementalAllocator
from kafka_sink.accumulator.producer_batch import BatchState, ProducerBatch
from kafka_sink.model import CompressionType, TopicPartition
from kafka_sink.records.compression import codec_for


def test_all_batches_of_a_thread_share_one_zstd_context(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []
    compressor = zstandard.ZstdCompressor

    def counted(**options: int) -> zstandard.ZstdCompressor:
        made.append(options)
        return compressor(**options)  # type: ignore[arg-type]

    monkeypatch.setattr(zstandard, "ZstdCompressor", counted)
    codec = codec_for(CompressionType.ZSTD, None)
    allocator = IncrementalAllocator(BufferPool(4 << 20, 16_384, clock_ms=lambda: 0.0), 16_384)
    batches = []
    for partition in range(200):
        buffer = allocator.try_open(1_000)
        assert buffer is not None
        batch = ProducerBatch(
            TopicPartition("t", partition), buffer, codec, CompressionType.ZSTD, 1.0, 0, 0.0
        )
        batch.leased = True
        batch.append(memoryview(b"row" * 300), 1, 0)
        batch.move_to(BatchState.CLOSED)
        batches.append(batch)
    assert made == [], "an open batch holds no context"

    def seal_all() -> None:
        for batch in batches[:100]:
            batch.seal()

    # The task's thread seals what is full, the sender's what it drains.
    other = threading.Thread(target=seal_all)
    other.start()
    other.join()
    for batch in batches[100:]:
        batch.seal()
    assert len(made) == 2
