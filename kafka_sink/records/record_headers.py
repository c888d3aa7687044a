"""The header section of records, for whole columns: count, then key and value of each header."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from kafka_sink.records import varint
from kafka_sink.records.arrays import as_binary, lengths, null_mask

# A scalar taken from an array: pa.scalar of a Python value would import pandas (see arrays).
_EMPTY = pa.Array.from_buffers(pa.binary(), 1, [None, pa.py_buffer(bytes(8)), pa.py_buffer(b"")])[0]

Int64s = npt.NDArray[np.int64]


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
    count_bytes = binary(varint.lay_out([count], len(counts)), count.widths, len(counts))
    count_widths = np.broadcast_to(count.widths, len(counts)).astype(np.int64)
    if len(flat) == 0:
        return count_bytes, count_widths
    entries, entry_lengths = _header_entries(as_binary(keys), as_binary(values))
    ends = np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(counts, dtype=np.int64)))
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
    key = varint.column(key_lengths)
    shown = np.where(null_mask(values), -1, value_lengths) if values.null_count else value_lengths
    value = varint.column(shown)
    before = binary(varint.lay_out([key], len(keys)), key.widths, len(keys))
    between = binary(varint.lay_out([value], len(keys)), value.widths, len(keys))
    sizes: Int64s = np.add(key_lengths, value_lengths, dtype=np.int64)
    sizes += key.widths
    sizes += value.widths
    return _join([before, keys, between, _no_nulls(values)]), sizes


def _no_nulls(column: pa.Array) -> pa.Array:
    return pc.coalesce(column, _EMPTY) if column.null_count else column


def _join(parts: list[pa.Array]) -> pa.Array:
    """Concatenates element by element."""
    return pc.binary_join_element_wise(*parts, _EMPTY)


def binary(data: npt.NDArray[np.uint8], widths: npt.NDArray[np.integer] | int, count: int) -> pa.Array:
    """``count`` entries that lie back to back in ``data``, with as many bytes as ``widths`` says."""
    if isinstance(widths, int):
        offsets = np.arange(count + 1, dtype=np.int32) * np.int32(widths)
    else:
        offsets = np.zeros(count + 1, dtype=np.int32)
        np.cumsum(widths, out=offsets[1:])
    return pa.Array.from_buffers(pa.binary(), count, [None, pa.py_buffer(offsets), pa.py_buffer(data)])
