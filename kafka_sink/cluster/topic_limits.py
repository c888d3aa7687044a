"""How many rows a topic's batches take, and how many bytes they need, learnt from its earlier batches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kafka_sink.cluster.records_builder import SAFETY, RecordsBuilder, projected_size
from kafka_sink.records import batch_header, encoder
from kafka_sink.records.arrays import Int64s
from kafka_sink.records.compression import BlockCodec, WholeCodec
from kafka_sink.records.ordered_rows import OrderedRows

# The estimated compressed bytes per raw byte before a topic's first batch.
INITIAL_RATIO = 1.0
# One batch lowers or raises the estimate by one of these.
_IMPROVING_STEP = 0.005
_DETERIORATING_STEP = 0.05
# An estimate that was never too low may fall to this share of its value with one batch.
_FIRST_SHARE = 0.75
# The number of rows in the first step of an exact cut, which is usually also the last step, and in the
# largest step.
_FIRST_SCAN_ROWS = 128
_SCAN_ROWS = 8192
# A whole-batch codec copies all raw rows of a batch once, outside the pool. This keeps the copy small.
_WHOLE_RAW_LIMIT = 4 << 20
# A learnt limit doubles after the first of these times, because an administrator may have raised the broker's
# limit. The wait doubles each time that brokers refuse the larger batches, so that a permanent limit costs
# one split every ten minutes.
_FIRST_RISE_MS, _LONGEST_RISE_MS = 1_000.0, 600_000.0
# The new limit is the refused size divided by one of these.
_AFTER_SPLIT, _AFTER_LOSS = 2, 8


class LimitStore(Protocol):
    """Keeps the limits that brokers enforce, in bytes by topic, for producers of the same brokers."""

    def read(self) -> dict[str, int]: ...

    def write(self, limits: Mapping[str, int]) -> None: ...


class TopicLimits:
    """One topic's limits and compression ratio. Sizes are in bytes.

    A batch takes ``write_limit`` estimated bytes on the wire, and ``raw_limit`` raw bytes. Only the task's
    thread uses the attributes, except for ``learnt`` and its rise (see ``rise``).

    ``ratio`` is the compressed bytes per raw byte. It is learnt from batches almost as in Kafka's
    CompressionRatioEstimator: it rises at once to a worse observation and falls by small steps, because a
    batch with too many rows costs a split. Kafka also adds a step to each worse observation. Here only an
    observation beyond the safety margin adds it: for rows that shrink to 0.27 of their size, the step makes
    the next ten batches up to a sixth smaller, and a far broker then takes that much fewer rows for each
    request in flight. Until the estimate first rises, it falls by a quarter at a time instead. With small
    steps alone, a topic's first 146 batches would be too small. Kafka's producer lives for days, a task for
    seconds.

    ``learnt`` is the limit that brokers enforce, or None if no batch was too large. The sender's thread
    writes it. It is kept for later producers: if a broker rejects a batch as too large after the batch's
    connection broke, the batch may not be split. Then the task fails and its Python worker ends. A new worker
    that began with batch.size again would fail in the same way, in every attempt that Spark allows.
    """

    def __init__(
        self,
        topic: str,
        batch_size: int,
        codec: BlockCodec | WholeCodec | None = None,
        store: LimitStore | None = None,
        learnt: int | None = None,
    ) -> None:
        self._topic = topic
        self._batch_size = batch_size
        self._codec = codec
        # The factor by which rows may take more bytes than estimated.
        self._safety = 1.0 if codec is None else SAFETY
        self._store = store
        self.learnt = learnt
        # When the limit may double; None until a broker takes the first large batch after it was learnt. Only
        # the sender's thread uses these three.
        self._rises_at_ms: float | None = None
        self._rise_wait_ms, self._has_doubled = _FIRST_RISE_MS, False
        self.raw_limit = max(batch_size, _WHOLE_RAW_LIMIT) if isinstance(codec, WholeCodec) else None
        self.begin()

    def begin(self) -> None:
        """Begin a new task: it estimates the ratio again, but keeps the learnt limit."""
        self.write_limit = self.largest_batch
        self.ratio = INITIAL_RATIO
        # Whether the ratio was too low at least once.
        self._has_risen = False

    @property
    def largest_batch(self) -> int:
        """batch.size, or the learnt limit if that is smaller."""
        return self._batch_size if self.learnt is None else min(self.learnt, self._batch_size)

    def observe(self, ratio: float) -> None:
        """Adjust the estimate to the ratio of one batch."""
        current = self.ratio
        if ratio > current:
            exceeds = ratio > current * self._safety
            self.ratio = max(current + _DETERIORATING_STEP, ratio) if exceeds else ratio
            self._has_risen = True
        elif ratio < current:
            updated = current - _IMPROVING_STEP
            if not self._has_risen:
                updated = min(updated, current * _FIRST_SHARE)
            self.ratio = max(updated, ratio)

    def relearn(self, ratio: float, estimate: float) -> None:
        """Apply the learnt limit after a batch was too large. ``ratio`` is what its rows compressed to, and
        ``estimate`` what was expected when it opened.

        If the estimate was too low, it is corrected to at least 1.0 as in Kafka's producer. Otherwise only
        the broker's limit was lower than ours, and a correction would keep many later batches small.
        """
        if ratio > estimate * self._safety:
            self.ratio = max(INITIAL_RATIO, ratio)
            self._has_risen = True
        self.write_limit = self.largest_batch

    def on_too_large(self, size: int, *, costs_task: bool = False) -> None:
        """Learn from a batch of ``size`` bytes that was too large. If it was within our limit, the broker's
        limit is lower.

        The new limit is half the size, because each split walks over the batch's records. If the batch
        cannot be split, it ``costs_task`` and the new limit is an eighth, because Spark allows four attempts
        by default. Called by the sender's thread.
        """
        if size > self.largest_batch:
            return
        self.learnt = limit = max(1, size // (_AFTER_LOSS if costs_task else _AFTER_SPLIT))
        if self._has_doubled:
            self._rise_wait_ms = min(2 * self._rise_wait_ms, _LONGEST_RISE_MS)
        self._rises_at_ms, self._has_doubled = None, False
        self._keep(limit)

    def may_rise(self, size: int, now_ms: float) -> bool:
        """Whether a learnt limit may double now, because a broker has taken a batch of ``size`` bytes.

        Only a batch larger than half the limit counts. Smaller batches neither need a larger limit nor show
        that brokers take batches as large as the present one. Called by the sender's thread.
        """
        if self.learnt is None or self.learnt >= self._batch_size or 2 * size <= self.learnt:
            return False
        if self._rises_at_ms is None:
            self._rises_at_ms = now_ms + self._rise_wait_ms
        return now_ms >= self._rises_at_ms

    def rise(self) -> None:
        """Double the learnt limit, up to batch.size. The caller holds the accumulator's lock, because the
        task's thread reads ``write_limit`` with it.

        The new limit is not kept for later producers: no broker has taken such a batch yet, and another task
        may just have learnt a lower limit. Each producer finds out for itself.
        """
        limit = min(2 * self.largest_batch, self._batch_size)
        self.learnt = self.write_limit = limit
        self._rises_at_ms, self._has_doubled = None, True

    def _keep(self, limit: int) -> None:
        """Keep the limit for later producers, unless a lower one is kept.

        If nothing changes, nothing is written: the kept limits end an hour after the last write, so a refusal
        of a larger batch every ten minutes would keep a limit that is too low for ever.
        """
        if self._store is not None:
            kept = self._store.read()
            if limit < kept.get(self._topic, limit + 1):
                self._store.write({**kept, self._topic: limit})

    def rows_that_fit(
        self, ordered: OrderedRows, start: int, stop: int, batch: RecordsBuilder | None = None
    ) -> int:
        """The first row from ``start`` on that an open batch, or a new one, does not take; ``stop`` if it
        takes all rows.

        A row fits if the header, the raw bytes so far times the ratio, and the raw row itself are together
        within the limit (Kafka's hasRoomFor). This sum does not grow steadily if row sizes differ much, so
        all rows are checked in order; a bisection could miss the first row that does not fit. An empty batch
        takes any row.
        """
        if batch is None:
            raw_bytes = record_count = 0
            ratio, base_timestamp, is_bounded = self.ratio, ordered.timestamp(start), True
        else:
            raw_bytes, record_count = batch.raw_bytes, batch.record_count
            ratio, base_timestamp = batch.ratio, batch.base_timestamp
            is_bounded = ordered.deltas_are_bounded(base_timestamp)
        factor = ratio * self._safety
        bound = ordered.bound(start, stop)
        limit = self.write_limit - batch_header.SIZE
        surely = (
            (raw_bytes + bound) * factor + (0 if factor == 1.0 else ordered.largest_bound) <= limit
            and (self.raw_limit is None or raw_bytes + bound <= self.raw_limit)
            and record_count + stop - start <= encoder.MAX_RECORDS_PER_BATCH
            and is_bounded
        )
        if surely:
            return stop
        return self._first_beyond(ordered, start, stop, raw_bytes, record_count, base_timestamp, factor)

    def _first_beyond(
        self,
        ordered: OrderedRows,
        start: int,
        stop: int,
        raw_bytes: int,
        record_count: int,
        base_timestamp: int,
        factor: float,
    ) -> int:
        """The same row as ``rows_that_fit`` returns, found with the rows' exact sizes if their upper bounds
        are too large."""
        at = start
        if ordered.deltas_are_bounded(base_timestamp):
            at = self._surely_fit(ordered, start, stop, raw_bytes, record_count, factor)
        if at > start:
            raw_bytes += int(ordered.exact_sizes(start, at, record_count, base_timestamp).sum())
            record_count += at - start
        step = _FIRST_SCAN_ROWS
        while at < stop:
            end = min(stop, at + step)
            step = min(4 * step, _SCAN_ROWS)
            sizes = ordered.exact_sizes(at, end, record_count, base_timestamp)
            fails = self._failures(sizes, raw_bytes, record_count, factor)
            if record_count == 0:
                fails[0] = False
            if fails.any():
                return at + int(fails.argmax())
            raw_bytes += int(sizes.sum())
            record_count += end - at
            at = end
        return stop

    def _surely_fit(
        self, ordered: OrderedRows, start: int, stop: int, raw_bytes: int, record_count: int, factor: float
    ) -> int:
        """The first row that may not fit. All rows before it fit according to their upper bounds."""
        limit = (self.write_limit - batch_header.SIZE - ordered.largest_bound) / factor
        if self.raw_limit is not None:
            limit = min(limit, self.raw_limit)
        left = encoder.MAX_RECORDS_PER_BATCH - record_count
        # One byte less than the limit, so that a rounding error cannot admit one more row.
        return min(ordered.rows_below(start, int(limit) - raw_bytes - 1), stop, start + max(left, 0))

    def _failures(
        self, sizes: Int64s, raw_bytes: int, record_count: int, factor: float
    ) -> npt.NDArray[np.bool_]:
        before = np.cumsum(sizes) - sizes + raw_bytes
        fails: npt.NDArray[np.bool_] = before * factor + sizes > self.write_limit - batch_header.SIZE
        if self.raw_limit is not None:
            fails |= before + sizes > self.raw_limit
        left = encoder.MAX_RECORDS_PER_BATCH - record_count
        if left < len(fails):
            fails[max(left, 0) :] = True
        return fails

    def is_full(self, batch: RecordsBuilder) -> bool:
        """Whether a batch takes no more rows, however small (Kafka's isFull)."""
        return (
            batch_header.SIZE + batch.raw_bytes * batch.ratio * self._safety >= self.write_limit
            or batch.record_count >= encoder.MAX_RECORDS_PER_BATCH
            or (self.raw_limit is not None and batch.raw_bytes >= self.raw_limit)
        )

    def remaining(self, row_bytes: float, batch: RecordsBuilder | None = None) -> float:
        """How many bytes of rows of about ``row_bytes`` each an open batch, or a new one, takes."""
        factor = (self.ratio if batch is None else batch.ratio) * self._safety
        limit = (self.write_limit - batch_header.SIZE - row_bytes) / factor + row_bytes
        if self.raw_limit is not None:
            limit = min(limit, self.raw_limit)
        return max(0.0, limit - (0 if batch is None else batch.raw_bytes))

    def new_batch_bytes(self, ordered: OrderedRows, start: int, stop: int) -> int:
        """The most bytes that a new batch needs for rows ``start`` to ``stop``, all of which fit. With a
        whole-batch codec they are stored raw until the batch is sealed."""
        codec, bound = self._codec, ordered.bound(start, stop)
        if isinstance(codec, BlockCodec):
            return projected_size(codec, self.ratio, batch_header.SIZE + len(codec.prologue), bound)
        if codec is None and batch_header.SIZE + bound > self.write_limit:
            # Several rows fit according to their exact sizes. A single row may exceed the limit.
            if stop - start > 1:
                return self.write_limit
            bound = int(ordered.exact_sizes(start, stop, 0, ordered.timestamp(start))[0])
        return batch_header.SIZE + bound
