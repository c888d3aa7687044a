"""Arrow arrays as numpy's and back, through their buffers.

``pa.array`` and ``Array.to_numpy`` import pandas where it is installed, to recognise its objects: 160 ms of
CPU and 40 MB in every Python worker, for nothing.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa


def null_mask(array: pa.Array) -> npt.NDArray[np.bool_]:
    """True where an entry is null; for types that keep a validity bitmap (all but null, union, run-end)."""
    bitmap = array.buffers()[0]
    if bitmap is None:
        return np.full(len(array), array.type == pa.null(), dtype=np.bool_)
    first, skipped = divmod(array.offset, 8)
    size = (skipped + len(array) + 7) // 8
    bits = np.unpackbits(np.frombuffer(bitmap, np.uint8, size, first), bitorder="little")
    mask: npt.NDArray[np.bool_] = bits[skipped : skipped + len(array)] == 0
    return mask


def numbers(array: pa.Array, dtype: Any) -> npt.NDArray[Any]:
    """A view of the values of a fixed-width array, ``dtype`` being their type; nulls have any value."""
    if len(array) == 0:
        return np.zeros(0, dtype=dtype)
    wide = np.dtype(dtype)
    return np.frombuffer(array.buffers()[1], wide, len(array), array.offset * wide.itemsize)


def indices(rows: npt.NDArray[np.integer]) -> pa.Array:
    """Row numbers below 2^31 as an Arrow array, for ``take``; no copy of 32-bit ones."""
    narrow = np.ascontiguousarray(rows, dtype=np.int32)
    return pa.Array.from_buffers(pa.int32(), len(narrow), [None, pa.py_buffer(narrow)])


def with_narrow_offsets(array: pa.Array) -> pa.Array:
    """A large_string or large_binary array as binary: 32-bit offsets over the same bytes.

    Arrow's own cast keeps the absolute offsets, and so refuses a small slice that begins beyond 2^31. Raises
    OverflowError where the entries themselves take 2 GiB and more.
    """
    offsets: npt.NDArray[np.int64] = np.zeros(1, dtype=np.int64)
    if len(array):
        offsets = np.frombuffer(array.buffers()[1], np.int64, len(array) + 1, array.offset * 8)
    first, size = int(offsets[0]), int(offsets[-1] - offsets[0])
    if size > np.iinfo(np.int32).max:
        raise OverflowError(f"{len(array)} entries take {size} bytes; units stay below 2 GiB")
    data = array.buffers()[2]
    return pa.Array.from_buffers(
        pa.binary(),
        len(array),
        [
            pa.py_buffer(np.packbits(~null_mask(array), bitorder="little")) if array.null_count else None,
            pa.py_buffer((offsets - first).astype(np.int32)),
            pa.py_buffer(b"") if data is None else data.slice(first, size),
        ],
    )
