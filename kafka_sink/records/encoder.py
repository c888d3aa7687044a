"""Encodes rows as V2 records, a whole table at once.

A record is: length, attributes (0), timestamp delta, offset delta, key length, key, value length,
value, header count and headers; every number a zigzag varint
(https://kafka.apache.org/documentation/#record). The numbers of all rows are laid out as columns of
bytes, then one C++ take interleaves them with keys and values: no Python per record.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from kafka_sink.records import varint
from kafka_sink.records.arrays import as_binary, indices, lengths, null_mask

# Keeps an offset delta within three bytes, so that a record's upper bound stays tight.
MAX_RECORDS_PER_BATCH = 1 << 20
# Attributes (1) + offset delta (3).
_FIXED_UPPER_BYTES = 1 + 3

_MAX_JOIN = int(np.iinfo(np.int32).max)
_ZERO = varint.same(0)
_ONE_ZERO_BYTE = pa.Array.from_buffers(
    pa.binary(), 1, [None, pa.py_buffer(np.array([0, 1], dtype=np.int32)), pa.py_buffer(b"\0")]
)
# A scalar taken from an array: pa.scalar of a Python value would import pandas (see arrays).
_EMPTY = pa.Array.from_buffers(pa.binary(), 1, [None, pa.py_buffer(bytes(8)), pa.py_buffer(b"")])[0]

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class RecordColumns:
    """The columns of rows, and the order in which they are written.

    ``key``, ``headers`` (each row's encoded header section, count included) and the chunks of ``value`` hold
    the rows as they came. ``key`` and ``headers`` are None if no row has one. ``order`` and the lengths
    (bytes, 0 for null) have one entry per row that is written, in writing order; ``order`` is the row's
    position in the columns. ``order`` None: all rows are written as they came.
    """

    key: pa.Array | None
    value: tuple[pa.Array, ...]
    headers: pa.Array | None
    key_lengths: Int64s
    value_lengths: Int64s
    header_lengths: Int64s | None
    order: npt.NDArray[np.int32] | None = None

    @classmethod
    def of(cls, key: pa.Array | None, value: Sequence[pa.Array], headers: pa.Array | None) -> RecordColumns:
        """Rows as they came; ``headers`` as ``encode_headers`` takes them."""
        value_lengths = np.concatenate([lengths(chunk) for chunk in value])
        key_lengths = np.zeros(len(value_lengths), dtype=np.int64) if key is None else lengths(key)
        encoded, header_lengths = (None, None) if headers is None else encode_headers(headers)
        return cls(key, tuple(value), encoded, key_lengths, value_lengths, header_lengths)

    def __len__(self) -> int:
        return len(self.value_lengths)

    def upper_bounds(self, delta_bytes: int) -> Int64s:
        """Bytes that each record takes at most, whatever batch it goes to.

        ``delta_bytes`` is the widest timestamp delta possible among the rows at hand.
        """
        bounds = self.key_lengths + self.value_lengths
        bounds += 1 if self.header_lengths is None else self.header_lengths
        bounds += _length_width(self.key_lengths) + _length_width(self.value_lengths)
        bounds += delta_bytes + _FIXED_UPPER_BYTES
        bounds += _length_width(bounds)
        return bounds

    def ordered(self, order: npt.NDArray[np.integer]) -> RecordColumns:
        """The same rows in another order; only the lengths move."""
        return replace(
            self,
            key_lengths=self.key_lengths[order],
            value_lengths=self.value_lengths[order],
            header_lengths=None if self.header_lengths is None else self.header_lengths[order],
            order=(order if self.order is None else self.order[order]).astype(np.int32, copy=False),
        )

    def slice(self, start: int, stop: int) -> RecordColumns:
        """Rows ``start`` to ``stop`` in writing order. A small part is gathered, so that encoding it does
        not touch the rest."""
        count = stop - start
        if count == len(self):
            return self
        order = np.arange(start, stop, dtype=np.int32) if self.order is None else self.order[start:stop]
        part = replace(
            self,
            key_lengths=self.key_lengths[start:stop],
            value_lengths=self.value_lengths[start:stop],
            header_lengths=None if self.header_lengths is None else self.header_lengths[start:stop],
            order=order,
        )
        return part if count > len(self) // 2 else part._gathered(indices(order))

    def _gathered(self, order: pa.Array) -> RecordColumns:
        taken = pa.chunked_array(self.value).take(order)
        return replace(
            self,
            key=None if self.key is None else self.key.take(order),
            value=tuple(taken.chunks),
            headers=None if self.headers is None else self.headers.take(order),
            order=None,
        )


@dataclass(frozen=True, slots=True)
class EncodedRecords:
    """Records back to back: row i is ``data[ends[i - 1]:ends[i]]`` (from 0 for the first row)."""

    data: memoryview
    ends: Int64s


def varint_widths(values: Int64s) -> Int64s:
    """Bytes of each number as a zigzag varint."""
    return np.broadcast_to(varint.column(values).widths, len(values)).astype(np.int64)


def _length_width(lengths: Int64s) -> int:
    """The widest varint any of these lengths needs; one number, because the bound need not be tight."""
    longest = int(lengths.max()) if len(lengths) else 0
    return len(varint.scalar(longest))


def encode(rows: RecordColumns, offset_deltas: Int64s, timestamp_deltas: Int64s) -> EncodedRecords:
    """Encodes every row as one V2 record.

    Parameters are per row: ``offset_deltas`` count from the batch's first record and
    ``timestamp_deltas`` are milliseconds from its base timestamp (negative where rows go back in time).
    """
    count = len(rows)
    if count == 0:
        return EncodedRecords(memoryview(b""), np.zeros(0, dtype=np.int64))
    sizes, prefix, middle = _number_columns(rows, offset_deltas, timestamp_deltas)
    ends = np.cumsum(sizes, dtype=np.int64)
    if ends[-1] > _MAX_JOIN:
        raise OverflowError(f"{count} rows encode to {ends[-1]} bytes; a table stays below 2 GiB")
    joined = _interleave(rows, prefix, middle)
    # Without headers a record's last byte, its header count of 0, is the first of the next record's prefix.
    first = 1 if rows.headers is None else 0
    return EncodedRecords(memoryview(joined)[first : first + int(ends[-1])], ends)


def _interleave(rows: RecordColumns, prefix: pa.Array, middle: pa.Array | None) -> pa.Buffer:
    """The bytes of all records: one take over one array of all their parts.

    This orders the rows and joins their parts in one pass. Measured: 39 ns a row with the making of the array
    and the index; take and then binary_join_element_wise took 76.
    """
    count = len(rows)
    here: npt.NDArray[np.int32] = np.arange(count, dtype=np.int32)
    there = here if rows.order is None else rows.order
    sources: list[pa.Array] = [prefix]
    places = [here]
    filled = count

    def add(arrays: list[pa.Array], index: npt.NDArray[np.int32]) -> None:
        nonlocal filled
        sources.extend(arrays)
        places.append(index + np.int32(filled))
        filled += sum(len(array) for array in arrays)

    if rows.key is not None and middle is not None:
        add([as_binary(rows.key)], there)
        add([middle], here)
    add([as_binary(chunk) for chunk in rows.value], there)
    if rows.headers is not None:
        add([rows.headers], there)
        index = np.stack(places, axis=1).reshape(-1)
    else:
        index = np.empty(count * len(places) + 1, dtype=np.int32)
        matrix = index[:-1].reshape(count, len(places))
        for column, place in enumerate(places):
            matrix[:, column] = place
        index[-1] = filled
        sources.append(_ONE_ZERO_BYTE)
    return pc.take(pa.concat_arrays(sources), indices(index), boundscheck=False).buffers()[2]


def _number_columns(
    rows: RecordColumns, offset_deltas: Int64s, timestamp_deltas: Int64s
) -> tuple[Int64s, pa.Array, pa.Array | None]:
    """Record sizes, the bytes before the key, and those between key and value (None without keys)."""
    count = len(rows)
    timestamps = varint.column(timestamp_deltas)
    offsets = varint.column(offset_deltas)
    key = _length_column(None if rows.key is None else [rows.key], rows.key_lengths, rows.order)
    value = _length_column(rows.value, rows.value_lengths, rows.order)
    prefix_width = timestamps.widths + offsets.widths + key.widths + 1
    body = rows.value_lengths + prefix_width
    body += value.widths
    body += rows.key_lengths
    body += 1 if rows.header_lengths is None else rows.header_lengths
    length = varint.column(body)
    body += length.widths
    prefix_width = prefix_width + length.widths
    numbers = [length, _ZERO, timestamps, offsets, key]
    if rows.headers is None:
        # The header count of the record before.
        numbers.insert(0, _ZERO)
        prefix_width = prefix_width + 1
    if rows.key is None:
        prefix = _binary(varint.lay_out([*numbers, value], count), prefix_width + value.widths, count)
        return body, prefix, None
    middle = _binary(varint.lay_out([value], count), value.widths, count)
    return body, _binary(varint.lay_out(numbers, count), prefix_width, count), middle


def _length_column(
    chunks: Sequence[pa.Array] | None, lengths: Int64s, order: npt.NDArray[np.int32] | None = None
) -> varint.Column:
    """A length field, -1 for null. ``order`` is the position of each length's row in the chunks."""
    if chunks is None:
        return varint.same(-1)
    if any(chunk.null_count for chunk in chunks):
        nulls = np.concatenate([null_mask(chunk) for chunk in chunks])
        lengths = np.where(nulls if order is None else nulls[order], np.int64(-1), lengths)
    return varint.column(lengths)


def encode_headers(headers: pa.Array) -> tuple[pa.Array, Int64s]:
    """The header section of every row: count, then key and value of each header.

    ``headers`` is list<struct<key: string, value: binary>> (list or large_list, sliced or not); a null
    list is no header. Returns a binary array and its lengths in bytes.

    Raises ``ValueError`` for a null header key, which Kafka does not allow.
    """
    counts = lengths(headers)
    flat = headers.flatten()
    # StructArray.flatten applies the parent's offset and nulls; field() does not.
    keys, values = flat.flatten()
    if keys.null_count:
        raise ValueError("a header has a null key")
    count = varint.column(counts)
    count_bytes = _binary(varint.lay_out([count], len(counts)), count.widths, len(counts))
    count_widths = np.broadcast_to(count.widths, len(counts)).astype(np.int64)
    if len(flat) == 0:
        return count_bytes, count_widths
    entries, entry_lengths = _header_entries(as_binary(keys), as_binary(values))
    ends = np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(counts)))
    bytes_at = np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(entry_lengths)))
    per_row = np.diff(bytes_at[ends])
    grouped = pa.Array.from_buffers(
        pa.binary(),
        len(counts),
        [None, pa.py_buffer(bytes_at[ends].astype(np.int32)), entries.buffers()[2]],
    )
    return _join([count_bytes, grouped]), count_widths + per_row


