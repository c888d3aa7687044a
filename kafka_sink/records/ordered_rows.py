"""Rows in the order of their partitions, with bounds of their sizes that decide which fit a batch."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from kafka_sink.model import TopicPartition
from kafka_sink.records import varint_columns
from kafka_sink.records.arrays import Int64s
from kafka_sink.records.record_columns import RecordColumns
from kafka_sink.varint import signed

# A batch may be older than these rows. Its timestamp deltas are then larger than those between these rows.
_MIN_DELTA_BYTES = 3
# The longest varint of 64 bits.
_MAX_DELTA_BYTES = 10


class OrderedRows:
    """About 2 MiB of rows, ordered by partition.

    Rows ``starts[r]`` to ``starts[r + 1]``, called a run, go to ``partitions[r]``. ``timestamps`` are
    milliseconds since the epoch: one for each row in the same order, or one for all rows. ``delta_bytes`` is
    how many bytes the difference of two of these timestamps can take. ``are_movable`` means that nothing
    decides the partition of any of these rows, so that they may move to other partitions of their topics.
    """

    def __init__(
        self,
        columns: RecordColumns,
        timestamps: Int64s | int,
        partitions: list[TopicPartition],
        starts: list[int],
        *,
        are_movable: bool = False,
    ) -> None:
        self.columns = columns
        self.partitions = partitions
        self.starts = starts
        self.are_movable = are_movable
        if isinstance(timestamps, int):
            self._earliest = self._latest = timestamps
        else:
            self._earliest, self._latest = int(timestamps.min()), int(timestamps.max())
        self.timestamps = self._latest if self._earliest == self._latest else timestamps
        self.delta_bytes = max(_MIN_DELTA_BYTES, len(signed(self._latest - self._earliest)))
        reach = 1 << (7 * self.delta_bytes - 1)
        # Lowest and highest base timestamp of a batch for which all deltas fit ``delta_bytes``.
        self._base_range = (self._latest - reach + 1, self._earliest + reach)
        bounds = columns.upper_bounds(self.delta_bytes)
        # bounds.largest is not used, as it may add key and value of different rows.
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
        """An upper bound of the bytes of the records of rows ``start`` to ``stop``."""
        return int(self._cumulated[stop] - self._cumulated[start])

    def deltas_are_bounded(self, base_timestamp: int) -> bool:
        """Whether ``bound`` holds in a batch with this base timestamp."""
        low, high = self._base_range
        return low <= base_timestamp <= high

    def surplus(self, rows: int, base_timestamp: int) -> int:
        """The bytes by which ``rows`` rows may exceed their ``bound`` in a batch with this base timestamp.

        It is 0 unless the base timestamp is so far from the rows' timestamps that the deltas, and thereby the
        records' lengths, take more bytes than between the rows themselves.
        """
        if self.deltas_are_bounded(base_timestamp):
            return 0
        return rows * (_MAX_DELTA_BYTES - self.delta_bytes + 1)

    def rows_within(self, start: int, stop: int, limit: int) -> int:
        """The end of the rows from ``start`` whose bounds sum up to ``limit`` bytes, but at least one row."""
        return max(start + 1, min(self.rows_below(start, limit), stop))

    def rows_below(self, start: int, limit: int) -> int:
        """The end of the rows from ``start`` whose bounds sum up to ``limit`` bytes at most, or ``start``."""
        target = self._cumulated[start] + max(limit, 0)
        return int(np.searchsorted(self._cumulated, target, side="right")) - 1

    @cached_property
    def _fixed_sizes(self) -> Int64s:
        """The size of each record without its two deltas and its own length field."""
        return self.columns.body.numbers().astype(np.int64, copy=False)

    def exact_sizes(self, start: int, stop: int, base_offset: int, base_timestamp: int) -> Int64s:
        """The sizes of rows ``start`` to ``stop`` as records, the first with offset delta ``base_offset``."""
        offsets = np.arange(base_offset, base_offset + stop - start)
        sizes: Int64s = self._fixed_sizes[start:stop].copy()
        sizes += varint_columns.widths(offsets, base_offset, base_offset + stop - start - 1)
        if isinstance(self.timestamps, int):
            sizes += len(signed(self.timestamps - base_timestamp))
        else:
            sizes += varint_columns.column(self.timestamps[start:stop] - base_timestamp).widths
        sizes += varint_columns.widths(sizes)
        return sizes
