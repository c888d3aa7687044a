"""The partitions that rows need, and rows that stay in place. test_partitioner.py tests their order."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from kafka_sink.records.record_columns import RecordColumns
from kafka_sink.rows.column_plan import ColumnPlan
from kafka_sink.rows.columns import extract
from kafka_sink.rows.ordering import by_partition, partitions_needed


def test_the_partitions_that_rows_need_are_counted_by_topic() -> None:
    batch = pa.record_batch(
        {
            "topic": pa.array(["a", "b", "a", "c"]),
            "value": pa.array([b"v"] * 4),
            "partition": pa.array([0, 7, 3, None], pa.int32()),
        }
    )
    plan = ColumnPlan.of([("topic", "string"), ("value", "binary"), ("partition", "int")], None)
    assert partitions_needed(extract(plan, batch, 0)) == {"a": 4, "b": 8}
    assert partitions_needed(extract(plan.of([("value", "binary")], "a"), batch.select(["value"]), 0)) == {}
    one = ColumnPlan.of([("value", "binary"), ("partition", "int")], "a")
    assert partitions_needed(extract(one, batch.select(["value", "partition"]), 0)) == {"a": 8}


@pytest.mark.parametrize(
    ("slots", "muted", "partitions", "order"),
    [
        ([2, 2, 0, 0, 1], [], [2, 0, 1], None),
        ([1, 1, 1, 1, 1], [], [1], None),
        ([2, 2, 0, 0, 2], [], [0, 2], [2, 3, 0, 1, 4]),
        ([2, 2, 0, 0, 1], [0], [1, 2, 0], [4, 0, 1, 2, 3]),
    ],
)
def test_rows_of_one_partition_that_follow_each_other_stay(
    slots: list[int], muted: list[int], partitions: list[int], order: list[int] | None
) -> None:
    """Ordering rows without keys took 3 % of a write."""
    values = pa.record_batch({"value": pa.array([b"v"] * len(slots), pa.binary())})
    rows = extract(ColumnPlan.of([("value", "binary")], "t"), values, 0)
    columns = RecordColumns.of(rows.key, rows.value, rows.headers)
    bases = np.array([0, 3], dtype=np.int32)
    found = np.array(slots, dtype=np.int32)
    ordered = by_partition(rows, columns, found, bases, muted, now_ms=0, are_movable=True)
    assert [partition.partition for partition in ordered.partitions] == partitions
    assert (None if ordered.columns.order is None else ordered.columns.order.tolist()) == order
