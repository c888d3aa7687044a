"""Appends rows to batches, on the task's thread.

``RecordAppender.append`` takes the rows of an Arrow batch, ordered by partition, and places them in one or
more append passes. A pass (``AppendPass``) has three steps. ``plan`` holds the accumulator's lock: it decides
which rows go to which batch, takes the memory for them, and marks these batches as held, so that the sender
leaves them alone. ``encode`` writes the rows without the lock, because that takes the most time. ``end``
takes the lock again and lets the batches go. If memory is short, ``plan`` stops at the first row without
memory. Then the pass is carried out, and the task waits for memory while it holds no batch: a held batch
cannot be sent, so the task would wait for memory that it keeps itself.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, field

import numpy as np

from kafka_sink.breaker.breaker import Breaker
from kafka_sink.clock import BROKER, MEMORY, Clock, TaskActivity
from kafka_sink.cluster.partition import BatchState, Partition, ProducerBatch, open_batch_of
from kafka_sink.engine.accumulator import RecordAccumulator
from kafka_sink.errors import BufferExhaustedError, DeliveryError
from kafka_sink.memory.allocator import BufferAllocator
from kafka_sink.memory.buffer import ChunkedBuffer
from kafka_sink.model import TopicPartition
from kafka_sink.records import batch_header, encoder
from kafka_sink.records.encoder import RowRange
from kafka_sink.records.ordered_rows import OrderedRows
from kafka_sink.rows.partitioner import BatchCapacity

_log = logging.getLogger(__name__)
# How often a waiting task checks whether the mute has ended, because the end of a mute sends no signal.
_CHECK_MS = 50.0
# A task waits for at most 1/16 of the pool: small grants come sooner, and the batch grows later.
_BLOCKING_DIVISOR = 16
# The bytes of rows that the strategy `full` waits for, as a multiple of batch.size.
_FULL_SHARE = 4
# The number of new batches for which the pool is asked in one call, which then takes about 50 us.
_OPENED_AT_ONCE = 128
# The bytes of a batch's header, and at least the bytes that a codec adds to a block of incompressible rows.
_FRAME_BYTES = batch_header.SIZE + 64
# Sealed batches go to the sender together once they have this many bytes of rows. Taking the lock and waking
# the sender cost as much as sealing a batch of a few rows.
_GROUP_BYTES = 65_536


@dataclass(slots=True, eq=False)
class MutedMemoryLimit:
    """Keeps rows for muted partitions within ``limit_bytes`` of buffer.memory, so that rows for healthy
    partitions find memory. Only the task's thread uses it."""

    accumulator: RecordAccumulator
    limit_bytes: int
    breaker: Breaker
    clock_ms: Clock
    _said: bool = field(init=False, default=False)

    def wait(self, needs: Sequence[tuple[TopicPartition, int]], check: Callable[[], object]) -> int:
        """Wait until the first of these runs may be appended, and return how many of them may. A run is a
        partition and the bytes of its rows.

        The wait ends when enough memory is free or the first partition is no longer muted. The caller holds
        no batch, and no memory outside of batches. ``check`` raises when the task is lost. After
        delivery.timeout.ms this raises DeliveryError with the cause of the mute.
        """
        partition, started_ms = needs[0][0], self.clock_ms()
        timeout_ms = self.accumulator.options.delivery_timeout_ms
        while not (taken := self._may_go(needs)):
            if not self._said:
                self._said = True
                _log.warning(
                    "rows with a key or a partition column wait for %s, because such rows use all memory "
                    "that muted partitions may use (%d bytes): %s. If keys are spread over all partitions, "
                    "the task stops until the broker is back, for at most kafka.delivery.timeout.ms = %.0f "
                    "ms. kafka.partitioner.spread.keys.when.muted=true sends rows with keys to other "
                    "partitions meanwhile; rows of one key are then in several partitions",
                    partition,
                    self.limit_bytes,
                    self.breaker.explain(partition),
                    timeout_ms,
                )
            if self.clock_ms() - started_ms >= timeout_ms:
                raise DeliveryError(
                    f"rows for {partition} waited for kafka.delivery.timeout.ms = {timeout_ms:.0f} ms "
                    f"because the partition is muted: {self.breaker.explain(partition)}"
                )
            self.accumulator.await_change(_CHECK_MS / 1000)
            check()
        return taken

    def _may_go(self, needs: Sequence[tuple[TopicPartition, int]]) -> int:
        mutes = self.breaker.avoided
        if not mutes:
            self._said = False
            return len(needs)
        used = self.accumulator.memory_of(mutes)
        for taken, (partition, needed) in enumerate(needs):
            if partition not in mutes:
                continue
            # If muted partitions use no memory, one run may always go, however large it is.
            if used and used + needed > self.limit_bytes:
                return taken
            used += needed
        return len(needs)


