"""With errors.tolerance=all: makes rows that can never be written dead letters.

While all rows are valid, this costs nothing: the errors that else fail the task mark invalid rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kafka_sink import clock
from kafka_sink.clock import Clock
from kafka_sink.cluster.producer_metadata import ProducerMetadata
from kafka_sink.dead_letters.rejected_rows import HEADER_OVERHEAD, DeadLetters, OwnHeaders, RejectedRows
from kafka_sink.errors import InvalidRowError, MetadataTimeoutError, MissingPartitionError, TopicRefusedError
from kafka_sink.model import NO_TIMESTAMP, TopicMetadata, TopicPartition
from kafka_sink.records import varint_columns
from kafka_sink.records.arrays import (
    Bools,
    Bytes,
    Int64s,
    as_binary,
    binary_of,
    indices,
    is_utf8,
    lengths,
    null_mask,
    numbers,
    spans,
)
from kafka_sink.records.ordered_rows import OrderedRows
from kafka_sink.rows.column_plan import ColumnPlan
from kafka_sink.rows.columns import NO_PARTITION, RowBatch
from kafka_sink.rows.ordering import partitions_needed

# Brokers learn of an added partition at different times. One that is unknown after this time does not exist.
PARTITION_WAIT_MS = 5000.0
_CHECK_MS = 100.0

Order = Callable[[ColumnPlan, pa.Table], OrderedRows]


class RowRejection:
    """Used by the task's thread. The limits are the options max.block.ms and metadata.max.age.ms."""

    def __init__(
        self,
        cluster: ProducerMetadata,
        clock_ms: Clock,
        max_block_ms: float,
        max_age_ms: float,
    ) -> None:
        self._cluster = cluster
        self._clock_ms = clock_ms
        self._max_block_ms = max_block_ms
        self._max_age_ms = max_age_ms
        # For each topic, the number of partitions that brokers have confirmed, and until when this is valid.
        self._confirmed: dict[str, tuple[int, float]] = {}

    def order(
        self, plan: ColumnPlan, table: pa.RecordBatch | pa.Table, order: Order, dead_letters: DeadLetters
    ) -> OrderedRows | None:
        """Call ``order`` with the valid rows; None without any. Add invalid rows to ``dead_letters``. Raises
        the errors of ``order`` that are not about rows, and TooManyDeadLettersError."""
        left = table if isinstance(table, pa.Table) else pa.Table.from_batches([table])
        while left.num_rows:
            try:
                return order(plan, left)
            except InvalidRowError as error:
                if error.rows is None or not error.rows.any():
                    raise
                dead_letters.add(rows_of_table(plan, left, error))
                left = left.take(indices(np.flatnonzero(~error.rows)))
        return None

    def await_topics(self, rows: RowBatch, check: Callable[[], None]) -> dict[str, TopicMetadata]:
        """The metadata of the rows' topics.

        Waits up to 5 s for missing partitions, for those of all topics together, and waits again only after
        metadata.max.age.ms. A topic that is not authorized is requested for equally long.

        Raises MetadataTimeoutError after max.block.ms, and InvalidRowError, which marks the rows, for a topic
        that can never be written or a partition that does not exist.
        """
        try:
            topics = self._cluster.await_topics(
                rows.topics,
                self._max_block_ms,
                check,
                unauthorized_wait_ms=min(clock.UNAUTHORIZED_TOPIC_MS, self._max_block_ms / 2),
            )
        except TopicRefusedError as error:
            error.rows = _rows_of(rows, error.topic)
            raise
        needed = partitions_needed(rows)
        doubtful = {name: count for name, count in needed.items() if self._is_doubtful(topics[name], count)}
        if doubtful:
            topics |= self._await_partitions(doubtful, check)
        for name, count in needed.items():
            exists = len(topics[name].partitions)
            if count > exists and rows.partition is not None:
                reason = f"topic {name!r} has only partitions 0 to {exists - 1}"
                missing = _rows_of(rows, name) & (rows.partition >= exists)
                raise MissingPartitionError(reason, missing)
        return topics

    def _await_partitions(
        self, needed: dict[str, int], check: Callable[[], None]
    ) -> dict[str, TopicMetadata]:
        """The metadata of these topics, with all needed partitions, or newer than this call. Raises
        MetadataTimeoutError if there is none after max.block.ms."""
        started_ms = self._clock_ms()
        with suppress(MissingPartitionError):
            # Wait once for the partitions of all topics.
            wait_ms = min(PARTITION_WAIT_MS, self._max_block_ms)
            return self._cluster.await_topics(needed, wait_ms, check, needed)
        # The partition only counts as missing when a broker has responded without it.
        while old := [name for name in needed if self._is_older(name, started_ms)]:
            if self._clock_ms() - started_ms >= self._max_block_ms:
                raise MetadataTimeoutError(
                    f"no broker reported within kafka.max.block.ms = {self._max_block_ms:.0f} ms whether "
                    f"topic {old[0]!r} has the partitions in column 'partition'"
                )
            check()
            with suppress(MissingPartitionError):
                self._cluster.await_topics(old, _CHECK_MS, check, needed)
        topics = {name: self._cluster.topic(name) for name in needed}
        until_ms = self._clock_ms() + self._max_age_ms
        for name, topic in topics.items():
            if topic is not None:
                self._confirmed[name] = (len(topic.partitions), until_ms)
        return {name: topic for name, topic in topics.items() if topic is not None}

    def _is_older(self, topic: str, than_ms: float) -> bool:
        # Read the clock only once, because the thread may be delayed between two readings.
        now_ms = self._clock_ms()
        known = self._cluster.snapshot(now_ms, [topic]).topics
        return not known or known[0].age_ms > now_ms - than_ms

    def _is_doubtful(self, topic: TopicMetadata, needed: int) -> bool:
        """Whether the topic is known with fewer partitions, and this was not confirmed recently."""
        exists = len(topic.partitions)
        count, until_ms = self._confirmed.get(topic.name, (0, 0.0))
        return needed > exists and not (count == exists and self._clock_ms() < until_ms)


