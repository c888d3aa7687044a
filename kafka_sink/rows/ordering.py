"""Orders rows by partition, and reports rows that are too large."""

from __future__ import annotations

import numpy as np

from kafka_sink.errors import RecordTooLargeError
from kafka_sink.model import TopicPartition
from kafka_sink.records import batch_header
from kafka_sink.records.arrays import Int32s, Int64s
from kafka_sink.records.ordered_rows import OrderedRows
from kafka_sink.records.record_columns import RecordColumns
from kafka_sink.rows.columns import RowBatch

# numpy uses a radix sort for 16-bit integers, which is six times as fast as its sort of wider integers.
_RADIX_LIMIT = 1 << 15


def by_partition(
    rows: RowBatch,
    columns: RecordColumns,
    slots: Int32s,
    bases: Int32s,
    resting: list[int],
    *,
    now_ms: int,
    are_movable: bool,
) -> OrderedRows:
    """Order rows by partition. The rows of one partition keep their order. If each partition's rows already
    follow each other, as rows without keys mostly do, they all stay where they are.

    ``slots`` has a number for each row: its partition plus the entry of ``bases`` for its topic. ``resting``
    are the slots of muted partitions. ``now_ms`` is the timestamp of rows without one. ``OrderedRows``
    describes ``are_movable``.
    """
    timestamps = now_ms if rows.timestamps_ms is None else rows.timestamps_ms
    starts = _starts(slots)
    if resting or len(starts) > int(bases[-1]) or len(set(slots[starts].tolist())) < len(starts):
        order = stable_order(_muted_last(slots, resting, bases), int(bases[-1]))
        slots = slots[order]
        columns = columns.ordered(order)
        timestamps = timestamps if isinstance(timestamps, int) else timestamps[order]
        starts = _starts(slots)
    topic_of = np.searchsorted(bases, slots[starts], side="right") - 1
    numbers = (slots[starts] - bases[topic_of]).tolist()
    partitions = [
        TopicPartition(rows.topics[topic], number)
        for topic, number in zip(topic_of.tolist(), numbers, strict=True)
    ]
    return OrderedRows(
        columns, timestamps, partitions, [*starts.tolist(), rows.num_rows], are_movable=are_movable
    )


def _starts(slots: Int32s) -> Int64s:
    """The positions at which another slot begins, and 0."""
    starts: Int64s = np.append(0, np.flatnonzero(slots[1:] != slots[:-1]) + 1)
    return starts


def record_too_large(rows: RowBatch, ordered: OrderedRows, limit: int, option: str) -> RecordTooLargeError:
    """The error for rows of which some may exceed ``limit`` bytes as a record in a batch of their own.
    ``option`` is the name of the option that sets the limit."""
    columns = RecordColumns.of(rows.key, rows.value, rows.headers)
    bounds = columns.upper_bounds(ordered.delta_bytes).numbers()
    largest = int(bounds.argmax())
    topic = rows.topics[0 if rows.topic_index is None else int(rows.topic_index[largest])]
    key_bytes, value_bytes = (
        max(0, int(sizes.numbers()[largest])) for sizes in (columns.key_lengths, columns.value_lengths)
    )
    total = int(bounds[largest]) + batch_header.SIZE
    rest = total - key_bytes - value_bytes
    return RecordTooLargeError(
        f"a row for topic '{topic}' becomes a batch of up to {total} bytes (key {key_bytes}, value "
        f"{value_bytes}, headers and the formats of record and batch {rest}), more than {option} = {limit}. "
        "Find such rows by length(value). Raise "
        f"{option} (and the topic's max.message.bytes if that is lower), send smaller rows, or set "
        "errors.tolerance=all to skip them (errors.deadletterqueue.topic.name keeps them)",
        bounds > limit - batch_header.SIZE,
        f"the record is larger than {option} = {limit}",
    )


def partitions_needed(rows: RowBatch) -> dict[str, int]:
    """How many partitions each topic must have for the partitions in its rows. Other topics are left out."""
    if rows.partition is None:
        return {}
    highest = np.full(len(rows.topics), -1, dtype=np.int64)
    if rows.topic_index is None:
        highest[0] = rows.partition.max()
    else:
        np.maximum.at(highest, rows.topic_index, rows.partition)
    return {topic: last + 1 for topic, last in zip(rows.topics, highest.tolist(), strict=True) if last >= 0}


def _muted_last(slots: Int32s, resting: list[int], bases: Int32s) -> Int32s:
    """Numbers to sort by, in which muted partitions are last, because their rows may have to wait."""
    if not resting:
        return slots
    places = np.concatenate([np.delete(np.arange(bases[-1]), resting), resting])
    ranks = np.empty(len(places), dtype=np.int32)
    ranks[places] = np.arange(len(places), dtype=np.int32)
    ranked: Int32s = ranks[slots]
    return ranked


def stable_order(numbers: Int32s, limit: int) -> Int64s:
    """The positions of the numbers in ascending order. Stable. All are below ``limit``."""
    narrow = numbers.astype(np.int16) if limit <= _RADIX_LIMIT else numbers
    return np.argsort(narrow, kind="stable")
