"""Rows with partitions, and a partitioner without chance, for tests of the code after the partitioner."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from kafka_sink.model import PartitionMetadata
from kafka_sink.records.ordered_rows import OrderedRows
from kafka_sink.rows.column_plan import ColumnPlan
from kafka_sink.rows.columns import extract
from kafka_sink.rows.partitioner import BatchCapacity, Partitioner
from tests.support.topic_metadata import topic_of


def plain_partitioner(batch_bytes: float = 100, *, spread_keys: bool = False) -> Partitioner:
    """All queues are empty, and each batch takes ``batch_bytes``."""
    return Partitioner(
        capacity=lambda *_: BatchCapacity(None, batch_bytes),
        loads=lambda topic, count: [0] * count,
        ignore_keys=False,
        adaptive=False,
        random=lambda: 0.5,
        spread_keys=spread_keys,
    )


def row_batch(values: Sequence[bytes], partitions: Sequence[int | None]) -> pa.RecordBatch:
    return pa.record_batch(
        {"value": pa.array(values, pa.binary()), "partition": pa.array(partitions, pa.int32())}
    )


_PLAN = ColumnPlan.of([("value", "binary"), ("partition", "int")], "t")
_PARTITIONER = plain_partitioner()


def ordered(
    values: Sequence[bytes], partitions: Sequence[int] | None = None, timestamp_ms: int = 0
) -> OrderedRows:
    """Rows of topic t with these values, for partition 0 unless they have their own."""
    numbers = partitions or [0] * len(values)
    infos = tuple(PartitionMetadata("t", number, 0, 0) for number in range(max(numbers) + 1))
    rows = extract(_PLAN, row_batch(values, numbers), timestamp_ms)
    return _PARTITIONER.order(rows, {"t": topic_of("t", None, infos)}, timestamp_ms)
