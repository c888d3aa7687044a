"""How many rows a topic's batches take and how many bytes they need, as learnt from those before them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kafka_sink import spark_application
from kafka_sink.records import batch_header, encoder
from kafka_sink.records.arrays import Int64s
from kafka_sink.records.compression import BlockCodec, WholeCodec
from kafka_sink.records.ordered_rows import OrderedRows

if TYPE_CHECKING:
    from kafka_sink.engine.batch import ProducerBatch

# Compressed bytes per raw byte before a topic's first batch; and by how much an estimate may be too low.
INITIAL_RATIO = 1.0
SAFETY = 1.05
# By how much an estimate falls, and rises, with a batch.
_IMPROVING_STEP = 0.005
_DETERIORATING_STEP = 0.05
# An estimate that was never too low falls to this share at most.
_FIRST_SHARE = 0.75
# Rows that the first step of an exact cut looks at, as it usually ends there, and the largest step.
_FIRST_SCAN_ROWS = 128
_SCAN_ROWS = 8192
# A whole-batch codec joins a batch's raw rows once, outside the pool: that copy must stay small.
_WHOLE_RAW_LIMIT = 4 << 20
# How long a limit learnt by an earlier producer is used: an administrator may have raised it since.
_BELIEVED_S = 3600.0
# A learnt limit doubles after this long, as an administrator may have raised the broker's. The wait doubles
# each time that brokers refuse the larger batches, so that a lasting limit costs a split every ten minutes.
_FIRST_RISE_MS, _LONGEST_RISE_MS = 1_000.0, 600_000.0
# The size that was too large is divided by these.
_AFTER_SPLIT, _AFTER_LOSS = 2, 8


def kept_limits(cluster: str | None) -> dict[str, int]:
    """What earlier producers learnt of the limits of these brokers, in bytes by topic."""
    text = None if cluster is None else spark_application.noted_within(_key(cluster), _BELIEVED_S)
    found: object = None
    with contextlib.suppress(ValueError):
        found = json.loads(text or "null")
    if not isinstance(found, dict):
        return {}
    return {topic: limit for topic, limit in found.items() if type(limit) is int and limit > 0}


def _key(cluster: str) -> str:
    return f"batch size limits of {cluster}"


def projected_size(codec: BlockCodec | None, ratio: float, body: int, tail: int) -> int:
    """Bytes held by ``body`` bytes and ``tail`` raw bytes after them.

    Full blocks of ``codec`` shrink as estimated; the last block stays raw, and so does everything without a
    codec.
    """
    if codec is None:
        return body + tail
    blocks, rest = divmod(tail, codec.block_size)
    compressed = int(blocks * codec.block_size * min(1.0, ratio * SAFETY))
    return body + compressed + rest + (blocks + 1) * codec.block_overhead + len(codec.epilogue)


class TopicLimits:
    """One topic's limits and compression ratio; the task's thread has all of it but ``learnt``. Sizes are
    bytes.

    A batch takes ``write_limit`` estimated bytes on the wire, and ``raw_limit`` raw ones.

    ``ratio``, compressed bytes per raw byte, is learnt from batches almost as Kafka's
    CompressionRatioEstimator does: it rises at once to a worse observation (plus a step) and falls by small
    steps, because an over-packed batch costs a split and an under-packed one only a little efficiency. Until
    it first rises, it falls by a quarter at a time instead: with small steps alone, a topic's first 146
    batches would be too small where rows shrink to 0.27 of their size. Kafka's producer lives for days, a
    task for seconds.

    ``learnt`` is the limit that brokers taught, None where nothing was too large; the sender's thread writes
    it. It outlives the producer: if a broker rejects a batch as too large after the batch's connection broke,
    the batch may not be split. Its task fails then, and the task's Python worker ends. A new worker that
    began with batch.size again would fail in the same way, in every attempt that Spark allows.
    """

    def __init__(
        self,
        topic: str,
        batch_size: int,
        codec: BlockCodec | WholeCodec | None = None,
        cluster: str | None = None,
        learnt: int | None = None,
    ) -> None:
        """``cluster`` identifies the brokers; with None what they teach is not kept."""
        self._topic = topic
        self._batch_size = batch_size
        self._codec = codec
        # By how much rows may shrink less than estimated.
        self._safety = 1.0 if codec is None else SAFETY
        self._cluster = cluster
        self.learnt = learnt
        # When the limit may double; None until the first batch after it was learnt is taken. The sender's.
        self._rises_at_ms: float | None = None
        self._rise_wait_ms, self._has_doubled = _FIRST_RISE_MS, False
        self.raw_limit = max(batch_size, _WHOLE_RAW_LIMIT) if isinstance(codec, WholeCodec) else None
        self.begin()

    def begin(self) -> None:
        """A new task estimates anew; what brokers taught stays."""
        self.write_limit = self.largest_batch
        self.ratio = INITIAL_RATIO
        # Whether the ratio was once too low.
        self._has_risen = False

    # -- learning -----------------------------------------------------------------------------------

    @property
    def largest_batch(self) -> int:
        """batch.size, or less if that is too large for brokers."""
        return self._batch_size if self.learnt is None else min(self.learnt, self._batch_size)

    def observe(self, ratio: float) -> None:
        """Adjust the estimate by what one batch shrank to."""
        current = self.ratio
        if ratio > current:
            self.ratio = max(current + _DETERIORATING_STEP, ratio)
            self._has_risen = True
        elif ratio < current:
            updated = current - _IMPROVING_STEP
            if not self._has_risen:
                updated = min(updated, current * _FIRST_SHARE)
            self.ratio = max(updated, ratio)

    def relearn(self, ratio: float) -> None:
        """Start over with an estimate that proved too low, at least at 1.0 as Kafka's producer does, and take
        over what brokers taught."""
        self.ratio = max(INITIAL_RATIO, ratio)
        self._has_risen = True
        self.write_limit = self.largest_batch

    def too_large(self, size: int, *, costs_task: bool = False) -> None:
        """A batch of ``size`` bytes was too large. If it was within the limit, the broker's own is lower.

        The new limit is half the size, since splitting a batch costs a walk over its records. It is an eighth
        if this ``costs_task``, since Spark allows four attempts by default. Called by the sender's thread.
        """
        if size > self.largest_batch:
            return
        self.learnt = limit = max(1, size // (_AFTER_LOSS if costs_task else _AFTER_SPLIT))
        if self._has_doubled:
            self._rise_wait_ms = min(2 * self._rise_wait_ms, _LONGEST_RISE_MS)
        self._rises_at_ms, self._has_doubled = None, False
        self._keep(lambda kept: min(limit, kept))

    def may_rise(self, now_ms: float) -> bool:
        """Whether a learnt limit is due to double, now that a broker has taken a batch. The sender's thread
        calls it."""
        if self.learnt is None or self.learnt >= self._batch_size:
            return False
        if self._rises_at_ms is None:
            self._rises_at_ms = now_ms + self._rise_wait_ms
        return now_ms >= self._rises_at_ms

    def rise(self) -> None:
        """Double the learnt limit, up to batch.size. The accumulator's lock is held: the task's thread reads
        ``write_limit`` under it."""
        limit = min(2 * self.largest_batch, self._batch_size)
        self.learnt = self.write_limit = limit
        self._rises_at_ms, self._has_doubled = None, True
        self._keep(lambda _: limit)

    def _keep(self, limit: Callable[[int], int]) -> None:
        """Keep the learnt limit for later producers: ``limit`` of the one that is kept by now."""
        if self._cluster is not None and self.learnt is not None:
            kept = kept_limits(self._cluster)
            kept[self._topic] = limit(kept.get(self._topic, self.learnt))
            spark_application.note(_key(self._cluster), json.dumps(kept))

    # -- asking -------------------------------------------------------------------------------------

    def rows_that_fit(
        self, ordered: OrderedRows, start: int, stop: int, batch: ProducerBatch | None = None
    ) -> int:
        """First row from ``start`` on that an open batch, or a new one, does not take (``stop`` when it takes
        all).

        A row fits while header + raw bytes so far x ratio + the row itself, raw, stay within the limit
        (Kafka's hasRoomFor). That sum does not grow steadily if sizes differ much, so a scan finds the first
        row that fails; a bisection could miss it. An empty batch takes any row.
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
        """As ``rows_that_fit``, by the rows' exact sizes where their bounds do not do."""
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
        """The row up to which all rows fit by their upper bounds alone, without a check of each."""
        limit = (self.write_limit - batch_header.SIZE - ordered.largest_bound) / factor
        if self.raw_limit is not None:
            limit = min(limit, self.raw_limit)
        left = encoder.MAX_RECORDS_PER_BATCH - record_count
        # One byte less than the limit allows: a rounding error must not let one more row in.
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

    def is_full(self, batch: ProducerBatch) -> bool:
        """Whether a batch takes no further row, however small (Kafka's isFull)."""
        return (
            batch_header.SIZE + batch.raw_bytes * batch.ratio * self._safety >= self.write_limit
            or batch.record_count >= encoder.MAX_RECORDS_PER_BATCH
            or (self.raw_limit is not None and batch.raw_bytes >= self.raw_limit)
        )

    def remaining(self, row_bytes: float, batch: ProducerBatch | None = None) -> float:
        """Bytes of rows of about ``row_bytes`` that an open batch, or a new one, takes: see rows_that_fit."""
        factor = (self.ratio if batch is None else batch.ratio) * self._safety
        limit = (self.write_limit - batch_header.SIZE - row_bytes) / factor + row_bytes
        if self.raw_limit is not None:
            limit = min(limit, self.raw_limit)
        return max(0.0, limit - (0 if batch is None else batch.raw_bytes))

    def new_batch_bytes(self, ordered: OrderedRows, start: int, stop: int) -> int:
        """Bytes that a new batch will hold at most with rows ``start`` to ``stop``, which it has room for.
        With a whole-batch codec they are held raw."""
        codec, bound = self._codec, ordered.bound(start, stop)
        if isinstance(codec, BlockCodec):
            return projected_size(codec, self.ratio, batch_header.SIZE + len(codec.prologue), bound)
        if codec is None and batch_header.SIZE + bound > self.write_limit:
            # Several rows have room by their exact sizes. One alone may be larger than the limit.
            if stop - start > 1:
                return self.write_limit
            bound = int(ordered.exact_sizes(start, stop, 0, ordered.timestamp(start))[0])
        return batch_header.SIZE + bound
