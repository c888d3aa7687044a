"""Rows in partition order, with the bounds by which batches take them."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from kafka_sink.model import TopicPartition
from kafka_sink.records import varint
from kafka_sink.records.arrays import Int64s
from kafka_sink.records.record_columns import RecordColumns

# A batch may be older than these rows; their deltas then exceed the span of their own timestamps.
_MIN_DELTA_BYTES = 3
# The widest varint of 64 bits.
_MAX_DELTA_BYTES = 10


class OrderedRows:
    """About 2 MiB of rows, ordered by partition. Run r, rows ``starts[r]`` to ``starts[r + 1]``, is for
    ``partitions[r]``.

    ``timestamps`` are milliseconds since the epoch, one per row in the same order, or the one of all rows.
    ``delta_bytes`` are the most bytes that the difference of two of them takes. ``free``: the rows may as
    well go to other partitions of their topics.
    """

    def __init__(
        self,
        columns: RecordColumns,
        timestamps: Int64s | int,
        partitions: list[TopicPartition],
        starts: list[int],
        *,
        free: bool = False,
    ) -> None:
        self.columns = columns
        self.partitions = partitions
        self.starts = starts
        self.free = free
        if isinstance(timestamps, int):
            self._earliest = self._latest = timestamps
        else:
            self._earliest, self._latest = int(timestamps.min()), int(timestamps.max())
        self.timestamps = self._latest if self._earliest == self._latest else timestamps
        self.delta_bytes = max(_MIN_DELTA_BYTES, len(varint.scalar(self._latest - self._earliest)))
        reach = 1 << (7 * self.delta_bytes - 1)
        # Base timestamps for which every row's delta fits ``delta_bytes``.
        self._base_range = (self._latest - reach + 1, self._earliest + reach)
        bounds = columns.upper_bounds(self.delta_bytes)
        # Not bounds.largest, which adds the largest key and the largest value of different rows.
        self.largest_bound = bounds.largest if bounds.each is None else int(bounds.each.max())
        self._cumulated: Int64s
        if bounds.each is None:
            self._cumulated = np.arange(columns.payload.count + 1, dtype=np.int64) * bounds.largest
        else:
            self._cumulated = np.zeros(columns.payload.count + 1, dtype=np.int64)
            np.cumsum(bounds.each, out=self._cumulated[1:])

    def __len__(self) -> int:
        return self.columns.payload.count

    def timestamp(self, row: int) -> int:
        return self.timestamps if isinstance(self.timestamps, int) else int(self.timestamps[row])

    def bound(self, start: int, stop: int) -> int:
        """Upper bound in bytes of the records of rows ``start`` to ``stop``."""
        return int(self._cumulated[stop] - self._cumulated[start])

    def deltas_are_bounded(self, base_timestamp: int) -> bool:
        """Whether ``bound`` holds in a batch with this base timestamp."""
        low, high = self._base_range
        return low <= base_timestamp <= high

    def surplus(self, rows: int, base_timestamp: int) -> int:
        """Bytes that ``rows`` rows may take beyond their ``bound`` in a batch with this base timestamp.

        Not 0 only if it is so far from these rows' timestamps that the deltas, and with them the records'
        lengths, take more bytes than between these rows.
        """
        if self.deltas_are_bounded(base_timestamp):
            return 0
        return rows * (_MAX_DELTA_BYTES - self.delta_bytes + 1)

    def rows_within(self, start: int, stop: int, limit: int) -> int:
        """First row past ``start`` whose bound exceeds ``limit`` bytes together with its predecessors'.

        At least one row is taken.
        """
        return max(start + 1, min(self.rows_below(start, limit), stop))

    def rows_below(self, start: int, limit: int) -> int:
        """First row past ``start`` whose bound exceeds ``limit`` bytes together with its predecessors'."""
        target = self._cumulated[start] + max(limit, 0)
        return int(np.searchsorted(self._cumulated, target, side="right")) - 1

    @cached_property
    def _fixed_sizes(self) -> Int64s:
        """Record bytes without the two deltas and the record's own length."""
        return self.columns.body.numbers().astype(np.int64, copy=False)

    def exact_sizes(self, start: int, stop: int, base_offset: int, base_timestamp: int) -> Int64s:
        """Record sizes of rows ``start`` to ``stop``, the first with the batch's offset ``base_offset``."""
        sizes: Int64s = self._fixed_sizes[start:stop] + varint.count_widths(base_offset, stop - start)
        if isinstance(self.timestamps, int):
            sizes += len(varint.scalar(self.timestamps - base_timestamp))
        else:
            sizes += varint.column(self.timestamps[start:stop] - base_timestamp).widths
        sizes += varint.widths(sizes)
        return sizes
