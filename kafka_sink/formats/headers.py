"""Adds the header that names a record's schema."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from kafka_sink.records.arrays import as_binary, binary_of, indices, lengths, null_mask


def with_header(own: pa.Array | None, name: str, contents: pa.Array, encoded: pa.Array) -> pa.Array:
    """Each row's own headers, and one more where ``encoded`` is not null: a tombstone has no schema.

    ``own`` is a list of (key, value) structs of text or binary, or None; ``contents`` has the header's value.
    """
    rows = len(contents)
    held = np.zeros(rows, dtype=np.int64) if own is None else lengths(own).astype(np.int64)
    added = np.ones(rows, dtype=np.bool_) if not encoded.null_count else ~null_mask(encoded)
    ends = np.zeros(rows + 1, dtype=np.int32)
    np.cumsum(held + added, out=ends[1:])
    keys, values = _entries(own)
    key_at = np.empty(int(ends[-1]), dtype=np.int32)
    value_at = np.empty(len(key_at), dtype=np.int32)
    last = ends[1:][added] - 1
    key_at[last] = len(keys)
    value_at[last] = len(values) + np.flatnonzero(added)
    before = np.ones(len(key_at), dtype=np.bool_)
    before[last] = False
    key_at[before] = value_at[before] = np.arange(len(keys), dtype=np.int32)
    entries = pa.StructArray.from_arrays(
        [
            pa.concat_arrays([keys, binary_of([name.encode()]).cast(keys.type)]).take(indices(key_at)),
            pa.concat_arrays([values, contents]).take(indices(value_at)),
        ],
        ["key", "value"],
    )
    starts = pa.Array.from_buffers(pa.int32(), rows + 1, [None, pa.py_buffer(ends)])
    return pa.ListArray.from_arrays(starts, entries)


def _entries(own: pa.Array | None) -> tuple[pa.Array, pa.Array]:
    if own is None:
        return pa.nulls(0, pa.string()), pa.nulls(0, pa.binary())
    keys, values = own.flatten().flatten()
    return keys, as_binary(values)
