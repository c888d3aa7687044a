"""Converts Arrow arrays to numpy arrays and back through their buffers. Only it reads Arrow's offsets.

``pa.array`` and ``Array.to_numpy`` are avoided: if pandas is installed, they import it to recognise its
objects, which would cost every Python worker 160 ms of CPU time and 40 MB for nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

Bools = npt.NDArray[np.bool_]
Bytes = npt.NDArray[np.uint8]
Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]
UInt32s = npt.NDArray[np.uint32]
UInt64s = npt.NDArray[np.uint64]
Offsets = npt.NDArray[np.signedinteger[Any]]
LengthArray = Int32s | Int64s
# Types are identified by id, because Arrow builds a type's text before it compares or hashes the type.
_BYTES = {kind.id for kind in (pa.binary(), pa.string(), pa.large_binary(), pa.large_string())}
_BINARY = pa.binary().id
_NULL = pa.null().id
_FIRST_NOT_ASCII = 0x80
_LARGE = {kind.id for kind in (pa.large_binary(), pa.large_string(), pa.large_list(pa.null()))}


def null_mask(array: pa.Array) -> Bools:
    """True for each null entry. For all types but union and run-end types."""
    if array.type.id == _NULL:
        # Arrow's null type has no bitmap, or a wrong one if ``take`` made it in a struct.
        return np.ones(len(array), dtype=np.bool_)
    bitmap = array.buffers()[0]
    if bitmap is None:
        return np.zeros(len(array), dtype=np.bool_)
    first, skipped = divmod(array.offset, 8)
    size = (skipped + len(array) + 7) // 8
    bits = np.unpackbits(np.frombuffer(bitmap, np.uint8, size, first), bitorder="little")
    mask: Bools = bits[skipped : skipped + len(array)] == 0
    return mask


def numbers(array: pa.Array, dtype: Any) -> npt.NDArray[Any]:
    """A view of a fixed-width array's values, of type ``dtype``. Null entries have arbitrary values."""
    if len(array) == 0:
        return np.zeros(0, dtype=dtype)
    wide = np.dtype(dtype)
    return np.frombuffer(array.buffers()[1], wide, len(array), array.offset * wide.itemsize)


def indices(rows: npt.NDArray[np.integer]) -> pa.Array:
    """Row numbers below 2^31 as an Arrow array for ``take``. 32-bit numbers are not copied."""
    narrow = np.ascontiguousarray(rows, dtype=np.int32)
    return pa.Array.from_buffers(pa.int32(), len(narrow), [None, pa.py_buffer(narrow)])


def offsets(array: pa.Array) -> Offsets:
    """The ``len(array) + 1`` ascending offsets of a string, binary or list array, without a copy.

    Entry i has the bytes (or the elements of a list) from ``offsets[i]`` to ``offsets[i + 1]``. The array may
    be a large type or a slice.
    """
    wide: np.dtype[np.signedinteger[Any]] = np.dtype(np.int64 if array.type.id in _LARGE else np.int32)
    if len(array) == 0:
        return np.zeros(1, dtype=wide)
    return np.frombuffer(array.buffers()[1], wide, len(array) + 1, array.offset * wide.itemsize)


def has_byte_offsets(kind: pa.DataType) -> bool:
    """Whether the ``offsets`` of an array of this type count bytes."""
    return kind.id in _BYTES


def lengths(array: pa.Array) -> LengthArray:
    """The length of each entry of an array with ``offsets``, in bytes or in elements of a list; 0 for null.
    The numbers are as wide as the offsets."""
    ends = offsets(array)
    sizes: LengthArray = np.subtract(ends[1:], ends[:-1])
    if array.null_count:
        # In Arrow, a null entry may span bytes, which have no meaning.
        sizes[null_mask(array)] = 0
    return sizes


def values_buffer(array: pa.Array) -> Bytes:
    """The bytes to which the ``offsets`` of a string or binary array refer, without a copy."""
    data = array.buffers()[2]
    if data is None or data.size == 0:
        return np.zeros(0, dtype=np.uint8)
    return np.frombuffer(data, np.uint8)


def binary_of(entries: Sequence[bytes | None]) -> pa.Array:
    """A binary array with these entries. ``pa.array`` is not used, because it would import pandas."""
    sizes = np.array([0, *(len(entry or b"") for entry in entries)], dtype=np.int64)
    nulls = np.array([entry is None for entry in entries], dtype=np.bool_)
    data = pa.py_buffer(b"".join(entry or b"" for entry in entries))
    buffers = [validity(nulls), pa.py_buffer(np.cumsum(sizes).astype(np.int32)), data]
    return pa.Array.from_buffers(pa.binary(), len(entries), buffers)


