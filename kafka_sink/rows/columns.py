"""Converts an Arrow batch to the parts of Kafka records, without a copy of offsets and data.

Only columns of a few bytes per row are copied: timestamps in milliseconds, partitions and topic numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

import numpy as np
import pyarrow as pa

from kafka_sink.errors import InvalidRowError, SchemaError
from kafka_sink.model import NO_TIMESTAMP
from kafka_sink.options import topic_problem
from kafka_sink.records.arrays import Bools, Int32s, Int64s, as_binary, is_utf8, lengths, null_mask, numbers
from kafka_sink.rows.column_plan import ColumnPlan

__all__ = ["NO_PARTITION", "ColumnPlan", "RowBatch", "extract"]

# The partition of a row without a partition. The partitioner chooses one.
NO_PARTITION = -1
_MICROS_PER_MILLI = 1000


@dataclass(frozen=True, slots=True)
class RowBatch:
    """The rows of one Arrow batch, as parts of records. Every array has ``num_rows`` entries.

    ``key`` and ``value`` are binary or large_binary. ``headers`` is a list or large_list of structs (key
    string, value binary), in which only lists and values may be null. ``value`` consists of the chunks that
    Spark sent, over the same buffers; the other parts are in one piece. A part that no row has is None.
    ``timestamps_ms`` is None if there is no such column; all rows then get the current time. ``partition`` is
    -1 for a row without a partition. ``topics`` are the distinct topics. Row i belongs to
    ``topics[topic_index[i]]``, or to the only topic if ``topic_index`` is None.
    """

    num_rows: int
    key: pa.Array | None
    value: tuple[pa.Array, ...]
    timestamps_ms: Int64s | None
    headers: pa.Array | None
    partition: Int32s | None
    topics: tuple[str, ...]
    topic_index: Int32s | None


def extract(plan: ColumnPlan, batch: pa.RecordBatch | pa.Table, now_ms: int) -> RowBatch:
    """The parts of a table's rows. The table has at least one row.

    ``now_ms`` is the wall clock in milliseconds since the epoch, which rows with a null timestamp get. Raises
    InvalidRowError, whose message has the column, the problem and the number of rows, not their content.
    """
    table = batch if isinstance(batch, pa.Table) else pa.Table.from_batches([batch])
    topics, topic_index = ((plan.topic,), None) if plan.topic is not None else _topics(plan, table)
    return RowBatch(
        table.num_rows,
        None if plan.key is None else _none_if_all_null(_binary_column(_whole(table, plan.key), "key")),
        tuple(_binary_column(chunk, "value") for chunk in table.column(plan.value).chunks),
        None if plan.timestamp is None else _timestamps(_whole(table, plan.timestamp), now_ms),
        None if plan.headers is None else _headers(_whole(table, plan.headers)),
        None if plan.partition is None else _partitions(_whole(table, plan.partition)),
        topics,
        topic_index,
    )


def _whole(table: pa.Table, index: int) -> pa.Array:
    chunks = table.column(index).chunks
    return chunks[0] if len(chunks) == 1 else pa.concat_arrays(chunks)


_AS_BINARY = {
    pa.string().id: pa.binary(),
    pa.large_string().id: pa.large_binary(),
    pa.binary().id: pa.binary(),
    pa.large_binary().id: pa.large_binary(),
    pa.null().id: pa.binary(),
}


def _binary_column(column: pa.Array, name: str) -> pa.Array:
    wanted = _AS_BINARY.get(column.type.id)
    if wanted is None:
        raise SchemaError(f"column '{name}' has the Arrow type {column.type}, but must be string or binary")
    if column.type.id == wanted.id:
        return column
    # Both ways share all buffers. A view takes a tenth of a cast's time, but the null type has none.
    return column.cast(wanted) if column.type == pa.null() else column.view(wanted)


def _none_if_all_null(column: pa.Array) -> pa.Array | None:
    return None if column.null_count == len(column) else column


def _timestamps(column: pa.Array, now_ms: int) -> Int64s:
    if not pa.types.is_timestamp(column.type) or column.type.unit != "us":
        raise SchemaError(f"column 'timestamp' has the Arrow type {column.type}, but must be in microseconds")
    # Round down, and not towards zero, so that instants before 1970 get the right millisecond.
    millis: Int64s = numbers(column, np.int64) // _MICROS_PER_MILLI
    if column.null_count:
        millis[null_mask(column)] = now_ms
    if len(millis) and int(millis.min()) < 0:
        wrong = (millis < 0) & (millis != NO_TIMESTAMP)
        if wrong.any():
            raise InvalidRowError(
                f"column 'timestamp' is before 1970 in {int(wrong.sum())} of {len(millis)} rows. "
                "Timestamp should always be non-negative or null.",
                wrong,
                "column 'timestamp' is before 1970",
            )
    return millis


def _partitions(column: pa.Array) -> Int32s | None:
    if column.null_count == len(column):
        return None
    partitions: Int32s = numbers(column.cast(pa.int32()), np.int32)
    wrong = partitions < 0
    if column.null_count:
        nulls = null_mask(column)
        wrong &= ~nulls
        partitions = np.where(nulls, np.int32(NO_PARTITION), partitions)
    if wrong.any():
        raise InvalidRowError(
            f"Invalid partition: column 'partition' is negative in {int(wrong.sum())} of {len(column)} rows. "
            "Partition number should always be non-negative or null.",
            wrong,
            "column 'partition' is negative",
        )
    return partitions


def _headers(column: pa.Array) -> pa.Array | None:
    if column.null_count == len(column):
        return None
    entries = column.flatten()
    if entries.null_count:
        _require_header_keys(column, null_mask(entries), "a null header")
    # Unlike field(), flatten() of a struct array is correct for slices in every version of pyarrow.
    keys = entries.flatten()[0]
    if keys.null_count:
        _require_header_keys(column, null_mask(keys), "a header without a key")
    if not is_utf8(keys):
        # Brokers accept such a key, but the protocol requires UTF-8, and clients fail to read the record.
        invalid = [key.decode(errors="replace").encode() != key for key in as_binary(keys).to_pylist()]
        _require_header_keys(column, np.array(invalid), "a header whose key is not valid UTF-8")
    return column


def _require_header_keys(column: pa.Array, entries: Bools, what: str) -> NoReturn:
    """Raise an InvalidRowError. ``entries`` marks the invalid ones among all rows' headers."""
    wrong = np.zeros(len(column), dtype=np.bool_)
    ends = np.cumsum(lengths(column))
    wrong[np.searchsorted(ends, np.flatnonzero(entries), side="right")] = True
    raise InvalidRowError(
        f"column 'headers' has {what} in {int(wrong.sum())} of {len(column)} rows. "
        "A header must have a key, in UTF-8.",
        wrong,
        f"column 'headers' has {what}",
    )