@dataclass(slots=True, eq=False)
class AppendPass:
    """One append pass: the rows of a table from row ``start`` on, up to run ``stop_run`` at most. A run is
    the rows of one partition.

    ``plan`` puts each run first into the open batch of its partition, and the rest into new batches.
    Consecutive whole runs without an open batch get their memory in one call to the pool
    (``_open_for_runs``), which is the common case if partitions are many and runs are short. Its result:

    - ``ranges[i]`` are the rows that go into ``batches[i]``, counted from ``start`` on.
    - ``closed`` are the batches that take no more rows after this pass. ``end`` adds the ones that are full.
    - ``stop`` is the first row that was not placed.
    - ``missing`` is set if memory was short: the bytes that the next pass needs, the row up to which these
      bytes are for, and the bytes of the first record alone.

    Each batch is held from ``plan`` to ``end``. A closed batch stays held until it is sealed.
    """

    accumulator: RecordAccumulator
    # The accumulator's allocator, or the one of dead letters.
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
    # The memory that this pass took for new batches.
    _taken: list[ChunkedBuffer] = field(init=False, default_factory=list)
    _opened: bool = field(init=False, default=False)

    # -- planning: under the accumulator's lock -----------------------------------------------------

    def plan(self, granted: ChunkedBuffer | None = None, granted_stop: int = 0) -> None:
        """Place rows, fix their offsets and base timestamps, and take memory. Nothing is encoded yet.

        ``granted`` is memory that the task has waited for. It is for the first rows, up to ``granted_stop``.
        If that is not the whole run, the pass ends there. If this method raises, the caller calls
        ``give_back``.
        """
        accumulator, ordered, start = self.accumulator, self.ordered, self.start
        for limits, ratio, estimate in accumulator.too_large_batches:
            limits.relearn(ratio, estimate)
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
                # The memory may be too small for the whole run: the next pass places the rest.
                self._open(granted, partition, start, granted_stop)
                start, granted = granted_stop, None
            else:
                # A single run needs no common call to the pool.
                if start == starts[run] and run + 1 < self.stop_run and tail is None:
                    opened = self._open_for_runs(run, min(self.stop_run, run + _OPENED_AT_ONCE))
                    if run < opened:
                        continue
                start = self._place_run(partition, tail, start, stop)
            if start < stop:
                self.stop = start
                return

    def give_back(self) -> None:
        """Return the memory that no batch has got. The caller holds the accumulator's lock."""
        owned = {id(batch.buffer) for batch in self.accumulator.live}
        for buffer in self._taken:
            if id(buffer) not in owned:
                buffer.release()

    def _close(self, batch: ProducerBatch) -> None:
        """Close the batch. It stays held until this pass's rows are in it and it is sealed."""
        batch.held = True
        batch.move_to(BatchState.CLOSED)
        self.closed.append(batch)

    def _extend(self, tail: ProducerBatch, start: int, stop: int) -> bool:
        """Put rows into an open batch. Return False if the pool is short of memory."""
        ordered = self.ordered
        most = ordered.bound(start, stop) + ordered.surplus(stop - start, tail.base_timestamp)
        projected = tail.projected_size_with(most)
        if projected > tail.buffer.capacity:
            if tail.codec is None:
                # The rows' exact sizes fit, so the batch stays within the limit even if their upper bound
                # exceeds it.
                projected = min(projected, tail.queue.limits.write_limit)
            if self.allocator.pool.overdrawn or not tail.buffer.grow(projected):
                return False
        elif tail.codec is not None and self.allocator.pool.overdrawn:
            return False
        tail.held = True
        tail.is_movable &= ordered.are_movable
        self.batches.append(tail)
        rows = start - self.start, stop - self.start
        self.ranges.append(RowRange(*rows, tail.record_count, tail.base_timestamp))
        return True

    def _open(self, buffer: ChunkedBuffer, partition: Partition, start: int, stop: int) -> None:
        """Open a batch in this memory with the rows from ``start`` to ``stop``, as its partition's last."""
        options = self.accumulator.options
        batch = ProducerBatch(
            buffer,
            self.accumulator.codec,
            options.compression_type,
            partition.limits.ratio,
            self.ordered.timestamp(start),
            partition,
            self.now_ms,
            is_movable=self.ordered.are_movable,
            dead_letters=self.dead_letters,
            held=True,
        )
        self.accumulator.enqueue(partition, batch)
        self._opened = True
        self.batches.append(batch)
        self.ranges.append(RowRange(start - self.start, stop - self.start, 0, batch.base_timestamp))

    def _open_for_runs(self, run: int, stop_run: int) -> int:
        """Put whole runs from ``run`` on into a new batch each. Stop before a run whose partition has an open
        batch, that may not fit into one batch, or that the pool has no memory for. Return that run."""
        ordered, accumulator = self.ordered, self.accumulator
        starts = ordered.starts
        partitions: list[Partition] = []
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
            partitions.append(partition)
            sizes.append(size)
        buffers = self.allocator.try_open_all(sizes)
        self._taken += buffers
        for partition, buffer in zip(partitions, buffers, strict=False):
            self._open(buffer, partition, starts[run], starts[run + 1])
            run += 1
        return run

    def _place_run(self, partition: Partition, tail: ProducerBatch | None, start: int, stop: int) -> int:
        """Place a run in as many batches as it needs, beginning with its partition's open batch ``tail``.
        Return ``stop``, or the first row without a place if the pool is short of memory."""
        if tail is not None:
            start = self._place_in_tail(tail, start, stop)
            if start < stop:
                # The batch is full, or the task will wait for memory: the sender may take it.
                self._close(tail)
        ordered, limits, full = self.ordered, partition.limits, self.allocator.full
        batch_size = self.accumulator.options.batch_size
        while start < stop:
            first_record = _FRAME_BYTES + ordered.bound(start, start + 1)
            end = most = limits.rows_that_fit(ordered, start, stop)
            size = limits.new_batch_bytes(ordered, start, end)
            buffer = self.allocator.try_open(size, first_record)
            if buffer is None and full and size > batch_size:
                # Open batches may have used up the memory that rows may take in addition to the buffers.
                # The buffer itself still has room for some rows.
                end = ordered.rows_within(start, most, batch_size - _FRAME_BYTES)
                buffer = self.allocator.try_open(limits.new_batch_bytes(ordered, start, end), first_record)
            if buffer is None:
                share = max(self.allocator.pool.total_bytes // _BLOCKING_DIVISOR, 1)
                if full:
                    # The pool gives batch.size in any case, and fewer rows would fill little of it once they
                    # are compressed.
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
        """Put rows into an open batch that has room. Return the first row that did not fit."""
        ordered = self.ordered
        end = tail.queue.limits.rows_that_fit(ordered, start, stop, tail)
        if end > start and not self._extend(tail, start, end):
            # Memory is short: take the rows that fit into what the buffer has or can still get.
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
        """Close full batches and let the other ones go. Return whether to wake the sender."""
        # This loop has one iteration per partition, and for short runs method calls are most of its cost.
        for batch in self.batches:
            if batch.state is not BatchState.OPEN:
                # A closed batch stays held until it is sealed.
                continue
            limits = batch.queue.limits
            # Most batches are far from full, so the first comparison saves the call.
            if batch.buffer.overflowed or (
                2 * batch.raw_bytes >= limits.write_limit and limits.is_full(batch)
            ):
                # A batch that outgrew its reserved memory is sent early. A full batch must not wait until a
                # row comes that it cannot take.
                self._close(batch)
            else:
                batch.held = False
        # The sender sleeps until the first batch that it has seen is due. So the task must wake it for a new
        # batch, and for a batch that it skipped because it was held.
        wake = self._opened or self.accumulator.held_batch_skipped
        self.accumulator.held_batch_skipped = False
        return wake


class RecordAppender:
    """Appends rows to batches for one task: see the module. Only the task's thread uses it."""

    def __init__(
        self,
        accumulator: RecordAccumulator,
        clock_ms: Clock,
        wake_sender: Callable[[], None],
        muted_memory_limit: MutedMemoryLimit | None = None,
        activity: TaskActivity | None = None,
        dead_letter_memory: BufferAllocator | None = None,
    ) -> None:
        """``dead_letter_memory`` is for an appender of dead letters, which runs on the same thread: they can
        then be written while the task waits for memory that rejected rows hold."""
        self._activity = TaskActivity(clock_ms) if activity is None else activity
        self.encode_ms = 0.0
        self.pool_wait_ms = 0.0
        self._accumulator = accumulator
        self._allocator = dead_letter_memory or accumulator.allocator
        self._dead_letters = dead_letter_memory is not None
        self._clock_ms = clock_ms
        self._wake_sender = wake_sender
        self._muted_memory_limit = muted_memory_limit
        # How much of max.block.ms the current rows have already spent waiting for metadata.
        self._waited_ms = 0.0

    def append(self, ordered: OrderedRows, check: Callable[[], object], waited_ms: float = 0.0) -> None:
        """Append all rows. If memory is short, wait for it for up to max.block.ms.

        ``waited_ms`` is how long these rows have waited for metadata. As in Kafka's producer, the first wait
        for memory is shorter by this time. ``check`` raises when the task is already lost.

        Raises BufferExhaustedError if no memory became free in time, and DeliveryError if rows for a muted
        partition have waited for delivery.timeout.ms.
        """
        self._waited_ms = waited_ms
        limit, count = self._muted_memory_limit, len(ordered.partitions)
        mutes = () if limit is None else limit.breaker.avoided
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
            append_pass = AppendPass(
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
                    append_pass.plan(granted, granted_stop)
                except BaseException:
                    append_pass.give_back()
                    raise
            self.carry_out(append_pass)
            check()
            row = append_pass.stop
            if row == ordered.starts[stop_run]:
                return
            granted = None
            if append_pass.missing is not None:
                size, granted_stop, first_record = append_pass.missing
                granted = self._wait_for_memory(size, first_record, check)
                if granted.capacity < size:
                    granted_stop = ordered.rows_within(row, granted_stop, granted.capacity - _FRAME_BYTES)

    def carry_out(self, append_pass: AppendPass) -> None:
        """Encode, end and seal what a pass has planned."""
        started = self._clock_ms()
        append_pass.encode()
        with self._accumulator.lock:
            wake = append_pass.end()
        self._seal(append_pass.closed)
        self.encode_ms += self._clock_ms() - started
        if wake:
            self._wake_sender()

    def _seal(self, closed: list[ProducerBatch]) -> None:
        """Seal batches and let them go: a large batch at once, small batches together."""
        group: list[ProducerBatch] = []
        raw_bytes = 0
        for batch in closed:
            batch.seal()
            if batch.codec is not None:
                batch.queue.limits.observe(batch.observed_ratio)
            group.append(batch)
            raw_bytes += batch.raw_bytes
            if raw_bytes >= _GROUP_BYTES or batch is closed[-1]:
                with self._accumulator.lock:
                    for sealed in group:
                        sealed.held = False
                self._wake_sender()
                group, raw_bytes = [], 0

    def _wait_for_memory(self, size: int, first_record: int, check: Callable[[], object]) -> ChunkedBuffer:
        def watch() -> None:
            # The sender must be woken only now, when this request waits in line: if it were woken earlier,
            # it could find no waiter and sleep on until linger.ms has passed.
            self._wake_sender()
            # Nothing more of a lost task is sent, so no memory would become free.
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
        """The bytes of rows of about ``row_bytes`` each that the partition's open batch still takes, and that
        a new batch takes, before they are full."""
        with self._accumulator.lock:
            queue = self._accumulator.partition(partition)
            tail = open_batch_of(queue)
            left = None if tail is None else queue.limits.remaining(row_bytes, tail)
            return BatchCapacity(left, queue.limits.remaining(row_bytes))

    def flush(self, partitions: Set[TopicPartition] | None = None) -> None:
        """Close and seal every open batch; with ``partitions`` only theirs, and later batches linger as
        usual."""
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
    """Group ascending numbers without gaps. Yields the start and the stop of each group."""
    first = 0
    for index, run in enumerate(runs):
        if index + 1 == len(runs) or runs[index + 1] != run + 1:
            yield runs[first], run + 1
            first = index + 1
