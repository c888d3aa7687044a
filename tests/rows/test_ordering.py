"""What is known of rows before they are ordered; test_partitioner.py has their order."""

from __future__ import annotations

import pyarrow as pa

from kafka_sink.rows.column_plan import ColumnPlan
from kafka_sink.rows.columns import extract
from kafka_sink.rows.ordering import partitions_needed


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
