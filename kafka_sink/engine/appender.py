"""Rows into batches, on the task's thread, in append passes.

A pass decides under the accumulator's lock which rows go to which batch, then encodes and writes without it.
Where memory is short the pass ends there, and the task waits for memory while it holds no batch.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, field

import numpy as np

from kafka_sink.breaker.breaker import Breaker
from kafka_sink.clock import BROKER, MEMORY, Clock, TaskActivity
from kafka_sink.cluster.partition import Partition
from kafka_sink.engine.accumulator import RecordAccumulator
from kafka_sink.engine.batch import BatchState, ProducerBatch, open_batch_of
from kafka_sink.errors import BufferExhaustedError, DeliveryError
from kafka_sink.memory.allocator import BufferAllocator
from kafka_sink.memory.buffer import ChunkedBuffer
from kafka_sink.model import TopicPartition
from kafka_sink.records import batch_header, encoder
from kafka_sink.records.encoder import RowRange
from kafka_sink.records.ordered_rows import OrderedRows
from kafka_sink.rows.partitioner import BatchCapacity

_log = logging.getLogger(__name__)
# How often a waiting task looks whether the mute has ended: the end of a mute sends no signal.
_CHECK_MS = 50.0
# A task waits for at most 1/16 of the pool: small grants come sooner, and the
# batch grows on without blocking once memory is free again.
_BLOCKING_DIVISOR = 16
# Raw rows for which `full` waits, in batch.size.
_FULL_SHARE = 4
# New batches for which the pool is asked in one call: so many chunks take it some 50 us.
_OPENED_AT_ONCE = 128
# A batch's header, and at least what a codec writes around a block of rows that do not shrink.
_FRAME_BYTES = batch_header.SIZE + 64
# Sealed batches go to the sender as soon as they have so many bytes of rows. To take the lock and wake the
# sender costs as much as to seal a batch of a few rows.
_GROUP_BYTES = 65_536


class MutedMemoryLimit:
    """Used by the task's thread. Muted partitions may use ``limit_bytes`` of buffer.memory."""

    def __init__(
        self, accumulator: RecordAccumulator, limit_bytes: int, breaker: Breaker, clock_ms: Clock
    ) -> None:
        self.breaker = breaker
        self._accumulator = accumulator
        self._limit_bytes = limit_bytes
        self._clock_ms = clock_ms
        self._said = False

    def wait(self, needs: Sequence[tuple[TopicPartition, int]], check: Callable[[], object]) -> int:
        """How many of these runs may go, the first at least. A run is a partition and the bytes of its rows.

        Waits until enough memory is free or the first is no longer muted. The caller holds no batch, and no
        memory outside of batches. ``check`` raises when the task is lost. Raises DeliveryError naming
        the cause of the mute after delivery.timeout.ms.
        """
        partition, started_ms = needs[0][0], self._clock_ms()
        timeout_ms = self._accumulator.options.delivery_timeout_ms
        while not (taken := self._may_go(needs)):
            if not self._said:
                self._said = True
                _log.warning(
                    "rows with a key or a partition column wait for %s, as such rows use all memory that "
                    "muted partitions may (%d bytes): %s. Where keys spread over all partitions this stops "
                    "the task until the broker is back, for kafka.delivery.timeout.ms = %.0f ms at most. "
                    "kafka.partitioner.spread.keys.when.muted=true sends rows with keys to other partitions "
                    "meanwhile; rows of one key are then in several partitions",
                    partition,
                    self._limit_bytes,
                    self.breaker.explain(partition),
                    timeout_ms,
                )
            if self._clock_ms() - started_ms >= timeout_ms:
                raise DeliveryError(
                    f"rows for {partition} waited kafka.delivery.timeout.ms = {timeout_ms:.0f} ms for a "
                    f"muted partition: {self.breaker.explain(partition)}"
                )
            self._accumulator.await_change(_CHECK_MS / 1000)
            check()
        return taken

    def _may_go(self, needs: Sequence[tuple[TopicPartition, int]]) -> int:
        mutes = self.breaker.view
        if not mutes:
            self._said = False
            return len(needs)
        used = self._accumulator.memory_of(mutes)
        for taken, (partition, needed) in enumerate(needs):
            if partition not in mutes:
                continue
            # If no memory is used, one run may always go, however large it is.
            if used and used + needed > self._limit_bytes:
                return taken
            used += needed
        return len(needs)


