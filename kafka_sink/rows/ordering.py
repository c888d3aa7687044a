"""Orders rows by partition, and finds those that are too large."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kafka_sink.model import TopicPartition
from kafka_sink.records.arrays import Bools, Int32s, Int64s
from kafka_sink.records.ordered_rows import OrderedRows
from kafka_sink.records.record_columns import RecordColumns
from kafka_sink.rows.columns import RowBatch

# numpy sorts 16-bit integers by radix, six times as fast as wider ones.
_RADIX_LIMIT = 1 << 15


def by_partition(
    rows: RowBatch,
    columns: RecordColumns,
    slots: Int32s,
    bases: Int32s,
    resting: list[int],
    *,
    now_ms: int,
    free: bool,
) -> OrderedRows:
    """The rows ordered by partition; rows of one partition keep their order.

    ``slots`` has a number per row, its partition and the ``bases`` of its topic; ``resting`` are slots of
    muted partitions. ``now_ms`` is the timestamp of rows without one. ``free``: see ``OrderedRows``.
    """
    timestamps = now_ms if rows.timestamps_ms is None else rows.timestamps_ms
    if slots.min() != slots.max():
        order = stable_order(_muted_last(slots, resting, bases), int(bases[-1]))
        slots = slots[order]
        columns = columns.ordered(order)
        timestamps = timestamps if isinstance(timestamps, int) else timestamps[order]
    changes = np.flatnonzero(slots[1:] != slots[:-1]) + 1
    starts = [0, *changes.tolist()]
    topic_of = np.searchsorted(bases, slots[starts], side="right") - 1
    numbers = (slots[starts] - bases[topic_of]).tolist()
    partitions = [
        TopicPartition(rows.topics[topic], number)
        for topic, number in zip(topic_of.tolist(), numbers, strict=True)
    ]
    return OrderedRows(columns, timestamps, partitions, [*starts, rows.num_rows], free=free)


@dataclass(frozen=True, slots=True)
class LargeRows:
    """Rows whose records may exceed a limit. ``rows`` marks them, in their order before ``OrderedRows``.

    The largest of them, by its topic and its bytes: of the record at most, of its key and of its value.
    """

    rows: Bools
    topic: str
    record_bytes: int
    key_bytes: int
    value_bytes: int


def rows_larger_than(rows: RowBatch, ordered: OrderedRows, limit: int) -> LargeRows:
    """The rows with a record that may exceed ``limit`` bytes."""
    columns = RecordColumns.of(rows.key, rows.value, rows.headers)
    bounds = columns.upper_bounds(ordered.delta_bytes).numbers()
    largest = int(bounds.argmax())
    return LargeRows(
        bounds > limit,
        rows.topics[0 if rows.topic_index is None else int(rows.topic_index[largest])],
        int(bounds[largest]),
        max(0, int(columns.key_lengths.numbers()[largest])),
        max(0, int(columns.value_lengths.numbers()[largest])),
    )


def partitions_needed(rows: RowBatch) -> dict[str, int]:
    """How many partitions topics must have for the partitions that rows name; only topics of such rows."""
    if rows.partition is None:
        return {}
    highest = np.full(len(rows.topics), -1, dtype=np.int64)
    if rows.topic_index is None:
        highest[0] = rows.partition.max()
    else:
        np.maximum.at(highest, rows.topic_index, rows.partition)
    return {topic: last + 1 for topic, last in zip(rows.topics, highest.tolist(), strict=True) if last >= 0}


def _muted_last(slots: Int32s, resting: list[int], bases: Int32s) -> Int32s:
    """Numbers to order by that put muted partitions last, since their rows may have to wait."""
    if not resting:
        return slots
    places = np.concatenate([np.delete(np.arange(bases[-1]), resting), resting])
    ranks = np.empty(len(places), dtype=np.int32)
    ranks[places] = np.arange(len(places), dtype=np.int32)
    ranked: Int32s = ranks[slots]
    return ranked


def stable_order(numbers: Int32s, limit: int) -> Int64s:
    """Places of numbers below ``limit`` in ascending order; equal ones keep theirs."""
    narrow = numbers.astype(np.int16) if limit <= _RADIX_LIMIT else numbers
    return np.argsort(narrow, kind="stable")