def _topics(plan: ColumnPlan, table: pa.Table) -> tuple[tuple[str, ...], Int32s | None]:
    if plan.topic_column is None:
        raise SchemaError("the plan has neither a topic nor a column of topics")
    column = _whole(table, plan.topic_column)
    if column.null_count:
        raise InvalidRowError(
            "The Kafka message data sent to the producer contains a null topic. Give such rows one, as in "
            "coalesce(topic, 'orders'): the option 'topic' would replace the topics of all rows "
            f"(column 'topic' is null in {column.null_count} of {len(column)} rows)",
            null_mask(column),
            "column 'topic' is null",
        )
    encoded = _binary_column(column, "topic").dictionary_encode()
    # A string from Spark may not be valid UTF-8. The replacement character makes such a topic's name invalid.
    topics = tuple(name.decode(errors="replace") for name in encoded.dictionary.to_pylist())
    index: Int32s = numbers(encoded.indices, np.int32)
    problems = {number: text for number, topic in enumerate(topics) if (text := topic_problem(topic))}
    if problems:
        wrong = np.isin(index, list(problems))
        problem = next(iter(problems.values()))
        raise InvalidRowError(
            f"column 'topic' has an invalid topic name in {int(wrong.sum())} of {len(index)} rows: "
            f"the name {problem}",
            wrong,
            f"the topic's name {problem}" if len(problems) == 1 else "the topic's name is invalid",
        )
    return topics, index if len(topics) > 1 else None
