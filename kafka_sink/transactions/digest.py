"""A digest of a task's rows, to recognise the same rows in a later run: their number, their bytes, and a
sample of them in order."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import pyarrow as pa
import pyarrow.compute as pc

from kafka_sink.transactions.decision import RowsDigest

# Each so-manyth row is looked at: a task is not slowed down by it, and rows that moved are noticed.
SAMPLED = 256


class RunningDigest:
    """Of Arrow batches in order, however their rows are split into batches. Uses the columns at
    ``indices``."""

    def __init__(self, indices: Sequence[int]) -> None:
        self._indices = tuple(indices)
        self._rows = 0
        self._size = 0
        self._checksum = 0

    def update(self, batch: pa.RecordBatch) -> None:
        """Counts a batch in."""
        first = -self._rows % SAMPLED
        sampled = pa.array(range(first, batch.num_rows, SAMPLED), pa.int64())
        for index in self._indices:
            column = batch.column(index)
            if not _is_bytes(column.type):
                continue
            self._size += pc.sum(pc.binary_length(column)).as_py() or 0
            for value in column.take(sampled).to_pylist():
                data = value.encode() if isinstance(value, str) else value or b""
                # With its length, so that bytes cannot move between neighbours unnoticed.
                self._checksum = zlib.crc32(data, zlib.crc32(b"%d" % len(data), self._checksum))
        self._rows += batch.num_rows

    def result(self) -> RowsDigest:
        """Of all batches so far."""
        return RowsDigest(self._rows, self._size, self._checksum)


def _is_bytes(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_binary(kind)
        or pa.types.is_large_binary(kind)
        or pa.types.is_string(kind)
        or pa.types.is_large_string(kind)
    )
