"""Spark's Arrow batches as units of about 4 MiB: large ones sliced, small ones joined while linger allows.

A unit is what is ordered by partition, encoded and appended at once. Larger ones would multiply memory,
smaller ones the work per partition. Row order is kept.
"""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pyarrow as pa

UNIT_BYTES = 4 * 1024 * 1024
# What a row takes besides key, value and headers; bounds the rows of a unit where those are empty.
ROW_BYTES = 16
# What a held batch costs besides its rows: Arrow's and Python's objects around it.
HELD_BATCH_BYTES = 4096

Int64s = npt.NDArray[np.int64]


class UnitBuilder:
    """Collects batches of one schema and gives them back as units; the time comes in as ``now_ms``.

    ``columns`` are the positions of the columns whose bytes count (key, value, headers). Rows are held for
    ``linger_ms`` at most, if ``take`` is called when ``deadline_ms`` says so. A batch of a unit's size or
    more is never held, nor copied.
    """

    def __init__(self, columns: tuple[int, ...], *, linger_ms: float, unit_bytes: int = UNIT_BYTES) -> None:
        self._columns = columns
        self._linger_ms = linger_ms
        self._unit_bytes = unit_bytes
        self._held: list[pa.RecordBatch] = []
        self._held_bytes = 0
        self._deadline_ms = math.inf

    @property
    def is_empty(self) -> bool:
        """Whether no rows are held."""
        return not self._held

    def deadline_ms(self) -> float:
        """When the held rows must go; infinite where none are."""
        return self._deadline_ms

    def offer(self, batch: pa.RecordBatch, now_ms: float) -> list[pa.RecordBatch]:
        """Take in a batch; returns the units that are ready, none without rows."""
        if batch.num_rows == 0:
            return self.take(now_ms)
        size = self._bytes(batch)
        if size >= self._unit_bytes:
            # Joining what is held to it would copy it.
            return [*self.drain(), *self._cut(batch, size)]
        if not self._held:
            self._deadline_ms = now_ms + self._linger_ms
        self._held.append(batch)
        self._held_bytes += size + HELD_BATCH_BYTES
        return self.drain() if self._held_bytes >= self._unit_bytes else self.take(now_ms)

    def take(self, now_ms: float) -> list[pa.RecordBatch]:
        """The held rows if their time has come, else nothing."""
        return self.drain() if now_ms >= self._deadline_ms else []

    def drain(self) -> list[pa.RecordBatch]:
        """The held rows, whether or not their time has come: one unit, or none."""
        held, size = self._held, self._held_bytes
        if not held:
            return []
        self._held, self._held_bytes, self._deadline_ms = [], 0, math.inf
        # Less than two units: what was held is less than one, and so is the batch that came last.
        return self._cut(_join(held), size)

    def _cut(self, batch: pa.RecordBatch, size: int) -> list[pa.RecordBatch]:
        """Slices of nearly equal size, so that no small rest is left over."""
        count = round(size / self._unit_bytes)
        if count < 2 or batch.num_rows < 2:
            return [batch]
        before = self._bytes_before(batch)
        targets = np.arange(1, count, dtype=np.float64) * (float(before[-1]) / count)
        # A row larger than a unit makes several targets fall on it.
        edges = np.unique(np.concatenate(([0], np.searchsorted(before, targets), [batch.num_rows]))).tolist()
        return [batch.slice(start, stop - start) for start, stop in pairwise(edges)]

    def _bytes(self, batch: pa.RecordBatch) -> int:
        """Bytes of the rows, from buffer ends alone: the cost does not grow with the rows."""
        size: int = batch.num_rows * ROW_BYTES
        for index in self._columns:
            column = batch.column(index)
            offsets = _offsets(column)
            size += column.nbytes if offsets is None else int(offsets[-1]) - int(offsets[0])
        return size

    def _bytes_before(self, batch: pa.RecordBatch) -> Int64s:
        """Bytes before each row, and of all rows at the end: ``num_rows + 1`` ascending numbers."""
        before = np.arange(batch.num_rows + 1, dtype=np.int64) * ROW_BYTES
        for index in self._columns:
            column = batch.column(index)
            offsets = _offsets(column)
            if offsets is not None:
                before += offsets - offsets[0]
            elif pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
                entries = _list_offsets(column)
                spread = column.nbytes / max(1, int(entries[-1]) - int(entries[0]))
                before += ((entries - entries[0]) * spread).astype(np.int64)
        return before


def _join(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    if len(batches) == 1:
        return batches[0]
    # pyarrow.concat_batches came after 18, the oldest that is supported.
    columns = [
        pa.concat_arrays([batch.column(i) for batch in batches]) for i in range(batches[0].num_columns)
    ]
    return pa.RecordBatch.from_arrays(columns, schema=batches[0].schema)


def _offsets(column: pa.Array) -> npt.NDArray[np.signedinteger] | None:
    """The offsets of a string or binary column's rows, None for other types."""
    kind = column.type
    if pa.types.is_large_string(kind) or pa.types.is_large_binary(kind):
        return _view_offsets(column, np.dtype(np.int64))
    if pa.types.is_string(kind) or pa.types.is_binary(kind):
        return _view_offsets(column, np.dtype(np.int32))
    return None


def _list_offsets(column: pa.Array) -> npt.NDArray[np.signedinteger]:
    return _view_offsets(column, np.dtype(np.int64 if pa.types.is_large_list(column.type) else np.int32))


def _view_offsets(column: pa.Array, dtype: np.dtype[np.signedinteger]) -> npt.NDArray[np.signedinteger]:
    if len(column) == 0:
        return np.zeros(1, dtype=dtype)
    return np.frombuffer(column.buffers()[1], dtype, len(column) + 1, column.offset * dtype.itemsize)
