"""Append passes over an accumulator without threads, and rows for them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from kafka_sink.engine.accumulator import RecordAccumulator
from kafka_sink.engine.appender import AppendPass, RecordAppender
from kafka_sink.memory.allocator import BufferAllocator
from kafka_sink.memory.buffer import ChunkedBuffer
from kafka_sink.memory.pool import BufferPool
from kafka_sink.model import CompressionType, TopicPartition
from kafka_sink.options import SinkOptions
from kafka_sink.records.ordered_rows import OrderedRows
from kafka_sink.records.record_columns import RecordColumns

BATCH_SIZE = 1_024
CHUNK = 1_024
P = [TopicPartition("t", index) for index in range(4)]


def rows(*counts: int, size: int = 50, partitions: Sequence[TopicPartition] = P) -> OrderedRows:
    """``counts[i]`` rows of about ``size`` bytes for ``partitions[i]``."""
    total = sum(counts)
    columns = RecordColumns.of(None, (pa.array([b"v" * size] * total, pa.binary()),), None)
    starts = np.concatenate(([0], np.cumsum(counts))).tolist()
    return OrderedRows(columns, 7, list(partitions[: len(counts)]), starts)


class Bench:
    """An appender over a pool of ``memory`` bytes in chunks of 1,024."""

    def __init__(self, memory: int = 1 << 20) -> None:
        self.pool = BufferPool(memory, CHUNK, clock_ms=lambda: 0.0)
        self.allocator = BufferAllocator(self.pool, BATCH_SIZE)
        options = SinkOptions(
            bootstrap_servers=(),
            batch_size=BATCH_SIZE,
            linger_ms=0,
            max_block_ms=0,
            delivery_timeout_ms=10_000,
            buffer_memory=memory,
            compression_type=CompressionType.NONE,
        )
        self.accumulator = RecordAccumulator(options, self.allocator)
        self.wakes = 0
        self.appender = RecordAppender(self.accumulator, lambda: 0.0, self._wake)

    def _wake(self) -> None:
        self.wakes += 1

    def planned(
        self,
        ordered: OrderedRows,
        start: int = 0,
        granted: ChunkedBuffer | None = None,
        granted_stop: int = 0,
    ) -> AppendPass:
        one = AppendPass(self.accumulator, self.allocator, ordered, start, len(ordered.partitions), 3.0)
        with self.accumulator.lock:
            one.plan(granted, granted_stop)
        return one
