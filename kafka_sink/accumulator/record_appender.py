"""The task's side of the accumulator: rows of a unit into leased batches, in turns.

A turn plans under the lock (lease the tail batches, fix offsets and base timestamps, take memory),
then encodes and writes outside it, then ends the leases. The sender leaves leased batches alone. A
refused reservation ends the turn before anything beyond it is encoded; the task then waits for memory
while it holds no open batch of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from kafka_sink.accumulator.batch_buffer import BatchBuffer
from kafka_sink.accumulator.batch_limits import BatchLimits, BatchRoom
from kafka_sink.accumulator.muted_memory_limit import MutedMemoryLimit
from kafka_sink.accumulator.producer_batch import BatchState, ProducerBatch, projected_size
from kafka_sink.accumulator.record_accumulator import PartitionQueue, RecordAccumulator
from kafka_sink.clock import Clock
from kafka_sink.model import TopicPartition
from kafka_sink.records import batch_header, encoder
from kafka_sink.records.compression import PACKER, BlockCodec, CompressionRatios, WholeCodec
from kafka_sink.records.ordered_rows import OrderedRows

# A refused reservation waits for at most this share of the pool: small grants come sooner, and the
# batch grows on without blocking once memory is free again.
_BLOCKING_SHARE = 16
# A whole-batch codec joins a batch's raw rows once, outside the pool: that copy must stay small.
_WHOLE_RAW_LIMIT = 4 << 20
# The share of the pool, as a divisor, that open batches of such a codec may hold raw; beyond it they pack.
_RAW_SHARE = 2


@dataclass(slots=True)
class Segment:
    """Rows ``start`` to ``stop`` of a unit go to ``batch``, whose row ``base_offset`` is the first."""

    batch: ProducerBatch
    start: int
    stop: int
    base_offset: int


@dataclass(slots=True)
class AppendPlan:
    """One turn: segments to encode, batches that are full after it, and where it stopped."""

    segments: list[Segment] = field(default_factory=list)
    full: list[ProducerBatch] = field(default_factory=list)
    opened: bool = False
    run: int = 0
    row: int = 0
    # Bytes for batches of a whole-batch codec that do not pack.
    raw_bytes: int = 0
    refused_bytes: int = 0
    refused_stop: int = 0


class RecordAppender:
    """Appends units to an accumulator; used by one task thread at a time."""

    def __init__(
        self,
        accumulator: RecordAccumulator,
        codec: BlockCodec | WholeCodec | None,
        clock_ms: Clock,
        wake_sender: Callable[[], None],
        muted_memory_limit: MutedMemoryLimit | None = None,
    ) -> None:
        self.encode_ms = 0.0
        self.pool_wait_ms = 0.0
        self._accumulator = accumulator
        self._settings = accumulator.settings
        self._allocator = accumulator.allocator
        self._moves_to_grow = self._allocator.moves_to_grow
        self._ratios = CompressionRatios()
        self._codec = codec
        batch_size = self._settings.batch_size
        self._whole = isinstance(codec, WholeCodec)
        self._limits = BatchLimits(batch_size, max(batch_size, _WHOLE_RAW_LIMIT) if self._whole else None)
        self._lowest_limit = batch_size
        # What packed rows of a topic shrank to last.
        self._packed_ratios: dict[str, float] = {}
        self._open_raw_limit = self._settings.buffer_memory // _RAW_SHARE
        # By topic; lower ones where brokers refused a batch within batch.size.
        self._topic_limits: dict[str, BatchLimits] = {}
        self._clock_ms = clock_ms
        self._wake_sender = wake_sender
        self._muted_memory_limit = muted_memory_limit

    def append(self, ordered: OrderedRows, check: Callable[[], None]) -> None:
        """Takes all rows of a unit, waiting up to max.block.ms for memory at each refusal.

        ``check`` raises when the task is already lost; it is called between turns and in waits. Raises
        BufferExhaustedError when no memory came free in time, DeliveryError where rows for a muted partition
        waited for delivery.timeout.ms.
        """
        share, count = self._muted_memory_limit, len(ordered.partitions)
        mutes = () if share is None else share.mutes()
        if share is None or not mutes:
            self._append_runs(ordered, 0, count, check)
            return
        # Rows for healthy partitions go first. A partition has one run in a unit, so its order is kept.
        muted = [run for run, partition in enumerate(ordered.partitions) if partition in mutes]
        resting = set(muted)
        for run, stop in _neighbours([run for run in range(count) if run not in resting]):
            self._append_runs(ordered, run, stop, check)
        while muted:
            needs = [
                (ordered.partitions[run], ordered.bound(ordered.starts[run], ordered.starts[run + 1]))
                for run in muted
            ]
            taken = share.wait(needs, check)
            for run, stop in _neighbours(muted[:taken]):
                self._append_runs(ordered, run, stop, check)
            del muted[:taken]

    def _append_runs(self, ordered: OrderedRows, run: int, stop_run: int, check: Callable[[], None]) -> None:
        row = 0
        granted: tuple[BatchBuffer, int] | None = None
        while True:
            try:
                with self._accumulator.lock:
                    plan = self._plan(ordered, run, stop_run, row, granted)
            except BaseException:
                # A grant that no batch has taken over belongs to nobody else.
                if granted is not None and not self._accumulator.owns(granted[0]):
                    granted[0].release()
                raise
            started = self._clock_ms()
            self._fill(ordered, plan)
            self.encode_ms += self._clock_ms() - started
            check()
            if plan.run == stop_run:
                return
            run, row = plan.run, plan.row
            if plan.refused_bytes:
                granted = (self._wait_for_memory(plan.refused_bytes, check), plan.refused_stop)
            else:
                granted = None

    def _wait_for_memory(self, needed: int, check: Callable[[], None]) -> BatchBuffer:
        def watch() -> None:
            # In line by now: woken before, the sender could find nobody waiting and sleep on through linger.
            self._wake_sender()
            # Of a lost task nothing more is sent, so no memory would come free.
            check()

        started = self._clock_ms()
        try:
            return self._allocator.open(needed, self._settings.max_block_ms, watch)
        finally:
            self.pool_wait_ms += self._clock_ms() - started

    def _plan(
        self, ordered: OrderedRows, run: int, stop_run: int, row: int, granted: tuple[BatchBuffer, int] | None
    ) -> AppendPlan:
        plan = AppendPlan(run=run)
        now_ms = self._clock_ms()
        if self._accumulator.too_large_batches:
            self._learn_from_refusals()
        starts = ordered.starts
        at_run = ordered.bound_at_run
        start = max(row, starts[run])
        for index in range(run, stop_run):
            stop = starts[index + 1]
            queue = self._accumulator.queue(ordered.partitions[index])
            tail = queue.batches[-1] if queue.batches else None
            # The common case by far: a short run, and its batch has room and memory for all of it.
            if (
                tail is not None
                and granted is None
                and start == starts[index]
                and self._extend(ordered, plan, tail, start, stop, at_run[index + 1] - at_run[index])
            ):
                start = stop
                continue
            start = self._plan_run(ordered, plan, queue, start, stop, now_ms, granted)
            granted = None
            if start < stop:
                plan.run, plan.row = index, start
                return plan
        plan.run = stop_run
        return plan

    def _extend(
        self, ordered: OrderedRows, plan: AppendPlan, tail: ProducerBatch, start: int, stop: int, bound: int
    ) -> bool:
        """Puts a whole run into the open tail batch if room and memory allow; else changes nothing."""
        if tail.state is not BatchState.OPEN:
            return False
        fits = self._rows_that_fit(ordered, start, stop, tail)
        surplus = ordered.surplus(stop - start, tail.base_timestamp)
        if fits != stop or not self._grow(plan, tail, bound + surplus):
            return False
        self._lease(plan, tail, start, stop)
        return True

    def _plan_run(
        self,
        ordered: OrderedRows,
        plan: AppendPlan,
        queue: PartitionQueue,
        start: int,
        stop: int,
        now_ms: float,
        granted: tuple[BatchBuffer, int] | None,
    ) -> int:
        """Plans a run over as many batches as it needs; returns the first row without a place."""
        while start < stop:
            tail = queue.batches[-1] if queue.batches else None
            if tail is not None and tail.state is BatchState.OPEN and granted is None:
                fits = self._rows_that_fit(ordered, start, stop, tail)
                surplus = ordered.surplus(fits - start, tail.base_timestamp)
                if fits > start and self._grow(plan, tail, ordered.bound(start, fits) + surplus):
                    self._lease(plan, tail, start, fits)
                    start = fits
                    if start == stop:
                        break
                elif fits > start:
                    start = self._fill_up(ordered, plan, tail, start, fits)
                # Full, or the pool is exhausted: drainable either way before anything blocks.
                self._close(plan, tail)
                continue
            batch, end = self._new_batch(ordered, plan, queue, start, stop, now_ms, granted)
            if batch is None:
                break
            self._lease(plan, batch, start, end)
            start = end
            if granted is not None:
                # The grant may be smaller than the batch; the next turn looks at it again.
                break
            if start < stop:
                self._close(plan, batch)
        return start

    def _fill_up(
        self, ordered: OrderedRows, plan: AppendPlan, tail: ProducerBatch, start: int, fits: int
    ) -> int:
        """Puts as many rows as memory is left for into a batch with room for all up to ``fits``."""
        rows = fits - start
        limit = tail.buffer.capacity + self._allocator.growable_bytes(tail.buffer)
        room = tail.raw_bytes_within(limit) - ordered.surplus(rows, tail.base_timestamp)
        end = min(ordered.rows_below(start, room), fits)
        if end <= start:
            return start
        added = ordered.bound(start, end) + ordered.surplus(end - start, tail.base_timestamp)
        if not self._grow(plan, tail, added):
            return start
        self._lease(plan, tail, start, end)
        return end

    def _new_batch(
        self,
        ordered: OrderedRows,
        plan: AppendPlan,
        queue: PartitionQueue,
        start: int,
        stop: int,
        now_ms: float,
        granted: tuple[BatchBuffer, int] | None,
    ) -> tuple[ProducerBatch | None, int]:
        ratio = self._ratios.estimate(queue.partition.topic, self._settings.compression)
        base_timestamp = int(ordered.timestamps[start])
        if granted is not None:
            buffer, end = granted
        else:
            end = self._limits_of(queue.partition.topic).rows_that_fit(
                ordered,
                start,
                stop,
                raw_bytes=0,
                record_count=0,
                base_timestamp=base_timestamp,
                factor=self._factor(ratio),
            )
            opened = self._allocator.try_open(self._initial_hold(ordered, plan, queue, ratio, start, end))
            if opened is None:
                share = max(self._settings.buffer_memory // _BLOCKING_SHARE, 1)
                plan.refused_stop = stop = ordered.rows_within(start, end, share)
                plan.refused_bytes = self._initial_hold(ordered, plan, queue, ratio, start, stop)
                return None, start
            buffer = opened
        try:
            batch = ProducerBatch(
                queue.partition,
                buffer,
                self._codec,
                self._settings.compression,
                ratio,
                base_timestamp,
                now_ms,
            )
        except BaseException:
            if granted is None:
                buffer.release()
            raise
        self._accumulator.enqueue(queue, batch)
        plan.opened = True
        if self._whole and batch_header.SIZE + ordered.bound(start, end) > buffer.capacity:
            batch.pack(self._packed_ratio(queue.partition.topic))
        else:
            plan.raw_bytes += ordered.bound(start, end)
        return batch, end

    def _learn_from_refusals(self) -> None:
        """As Kafka's producer does, starts over with the estimate that proved too low; and takes over the
        topic's limit, which may be lower now."""
        for refusal in self._accumulator.too_large_batches:
            self._ratios.relearn(refusal.topic, self._settings.compression, refusal.ratio)
            self._topic_limits.pop(refusal.topic, None)
        self._accumulator.too_large_batches.clear()

    def _limits_of(self, topic: str) -> BatchLimits:
        found = self._topic_limits.get(topic)
        if found is None:
            limit = self._accumulator.limits.of(topic)
            found = self._limits
            if limit != found.write_limit:
                found = BatchLimits(limit, found.raw_limit)
                self._lowest_limit = min(self._lowest_limit, limit)
            self._topic_limits[topic] = found
        return found

    def _factor(self, ratio: float) -> float:
        return 1.0 if self._codec is None else ratio * CompressionRatios.SAFETY

    def _initial_hold(
        self,
        ordered: OrderedRows,
        plan: AppendPlan,
        queue: PartitionQueue,
        ratio: float,
        start: int,
        end: int,
    ) -> int:
        """Bytes that a new batch will hold with rows ``start`` to ``end``, which it has room for."""
        if self._codec is None:
            limit = self._limits_of(queue.partition.topic).write_limit
            return ordered.exact_hold(start, end, limit)
        added = ordered.bound(start, end)
        if isinstance(self._codec, BlockCodec):
            return projected_size(self._codec, ratio, batch_header.SIZE + len(self._codec.prologue), added)
        raw = batch_header.SIZE + added
        if not self._must_pack(plan, added, raw, self._settings.batch_size):
            return raw
        return min(
            raw, projected_size(PACKER, self._packed_ratio(queue.partition.topic), batch_header.SIZE, added)
        )

    def _rows_that_fit(self, ordered: OrderedRows, start: int, stop: int, batch: ProducerBatch) -> int:
        return self._limits_of(batch.partition.topic).rows_that_fit(
            ordered,
            start,
            stop,
            raw_bytes=batch.raw_bytes,
            record_count=batch.record_count,
            base_timestamp=batch.base_timestamp,
            factor=self._factor(batch.ratio),
        )

    def _is_full(self, batch: ProducerBatch) -> bool:
        # Most batches are far from it: runs are short where partitions are many.
        if 2 * batch.raw_bytes < self._lowest_limit:
            return False
        return self._limits_of(batch.partition.topic).reached(
            raw_bytes=batch.raw_bytes, record_count=batch.record_count, factor=self._factor(batch.ratio)
        )

    def _grow(self, plan: AppendPlan, batch: ProducerBatch, added: int) -> bool:
        """Memory for rows that the batch has room for, ``added`` bytes at most."""
        projected = batch.projected_size_with(added)
        raw = self._whole and not batch.packing
        if raw and self._must_pack(plan, added, projected, batch.buffer.capacity):
            batch.pack(self._packed_ratio(batch.partition.topic))
            projected = batch.projected_size_with(added)
        if self._codec is None:
            if projected <= batch.buffer.capacity:
                return True
            # Uncompressed, what has room stays within the limit by its exact size, not by its upper bound.
            projected = min(projected, self._limits_of(batch.partition.topic).write_limit)
        if self._allocator.overdrawn:
            return False
        if projected > batch.buffer.capacity and not self._allocator.try_grow(batch.buffer, projected):
            return False
        if raw and not batch.packing:
            plan.raw_bytes += added
        return True

    def _packed_ratio(self, topic: str) -> float:
        return self._packed_ratios.get(topic, 1.0)

    def _must_pack(self, plan: AppendPlan, added: int, projected: int, capacity: int) -> bool:
        """Whether a batch of a whole-batch codec must no longer hold its rows raw: because all open batches
        together hold enough, or because it would outgrow the batch.size that `full` gave it."""
        held = self._accumulator.open_raw_bytes + plan.raw_bytes + added
        return held > self._open_raw_limit or (self._moves_to_grow and projected > capacity)

    @staticmethod
    def _lease(plan: AppendPlan, batch: ProducerBatch, start: int, stop: int) -> None:
        batch.leased = True
        plan.segments.append(Segment(batch, start, stop, batch.record_count))

    def _close(self, plan: AppendPlan, batch: ProducerBatch) -> None:
        """No more rows; the task seals it after this turn's rows are in, so it stays leased till then."""
        batch.leased = True
        batch.move_to(BatchState.CLOSED)
        self._accumulator.uncount_raw(batch)
        plan.full.append(batch)

    # -- outside the lock: encode, write, seal ----------------------------------------------------

    def _fill(self, ordered: OrderedRows, plan: AppendPlan) -> None:
        if plan.segments:
            self._encode(ordered, plan.segments)
        accumulator = self._accumulator
        with accumulator.lock:
            for segment in plan.segments:
                batch = segment.batch
                if batch.state is BatchState.OPEN and (batch.overflowed or self._is_full(batch)):
                    # What holds memory beyond the pool goes early; a full batch need not wait for a row
                    # that it does not take.
                    self._close(plan, batch)
                if batch.packing:
                    self._packed_ratios[batch.partition.topic] = batch.packed_ratio
                if self._whole and batch.state is BatchState.OPEN:
                    accumulator.count_raw(batch)
                # What was closed stays leased until it is sealed.
                batch.leased = batch.state is BatchState.CLOSED
            # The sender sleeps until what it knew of is due: it must hear of a batch that is new, and of one
            # that it found leased.
            news = plan.opened or accumulator.leased_batch_skipped
            accumulator.leased_batch_skipped = False
        for batch in plan.full:
            self._seal(batch)
        if news:
            self._wake_sender()

    def _seal(self, batch: ProducerBatch) -> None:
        batch.seal()
        self._ratios.observe(batch.partition.topic, batch.compression, batch.observed_ratio)
        with self._accumulator.lock:
            batch.leased = False
        self._wake_sender()

    def _encode(self, ordered: OrderedRows, segments: list[Segment]) -> None:
        """Encodes the rows of all segments in one pass; they are neighbours in the unit's order."""
        first, last = segments[0].start, segments[-1].stop
        rows = ordered.columns.slice(first, last)
        starts = np.array([segment.start for segment in segments], dtype=np.int64) - first
        lengths = np.diff(np.append(starts, last - first))
        shift = np.array([segment.base_offset for segment in segments], dtype=np.int64) - starts
        offset_deltas = np.arange(last - first, dtype=np.int64) + np.repeat(shift, lengths)
        timestamps = ordered.timestamps[first:last]
        bases = np.array([segment.batch.base_timestamp for segment in segments], dtype=np.int64)
        encoded = encoder.encode(rows, offset_deltas, timestamps - np.repeat(bases, lengths))
        latest = np.maximum.reduceat(timestamps, starts).tolist()
        ends = encoded.ends[starts + lengths - 1].tolist()
        at = 0
        for segment, end, max_timestamp in zip(segments, ends, latest, strict=True):
            segment.batch.append(encoded.data[at:end], segment.stop - segment.start, max_timestamp)
            at = end

    def batch_room(self, partition: TopicPartition, row_bytes: float) -> BatchRoom:
        """How many bytes of such rows the partition's batches take before they are full."""
        limits = self._limits_of(partition.topic)
        ratio = self._ratios.estimate(partition.topic, self._settings.compression)
        new = limits.room(raw_bytes=0, factor=self._factor(ratio), row_bytes=row_bytes)
        with self._accumulator.lock:
            tail = self._accumulator.open_batch(partition)
            if tail is None:
                return BatchRoom(None, new)
            factor = self._factor(tail.ratio)
            return BatchRoom(limits.room(raw_bytes=tail.raw_bytes, factor=factor, row_bytes=row_bytes), new)

    def flush(self) -> None:
        """Closes and seals every open batch on the task's thread; the sender drains them meanwhile."""
        with self._accumulator.lock:
            self._accumulator.flushing = True
            plan = AppendPlan()
            for batch in self._accumulator.open_batches():
                self._close(plan, batch)
        started = self._clock_ms()
        for batch in plan.full:
            self._seal(batch)
        self.encode_ms += self._clock_ms() - started
        self._wake_sender()


def _neighbours(runs: list[int]) -> Iterator[tuple[int, int]]:
    """Ascending numbers as first and past-the-last of those without a gap."""
    first = 0
    for index, run in enumerate(runs):
        if index + 1 == len(runs) or runs[index + 1] != run + 1:
            yield runs[first], run + 1
            first = index + 1