def _header_entries(keys: pa.Array, values: pa.Array) -> tuple[pa.Array, Int64s]:
    """One binary per header: key length, key, value length, value."""
    key_lengths, value_lengths = lengths(keys), lengths(values)
    key, value = _length_column([keys], key_lengths), _length_column([values], value_lengths)
    before = _binary(varint.lay_out([key], len(keys)), key.widths, len(keys))
    between = _binary(varint.lay_out([value], len(keys)), value.widths, len(keys))
    joined = _join([before, keys, between, _no_nulls(values)])
    return joined, key_lengths + value_lengths + key.widths + value.widths


def _no_nulls(column: pa.Array) -> pa.Array:
    return pc.coalesce(column, _EMPTY) if column.null_count else column


def _join(parts: list[pa.Array]) -> pa.Array:
    """Concatenates element by element."""
    return pc.binary_join_element_wise(*parts, _EMPTY)


def _binary(data: npt.NDArray[np.uint8], widths: npt.NDArray[np.integer] | int, count: int) -> pa.Array:
    if isinstance(widths, int):
        offsets = np.arange(count + 1, dtype=np.int32) * np.int32(widths)
    else:
        offsets = np.zeros(count + 1, dtype=np.int32)
        np.cumsum(widths, out=offsets[1:])
    return pa.Array.from_buffers(pa.binary(), count, [None, pa.py_buffer(offsets), pa.py_buffer(data)])
