"""Spark's Arrow batches as tables of about 2 MiB: large batches are sliced (into 8 MiB where rows are large),
small ones put together while linger allows.

The rows of a table are ordered by partition, encoded and appended at once. Larger tables would multiply
memory, smaller ones the work per partition. Row order is kept.
"""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pyarrow as pa

from kafka_sink.records.arrays import Int64s, has_byte_offsets, offsets
from kafka_sink.spark_application import LARGE_ROW_BYTES

# Measured with 130-byte rows, 4 partitions: 462 ns a row at 2.5 MiB, 501 at 4 MiB, 479 at 1.3; larger ones
# fall out of caches (the processor's and malloc's), smaller ones leave fewer rows a partition.
TARGET_TABLE_BYTES = 2 * 1024 * 1024
# If a table has many runs, one per partition, more rows share the work per run. If rows are large, more rows
# share the work per table: with lz4, rows of 949 bytes take 5.5 us of processor time in 2 MB, 4.7 in 8 MB.
WIDE_TARGET_TABLE_BYTES = 4 * TARGET_TABLE_BYTES
_MANY_RUNS = 128
# Bytes of a row besides key, value and headers; limits the rows of a table in which those are empty.
ROW_BYTES = 16
# Bytes of a gathered batch besides its rows: Arrow's and Python's objects around it.
GATHERED_BATCH_BYTES = 4096
# A batch with which the gathered rows would exceed this many target sizes starts the next table.
_LARGEST = 1.5


class Rebatcher:
    """Collects batches of one schema and returns them as tables. The time comes in as ``now_ms``.

    ``columns`` are the positions of the columns whose bytes count (key, value, headers). Rows are gathered
    for ``linger_ms`` at most, if ``take`` is called when ``deadline_ms`` says so. A table's chunks are the
    batches or slices of them: no data is copied.
    """

    def __init__(
        self,
        columns: tuple[int, ...],
        *,
        linger_ms: float,
        target_bytes: int = TARGET_TABLE_BYTES,
        large_row_bytes: float = LARGE_ROW_BYTES,
    ) -> None:
        self._columns = columns
        self._linger_ms = linger_ms
        self._target_bytes = target_bytes
        self._large_row_bytes = large_row_bytes
        self._gathered: list[pa.RecordBatch] = []
        self._gathered_bytes = 0
        self._deadline_ms = math.inf
        # Of the largest batch so far.
        self.batch_bytes_max = 0

    def adapt(self, runs: int) -> None:
        """Size the next tables by the number of partitions that a table went to.

        Measured at 1,000 partitions with 110-byte rows: 990 ns of processor time a row instead of 1,260.
        """
        self._target_bytes = WIDE_TARGET_TABLE_BYTES if runs >= _MANY_RUNS else TARGET_TABLE_BYTES

    @property
    def is_empty(self) -> bool:
        return not self._gathered

    @property
    def gathered_rows(self) -> int:
        """How many rows are gathered. Any thread may ask."""
        return sum(batch.num_rows for batch in self._gathered)

    def deadline_ms(self) -> float:
        """When the gathered rows must go; infinite if no rows are gathered."""
        return self._deadline_ms

    def offer(self, batch: pa.RecordBatch, now_ms: float) -> list[pa.Table]:
        """Add a batch; return the tables that are ready, each with at least one row."""
        if batch.num_rows == 0:
            return self.take(now_ms)
        size = self._bytes(batch)
        self.batch_bytes_max = max(self.batch_bytes_max, size)
        if size >= self._target_bytes:
            return [*self.finish(), *self._cut(batch, size)]
        ready = self.finish() if self._gathered_bytes + size > _LARGEST * self._target_bytes else []
        if not self._gathered:
            self._deadline_ms = now_ms + self._linger_ms
        self._gathered.append(batch)
        self._gathered_bytes += size + GATHERED_BATCH_BYTES
        ready += self.finish() if self._gathered_bytes >= self._target_bytes else self.take(now_ms)
        return ready

    def take(self, now_ms: float) -> list[pa.Table]:
        """The gathered rows if their time has come, else nothing."""
        return self.finish() if now_ms >= self._deadline_ms else []

    def finish(self) -> list[pa.Table]:
        """The gathered rows, whether or not their time has come: one table, or an empty list."""
        gathered = self._gathered
        if not gathered:
            return []
        self._gathered, self._gathered_bytes, self._deadline_ms = [], 0, math.inf
        return [pa.Table.from_batches(gathered)]

    def _cut(self, batch: pa.RecordBatch, size: int) -> list[pa.Table]:
        """Slices of nearly equal size, so that no small remainder is left."""
        is_large = size >= self._large_row_bytes * batch.num_rows
        count = round(size / (WIDE_TARGET_TABLE_BYTES if is_large else self._target_bytes))
        if count < 2 or batch.num_rows < 2:
            return [pa.Table.from_batches([batch])]
        before = self._bytes_before(batch)
        targets = np.arange(1, count, dtype=np.float64) * (float(before[-1]) / count)
        # Several targets may fall on a row larger than the target size.
        edges = np.unique(np.concatenate(([0], np.searchsorted(before, targets), [batch.num_rows]))).tolist()
        return [pa.Table.from_batches([batch.slice(start, stop - start)]) for start, stop in pairwise(edges)]

    def _bytes(self, batch: pa.RecordBatch) -> int:
        """Bytes of the rows, from buffer ends alone: the cost does not grow with the rows."""
        size: int = batch.num_rows * ROW_BYTES
        for index in self._columns:
            column = batch.column(index)
            if has_byte_offsets(column.type):
                ends = offsets(column)
                size += int(ends[-1]) - int(ends[0])
            else:
                size += column.nbytes
        return size

    def _bytes_before(self, batch: pa.RecordBatch) -> Int64s:
        """Bytes before each row, and of all rows at the end: ``num_rows + 1`` ascending numbers."""
        before = np.arange(batch.num_rows + 1, dtype=np.int64) * ROW_BYTES
        for index in self._columns:
            column = batch.column(index)
            if has_byte_offsets(column.type):
                ends = offsets(column)
                before += ends - ends[0]
            elif pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
                ends = offsets(column)
                spread = column.nbytes / max(1, int(ends[-1]) - int(ends[0]))
                before += ((ends - ends[0]) * spread).astype(np.int64)
        return before
