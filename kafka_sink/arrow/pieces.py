"""Cuts batches into pieces that stay small when their views and dictionaries become bytes.

A view or a dictionary has a value once for any number of rows: 16,000 rows that share a value of 60 kB take
1 GB as bytes. The bytes of each row are known from the buffers, so batches are cut before they are converted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from kafka_sink.errors import RecordTooLargeError
from kafka_sink.records.arrays import (
    Int32s,
    Int64s,
    has_byte_offsets,
    indices,
    null_mask,
    numbers,
    offsets,
    with_nulls,
)

# Rows that are converted at once. Measured with 110-byte strings of Polars: 15 ns a row, and 58 for 65,536,
# which fall out of the processor's caches.
CONVERTED_ROWS = 16_384
# Bytes that are converted at once: as large as the largest tables of rows/rebatching.py.
_CONVERTED_BYTES = 8 << 20
# By id: to compare a type, Arrow prints it first.
_VIEWS = (pa.string_view().id, pa.binary_view().id)
_VIEW = np.dtype(("<i4", 4))
# Bytes of a view that lie in itself. A longer one points to a buffer.
MAX_INLINE = 12
# Of a column whose entries lie in any order, these few show it.
_PROBED = 8
_MAX_INT32 = np.iinfo(np.int32).max


def is_view(kind: pa.DataType) -> bool:
    """Whether entries lie anywhere in the column's buffers, and may share their bytes."""
    return kind.id in _VIEWS


def may_share(kind: pa.DataType) -> bool:
    """Whether entries of a column of this type, at any depth, may share their bytes."""
    if isinstance(kind, pa.BaseExtensionType):
        return may_share(kind.storage_type)
    if pa.types.is_map(kind):
        return may_share(kind.key_type) or may_share(kind.item_type)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return may_share(kind.value_type)
    if pa.types.is_struct(kind):
        return any(may_share(field.type) for field in kind)
    return is_view(kind) or bool(pa.types.is_dictionary(kind))


def pieces(batch: pa.RecordBatch, places: Sequence[int]) -> Iterator[pa.RecordBatch]:
    """The batch in slices of CONVERTED_ROWS rows, or fewer if the columns at these places are large."""
    for start in range(0, max(1, batch.num_rows), CONVERTED_ROWS):
        piece = batch.slice(start, CONVERTED_ROWS)
        columns = [piece.column(place) for place in places]
        # Nearly always enough, and cheaper than the bytes of each row.
        if sum(map(_longest, columns)) * piece.num_rows <= _CONVERTED_BYTES:
            yield piece
        else:
            yield from _cut(piece, columns)


def _longest(column: pa.Array) -> float:
    """At least the bytes of the longest entry; infinite where it would cost too much to know."""
    kind = column.type
    if is_view(kind):
        return int(view_parts(column)[:, 0].max(initial=0))
    if has_byte_offsets(kind):
        return int(np.diff(offsets(column)).max(initial=0))
    if pa.types.is_fixed_size_binary(kind):
        return int(kind.byte_width)
    if pa.types.is_dictionary(kind) and len(column.dictionary) <= len(column):
        return _longest(column.dictionary)
    return math.inf if may_share(kind) else 0


def _cut(piece: pa.RecordBatch, columns: Sequence[pa.Array]) -> Iterator[pa.RecordBatch]:
    """Slices of nearly equal size. A row that is too large for a slice is one of its own."""
    sizes: Int64s = np.zeros(piece.num_rows, dtype=np.int64)
    for column in columns:
        sizes += entry_bytes(column)
    total = max(1, int(sizes.sum()))
    if int(sizes.max()) > _MAX_INT32:
        raise RecordTooLargeError(
            f"a row has {int(sizes.max()):,} bytes, which is more than kafka.max.request.size can be set to"
        )
    before = np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(sizes)))
    even = total // -(-total // _CONVERTED_BYTES) + int(sizes.max())
    start = 0
    while start < piece.num_rows:
        end = before[start] + min(even, _CONVERTED_BYTES)
        stop = max(start + 1, int(np.searchsorted(before, end, side="right")) - 1)
        yield piece.slice(start, stop - start)
        start = stop


