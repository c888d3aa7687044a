"""Which rows go to which batch: the part of a turn that the task's thread does under the accumulator's lock.

A plan leases batches, fixes offsets and base timestamps, and takes memory. It encodes nothing. It ends where
memory is short.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kafka_sink.accumulator.batch_limits import SizeEstimates
from kafka_sink.accumulator.producer_batch import BatchState, ProducerBatch
from kafka_sink.accumulator.record_accumulator import RecordAccumulator
from kafka_sink.clock import Clock
from kafka_sink.cluster.partition import Partition
from kafka_sink.memory.allocator import BufferAllocator
from kafka_sink.memory.buffer import Memory
from kafka_sink.options import SinkOptions
from kafka_sink.records import batch_header
from kafka_sink.records.encoder import Run
from kafka_sink.records.ordered_rows import OrderedRows

# A task waits for at most 1/16 of the pool: small grants come sooner, and the
# batch grows on without blocking once memory is free again.
_BLOCKING_DIVISOR = 16
# Raw rows for which `full` waits, in batch.size.
_FIXED_SHARE = 4
# New batches for which the pool is asked in one call: so many chunks take it some 50 us.
_OPENED_AT_ONCE = 128
# A batch's header, and at least what a codec writes around a block of rows that do not shrink.
_FRAME_BYTES = batch_header.SIZE + 64


@dataclass(frozen=True, slots=True)
class Grant:
    """Memory that was waited for: a new batch in it takes the rows up to ``stop``."""

    buffer: Memory
    stop: int


@dataclass(frozen=True, slots=True)
class Shortage:
    """Memory that the pool did not have: ``size`` bytes for the rows up to ``stop``, ``first_record`` for the
    first of them alone."""

    size: int
    stop: int
    first_record: int


@dataclass(slots=True)
class AppendPlan:
    """One turn: rows ``start`` to ``stop``, the batches that they go to, and those that are full after it.

    ``runs[i]`` are the rows of ``batches[i]``, counted from ``start`` on.
    """

    ordered: OrderedRows
    now_ms: float
    start: int
    stop: int
    batches: list[ProducerBatch] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)
    full: list[ProducerBatch] = field(default_factory=list)
    opened: bool = False
    shortage: Shortage | None = None

    def add(self, batch: ProducerBatch, start: int, stop: int) -> None:
        batch.leased = True
        batch.free &= self.ordered.free
        self.batches.append(batch)
        first = self.start
        self.runs.append(Run(start - first, stop - first, batch.record_count, batch.base_timestamp))

    def close(self, batch: ProducerBatch, queues: RecordAccumulator) -> None:
        """``batch`` takes no more rows. It is sealed after this turn's rows are in, and leased till then."""
        batch.leased = True
        queues.close(batch)
        self.full.append(batch)


