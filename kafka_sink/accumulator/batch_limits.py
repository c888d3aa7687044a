"""How many rows a batch takes."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kafka_sink.records import batch_header, encoder
from kafka_sink.records.encoder import Int64s
from kafka_sink.records.ordered_rows import OrderedRows

# Rows that the first step of an exact cut looks at, as it usually ends there, and the largest step.
_FIRST_SCAN_ROWS = 128
_SCAN_ROWS = 8192


class BatchRoom(NamedTuple):
    """How many uncompressed bytes of records fit, by the estimated compression ratio.

    ``open`` is for the partition's open batch, None if it has no open batch. ``new`` is for a new batch.
    """

    open: float | None
    new: float


class BatchLimits:
    """How full a batch may get: ``write_limit`` estimated bytes on the wire, ``raw_limit`` raw bytes held."""

    def __init__(self, write_limit: int, raw_limit: int | None) -> None:
        self.write_limit = write_limit
        self.raw_limit = raw_limit

    def rows_that_fit(
        self,
        ordered: OrderedRows,
        start: int,
        stop: int,
        *,
        raw_bytes: int,
        record_count: int,
        base_timestamp: int,
        factor: float,
    ) -> int:
        """First row from ``start`` on that a batch does not take (``stop`` when it takes all).

        A row fits while header + raw bytes so far x ``factor`` + the row itself, raw, stay within the
        limit (Kafka's hasRoomFor). That sum does not grow steadily if sizes differ much, so a scan finds the
        first row that fails; a bisection could miss it. An empty batch takes any row.
        """
        bound = ordered.bound(start, stop)
        limit = self.write_limit - batch_header.SIZE
        surely = (
            (raw_bytes + bound) * factor + (0 if factor == 1.0 else ordered.largest_bound) <= limit
            and (self.raw_limit is None or raw_bytes + bound <= self.raw_limit)
            and record_count + stop - start <= encoder.MAX_RECORDS_PER_BATCH
            and ordered.deltas_are_bounded(base_timestamp)
        )
        if surely:
            return stop
        at = self._surely_fit(ordered, start, stop, raw_bytes, record_count, base_timestamp, factor)
        if at > start:
            raw_bytes += int(ordered.exact_sizes(start, at, record_count, base_timestamp).sum())
            record_count += at - start
        step = _FIRST_SCAN_ROWS
        while at < stop:
            end = min(stop, at + step)
            step = min(4 * step, _SCAN_ROWS)
            sizes = ordered.exact_sizes(at, end, record_count, base_timestamp)
            fails = self._failures(sizes, raw_bytes, record_count, factor, limit)
            if record_count == 0:
                fails[0] = False
            if fails.any():
                return at + int(fails.argmax())
            raw_bytes += int(sizes.sum())
            record_count += end - at
            at = end
        return stop

    def reached(self, *, raw_bytes: int, record_count: int, factor: float) -> bool:
        """Whether a batch takes no further row, however small (Kafka's isFull)."""
        return (
            batch_header.SIZE + raw_bytes * factor >= self.write_limit
            or record_count >= encoder.MAX_RECORDS_PER_BATCH
            or (self.raw_limit is not None and raw_bytes >= self.raw_limit)
        )

    def room(self, *, raw_bytes: int, factor: float, row_bytes: float) -> float:
        """Bytes of rows of about ``row_bytes`` that a batch still takes: see rows_that_fit."""
        limit = (self.write_limit - batch_header.SIZE - row_bytes) / factor + row_bytes
        if self.raw_limit is not None:
            limit = min(limit, self.raw_limit)
        return max(0.0, limit - raw_bytes)

    def _surely_fit(
        self,
        ordered: OrderedRows,
        start: int,
        stop: int,
        raw_bytes: int,
        record_count: int,
        base_timestamp: int,
        factor: float,
    ) -> int:
        """The row up to which all rows fit by their upper bounds alone, without a look at each."""
        if not ordered.deltas_are_bounded(base_timestamp):
            return start
        limit = (self.write_limit - batch_header.SIZE - ordered.largest_bound) / factor
        if self.raw_limit is not None:
            limit = min(limit, self.raw_limit)
        room = encoder.MAX_RECORDS_PER_BATCH - record_count
        # One byte less than the limit allows: a rounding error must not let one more row in.
        return min(ordered.rows_below(start, int(limit) - raw_bytes - 1), stop, start + max(room, 0))

    def _failures(
        self, sizes: Int64s, raw_bytes: int, record_count: int, factor: float, limit: int
    ) -> npt.NDArray[np.bool_]:
        before = np.cumsum(sizes) - sizes + raw_bytes
        fails: npt.NDArray[np.bool_] = before * factor + sizes > limit
        if self.raw_limit is not None:
            fails |= before + sizes > self.raw_limit
        room = encoder.MAX_RECORDS_PER_BATCH - record_count
        if room < len(fails):
            fails[max(room, 0) :] = True
        return fails
