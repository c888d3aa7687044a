"""How many rows a batch takes, and what brokers taught of its limits; how many bytes
they need, as learnt from the batches before it."""

from __future__ import annotations

import contextlib
import json
import threading
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kafka_sink import spark_application
from kafka_sink.accumulator.producer_batch import ProducerBatch, projected_size
from kafka_sink.dtypes import Int64s
from kafka_sink.options import SinkOptions
from kafka_sink.records import batch_header, encoder
from kafka_sink.records.compression import BlockCodec, CompressionRatios, WholeCodec
from kafka_sink.records.ordered_rows import OrderedRows

# Rows that the first step of an exact cut looks at, as it usually ends there, and the largest step.
_FIRST_SCAN_ROWS = 128
_SCAN_ROWS = 8192


@dataclass(frozen=True, slots=True)
class TooLargeBatch:
    """A batch that was too large for its broker. ``ratio`` is compressed bytes per raw byte."""

    topic: str
    ratio: float


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


# How long a limit learnt by an earlier producer is used: an administrator may have raised it since.
_BELIEVED_S = 3600.0
# The size that was too large is divided by these.
_AFTER_SPLIT, _AFTER_LOSS = 2, 8


class LearntLimits:
    """What brokers taught of their limits, in bytes by topic. Thread-safe: the sender learns them, the task
    cuts batches by them.

    They outlive the producer. If a broker rejects a batch as too large after the batch's connection broke,
    the batch may not be split. Its task fails then, and the task's Python worker ends. A new worker that
    began with batch.size again would fail in the same way, in every attempt that Spark allows. ``cluster``
    identifies the brokers; with None the limits are not kept.
    """

    def __init__(self, batch_size: int, cluster: str | None = None) -> None:
        self._batch_size = batch_size
        self._key = None if cluster is None else f"batch size limits of {cluster}"
        self._lock = threading.Lock()  # guards the dictionary
        self._by_topic = self._kept()

    def of(self, topic: str) -> int:
        """The topic's limit: batch.size, or less if that is too large for brokers."""
        with self._lock:
            return min(self._by_topic.get(topic, self._batch_size), self._batch_size)

    @property
    def any_learnt(self) -> bool:
        """Whether ``learnt`` has a limit for any topic. Without the lock."""
        return bool(self._by_topic)

    def learnt(self, topic: str) -> int | None:
        """The limit of a topic whose batches were too large for brokers, None for any other."""
        with self._lock:
            return self._by_topic.get(topic)

    def note_too_large(self, topic: str, size: int, *, costs_task: bool = False) -> None:
        """A batch of ``size`` bytes was too large. If it was within the limit, the broker's own is lower.

        The new limit is half the size, since splitting a batch costs a walk over its records. It is an eighth
        if this ``costs_task``, since Spark allows four attempts by default.
        """
        with self._lock:
            if size > min(self._by_topic.get(topic, self._batch_size), self._batch_size):
                return
            self._by_topic[topic] = max(1, size // (_AFTER_LOSS if costs_task else _AFTER_SPLIT))
            if self._key is None:
                return
            kept = self._kept()
            for name, limit in self._by_topic.items():
                kept[name] = min(limit, kept.get(name, limit))
            spark_application.note(self._key, json.dumps(kept))

    def _kept(self) -> dict[str, int]:
        text = None if self._key is None else spark_application.noted_within(self._key, _BELIEVED_S)
        found: object = None
        with contextlib.suppress(ValueError):
            found = json.loads(text or "null")
        if not isinstance(found, dict):
            return {}
        return {topic: limit for topic, limit in found.items() if type(limit) is int and limit > 0}


# A whole-batch codec joins a batch's raw rows once, outside the pool: that copy must stay small.
_WHOLE_RAW_LIMIT = 4 << 20


class SizeEstimates:
    """Limits and compression ratios by topic; used by the task's thread alone. Sizes are bytes."""

    def __init__(
        self,
        options: SinkOptions,
        codec: BlockCodec | WholeCodec | None,
        size_limits: LearntLimits,
    ) -> None:
        self.compression = options.compression_type
        self.codec = codec
        self._size_limits = size_limits
        batch_size = options.batch_size
        raw_limit = max(batch_size, _WHOLE_RAW_LIMIT) if isinstance(codec, WholeCodec) else None
        self._default = BatchLimits(batch_size, raw_limit)
        # The lowest of all topics' limits so far.
        self.lowest_limit = batch_size
        # By topic; lower ones where a batch within batch.size was too large.
        self._by_topic: dict[str, BatchLimits] = {}
        self.ratios = CompressionRatios()

    # -- learning -----------------------------------------------------------------------------------

    def observe(self, batch: ProducerBatch) -> None:
        if self.codec is None:
            return
        self.ratios.observe(batch.partition.topic, batch.compression, batch.observed_ratio)

    def learn_from(self, too_large: list[TooLargeBatch]) -> None:
        """Start over with an estimate that proved too low, as Kafka's producer does, and take over the
        topic's limit, which may be lower now."""
        for batch in too_large:
            self.ratios.relearn(batch.topic, self.compression, batch.ratio)
            self._by_topic.pop(batch.topic, None)

    # -- asking -------------------------------------------------------------------------------------

    def ratio(self, topic: str) -> float:
        """Compressed bytes per raw byte."""
        return 1.0 if self.codec is None else self.ratios.estimate(topic, self.compression)

    def limits_of(self, topic: str) -> BatchLimits:
        found = self._by_topic.get(topic)
        if found is None:
            limit = self._size_limits.of(topic)
            found = self._default
            if limit != found.write_limit:
                found = BatchLimits(limit, found.raw_limit)
                self.lowest_limit = min(self.lowest_limit, limit)
            self._by_topic[topic] = found
        return found

    def rows_that_fit(self, ordered: OrderedRows, start: int, stop: int, batch: ProducerBatch) -> int:
        """First row from ``start`` on that an open batch does not take."""
        return self.limits_of(batch.partition.topic).rows_that_fit(
            ordered,
            start,
            stop,
            raw_bytes=batch.raw_bytes,
            record_count=batch.record_count,
            base_timestamp=batch.base_timestamp,
            factor=self._factor(batch.ratio),
        )

    def rows_for_new_batch(self, ordered: OrderedRows, start: int, stop: int, topic: str) -> int:
        return self.limits_of(topic).rows_that_fit(
            ordered,
            start,
            stop,
            raw_bytes=0,
            record_count=0,
            base_timestamp=ordered.timestamp(start),
            factor=self._factor(self.ratio(topic)),
        )

    def is_full(self, batch: ProducerBatch) -> bool:
        return self.limits_of(batch.partition.topic).reached(
            raw_bytes=batch.raw_bytes, record_count=batch.record_count, factor=self._factor(batch.ratio)
        )

    def room_in(self, batch: ProducerBatch, row_bytes: float) -> float:
        """Bytes of rows of about ``row_bytes`` that an open batch still takes."""
        return self.limits_of(batch.partition.topic).room(
            raw_bytes=batch.raw_bytes, factor=self._factor(batch.ratio), row_bytes=row_bytes
        )

    def room_in_new_batch(self, topic: str, row_bytes: float) -> float:
        factor = self._factor(self.ratio(topic))
        return self.limits_of(topic).room(raw_bytes=0, factor=factor, row_bytes=row_bytes)

    def new_batch_bytes(self, ordered: OrderedRows, start: int, stop: int, topic: str) -> int:
        """Bytes that a new batch will hold with rows ``start`` to ``stop``, which it has room for. With a
        whole-batch codec they are held raw."""
        if self.codec is None:
            return ordered.exact_hold(start, stop, self.limits_of(topic).write_limit)
        added = ordered.bound(start, stop)
        if isinstance(self.codec, BlockCodec):
            body = batch_header.SIZE + len(self.codec.prologue)
            return projected_size(self.codec, self.ratio(topic), body, added)
        return batch_header.SIZE + added

    def new_batch_bytes_of_run(self, topic: str, rows: int, bound: int, largest_bound: int) -> int | None:
        """As ``new_batch_bytes`` for a run of ``bound`` bytes at most that a new batch surely takes whole, by
        bounds alone; None where it may not."""
        limits, codec = self.limits_of(topic), self.codec
        size = batch_header.SIZE + bound
        if rows > encoder.MAX_RECORDS_PER_BATCH:
            return None
        if codec is None:
            return size if size <= limits.write_limit else None
        ratio = self.ratio(topic)
        if size * max(1.0, self._factor(ratio)) + largest_bound > limits.write_limit:
            return None
        if isinstance(codec, BlockCodec):
            return projected_size(codec, ratio, batch_header.SIZE + len(codec.prologue), bound)
        return size

    def _factor(self, ratio: float) -> float:
        return 1.0 if self.codec is None else ratio * CompressionRatios.SAFETY
