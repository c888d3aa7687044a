"""Batches as brokers acknowledge them."""

from __future__ import annotations

from kafka_sink.cluster.partition import Partition, ProducerBatch
from kafka_sink.engine.deliveries import WrittenBatch
from kafka_sink.memory.pool import BufferPool
from kafka_sink.model import CompressionType
from tests.support.allocators import incremental_allocator


def written_batch(
    partition: Partition, records: int, raw_bytes: int, sent_bytes: int, base_offset: int
) -> WrittenBatch:
    """A batch of so many records, whose ``sent_bytes`` include its header."""
    buffer = incremental_allocator(BufferPool(sent_bytes + 128, clock_ms=lambda: 0.0), 128).open(
        sent_bytes, 0.0
    )
    batch = ProducerBatch(buffer, None, CompressionType.NONE, 1.0, 0, partition, 0.0)
    buffer.write_growing(bytes(sent_bytes - buffer.size))
    batch.record_count, batch.raw_bytes = records, raw_bytes
    return batch, base_offset, -1
