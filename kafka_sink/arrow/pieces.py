"""Cuts batches into pieces that stay small when their views and dictionaries are converted to bytes.

Any number of rows can share one value of a view or dictionary: 16,000 rows that share a value of 60 kB become
1 GB of bytes. The buffers show the bytes of each row, so batches are cut before they are converted.
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

# This many rows are converted at once. With 110-byte strings of Polars this took 15 ns per row. It took 58 ns
# with 65,536 rows, which do not fit in the processor's caches.
CONVERTED_ROWS = 16_384
# At most this many bytes are converted at once, as many as in the largest tables of rows/rebatching.py.
_CONVERTED_BYTES = 8 << 20
# Types are compared by id, because Arrow compares types by their text.
_VIEWS = (pa.string_view().id, pa.binary_view().id)
_VIEW = np.dtype(("<i4", 4))
# A view of at most this many bytes contains them itself. A longer one points to a buffer.
MAX_INLINE = 12
# This many entries are enough to notice that a column's entries lie in any order.
_PROBED = 8
_MAX_INT32 = np.iinfo(np.int32).max


def is_view(kind: pa.DataType) -> bool:
    """Whether entries lie anywhere in the column's buffers and may share their bytes."""
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
    """Return slices of CONVERTED_ROWS rows, or of fewer rows if the columns at these positions are large."""
    for start in range(0, max(1, batch.num_rows), CONVERTED_ROWS):
        piece = batch.slice(start, CONVERTED_ROWS)
        columns = [piece.column(place) for place in places]
        # This estimate is nearly always enough, and cheaper than the bytes of each row.
        if sum(map(_longest, columns)) * piece.num_rows <= _CONVERTED_BYTES:
            yield piece
        else:
            yield from _cut(piece, columns)


def _longest(column: pa.Array) -> float:
    """Return an upper bound of an entry's bytes, or infinity if it would cost too much to compute."""
    kind = column.type
    if not len(column):
        return 0
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
    """Return slices of nearly equal size. A row that is too large for a slice has one of its own."""
    sizes: Int64s = np.zeros(piece.num_rows, dtype=np.int64)
    for column in columns:
        sizes += entry_bytes(column)
    total = max(1, int(sizes.sum()))
    if int(sizes.max()) > _MAX_INT32:
        raise RecordTooLargeError(
            f"a row has {int(sizes.max()):,} bytes, more than the largest value of kafka.max.request.size"
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
    """Return the bytes of texts and binaries in each entry, at any depth. They are 0 for nulls and other
    types.

    ``picked``: the positions of entries. Other entries cost no time, unless the column has lists or structs.
    """
    kind = column.type
    if isinstance(kind, pa.BaseExtensionType):
        return entry_bytes(column.storage, picked)
    sizes: Int64s
    if has_byte_offsets(kind):
        ends = offsets(column)
        sizes = (ends[1:] - ends[:-1] if picked is None else ends[picked + 1] - ends[picked]).astype(np.int64)
    elif is_view(kind):
        lengths = view_parts(column)[:, 0]
        sizes = (lengths if picked is None else lengths[picked]).astype(np.int64)
    elif pa.types.is_dictionary(kind):
        return _dictionary_bytes(column, picked)
    elif pa.types.is_fixed_size_binary(kind):
        sizes = np.full(len(column) if picked is None else len(picked), kind.byte_width, dtype=np.int64)
    else:
        sizes = _nested_bytes(column)
        return sizes if picked is None else sizes[picked]
    if column.null_count:
        nulls = null_mask(column)
        sizes[nulls if picked is None else nulls[picked]] = 0
    return sizes


def view_parts(column: pa.Array) -> Int32s:
    """Return four numbers for each entry: its length in bytes, and for one of more than 12 bytes, as the
    third and fourth, its buffer and its position in that. The numbers of a null are arbitrary."""
    return numbers(column, _VIEW)


def views_as_binary(column: pa.Array) -> pa.Array:
    """Return the views of a sound piece as a binary array.

    Most libraries write the entries of a new column one after the other. Views of such entries need no copy:
    with 110 bytes each this takes 3 ns per row, and a copy takes 13 ns.
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
    """Whether the entries lie one after the other in one buffer."""
    sizes, buffers, starts = views[:, 0], views[:, 2], views[:, 3]
    if int(sizes.min()) <= MAX_INLINE or int(buffers.min()) != int(buffers.max()):
        return False
    # A sum that overflows is negative, so it differs from every position.
    return bool(np.array_equal(starts[:-1] + sizes[:-1], starts[1:]))


def dictionary_index(column: pa.DictionaryArray) -> npt.NDArray[np.integer]:
    """Return the index of each entry. The index of a null is arbitrary."""
    kind = column.type.index_type
    sign = "i" if pa.types.is_signed_integer(kind) else "u"
    return numbers(column.indices, f"{sign}{kind.bit_width // 8}")


def decoded(column: pa.DictionaryArray, convert: Callable[[pa.Array], pa.Array] | None = None) -> pa.Array:
    """Return the entries of a piece without their dictionary. ``convert`` is needed for views, because Arrow
    cannot take entries of views."""
    dictionary, places = column.dictionary, column.indices
    if convert is None:
        return dictionary.take(places)
    if int(entry_bytes(dictionary).sum()) > _CONVERTED_BYTES:
        # Convert only the entries that the piece uses, in runs of neighbours.
        index, nulls = dictionary_index(column).astype(np.int64), null_mask(column.indices)
        used = np.unique(np.where(nulls, 0, index))
        runs = np.split(used, np.flatnonzero(np.diff(used) > 1) + 1)
        # The only run is empty if the piece has no entries.
        starts = [int(run[0]) if len(run) else 0 for run in runs]
        converted = [
            convert(dictionary.slice(start, len(run))) for start, run in zip(starts, runs, strict=True)
        ]
        dictionary = pa.concat_arrays(converted)
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
    kind, sizes = column.type, np.zeros(len(column), dtype=np.int64)
    if pa.types.is_struct(kind):
        for number in range(kind.num_fields):
            sizes += entry_bytes(column.field(number))
    elif pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_map(kind):
        ends = offsets(column).astype(np.int64)
        first, count = int(ends[0]), int(ends[-1] - ends[0])
        children = [column.keys, column.items] if pa.types.is_map(kind) else [column.values]
        for child in children:
            before = np.concatenate(([0], np.cumsum(entry_bytes(child.slice(first, count)))))
            sizes += before[ends[1:] - first] - before[ends[:-1] - first]
    elif pa.types.is_fixed_size_list(kind):
        size = kind.list_size
        child = column.values.slice(column.offset * size, len(column) * size)
        sizes += entry_bytes(child).reshape(len(column), size).sum(axis=1)
    return sizes
