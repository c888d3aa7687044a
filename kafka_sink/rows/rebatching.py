"""Turns Spark's Arrow batches into tables of about 2 MiB. Large batches are sliced, and small batches are
gathered for at most the linger time. If rows are large, slices have 8 MiB.

The rows of a table are ordered by partition, encoded and appended together. Larger tables would need several
times the memory, and smaller tables would multiply the work per partition. The order of the rows is kept.
"""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pyarrow as pa

from kafka_sink.records.arrays import Int64s, has_byte_offsets, offsets
from kafka_sink.spark_application import LARGE_ROW_BYTES

# Measured with 130-byte rows and 4 partitions: 462 ns per row with tables of 2.5 MiB, 501 ns with 4 MiB and
# 479 ns with 1.3 MiB. Larger tables do not fit the CPU's caches and malloc's, and smaller ones have fewer
# rows per partition.
TARGET_TABLE_BYTES = 2 * 1024 * 1024
# If a table has many runs, which are the rows of one partition, more rows share the work per run. If rows are
# large, more rows share the work per table: with lz4, 949-byte rows take 5.5 us in 2 MB and 4.7 us in 8 MB.
WIDE_TARGET_TABLE_BYTES = 4 * TARGET_TABLE_BYTES
_MANY_RUNS = 128
# Added to each row's key, value and headers. It limits the number of rows in a table if those are empty.
ROW_BYTES = 16
# Added for each gathered batch: the memory of Arrow's and Python's objects around its rows.
GATHERED_BATCH_BYTES = 4096
# A batch with which the gathered rows would exceed this many target sizes starts the next table.
_LARGEST = 1.5


class Rebatcher:
    """Gathers batches of one schema and returns them as tables. The current time is passed as ``now_ms``.

    ``columns`` are the positions of the columns whose bytes count (key, value, headers). Rows are gathered
    for at most ``linger_ms``, if the caller calls ``take`` at ``deadline_ms``. The chunks of a table are the
    batches or slices of them, so no data is copied.
    """

    def __init__(self, columns: tuple[int, ...], *, linger_ms: float) -> None:
        self._columns = columns
        self._linger_ms = linger_ms
        self.target_bytes = TARGET_TABLE_BYTES
        self._gathered: list[pa.RecordBatch] = []
        self._gathered_bytes = 0
        self._deadline_ms = math.inf
        # The size of the largest batch so far.
        self.batch_bytes_max = 0

    def adapt(self, runs: int) -> None:
        """Choose the size of the next tables by ``runs``, the number of partitions of the last table.
        Measured with 1,000 partitions and 110-byte rows: 990 ns of CPU time per row instead of 1,260 ns."""
        self.target_bytes = WIDE_TARGET_TABLE_BYTES if runs >= _MANY_RUNS else TARGET_TABLE_BYTES

    @property
    def is_empty(self) -> bool:
        return not self._gathered

    @property
    def gathered_rows(self) -> int:
        """How many rows are gathered. Any thread may read this."""
        return sum(batch.num_rows for batch in self._gathered)

    def deadline_ms(self) -> float:
        """When the gathered rows must be sent; infinity if there are none."""
        return self._deadline_ms

    def offer(self, batch: pa.RecordBatch, now_ms: float) -> list[pa.Table]:
        """Add a batch; return the tables that are ready, each with at least one row."""
        if batch.num_rows == 0:
            return self.take(now_ms)
        size = self._bytes(batch)
        self.batch_bytes_max = max(self.batch_bytes_max, size)
        if size >= self.target_bytes:
            return [*self.finish(), *self._cut(batch, size)]
        ready = self.finish() if self._gathered_bytes + size > _LARGEST * self.target_bytes else []
        if not self._gathered:
            self._deadline_ms = now_ms + self._linger_ms
        self._gathered.append(batch)
        self._gathered_bytes += size + GATHERED_BATCH_BYTES
        ready += self.finish() if self._gathered_bytes >= self.target_bytes else self.take(now_ms)
        return ready

    def take(self, now_ms: float) -> list[pa.Table]:
        """The gathered rows if their deadline has passed; otherwise nothing."""
        return self.finish() if now_ms >= self._deadline_ms else []

    def finish(self) -> list[pa.Table]:
        """The gathered rows as one table, even before their deadline. The list is empty if there are none."""
        gathered = self._gathered
        if not gathered:
            return []
        self._gathered, self._gathered_bytes, self._deadline_ms = [], 0, math.inf
        return [pa.Table.from_batches(gathered)]

    def _cut(self, batch: pa.RecordBatch, size: int) -> list[pa.Table]:
        """Cut a batch into slices of nearly equal size, so that no small slice is left at the end."""
        is_large = size >= LARGE_ROW_BYTES * batch.num_rows
        count = round(size / (WIDE_TARGET_TABLE_BYTES if is_large else self.target_bytes))
        if count < 2 or batch.num_rows < 2:
            return [pa.Table.from_batches([batch])]
        before = self._bytes_before(batch)
        targets = np.arange(1, count, dtype=np.float64) * (float(before[-1]) / count)
        # Several edges may lie within one row that is larger than the target size.
        edges = np.unique(np.concatenate(([0], np.searchsorted(before, targets), [batch.num_rows]))).tolist()
        return [pa.Table.from_batches([batch.slice(start, stop - start)]) for start, stop in pairwise(edges)]

    def _bytes(self, batch: pa.RecordBatch) -> int:
        """The size of the rows, from the ends of buffers, so the cost does not grow with the rows."""
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
        """The bytes before each row, and of all rows at the end: ``num_rows + 1`` ascending numbers."""
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
