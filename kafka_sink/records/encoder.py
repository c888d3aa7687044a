"""Encodes rows as V2 records, a whole table at once.

A record is: length, attributes (0), timestamp delta, offset delta, key length, key, value length,
value, header count and headers; every number a zigzag varint
(https://kafka.apache.org/documentation/#record). The numbers of all rows are laid out as columns of
bytes, then one C++ take interleaves them with keys and values: no Python per record.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from kafka_sink.records.arrays import as_binary, indices
from kafka_sink.records.record_columns import RecordColumns
from kafka_sink.records.record_heads import Heads, Run, heads_of

# Keeps an offset delta within three bytes, so that a record's upper bound stays tight.
MAX_RECORDS_PER_BATCH = 1 << 20

_MAX_JOIN = int(np.iinfo(np.int32).max)
_ONE_ZERO_BYTE = pa.Array.from_buffers(
    pa.binary(), 1, [None, pa.py_buffer(np.array([0, 1], dtype=np.int32)), pa.py_buffer(b"\0")]
)

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class EncodedRecords:
    """Records back to back: those of run r are ``data[ends[r - 1]:ends[r]]`` (from 0 for the first run)."""

    data: memoryview
    ends: list[int]


def encode(rows: RecordColumns, timestamps: Int64s | int, runs: Sequence[Run]) -> EncodedRecords:
    """Encodes every row as one V2 record.

    ``timestamps`` are milliseconds since the epoch, one a row in writing order, or the same for all rows. The
    runs cover the rows in order and without gaps; none is empty.
    """
    count = len(rows)
    if count == 0:
        return EncodedRecords(memoryview(b""), [0 for _ in runs])
    heads = heads_of(rows, timestamps, runs)
    size = heads.ends[-1]
    if size > _MAX_JOIN:
        raise OverflowError(f"{count} rows encode to {size} bytes; a table stays below 2 GiB")
    joined = _interleave(rows, heads)
    # Without headers a record's last byte, its header count of 0, is the first of the next record's prefix.
    first = 1 if rows.headers is None else 0
    return EncodedRecords(memoryview(joined)[first : first + size], heads.ends)


def _interleave(rows: RecordColumns, heads: Heads) -> pa.Buffer:
    """The bytes of all records: one take over one array of all their parts.

    This orders the rows and joins their parts in one pass.
    """
    count = len(rows)
    here: npt.NDArray[np.int32] = np.arange(count, dtype=np.int32)
    there = here if rows.order is None else rows.order
    columns: list[tuple[list[pa.Array], npt.NDArray[np.int32]]] = [([heads.prefix], here)]
    if heads.middle is not None:
        columns += [([as_binary(rows.key)], there), ([heads.middle], here)]
    columns.append(([as_binary(chunk) for chunk in rows.value], there))
    if rows.headers is not None:
        columns.append(([rows.headers], there))
    index: npt.NDArray[np.int32] = np.empty(count * len(columns) + 1, dtype=np.int32)
    matrix = index[:-1].reshape(count, len(columns))
    sources: list[pa.Array] = []
    filled = 0
    for place, (arrays, rows_of_arrays) in enumerate(columns):
        np.add(rows_of_arrays, np.int32(filled), out=matrix[:, place])
        sources += arrays
        filled += sum(map(len, arrays))
    if rows.headers is None:
        sources.append(_ONE_ZERO_BYTE)
        index[-1] = filled
    else:
        index = index[:-1]
    return pc.take(pa.concat_arrays(sources), indices(index), boundscheck=False).buffers()[2]