def _rows_of(rows: RowBatch, topic: str) -> Bools:
    if rows.topic_index is None:
        return np.ones(rows.num_rows, dtype=np.bool_)
    mask: Bools = rows.topic_index == rows.topics.index(topic)
    return mask


# Columns for the dead letters of rows that the task or a broker has rejected.


HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
_NO_BYTES = binary_of([b""])[0]
_MICROS_PER_MILLI = 1000


def rows_of_table(plan: ColumnPlan, table: pa.Table, error: InvalidRowError) -> RejectedRows:
    """The rows that the error marks."""
    if error.rows is None:
        raise ValueError("the error does not say which rows it is about")
    few = table.take(indices(np.flatnonzero(error.rows)))

    def column(index: int | None, kind: pa.DataType) -> pa.Array:
        """A column; if the rows do not have it, nulls of type ``kind``."""
        return pa.nulls(few.num_rows, kind) if index is None else pa.concat_arrays(few.column(index).chunks)

    key, value, topic = (
        as_binary(column(index, pa.binary())) for index in (plan.key, plan.value, plan.topic_column)
    )
    if plan.topic is not None:
        topic = _repeated(plan.topic, few.num_rows)
    headers = _listed_headers(column(plan.headers, HEADERS))
    sizes: Int64s = lengths(value).astype(np.int64) + headers.sizes
    for part in (key, topic):
        sizes += lengths(part)
    return RejectedRows(
        key,
        value,
        headers,
        topic,
        _numbers(column(plan.partition, pa.int32()), pa.int32(), NO_PARTITION),
        _milliseconds(column(plan.timestamp, pa.int64())),
        sizes,
        error.reason,
        type(error).__name__,
    )


def _repeated(topic: str, count: int) -> pa.Array:
    return binary_of([topic.encode()]).take(indices(np.zeros(count, dtype=np.int32)))


def _numbers(column: pa.Array, kind: pa.DataType, missing: int) -> Int64s:
    dtype = np.int32 if kind == pa.int32() else np.int64
    values: Int64s = numbers(column.cast(kind), dtype).astype(np.int64)
    return np.where(null_mask(column), missing, values) if column.null_count else values


def _milliseconds(column: pa.Array) -> Int64s:
    # Computed with numbers, because Python's dates end with the year 9999.
    micros = _numbers(column, pa.int64(), NO_TIMESTAMP * _MICROS_PER_MILLI)
    return micros // _MICROS_PER_MILLI


def _listed_headers(column: pa.Array) -> OwnHeaders:
    """The rows' own headers. A null header, and a header without a key, are kept with an empty key. Bytes in
    keys that are not valid UTF-8 are replaced, because clients could not read the dead letter. Struct fields
    are taken by position, because Spark ignores the case of their names."""
    counts = lengths(column).astype(np.int64)
    names, contents = column.flatten().flatten()
    keys, values = as_binary(names), as_binary(contents)
    keys = pc.coalesce(keys, _NO_BYTES) if keys.null_count else keys
    if not is_utf8(names):
        keys = binary_of([key.decode(errors="replace").encode() for key in keys.to_pylist()])
    return OwnHeaders(counts, counts, _header_sizes(counts, keys, values), keys, values)


def _header_sizes(counts: Int64s, keys: pa.Array, values: pa.Array) -> Int64s:
    """The bytes that each row's headers take in a dead letter."""
    before = np.zeros(len(keys) + 1, dtype=np.int64)
    np.cumsum(np.add(lengths(keys), lengths(values), dtype=np.int64) + HEADER_OVERHEAD, out=before[1:])
    ends = np.cumsum(counts)
    sizes: Int64s = before[ends] - before[ends - counts]
    return sizes