class AppendPlanner:
    """Plans turns for one task thread. It holds no lock: ``plan`` is called inside ``planning``."""

    def __init__(
        self,
        options: SinkOptions,
        allocator: BufferAllocator,
        estimates: SizeEstimates,
        clock_ms: Clock,
        *,
        letters: bool = False,
    ) -> None:
        """``letters``: the rows are dead letters."""
        self._options = options
        self._allocator = allocator
        self._codec = estimates.codec
        self._letters = letters
        self._estimates = estimates
        self._clock_ms = clock_ms

    def plan(
        self,
        queues: RecordAccumulator,
        ordered: OrderedRows,
        start: int,
        stop_run: int,
        grant: Grant | None = None,
    ) -> AppendPlan:
        """Place rows from ``start`` up to run ``stop_run``, until memory is short.

        ``grant`` is memory for the first rows. If it does not hold the whole run, the turn ends after it.
        """
        plan = AppendPlan(ordered, self._clock_ms(), start, ordered.starts[stop_run])
        if queues.too_large_batches:
            self._estimates.learn_from(queues.too_large_batches)
            queues.too_large_batches.clear()
        starts = ordered.starts
        at_run = ordered.bound_at_run
        opened = first = ordered.run_of(start)
        for run in range(first, stop_run):
            if run < opened:
                continue
            start = max(start, starts[run])
            stop = starts[run + 1]
            queue = queues.partition(ordered.partitions[run])
            # The common cases by far: a short run, and its batch, or a new one, takes all of it.
            if grant is None and start == starts[run]:
                if queue.batches and queue.batches[-1].state is BatchState.OPEN:
                    if self._extend(plan, queue.batches[-1], run, at_run[run + 1] - at_run[run]):
                        continue
                else:
                    opened = self._open_for_runs(queues, plan, run, min(stop_run, run + _OPENED_AT_ONCE))
                    if run < opened:
                        continue
            if grant is None:
                start = self._place_run(queues, plan, queue, start, stop)
            else:
                # The grant may be smaller than the batch: the next turn looks at the rest.
                start = self._place_granted(queues, plan, queue, start, grant)
                grant = None
            if start < stop:
                plan.stop = start
                return plan
        return plan

    def _rows_in_memory_left(self, ordered: OrderedRows, start: int, stop: int, tail: ProducerBatch) -> int:
        surplus = ordered.surplus(stop - start, tail.base_timestamp)
        limit = tail.buffer.capacity + tail.buffer.growable_bytes
        return max(start, min(ordered.rows_below(start, tail.raw_bytes_within(limit) - surplus), stop))

    def _extend(self, plan: AppendPlan, tail: ProducerBatch, run: int, bound: int) -> bool:
        """Put a whole run, ``bound`` bytes at most, into the open tail batch if room and memory allow."""
        ordered, start, stop = plan.ordered, plan.ordered.starts[run], plan.ordered.starts[run + 1]
        fit_stop = self._estimates.rows_that_fit(ordered, start, stop, tail)
        surplus = ordered.surplus(stop - start, tail.base_timestamp)
        if fit_stop != stop or not self._grow(tail, bound + surplus):
            return False
        plan.add(tail, start, stop)
        return True

    def _open_for_runs(self, queues: RecordAccumulator, plan: AppendPlan, run: int, stop_run: int) -> int:
        """Put whole runs from ``run`` on into new batches, up to the first whose partition has an open batch,
        that may not fit, or that the pool has no memory for. Return that run."""
        ordered = plan.ordered
        starts, at_run, partitions = ordered.starts, ordered.bound_at_run, ordered.partitions
        found: list[Partition] = []
        sizes: list[int] = []
        for number in range(run, stop_run):
            queue = queues.partition(partitions[number])
            if queue.batches and queue.batches[-1].state is BatchState.OPEN:
                break
            size = self._estimates.new_batch_bytes_of_run(
                queue.id.topic,
                starts[number + 1] - starts[number],
                at_run[number + 1] - at_run[number],
                ordered.largest_bound,
            )
            if size is None or (self._allocator.full and size > self._options.batch_size):
                break
            found.append(queue)
            sizes.append(size)
        buffers = self._allocator.try_open_all(sizes)
        number = run
        try:
            for queue, buffer in zip(found, buffers, strict=False):
                batch = self._batch_in(buffer, plan, queue, starts[number])
                number += 1
                self._add_batch(queues, plan, batch, starts[number - 1], starts[number])
        finally:
            for buffer in buffers[number - run :]:
                buffer.release()
        return number

    def _place_run(
        self, queues: RecordAccumulator, plan: AppendPlan, queue: Partition, start: int, stop: int
    ) -> int:
        """Place a run in as many batches as it needs; return the first row without a place."""
        while start < stop:
            tail = queue.batches[-1] if queue.batches else None
            if tail is not None and tail.state is BatchState.OPEN:
                start = self._place_in_tail(plan, tail, start, stop)
                if start == stop:
                    break
                # Full, or the pool is exhausted: the sender can take it either way before anything blocks.
                plan.close(tail, queues)
                continue
            end = self._place_in_new_batch(queues, plan, queue, start, stop)
            if end == start:
                break
            start = end
            if start < stop:
                plan.close(queue.batches[-1], queues)
        return start

    def _place_in_tail(self, plan: AppendPlan, tail: ProducerBatch, start: int, stop: int) -> int:
        """Put rows into an open batch as far as room and memory go; return the first row beyond."""
        ordered = plan.ordered
        fit_stop = self._estimates.rows_that_fit(ordered, start, stop, tail)
        if fit_stop == start:
            return start
        surplus = ordered.surplus(fit_stop - start, tail.base_timestamp)
        if self._grow(tail, ordered.bound(start, fit_stop) + surplus):
            plan.add(tail, start, fit_stop)
            return fit_stop
        # Memory is short: as many rows as fit into the rest of it.
        end = self._rows_in_memory_left(ordered, start, fit_stop, tail)
        if end == start:
            return start
        added = ordered.bound(start, end) + ordered.surplus(end - start, tail.base_timestamp)
        if not self._grow(tail, added):
            return start
        plan.add(tail, start, end)
        return end

    def _place_in_new_batch(
        self, queues: RecordAccumulator, plan: AppendPlan, queue: Partition, start: int, stop: int
    ) -> int:
        """Open a batch and put rows into it; return the first row beyond, ``start`` where the pool
        is short of memory."""
        ordered, topic = plan.ordered, queue.id.topic
        end = self._estimates.rows_for_new_batch(ordered, start, stop, topic)
        size = self._estimates.new_batch_bytes(ordered, start, end, topic)
        buffer = self._try_open(size, ordered, start)
        most = end
        if buffer is None and self._allocator.full and size > self._options.batch_size:
            # Open batches may have used up what rows may take beside their buffers. Some fit into the buffer.
            end = ordered.rows_within(start, most, self._options.batch_size - _FRAME_BYTES)
            size = self._estimates.new_batch_bytes(ordered, start, end, topic)
            buffer = self._try_open(size, ordered, start)
        if buffer is None:
            share = max(self._options.buffer_memory // _BLOCKING_DIVISOR, 1)
            if self._allocator.full:
                # The pool gives batch.size in any case. Compressed, fewer rows would fill little of it.
                share = max(share, _FIXED_SHARE * self._options.batch_size)
            end = ordered.rows_within(start, most, share)
            size = self._estimates.new_batch_bytes(ordered, start, end, topic)
            plan.shortage = Shortage(size, end, self._first_record_bytes(ordered, start))
            return start
        try:
            batch = self._batch_in(buffer, plan, queue, start)
        except BaseException:
            buffer.release()
            raise
        self._add_batch(queues, plan, batch, start, end)
        return end

    def _try_open(self, size: int, ordered: OrderedRows, start: int) -> Memory | None:
        """Memory for a batch of ``size`` bytes that begins with row ``start``, if there is enough now."""
        if size <= self._options.batch_size or not self._allocator.full:
            return self._allocator.try_open(size)
        return self._allocator.try_open(size, self._first_record_bytes(ordered, start))

    def _first_record_bytes(self, ordered: OrderedRows, start: int) -> int:
        return _FRAME_BYTES + ordered.bound(start, start + 1)

    def _place_granted(
        self, queues: RecordAccumulator, plan: AppendPlan, queue: Partition, start: int, grant: Grant
    ) -> int:
        """Open a batch in granted memory, which stays the caller's until the batch is in its queue."""
        batch = self._batch_in(grant.buffer, plan, queue, start)
        self._add_batch(queues, plan, batch, start, grant.stop)
        return grant.stop

    def _batch_in(self, buffer: Memory, plan: AppendPlan, queue: Partition, start: int) -> ProducerBatch:
        batch = ProducerBatch(
            queue,
            buffer,
            self._codec,
            self._options.compression_type,
            self._estimates.ratio(queue.id.topic),
            plan.ordered.timestamp(start),
            plan.now_ms,
        )
        batch.free = plan.ordered.free
        batch.letters = self._letters
        return batch

    def _add_batch(
        self, queues: RecordAccumulator, plan: AppendPlan, batch: ProducerBatch, start: int, stop: int
    ) -> None:
        """Make a batch its partition's last, with rows ``start`` to ``stop``."""
        queues.enqueue(batch.home, batch)
        plan.opened = True
        plan.add(batch, start, stop)

    def _grow(self, batch: ProducerBatch, added: int) -> bool:
        """Get memory for rows of at most ``added`` bytes that the batch has room for; False where the pool
        has none."""
        projected = batch.projected_size_with(added)
        if self._codec is None:
            if projected <= batch.buffer.capacity:
                return True
            # These rows have room by their exact sizes, so the batch stays within the limit even where the
            # upper bound exceeds it.
            projected = min(projected, self._estimates.limits_of(batch.partition.topic).write_limit)
        if self._allocator.pool.overdrawn:
            return False
        return projected <= batch.buffer.capacity or batch.buffer.grow(projected)
