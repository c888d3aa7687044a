"""A planner of turns without threads, and rows for it."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from kafka_sink.accumulator.append_planner import AppendPlan, AppendPlanner, Grant
from kafka_sink.accumulator.batch_limits import LearntLimits, SizeEstimates
from kafka_sink.accumulator.record_accumulator import RecordAccumulator
from kafka_sink.memory.pool import BufferPool
from kafka_sink.model import CompressionType, TopicPartition
from kafka_sink.options import SinkOptions
from kafka_sink.records.ordered_rows import OrderedRows
from kafka_sink.records.record_columns import RecordColumns
from tests.support.allocators import incremental_allocator

BATCH_SIZE = 1_024
CHUNK = 1_024
P = [TopicPartition("t", index) for index in range(4)]


def rows(*counts: int, size: int = 50) -> OrderedRows:
    """``counts[i]`` rows of about ``size`` bytes for partition i."""
    total = sum(counts)
    columns = RecordColumns.of(None, (pa.array([b"v" * size] * total, pa.binary()),), None)
    starts = np.concatenate(([0], np.cumsum(counts))).tolist()
    return OrderedRows(columns, 7, P[: len(counts)], starts)


class Bench:
    """A planner over a pool of ``memory`` bytes in chunks of 1,024."""

    def __init__(self, memory: int = 1 << 20) -> None:
        self.pool = BufferPool(memory, CHUNK, clock_ms=lambda: 0.0)
        self.allocator = incremental_allocator(self.pool, BATCH_SIZE)
        self.settings = SinkOptions(
            bootstrap_servers=(),
            batch_size=BATCH_SIZE,
            linger_ms=0,
            max_block_ms=0,
            delivery_timeout_ms=10_000,
            buffer_memory=memory,
            compression_type=CompressionType.NONE,
        )
        self.estimates = SizeEstimates(self.settings, None, LearntLimits(BATCH_SIZE))
        self.planner = AppendPlanner(self.settings, self.allocator, self.estimates, lambda: 3.0)
        self.queues = RecordAccumulator(self.settings, self.allocator)

    def plan(self, ordered: OrderedRows, start: int = 0, grant: Grant | None = None) -> AppendPlan:
        return self.planner.plan(self.queues, ordered, start, len(ordered.partitions), grant)