def rows_of_records(
    bodies: bytes | bytearray,
    ends: Int64s,
    timestamps_ms: Int64s,
    partition: TopicPartition,
    reason: str,
    error: str,
    max_bytes: int,
) -> RejectedRows:
    """Decode records that a broker rejected. Record i is ``bodies[ends[i - 1]:ends[i]]``, from the length of
    its key on. Headers that cannot fit into a dead letter of ``max_bytes`` are left out."""
    data = np.frombuffer(bodies, dtype=np.uint8)
    starts = np.concatenate(([0], ends[:-1])).astype(np.int64)
    key, at = _field(data, starts)
    value, at = _field(data, at)
    topic = _repeated(partition.topic, len(ends))
    counts, at = varint_columns.read_column(data, at)
    return RejectedRows(
        key,
        value,
        _encoded_headers(data, at, counts, max_bytes // HEADER_OVERHEAD),
        topic,
        np.full(len(ends), partition.partition, dtype=np.int64),
        timestamps_ms,
        ends - starts + lengths(topic),
        reason,
        error,
    )


def _field(data: Bytes, at: Int64s) -> tuple[pa.Array, Int64s]:
    """The bytes after the length at each position (null for length -1), and the positions after them."""
    size, begin = varint_columns.read_column(data, at)
    end = begin + np.maximum(size, 0)
    return spans(data, begin, end, size < 0), end


def _encoded_headers(data: Bytes, at: Int64s, counts: Int64s, limit: int) -> OwnHeaders:
    kept = np.where(counts > limit, 0, counts)
    first = np.cumsum(kept) - kept
    # For each header, where its key and its value begin and end, and whether the value is null.
    edges = np.zeros((4, int(kept.sum())), dtype=np.int64)
    nulls = np.zeros(edges.shape[1], dtype=np.bool_)
    rows = np.flatnonzero(kept)
    at = at[rows]
    number = 0
    while len(rows):
        size, key = varint_columns.read_column(data, at)
        key_end = key + size
        size, value = varint_columns.read_column(data, key_end)
        at = value + np.maximum(size, 0)
        place = first[rows] + number
        edges[:, place] = key, key_end, value, at
        nulls[place] = size < 0
        number += 1
        left = kept[rows] > number
        rows, at = rows[left], at[left]
    keys, values = spans(data, edges[0], edges[1]), spans(data, edges[2], edges[3], nulls)
    sizes = np.where(kept < counts, counts * HEADER_OVERHEAD, _header_sizes(kept, keys, values))
    return OwnHeaders(counts, kept, sizes, keys, values)


def headers_with(
    kept: Int64s, keys: pa.Array, values: pa.Array, added: Sequence[tuple[bytes, bytes | pa.Array]]
) -> pa.ListArray:
    """A list column of headers. Row i gets the next ``kept[i]`` keys and values, and then ``added``. An added
    header has one value for all rows, or an array of values, in which null omits it."""
    count = len(kept)
    present = [
        np.ones(count, dtype=np.bool_) if isinstance(value, bytes) else ~null_mask(value)
        for _, value in added
    ]
    ends = np.zeros(count + 1, dtype=np.int32)
    np.cumsum(kept + sum(present, np.zeros(count, dtype=np.int64)), out=ends[1:])
    key_at = np.empty(int(ends[-1]), dtype=np.int32)
    value_at = np.empty(len(key_at), dtype=np.int32)
    # The added headers move each of the existing ones by this many places.
    place = np.repeat(ends[:-1] - (np.cumsum(kept) - kept), kept)
    place += np.arange(len(place))
    key_at[place] = value_at[place] = np.arange(len(place))
    place = ends[:-1] + kept
    sources, filled = [values], len(values)
    for number, ((_, value), shown) in enumerate(zip(added, present, strict=True)):
        key_at[place[shown]] = len(keys) + number
        is_one = isinstance(value, bytes)
        sources.append(binary_of([value]) if is_one else value)
        value_at[place[shown]] = filled if is_one else filled + np.flatnonzero(shown)
        filled += len(sources[-1])
        place += shown
    names = binary_of([name for name, _ in added]).cast(keys.type)
    entries = pa.StructArray.from_arrays(
        [
            pa.concat_arrays([keys, names]).take(indices(key_at)),
            pa.concat_arrays(sources).take(indices(value_at)),
        ],
        ["key", "value"],
    )
    starts = pa.Array.from_buffers(pa.int32(), count + 1, [None, pa.py_buffer(ends)])
    return pa.ListArray.from_arrays(starts, entries)