def entry_bytes(column: pa.Array, picked: Int64s | None = None) -> Int64s:
    """The bytes of texts and binaries in each entry, at any depth; 0 for a null and for other types.

    ``picked``: the places of the entries. Only these cost time, unless they are lists.
    """
    kind = column.type
    if isinstance(kind, pa.BaseExtensionType):
        return entry_bytes(column.storage, picked)
    found: Int64s
    if has_byte_offsets(kind):
        ends = offsets(column)
        found = (ends[1:] - ends[:-1] if picked is None else ends[picked + 1] - ends[picked]).astype(np.int64)
    elif is_view(kind):
        sizes = view_parts(column)[:, 0]
        found = (sizes if picked is None else sizes[picked]).astype(np.int64)
    elif pa.types.is_dictionary(kind):
        return _dictionary_bytes(column, picked)
    elif pa.types.is_fixed_size_binary(kind):
        found = np.full(len(column) if picked is None else len(picked), kind.byte_width, dtype=np.int64)
    else:
        found = _nested_bytes(column)
        return found if picked is None else found[picked]
    if column.null_count:
        nulls = null_mask(column)
        found[nulls if picked is None else nulls[picked]] = 0
    return found


def view_parts(column: pa.Array) -> Int32s:
    """Four numbers of each entry, any numbers for a null: first its length in bytes; for one of more than 12
    bytes also, as the third and the fourth, its buffer and its place in that."""
    return numbers(column, _VIEW)


def views_as_binary(column: pa.Array) -> pa.Array:
    """The views of a sound piece as a binary array.

    Most libraries write the entries of a new column one after the other. Views of such entries need no copy:
    with 110 bytes each this takes 3 ns a row, and a copy 13.
    """
    views = view_parts(column)
    if len(views) and not column.null_count and _are_neighbours(views[:_PROBED]) and _are_neighbours(views):
        last = int(views[-1, 3]) + int(views[-1, 0])
        if last <= _MAX_INT32:
            ends = np.append(views[:, 3], np.int32(last))
            buffers = [None, pa.py_buffer(ends), column.buffers()[2 + int(views[0, 2])]]
            return pa.Array.from_buffers(pa.binary(), len(views), buffers)
    return column.cast(pa.binary())


def _are_neighbours(views: Int32s) -> bool:
    """Whether the entries lie one after the other in the same buffer."""
    sizes, buffers, starts = views[:, 0], views[:, 2], views[:, 3]
    if int(sizes.min()) <= MAX_INLINE or int(buffers.min()) != int(buffers.max()):
        return False
    # A sum that wraps is below 0, which no place is.
    return bool(np.array_equal(starts[:-1] + sizes[:-1], starts[1:]))


def dictionary_index(column: pa.DictionaryArray) -> npt.NDArray[np.integer]:
    """The index of each entry, which is any number for a null."""
    kind = column.type.index_type
    sign = "i" if pa.types.is_signed_integer(kind) else "u"
    return numbers(column.indices, f"{sign}{kind.bit_width // 8}")


def decoded(column: pa.DictionaryArray, convert: Callable[[pa.Array], pa.Array] | None = None) -> pa.Array:
    """The entries of a piece without their dictionary. ``convert``: of views, of which Arrow takes none."""
    dictionary, places = column.dictionary, column.indices
    if convert is None:
        return dictionary.take(places)
    if int(entry_bytes(dictionary).sum()) > _CONVERTED_BYTES:
        # Only the entries that the piece uses, in runs of neighbours.
        index, nulls = dictionary_index(column).astype(np.int64), null_mask(column.indices)
        used = np.unique(np.where(nulls, 0, index))
        runs = np.split(used, np.flatnonzero(np.diff(used) > 1) + 1)
        dictionary = pa.concat_arrays([convert(dictionary.slice(run[0], len(run))) for run in runs])
        places = with_nulls(indices(np.searchsorted(used, index)), nulls)
    else:
        dictionary = convert(dictionary)
    return dictionary.take(places)


def _dictionary_bytes(column: pa.DictionaryArray, picked: Int64s | None) -> Int64s:
    index, nulls = dictionary_index(column).astype(np.int64), null_mask(column.indices)
    if picked is not None:
        index, nulls = index[picked], nulls[picked]
    if not len(column.dictionary):
        return np.zeros(len(index), dtype=np.int64)
    return np.where(nulls, 0, entry_bytes(column.dictionary, np.where(nulls, 0, index)))


def _nested_bytes(column: pa.Array) -> Int64s:
    kind, found = column.type, np.zeros(len(column), dtype=np.int64)
    if pa.types.is_struct(kind):
        for number in range(kind.num_fields):
            found += entry_bytes(column.field(number))
    elif pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_map(kind):
        ends = offsets(column).astype(np.int64)
        first, count = int(ends[0]), int(ends[-1] - ends[0])
        children = [column.keys, column.items] if pa.types.is_map(kind) else [column.values]
        for child in children:
            before = np.concatenate(([0], np.cumsum(entry_bytes(child.slice(first, count)))))
            found += before[ends[1:] - first] - before[ends[:-1] - first]
    elif pa.types.is_fixed_size_list(kind):
        size = kind.list_size
        child = column.values.slice(column.offset * size, len(column) * size)
        found += entry_bytes(child).reshape(len(column), size).sum(axis=1)
    return found
