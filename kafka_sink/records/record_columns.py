"""The columns of rows that become records, and the lengths of their entries."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from kafka_sink.records import arrays, varint_columns
from kafka_sink.records.arrays import Bytes, Int32s, Int64s, as_binary, grouped, indices, lengths, null_mask
from kafka_sink.varint import signed

Ints = Int32s | Int64s
# Up to this length, sums of three lengths fit in 32 bits.
_MAX_NARROW = 1 << 29


@dataclass(frozen=True, slots=True)
class ColumnLengths:
    """The lengths of ``count`` entries in bytes; 0 for null.

    ``each`` is None if all entries have ``largest`` bytes. Every length is between ``smallest`` and
    ``largest``. The numbers have 32 bits if their range allows it, which halves the memory traffic.
    """

    count: int
    smallest: int
    largest: int
    each: Ints | None = None

    @classmethod
    def of(cls, chunks: Sequence[pa.Array]) -> ColumnLengths:
        """The lengths of a column that consists of these string or binary arrays."""
        lengths_of_chunks = [arrays.lengths(chunk) for chunk in chunks]
        numbers: npt.NDArray[Any] = (
            lengths_of_chunks[0] if len(lengths_of_chunks) == 1 else np.concatenate(lengths_of_chunks)
        )
        if len(numbers) == 0:
            return cls(0, 0, 0)
        smallest, largest = int(numbers.min()), int(numbers.max())
        if smallest == largest:
            return cls(len(numbers), smallest, largest)
        return cls(len(numbers), smallest, largest, _as_narrow(numbers, largest))

    def take(self, order: npt.NDArray[np.integer]) -> ColumnLengths:
        """The lengths at these positions, which may be all or some."""
        each = None if self.each is None else self.each.take(order)
        return ColumnLengths(len(order), self.smallest, self.largest, each)

    def slice(self, start: int, stop: int) -> ColumnLengths:
        each = None if self.each is None else self.each[start:stop]
        return ColumnLengths(stop - start, self.smallest, self.largest, each)

    def numbers(self) -> Ints:
        return np.full(self.count, self.largest, dtype=np.int64) if self.each is None else self.each

    def with_prefix(self) -> ColumnLengths:
        """The lengths plus the sizes of their varints. A null's varint, -1, takes one byte."""
        if self.each is None:
            return self.plus(len(signed(self.largest)))
        widths = varint_columns.widths(self.each, self.smallest, self.largest)
        if isinstance(widths, int):
            return self.plus(widths)
        low, high = (size + len(signed(size)) for size in (self.smallest, self.largest))
        return ColumnLengths(self.count, low, high, _as_narrow(self.each, high) + widths)

    def plus(self, other: ColumnLengths | int) -> ColumnLengths:
        """Add another column's lengths entry by entry, or a constant."""
        if isinstance(other, int):
            other = ColumnLengths(self.count, other, other)
        low, high = self.smallest + other.smallest, self.largest + other.largest
        if self.each is None and other.each is None:
            return ColumnLengths(self.count, low, high)
        mine: Ints | int = self.largest if self.each is None else _as_narrow(self.each, high)
        theirs: Ints | int = other.largest if other.each is None else _as_narrow(other.each, high)
        each: Ints = np.add(mine, theirs)
        return ColumnLengths(self.count, low, high, each)


def _as_narrow(numbers: Ints, largest: int) -> Ints:
    if largest <= _MAX_NARROW:
        return numbers.astype(np.int32, copy=False)
    return numbers.astype(np.int64, copy=False)


# -- the headers of records, for whole columns: header count, then key and value of each header -------------


# A scalar taken from an array, because pa.scalar would import pandas (see ``arrays``).
_EMPTY = pa.Array.from_buffers(pa.binary(), 1, [None, pa.py_buffer(bytes(8)), pa.py_buffer(b"")])[0]


def encode_headers(headers: pa.Array) -> pa.Array:
    """The encoded headers of every row: header count, then key and value of each header.

    ``headers`` is list<struct<key: string, value: binary>>, as a list or large_list that may be a slice. A
    null list means no headers. Returns a binary array.

    Raises ``ValueError`` for a null header key, which Kafka does not allow.
    """
    counts = lengths(headers)
    flat = headers.flatten()
    # Unlike field(), StructArray.flatten applies the offset and the nulls of the struct array.
    keys, values = flat.flatten()
    if keys.null_count:
        raise ValueError("a header has a null key")
    count = varint_columns.column(counts)
    count_bytes = binary(varint_columns.lay_out([count], len(counts)), count.widths, len(counts))
    if len(flat) == 0:
        return count_bytes
    entries = _header_entries(as_binary(keys), as_binary(values))
    return join([count_bytes, grouped(entries, counts)])


def _header_entries(keys: pa.Array, values: pa.Array) -> pa.Array:
    """One binary entry for each header: key length, key, value length, value."""
    key_lengths, value_lengths = lengths(keys), lengths(values)
    key = varint_columns.column(key_lengths)
    shown = np.where(null_mask(values), -1, value_lengths) if values.null_count else value_lengths
    value = varint_columns.column(shown)
    before = binary(varint_columns.lay_out([key], len(keys)), key.widths, len(keys))
    between = binary(varint_columns.lay_out([value], len(keys)), value.widths, len(keys))
    return join([before, keys, between, values])


