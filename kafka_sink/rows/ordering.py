"""Assigns rows to partitions, and orders them by partition."""

from __future__ import annotations

from collections.abc import Collection, Container, Mapping
from dataclasses import dataclass

import numpy as np

from kafka_sink.model import TopicMetadata, TopicPartition
from kafka_sink.records.arrays import Bools, Int32s, Int64s, indices
from kafka_sink.records.ordered_rows import OrderedRows
from kafka_sink.records.record_columns import Ints, RecordColumns
from kafka_sink.rows.columns import RowBatch
from kafka_sink.rows.partitioner import Partitioner, QueueLoads, TopicView

# Bytes of a timestamp delta of up to an hour and a half.
_DELTA_BYTES = 3
# numpy sorts 16-bit integers by radix, six times as fast as wider ones.
_RADIX_LIMIT = 1 << 15


def ordered_rows_of(  # noqa: PLR0913 - what decides where a row goes
    rows: RowBatch,
    topics: Mapping[str, TopicMetadata],
    partitioner: Partitioner,
    loads: QueueLoads,
    now_ms: int,
    unavailable: Collection[int] = (),
    muted: Container[TopicPartition] = (),
    near: Container[int] = (),
) -> OrderedRows:
    """Assign partitions and order the rows by them; rows of one partition keep their order.

    ``now_ms`` is the wall clock, the timestamp of rows without one. Rows without keys avoid partitions
    that are ``muted`` or led by an ``unavailable`` broker, if others are left, and of those prefer the ones
    led by ``near`` brokers. Raises InvalidRowError for a partition that does not exist.
    """
    columns = RecordColumns.of(rows.key, rows.value, rows.headers)
    # An upper bound, so that a batch takes what its partition is given. Only a free choice needs it.
    sizes = columns.value_lengths
    if partitioner.chooses(rows.key, rows.partition):
        sizes = columns.upper_bounds(_DELTA_BYTES)
    counts = np.array([len(topics[name].partitions.leaders) for name in rows.topics], dtype=np.int32)
    bases = np.zeros(len(counts) + 1, dtype=np.int32)
    np.cumsum(counts, out=bases[1:])
    views: list[TopicView] = []
    slots = _slots_by_key(rows, counts, bases, partitioner, muted=bool(muted))
    # Views of thousands of topics cost more than their rows, which need them only for muted partitions.
    if slots is None or muted:
        views = [_view(topics[name], unavailable, muted, near) for name in rows.topics]
    if slots is None:
        slots = _slots(rows, sizes.numbers(), views, bases, partitioner, loads)
    timestamps = now_ms if rows.timestamps_ms is None else rows.timestamps_ms
    if slots.min() != slots.max():
        order = _stable_order(_muted_last(slots, views, bases), int(bases[-1]))
        slots = slots[order]
        columns = columns.ordered(order)
        timestamps = timestamps if isinstance(timestamps, int) else timestamps[order]
    changes = np.flatnonzero(slots[1:] != slots[:-1]) + 1
    starts = [0, *changes.tolist()]
    topic_of = np.searchsorted(bases, slots[starts], side="right") - 1
    partitions = [
        TopicPartition(rows.topics[topic], partition)
        for topic, partition in zip(
            topic_of.tolist(), (slots[starts] - bases[topic_of]).tolist(), strict=True
        )
    ]
    free = partitioner.chooses_all(rows.key, rows.partition)
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


def _view(
    topic: TopicMetadata,
    unavailable: Collection[int],
    muted: Container[TopicPartition],
    near: Container[int],
) -> TopicView:
    available = [info for info in topic.partitions if info.leader >= 0 and info.leader not in unavailable]
    resting: tuple[int, ...] = ()
    if muted:
        places = (TopicPartition(topic.name, info.partition) for info in topic.partitions)
        resting = tuple(place.partition for place in places if place in muted)
        others = [info for info in available if info.partition not in resting]
        if others:
            available = others
        else:
            resting = ()
    preferred = [info for info in available if info.leader in near] or available
    return TopicView(topic.name, len(topic.partitions), tuple(info.partition for info in preferred), resting)


def _muted_last(slots: Int32s, views: list[TopicView], bases: Int32s) -> Int32s:
    """Numbers to order by that put muted partitions last, since their rows may have to wait."""
    resting = [int(bases[i]) + partition for i, view in enumerate(views) for partition in view.muted]
    if not resting:
        return slots
    places = np.concatenate([np.delete(np.arange(bases[-1]), resting), resting])
    ranks = np.empty(len(places), dtype=np.int32)
    ranks[places] = np.arange(len(places), dtype=np.int32)
    ranked: Int32s = ranks[slots]
    return ranked


def _slots_by_key(
    rows: RowBatch, counts: Int32s, bases: Int32s, partitioner: Partitioner, *, muted: bool
) -> Int32s | None:
    """As ``_slots``, for rows of several topics that all go by their keys; None for others."""
    if rows.topic_index is None:
        return None
    slots = partitioner.by_key(rows.key, rows.partition, counts, rows.topic_index, muted=muted)
    if slots is not None:
        slots += bases[rows.topic_index]
    return slots


def _slots(
    rows: RowBatch,
    sizes: Ints,
    views: list[TopicView],
    bases: Int32s,
    partitioner: Partitioner,
    loads: QueueLoads,
) -> Int32s:
    """One number per row, which identifies its topic and partition."""
    if rows.topic_index is None:
        return partitioner.assign(rows.key, rows.partition, sizes, views[0], loads)
    order = _stable_order(rows.topic_index, len(views))
    key = None if rows.key is None else rows.key.take(indices(order))
    ends = np.cumsum(np.bincount(rows.topic_index, minlength=len(views)))
    slots = np.empty(rows.num_rows, dtype=np.int32)
    start = 0
    for index, end in enumerate(ends.tolist()):
        if start == end:
            continue
        chosen = order[start:end]
        assigned = partitioner.assign(
            None if key is None else key.slice(start, end - start),
            None if rows.partition is None else rows.partition[chosen],
            sizes[chosen],
            views[index],
            loads,
        )
        slots[chosen] = assigned + int(bases[index])
        start = end
    return slots


def _stable_order(numbers: Int32s, limit: int) -> Int64s:
    narrow = numbers.astype(np.int16) if limit <= _RADIX_LIMIT else numbers
    return np.argsort(narrow, kind="stable")
