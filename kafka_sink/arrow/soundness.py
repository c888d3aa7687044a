"""Checks that a column's buffers hold together, before anything reads memory through its offsets.

Arrow data may come from any program. Arrow checks none of it on the way, and an offset beyond its buffer ends
the process. Texts that are not valid UTF-8 are no danger here, and checking them would cost 9 ns a row; these
checks cost 0.5 ns for texts and bytes of 110 bytes, and 3 ns for views.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from kafka_sink.arrow.pieces import dictionary_index, is_view, view_parts
from kafka_sink.errors import InvalidRowError
from kafka_sink.records.arrays import has_byte_offsets, null_mask, offsets

_BINARY, _LARGE_BINARY = pa.binary(), pa.large_binary()
_LARGE = (pa.large_string().id, pa.large_binary().id)
# Bytes of a view that lie in itself. A longer one points to a buffer.
_MAX_INLINE = 12


def require_sound(column: pa.Array, name: str) -> None:
    """Raise InvalidRowError for a column of which an offset, a length or an index is wrong."""
    try:
        _check(column)
    except pa.ArrowException as error:
        row = _first_damaged(column)
        place = "" if row is None else f" at row {row:,} of its batch, counted from 0"
        raise InvalidRowError(
            f"column '{name}' is damaged{place} ({error}): find out what made it, with "
            "validate(full=True) of pyarrow"
        ) from None


def _first_damaged(column: pa.Array) -> int | None:
    """None if it is not a row, as when the dictionary is damaged."""
    sound, damaged = -1, len(column)
    while damaged - sound > 1:
        middle = (sound + damaged) // 2
        try:
            _check(column.slice(0, middle))
        except pa.ArrowException:
            damaged = middle
        else:
            sound = middle
    return damaged - 1 if damaged else None


def _check(column: pa.Array) -> None:
    """Raise ArrowInvalid."""
    kind = column.type
    if has_byte_offsets(kind):
        # Binary, as Arrow would check the UTF-8 of strings.
        column.view(_LARGE_BINARY if kind.id in _LARGE else _BINARY).validate(full=True)
        return
    column.validate()
    if isinstance(kind, pa.BaseExtensionType):
        _check(column.storage)
    elif is_view(kind):
        if not _views_are_sound(column):
            # Nulls may have any bytes, and this check of Arrow's knows them.
            column.view(pa.binary_view()).validate(full=True)
    elif pa.types.is_dictionary(kind):
        index, count = dictionary_index(column), len(column.dictionary)
        if len(index) and (index.min() < 0 or index.max() >= count):
            # A null may have any index.
            wrong = ((index < 0) | (index >= count)) & ~null_mask(column.indices)
            if wrong.any():
                raise pa.ArrowInvalid(f"index {index[wrong][0]} in a dictionary of {count:,}")
        _check(column.dictionary)
    else:
        _check_children(column)


def _views_are_sound(column: pa.Array) -> bool:
    """Whether all views point into their buffers. Arrow's own check also reads what they point to, which
    costs 7 ns a row."""
    views = view_parts(column)
    if not len(views):
        return True
    shortest, longest = int(views[:, 0].min()), int(views[:, 0].max())
    if shortest < 0 or longest <= _MAX_INLINE:
        return shortest >= 0
    if shortest <= _MAX_INLINE:
        views = views[views[:, 0] > _MAX_INLINE]
    held = np.array([buffer.size for buffer in column.buffers()[2:]], dtype=np.int64)
    places, starts = views[:, 2], views[:, 3]
    if not 0 <= int(places.min()) <= int(places.max()) < len(held) or int(starts.min()) < 0:
        return False
    ends = np.add(starts, views[:, 0], dtype=np.int64)
    return bool(np.all(ends <= (held[0] if len(held) == 1 else held[places])))


def _check_children(column: pa.Array) -> None:
    kind = column.type
    if pa.types.is_struct(kind):
        for number in range(kind.num_fields):
            _check(column.field(number))
    elif pa.types.is_fixed_size_list(kind):
        _check(column.values)
    elif pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_map(kind):
        ends = offsets(column)
        children = [column.keys, column.items] if pa.types.is_map(kind) else [column.values]
        size = min(map(len, children))
        if int(ends[0]) < 0 or int(ends[-1]) > size or np.any(ends[1:] < ends[:-1]):
            raise pa.ArrowInvalid(f"the offsets of lists do not ascend from 0 to at most {size:,}")
        for child in children:
            _check(child.slice(int(ends[0]), int(ends[-1] - ends[0])))