@dataclass(slots=True, eq=False)
class AppendPass:
    """Rows of a table from ``start`` on, up to run ``stop_run``: the batches that they go to, and those that
    are full after it. It has placed the rows up to ``stop``.

    ``ranges[i]`` are the rows of ``batches[i]``, counted from ``start`` on. Each batch is held from
    ``plan`` to ``end``, a closed one until it is sealed. Where memory is short, the pass ends, and
    ``missing`` is what the next one needs: bytes, the row up to which they are for, and the bytes of the
    first record alone.
    """

    accumulator: RecordAccumulator
    # Dead letters have another than the accumulator's.
    allocator: BufferAllocator
    ordered: OrderedRows
    start: int
    stop_run: int
    now_ms: float
    dead_letters: bool = False
    stop: int = field(init=False)
    batches: list[ProducerBatch] = field(init=False, default_factory=list)
    ranges: list[RowRange] = field(init=False, default_factory=list)
    closed: list[ProducerBatch] = field(init=False, default_factory=list)
    missing: tuple[int, int, int] | None = field(init=False, default=None)
    # Memory for new batches.
    _taken: list[ChunkedBuffer] = field(init=False, default_factory=list)
    _opened: bool = field(init=False, default=False)

    # -- planning: under the accumulator's lock -----------------------------------------------------

    def plan(self, granted: ChunkedBuffer | None = None, granted_stop: int = 0) -> None:
        """Place rows, fix offsets and base timestamps, and take memory. Encodes nothing.

        ``granted`` is memory for the first rows, up to ``granted_stop``, that was waited for. If it does not
        hold the whole run, the pass ends after it. Where this fails, ``give_back`` follows.
        """
        accumulator, ordered, start = self.accumulator, self.ordered, self.start
        for limits, ratio in accumulator.too_large_batches:
            limits.relearn(ratio)
        accumulator.too_large_batches.clear()
        self._taken = [] if granted is None else [granted]
        starts = ordered.starts
        self.stop = starts[self.stop_run]
        opened = first = bisect_right(starts, start) - 1
        for run in range(first, self.stop_run):
            if run < opened:
                continue
            start = max(start, starts[run])
            stop = starts[run + 1]
            partition = accumulator.partition(ordered.partitions[run])
            tail = open_batch_of(partition)
            if granted is not None:
                # It may be smaller than the batch: the next pass looks at the rest.
                self._open(granted, partition, start, granted_stop)
                start, granted = granted_stop, None
            else:
                # Memory for one run alone needs no common call.
                if start == starts[run] and run + 1 < self.stop_run and tail is None:
                    opened = self._open_for_runs(run, min(self.stop_run, run + _OPENED_AT_ONCE))
                    if run < opened:
                        continue
                start = self._place_run(partition, tail, start, stop)
            if start < stop:
                self.stop = start
                return

    def give_back(self) -> None:
        """Return all memory that no batch has. The accumulator's lock is held."""
        owned = {id(batch.buffer) for batch in self.accumulator.live}
        for buffer in self._taken:
            if id(buffer) not in owned:
                buffer.release()

    def _close(self, batch: ProducerBatch) -> None:
        """``batch`` takes no more rows. It is sealed after this pass's rows are in, and held till then."""
        batch.held = True
        batch.move_to(BatchState.CLOSED)
        self.closed.append(batch)

    def _extend(self, tail: ProducerBatch, start: int, stop: int) -> bool:
        """Put rows, which an open batch has room for, into it if memory allows."""
        ordered = self.ordered
        most = ordered.bound(start, stop) + ordered.surplus(stop - start, tail.base_timestamp)
        projected = tail.projected_size_with(most)
        if projected > tail.buffer.capacity:
            if tail.codec is None:
                # These rows have room by their exact sizes, so the batch stays within the limit even where
                # the upper bound exceeds it.
                projected = min(projected, tail.home.limits.write_limit)
            if self.allocator.pool.overdrawn or not tail.buffer.grow(projected):
                return False
        elif tail.codec is not None and self.allocator.pool.overdrawn:
            return False
        tail.held = True
        tail.free &= ordered.free
        self.batches.append(tail)
        rows = start - self.start, stop - self.start
        self.ranges.append(RowRange(*rows, tail.record_count, tail.base_timestamp))
        return True

    def _open(self, buffer: ChunkedBuffer, partition: Partition, start: int, stop: int) -> None:
        """Make a batch in this memory the partition's last, with rows ``start`` to ``stop``."""
        options = self.accumulator.options
        batch = ProducerBatch(
            partition,
            buffer,
            self.accumulator.codec,
            options.compression_type,
            partition.limits.ratio,
            self.ordered.timestamp(start),
            self.now_ms,
            free=self.ordered.free,
            dead_letters=self.dead_letters,
            held=True,
        )
        self.accumulator.enqueue(partition, batch)
        self._opened = True
        self.batches.append(batch)
        self.ranges.append(RowRange(start - self.start, stop - self.start, 0, batch.base_timestamp))

    def _open_for_runs(self, run: int, stop_run: int) -> int:
        """Put whole runs from ``run`` on into new batches, up to the first whose partition has an open batch,
        that may not fit, or that the pool has no memory for. Return that run."""
        ordered, accumulator = self.ordered, self.accumulator
        starts = ordered.starts
        found: list[Partition] = []
        sizes: list[int] = []
        for number in range(run, stop_run):
            partition = accumulator.partition(ordered.partitions[number])
            if open_batch_of(partition) is not None:
                break
            limits = partition.limits
            start, stop = starts[number], starts[number + 1]
            if limits.rows_that_fit(ordered, start, stop) < stop:
                break
            size = limits.new_batch_bytes(ordered, start, stop)
            if self.allocator.full and size > self.accumulator.options.batch_size:
                break
            found.append(partition)
            sizes.append(size)
        buffers = self.allocator.try_open_all(sizes)
        self._taken += buffers
        for partition, buffer in zip(found, buffers, strict=False):
            self._open(buffer, partition, starts[run], starts[run + 1])
            run += 1
        return run

    def _place_run(self, partition: Partition, tail: ProducerBatch | None, start: int, stop: int) -> int:
        """Place a run in as many batches as it needs, the first its partition's open one, ``tail``; return
        the first row without a place, where the pool is short of memory."""
        if tail is not None:
            start = self._place_in_tail(tail, start, stop)
            if start < stop:
                # Full, or the pool is exhausted: the sender can take it either way before anything blocks.
                self._close(tail)
        ordered, limits, full = self.ordered, partition.limits, self.allocator.full
        batch_size = self.accumulator.options.batch_size
        while start < stop:
            first_record = _FRAME_BYTES + ordered.bound(start, start + 1)
            end = most = limits.rows_that_fit(ordered, start, stop)
            size = limits.new_batch_bytes(ordered, start, end)
            buffer = self.allocator.try_open(size, first_record)
            if buffer is None and full and size > batch_size:
                # Open batches may have used up what rows may take beside their buffers. Some fit into the
                # buffer.
                end = ordered.rows_within(start, most, batch_size - _FRAME_BYTES)
                buffer = self.allocator.try_open(limits.new_batch_bytes(ordered, start, end), first_record)
            if buffer is None:
                share = max(self.allocator.pool.total_bytes // _BLOCKING_DIVISOR, 1)
                if full:
                    # The pool gives batch.size in any case. Compressed, fewer rows would fill little of it.
                    share = max(share, _FULL_SHARE * batch_size)
                end = ordered.rows_within(start, most, share)
                self.missing = limits.new_batch_bytes(ordered, start, end), end, first_record
                break
            self._taken.append(buffer)
            self._open(buffer, partition, start, end)
            if end < stop:
                self._close(partition.batches[-1])
            start = end
        return start

    def _place_in_tail(self, tail: ProducerBatch, start: int, stop: int) -> int:
        """Put rows into an open batch as far as room and memory go; return the first row beyond."""
        ordered = self.ordered
        end = tail.home.limits.rows_that_fit(ordered, start, stop, tail)
        if end > start and not self._extend(tail, start, end):
            # Memory is short: as many rows as fit into the rest of it.
            surplus = ordered.surplus(end - start, tail.base_timestamp)
            limit = tail.buffer.capacity + tail.buffer.growable_bytes
            end = min(ordered.rows_below(start, tail.raw_bytes_within(limit) - surplus), end)
            if end <= start or not self._extend(tail, start, end):
                return start
        return end

    # -- carrying out -------------------------------------------------------------------------------

    def encode(self) -> None:
        """Write the rows into their batches, without the lock."""
        ordered, ranges = self.ordered, self.ranges
        if not ranges:
            return
        timestamps = ordered.timestamps
        if isinstance(timestamps, int):
            latest = [timestamps] * len(ranges)
        else:
            timestamps = timestamps[self.start : self.stop]
            latest = np.maximum.reduceat(timestamps, [rows.start for rows in ranges]).tolist()
        encoded = encoder.encode(ordered.columns.slice(self.start, self.stop), timestamps, ranges)
        for batch, rows, records, max_timestamp in zip(self.batches, ranges, encoded, latest, strict=True):
            batch.append(records, rows.stop - rows.start, max_timestamp)

    def end(self) -> bool:
        """Close full batches and let the others go, under the lock. Return whether to wake the
        sender."""
        # One iteration per partition: for short runs, calls are most of the cost.
        for batch in self.batches:
            if batch.state is not BatchState.OPEN:
                # A closed batch stays held until it is sealed.
                continue
            limits = batch.home.limits
            # Most batches are far from full: runs are short where partitions are many.
            if batch.buffer.overflowed or (
                2 * batch.raw_bytes >= limits.write_limit and limits.is_full(batch)
            ):
                # A batch that outgrew what was reserved for it goes early; a full batch need not wait for a
                # row that it does not take.
                self._close(batch)
            else:
                batch.held = False
        # The sender sleeps until a batch that it knows is due, so new batches and batches that it found
        # held must wake it.
        wake = self._opened or self.accumulator.held_batch_skipped
        self.accumulator.held_batch_skipped = False
        return wake


class RecordAppender:
    def __init__(
        self,
        accumulator: RecordAccumulator,
        clock_ms: Clock,
        wake_sender: Callable[[], None],
        muted_memory_limit: MutedMemoryLimit | None = None,
        activity: TaskActivity | None = None,
        dead_letter_memory: BufferAllocator | None = None,
    ) -> None:
        """``dead_letter_memory``: of an appender of dead letters, on the same thread. So they can be written
        while another appender waits for memory that rejected rows hold."""
        self._activity = TaskActivity(clock_ms) if activity is None else activity
        self.encode_ms = 0.0
        self.pool_wait_ms = 0.0
        self._accumulator = accumulator
        self._allocator = dead_letter_memory or accumulator.allocator
        self._dead_letters = dead_letter_memory is not None
        self._clock_ms = clock_ms
        self._wake_sender = wake_sender
        self._muted_memory_limit = muted_memory_limit
        # Of max.block.ms, what the present rows' wait for metadata has taken.
        self._waited_ms = 0.0

    def append(self, ordered: OrderedRows, check: Callable[[], object], waited_ms: float = 0.0) -> None:
        """Take all rows, waiting up to max.block.ms for memory where it is short.

        ``waited_ms`` is how long these rows have waited for metadata. As in Kafka's producer the first wait
        for memory is shorter by that.
        ``check`` raises when the task is already lost; it is called between passes and in waits. Raises
        BufferExhaustedError when no memory came free in time, DeliveryError where rows for a muted partition
        waited for delivery.timeout.ms.
        """
        self._waited_ms = waited_ms
        limit, count = self._muted_memory_limit, len(ordered.partitions)
        mutes = () if limit is None else limit.breaker.view
        if limit is None or not mutes:
            self._append_runs(ordered, 0, count, check)
            return
        # Rows for healthy partitions go first. A partition has one run, so its order is kept.
        muted = [run for run, partition in enumerate(ordered.partitions) if partition in mutes]
        muted_runs = set(muted)
        for run, stop in _neighbours([run for run in range(count) if run not in muted_runs]):
            self._append_runs(ordered, run, stop, check)
        while muted:
            needs = [
                (ordered.partitions[run], ordered.bound(ordered.starts[run], ordered.starts[run + 1]))
                for run in muted
            ]
            with self._activity.waiting(BROKER):
                taken = limit.wait(needs, check)
            for run, stop in _neighbours(muted[:taken]):
                self._append_runs(ordered, run, stop, check)
            del muted[:taken]

    def _append_runs(
        self, ordered: OrderedRows, run: int, stop_run: int, check: Callable[[], object]
    ) -> None:
        row = ordered.starts[run]
        granted: ChunkedBuffer | None = None
        granted_stop = 0
        while True:
            one = AppendPass(
                self._accumulator,
                self._allocator,
                ordered,
                row,
                stop_run,
                self._clock_ms(),
                dead_letters=self._dead_letters,
            )
            with self._accumulator.lock:
                try:
                    one.plan(granted, granted_stop)
                except BaseException:
                    one.give_back()
                    raise
            self.carry_out(one)
            check()
            row = one.stop
            if row == ordered.starts[stop_run]:
                return
            granted = None
            if one.missing is not None:
                size, granted_stop, first_record = one.missing
                granted = self._wait_for_memory(size, first_record, check)
                if granted.capacity < size:
                    granted_stop = ordered.rows_within(row, granted_stop, granted.capacity - _FRAME_BYTES)

    def carry_out(self, one: AppendPass) -> None:
        """Write what a pass has planned. Takes the accumulator's lock only to let batches go."""
        started = self._clock_ms()
        one.encode()
        with self._accumulator.lock:
            wake = one.end()
        self._seal(one.closed)
        self.encode_ms += self._clock_ms() - started
        if wake:
            self._wake_sender()

    def _seal(self, closed: list[ProducerBatch]) -> None:
        """Seal batches and let them go: a large one at once, small ones together."""
        group: list[ProducerBatch] = []
        raw_bytes = 0
        for batch in closed:
            batch.seal()
            if batch.codec is not None:
                batch.home.limits.observe(batch.observed_ratio)
            group.append(batch)
            raw_bytes += batch.raw_bytes
            if raw_bytes >= _GROUP_BYTES or batch is closed[-1]:
                with self._accumulator.lock:
                    for one in group:
                        one.held = False
                self._wake_sender()
                group, raw_bytes = [], 0

    def _wait_for_memory(self, size: int, first_record: int, check: Callable[[], object]) -> ChunkedBuffer:
        def watch() -> None:
            # Only now, with this request in line: a sender woken earlier could find no waiter and sleep on
            # until linger is over.
            self._wake_sender()
            # Nothing more of a lost task is sent, so no memory would come free.
            check()

        started = self._clock_ms()
        waited_ms, self._waited_ms = self._waited_ms, 0.0
        try:
            with self._activity.waiting(MEMORY, self._describe_memory):
                left_ms = max(self._accumulator.options.max_block_ms - waited_ms, 0.0)
                return self._allocator.open(size, left_ms, watch, first_record)
        except BufferExhaustedError as error:
            if waited_ms < 1.0:
                raise
            raise BufferExhaustedError(
                f"{error}; the wait for metadata had taken {waited_ms:.0f} ms"
            ) from None
        finally:
            self.pool_wait_ms += self._clock_ms() - started

    def _describe_memory(self) -> str:
        options = self._accumulator.options
        return (
            f"memory: rows that brokers have not acknowledged use all of kafka.buffer.memory = "
            f"{options.buffer_memory} bytes. It fails after kafka.max.block.ms = {options.max_block_ms} ms"
        )

    def batch_capacity(self, partition: TopicPartition, row_bytes: float) -> BatchCapacity:
        """How many bytes of rows of about ``row_bytes`` the partition's batches take before they are full."""
        with self._accumulator.lock:
            found = self._accumulator.partition(partition)
            tail = open_batch_of(found)
            left = None if tail is None else found.limits.remaining(row_bytes, tail)
            return BatchCapacity(left, found.limits.remaining(row_bytes))

    def flush(self, partitions: Set[TopicPartition] | None = None) -> None:
        """Close and seal every open batch on the task's thread; the sender drains them meanwhile.

        With ``partitions`` only theirs, and later batches linger again.
        """
        accumulator, closed = self._accumulator, []
        with accumulator.lock:
            accumulator.flushing |= partitions is None
            for partition in accumulator.waiting:
                tail = open_batch_of(partition)
                if tail is not None and (partitions is None or partition.id in partitions):
                    tail.held = True
                    tail.move_to(BatchState.CLOSED)
                    closed.append(tail)
        started = self._clock_ms()
        self._seal(closed)
        self.encode_ms += self._clock_ms() - started
        self._wake_sender()


def _neighbours(runs: list[int]) -> Iterator[tuple[int, int]]:
    """Group ascending numbers without gaps: the first of each group, and one past its last."""
    first = 0
    for index, run in enumerate(runs):
        if index + 1 == len(runs) or runs[index + 1] != run + 1:
            yield runs[first], run + 1
            first = index + 1