def strings_of(texts: Sequence[str]) -> pa.Array:
    return binary_of([text.encode() for text in texts]).cast(pa.string())


def spans(
    data: Bytes,
    starts: npt.NDArray[np.integer],
    ends: npt.NDArray[np.integer],
    nulls: Bools | None = None,
) -> pa.Array:
    """A binary array with the bytes from ``starts[i]`` to ``ends[i]`` of ``data``.

    The spans are in ascending order and do not overlap. Raises OverflowError if 2 GiB or more lie between the
    first and the last byte.
    """
    count = len(starts)
    if count == 0:
        return binary_of(())
    first = int(starts[0])
    if int(ends[-1]) - first > np.iinfo(np.int32).max:
        raise OverflowError(
            f"{count} entries lie in {int(ends[-1]) - first} bytes; a table must stay below 2 GiB"
        )
    edges = np.empty(2 * count, dtype=np.int32)
    edges[0::2], edges[1::2] = starts - first, ends - first
    array = every_second(edges, data[first : int(ends[-1])])
    return array if nulls is None else with_nulls(array, nulls)


def every_second(edges: Int32s, data: Bytes) -> pa.Array:
    """The bytes between edges 0 and 1, 2 and 3, and so on."""
    count = len(edges) - 1
    entries = pa.Array.from_buffers(pa.binary(), count, [None, pa.py_buffer(edges), pa.py_buffer(data)])
    return pc.take(entries, indices(np.arange(0, count, 2, dtype=np.int32)), boundscheck=False)


def grouped(array: pa.Array, counts: LengthArray) -> pa.Array:
    """Join consecutive entries of a binary array without nulls: ``counts[i]`` entries become entry i."""
    ends = np.zeros(len(counts) + 1, dtype=np.int64)
    np.cumsum(counts, out=ends[1:])
    bounds = np.ascontiguousarray(offsets(array)[ends], dtype=np.int32)
    return pa.Array.from_buffers(pa.binary(), len(counts), [None, pa.py_buffer(bounds), array.buffers()[2]])


def with_nulls(array: pa.Array, nulls: Bools) -> pa.Array:
    """The array with nulls where ``nulls`` is true, over the same buffers. The array must not be a slice."""
    if not nulls.any():
        return array
    return pa.Array.from_buffers(array.type, len(array), [validity(nulls), *array.buffers()[1:]])


def validity(nulls: Bools) -> pa.Buffer | None:
    return pa.py_buffer(np.packbits(~nulls, bitorder="little")) if nulls.any() else None


def is_utf8(array: pa.Array) -> bool:
    """Whether all entries of a string or binary array are valid UTF-8. A string array may not be: Spark keeps
    any bytes when it casts binary to string."""
    ends = offsets(array)
    if values_buffer(array)[int(ends[0]) : int(ends[-1])].max(initial=0) < _FIRST_NOT_ASCII:
        # This is nearly always so, and takes a tenth of the time of the check below.
        return True
    if array.type in (pa.binary(), pa.large_binary()):
        # Arrow validates the content of string arrays only.
        array = array.view(pa.string() if array.type == pa.binary() else pa.large_string())
    try:
        array.validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True


def as_binary(array: pa.Array) -> pa.Array:
    """A string or binary array as binary with 32-bit offsets, over the same bytes. Raises OverflowError if
    the entries take 2 GiB or more."""
    if array.type.id == _BINARY:
        return array
    return narrow(array, pa.binary()) if array.type.id in _LARGE else array.cast(pa.binary())


def narrow(array: pa.Array, kind: pa.DataType) -> pa.Array:
    """A large_string or large_binary array as ``kind``, a type with 32-bit offsets. Raises OverflowError.

    Arrow's own cast keeps the absolute offsets, so it fails for a small slice that begins after 2^31 bytes.
    """
    ends = offsets(array)
    first, size = int(ends[0]), int(ends[-1] - ends[0])
    if size > np.iinfo(np.int32).max:
        raise OverflowError(f"{len(array)} entries take {size} bytes; a table must stay below 2 GiB")
    data = array.buffers()[2]
    return pa.Array.from_buffers(
        kind,
        len(array),
        [
            validity(null_mask(array)) if array.null_count else None,
            pa.py_buffer((ends - first).astype(np.int32)),
            pa.py_buffer(b"") if data is None else data.slice(first, size),
        ],
    )