def join(parts: Sequence[pa.Array | pa.ChunkedArray]) -> pa.Array | pa.ChunkedArray:
    """The entries of these binary columns joined row by row. Nulls count as empty."""
    parts = [pc.coalesce(column, _EMPTY) if column.null_count else column for column in parts]
    return pc.binary_join_element_wise(*parts, _EMPTY)


def binary(data: Bytes, widths: npt.NDArray[np.integer] | int, count: int) -> pa.Array:
    """A binary array of ``count`` entries in sequence in ``data``. ``widths`` are their lengths."""
    if isinstance(widths, int):
        offsets = np.arange(count + 1, dtype=np.int32) * np.int32(widths)
    else:
        offsets = np.zeros(count + 1, dtype=np.int32)
        np.cumsum(widths, out=offsets[1:])
    return pa.Array.from_buffers(pa.binary(), count, [None, pa.py_buffer(offsets), pa.py_buffer(data)])


# -- the columns of rows that become records, and the order in which they are written -----------------------


# The attributes take 1 byte, the offset delta at most 3.
_FIXED_UPPER_BYTES = 1 + 3


@dataclass(frozen=True, slots=True)
class RecordColumns:
    """The columns of rows, and the order in which the rows are written.

    ``key``, ``headers`` (each row's encoded headers, with their count) and the chunks of ``value`` contain
    the rows in their original order. ``key`` and ``headers`` are None if no row has one. ``order`` is, for
    each row to be written, its position in these columns; None for all rows in their original order.

    The lengths are in writing order. ``payload`` is the size of key, value and headers with the varints of
    the key's and the value's length; without headers, their count is not included.
    """

    key: pa.Array | None
    value: tuple[pa.Array, ...]
    headers: pa.Array | None
    key_lengths: ColumnLengths
    value_lengths: ColumnLengths
    payload: ColumnLengths
    order: Int32s | None = None

    @classmethod
    def of(cls, key: pa.Array | None, value: Sequence[pa.Array], headers: pa.Array | None) -> RecordColumns:
        """Rows in their original order. ``headers`` has the type that ``encode_headers`` accepts."""
        value_lengths = ColumnLengths.of(value)
        key_lengths = ColumnLengths(value_lengths.count, 0, 0) if key is None else ColumnLengths.of([key])
        payload = key_lengths.with_prefix().plus(value_lengths.with_prefix())
        encoded = None
        if headers is not None:
            encoded = encode_headers(headers)
            payload = payload.plus(ColumnLengths.of([encoded]))
        return cls(key, tuple(value), encoded, key_lengths, value_lengths, payload)

    @property
    def has_nulls(self) -> bool:
        """Whether a key or value is null; False if no row has a key."""
        keyed = self.key is not None and self.key.null_count > 0
        return keyed or any(chunk.null_count for chunk in self.value)

    @property
    def body(self) -> ColumnLengths:
        """The size of each record without its two deltas and its own length field."""
        # This adds the attributes, and without headers also the header count.
        return self.payload.plus(2 if self.headers is None else 1)

    def upper_bounds(self, delta_bytes: int) -> ColumnLengths:
        """An upper bound of the size of each record, in any batch. ``delta_bytes`` is the size of the widest
        timestamp delta that is possible between these rows."""
        fixed = delta_bytes + _FIXED_UPPER_BYTES + (1 if self.headers is None else 0)
        # One number for the length field of all rows, because the bound need not be exact.
        return self.payload.plus(fixed + len(signed(self.payload.largest + fixed)))

    def ordered(self, order: npt.NDArray[np.integer]) -> RecordColumns:
        """The rows at these positions of the writing order, all or some. Only lengths are copied."""
        return replace(
            self,
            key_lengths=self.key_lengths.take(order),
            value_lengths=self.value_lengths.take(order),
            payload=self.payload.take(order),
            order=(order if self.order is None else self.order[order]).astype(np.int32, copy=False),
        )

    def slice(self, start: int, stop: int) -> RecordColumns:
        """Rows ``start`` to ``stop`` of the writing order. The columns of a small part are copied unless they
        are slices, so that encoding it does not touch the other rows."""
        count = stop - start
        if count == self.payload.count:
            return self
        part = replace(
            self,
            key_lengths=self.key_lengths.slice(start, stop),
            value_lengths=self.value_lengths.slice(start, stop),
            payload=self.payload.slice(start, stop),
            order=None if self.order is None else self.order[start:stop],
        )
        if part.order is None:
            return part._with_columns(lambda column: column.slice(start, count))
        if count > self.payload.count // 2:
            return part
        order = indices(part.order)
        return part._with_columns(lambda column: column.take(order))

    def _with_columns(self, pick: Callable[[Any], Any]) -> RecordColumns:
        """The columns after ``pick``, which returns their rows in writing order."""
        return replace(
            self,
            key=None if self.key is None else pick(self.key),
            value=tuple(pick(pa.chunked_array(self.value)).chunks),
            headers=None if self.headers is None else pick(self.headers),
            order=None,
        )
