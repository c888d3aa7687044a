"""Rows into batches, on the task's thread, in turns.

A turn plans under the accumulator's lock (append_planner), then encodes and writes without it.
Where memory is short the turn ends there, and the task waits for memory while it holds no lease.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Container, Iterator, Sequence
from copy import copy
from dataclasses import replace

import numpy as np

from kafka_sink.accumulator.append_planner import (
    AppendPlan,
    AppendPlanner,
    Grant,
    Shortage,
)
from kafka_sink.accumulator.batch_limits import SizeEstimates
from kafka_sink.accumulator.producer_batch import BatchState, ProducerBatch
from kafka_sink.accumulator.record_accumulator import RecordAccumulator
from kafka_sink.activity import BROKER, MEMORY, TaskActivity
from kafka_sink.clock import Clock
from kafka_sink.errors import BufferExhaustedError, DeliveryError
from kafka_sink.memory.allocator import BufferAllocator
from kafka_sink.model import TopicPartition
from kafka_sink.records import encoder
from kafka_sink.records.ordered_rows import OrderedRows
from kafka_sink.rows.partitioner import BatchCapacity

_log = logging.getLogger(__name__)
# How often a waiting task looks whether the mute has ended: the end of a mute sends no signal.
_LOOK_MS = 50.0


class MutedMemoryLimit:
    """Used by the task's thread. ``limit_bytes`` of buffer.memory may be held by muted partitions.

    ``mutes`` gives the muted partitions and is false if there are none. ``explain`` says why one is muted.
    """

    def __init__(
        self,
        accumulator: RecordAccumulator,
        limit_bytes: int,
        mutes: Callable[[], Container[TopicPartition]],
        explain: Callable[[TopicPartition], str | None],
        clock_ms: Clock,
    ) -> None:
        self.mutes = mutes
        self.waited_ms = 0.0
        self._accumulator = accumulator
        self._limit_bytes = limit_bytes
        self._explain = explain
        self._clock_ms = clock_ms
        self._said = False

    def wait(self, needs: Sequence[tuple[TopicPartition, int]], check: Callable[[], None]) -> int:
        """How many of these runs may go, the first at least. A run is a partition and the bytes of its rows.

        Waits until enough memory is free or the first is no longer muted. The caller holds no lease, and no
        memory outside of batches. ``check`` raises when the task is lost. Raises DeliveryError naming
        the cause of the mute after delivery.timeout.ms.
        """
        if taken := self._may_go(needs):
            return taken
        partition = needs[0][0]
        started_ms = self._clock_ms()
        timeout_ms = self._accumulator.options.delivery_timeout_ms
        self._say(partition)
        try:
            while not (taken := self._may_go(needs)):
                if self._clock_ms() - started_ms >= timeout_ms:
                    raise DeliveryError(
                        f"rows for {partition} waited kafka.delivery.timeout.ms = {timeout_ms:.0f} ms for a "
                        f"muted partition: {self._explain(partition)}"
                    )
                self._accumulator.await_change(_LOOK_MS / 1000)
                check()
        finally:
            self.waited_ms += self._clock_ms() - started_ms
        return taken

    def _may_go(self, needs: Sequence[tuple[TopicPartition, int]]) -> int:
        mutes = self.mutes()
        if not mutes:
            self._said = False
            return len(needs)
        held = self._accumulator.held_bytes(mutes)
        for taken, (partition, needed) in enumerate(needs):
            if partition not in mutes:
                continue
            # If no memory is held, one run may always go, however large it is.
            if held and held + needed > self._limit_bytes:
                return taken
            held += needed
        return len(needs)

    def _say(self, partition: TopicPartition) -> None:
        if self._said:
            return
        self._said = True
        _log.warning(
            "rows with a key or a partition column wait for %s, as such rows hold all that muted partitions "
            "may (%d bytes): %s. Where keys spread over all partitions this stops the task until the broker "
            "is back, for kafka.delivery.timeout.ms = %.0f ms at most. "
            "kafka.partitioner.spread.keys.when.muted=true sends rows with keys to other partitions "
            "meanwhile; rows of one key are then in several partitions",
            partition,
            self._limit_bytes,
            self._explain(partition),
            self._accumulator.options.delivery_timeout_ms,
        )


# Sealed batches go to the sender as soon as they have so many bytes of rows. To take the lock and wake the
# sender costs as much as to seal a batch of a few rows.
_GROUP_BYTES = 65_536


class RecordAppender:
    def __init__(
        self,
        accumulator: RecordAccumulator,
        estimates: SizeEstimates,
        clock_ms: Clock,
        wake_sender: Callable[[], None],
        muted_memory_limit: MutedMemoryLimit | None = None,
        activity: TaskActivity | None = None,
    ) -> None:
        self._activity = TaskActivity(clock_ms) if activity is None else activity
        self.encode_ms = 0.0
        self.pool_wait_ms = 0.0
        self._accumulator = accumulator
        self._options = accumulator.options
        self._allocator = accumulator.allocator
        self._estimates = estimates
        self._planner = AppendPlanner(accumulator.options, accumulator.allocator, estimates, clock_ms)
        self._clock_ms = clock_ms
        self._wake_sender = wake_sender
        self._muted_memory_limit = muted_memory_limit
        # Of max.block.ms, what the present rows' wait for metadata has taken.
        self._waited_ms = 0.0

    def for_letters(self, allocator: BufferAllocator, memory_bytes: int) -> RecordAppender:
        """An appender of dead letters, on the same thread. They have memory of their own, so that they can be
        written while this appender waits for memory that rejected rows hold."""
        found = copy(self)
        found._allocator = allocator
        found._options = replace(self._options, buffer_memory=memory_bytes)
        found._planner = AppendPlanner(
            found._options, allocator, self._estimates, self._clock_ms, letters=True
        )
        found._muted_memory_limit = None
        return found

    def append(self, ordered: OrderedRows, check: Callable[[], None], waited_ms: float = 0.0) -> None:
        """Take all rows, waiting up to max.block.ms for memory where it is short.

        ``waited_ms`` is how long these rows have waited for metadata. As in Kafka's producer the first wait
        for memory is shorter by that.
        ``check`` raises when the task is already lost; it is called between turns and in waits. Raises
        BufferExhaustedError when no memory came free in time, DeliveryError where rows for a muted partition
        waited for delivery.timeout.ms.
        """
        self._waited_ms = waited_ms
        limit, count = self._muted_memory_limit, len(ordered.partitions)
        mutes = () if limit is None else limit.mutes()
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

    def _append_runs(self, ordered: OrderedRows, run: int, stop_run: int, check: Callable[[], None]) -> None:
        row = ordered.starts[run]
        grant: Grant | None = None
        while True:
            plan = self._plan(ordered, row, stop_run, grant)
            started = self._clock_ms()
            self.write(plan)
            self.encode_ms += self._clock_ms() - started
            check()
            row = plan.stop
            if row == ordered.starts[stop_run]:
                return
            grant = None
            if plan.shortage is not None:
                grant = self._wait_for_memory(plan.shortage, check)

    def _plan(self, ordered: OrderedRows, row: int, stop_run: int, grant: Grant | None) -> AppendPlan:
        try:
            with self._accumulator.planning() as queues:
                return self._planner.plan(queues, ordered, row, stop_run, grant)
        except BaseException:
            # A grant that no batch has taken over has no other owner.
            if grant is not None and not self._accumulator.owns(grant.buffer):
                grant.buffer.release()
            raise

    def write(self, plan: AppendPlan) -> None:
        """Carry out a plan. Takes the accumulator's lock only to end leases."""
        if plan.batches:
            _encode(plan)
        # Most batches are far from full: runs are short where partitions are many.
        seldom_full, is_full = self._estimates.lowest_limit / 2, self._estimates.is_full
        with self._accumulator.planning() as queues:
            # One iteration per partition: for short runs, calls are most of the cost.
            for batch in plan.batches:
                if batch.state is BatchState.OPEN and (
                    batch.buffer.overflowed or (batch.raw_bytes >= seldom_full and is_full(batch))
                ):
                    # A batch that outgrew what was reserved for it goes early; a full batch need not wait for
                    # a row that it does not take.
                    plan.close(batch, queues)
                if batch.state is BatchState.OPEN:
                    # A closed batch stays leased until it is sealed.
                    batch.leased = False
            # The sender sleeps until a batch that it knows is due, so new batches and batches that it found
            # leased must wake it.
            wake = plan.opened or queues.leased_batch_skipped
            queues.leased_batch_skipped = False
        self.seal(plan.full)
        if wake:
            self._wake_sender()

    def seal(self, closed: list[ProducerBatch]) -> None:
        """Seal batches and end their leases: of a large batch at once, of small ones together."""
        group: list[ProducerBatch] = []
        held = 0
        for batch in closed:
            batch.seal()
            self._estimates.observe(batch)
            group.append(batch)
            held += batch.raw_bytes
            if held >= _GROUP_BYTES or batch is closed[-1]:
                self._accumulator.end_leases(group)
                self._wake_sender()
                group, held = [], 0

    def _wait_for_memory(self, shortage: Shortage, check: Callable[[], None]) -> Grant:
        def watch() -> None:
            # Only now, with this request in line: a sender woken earlier could find no waiter and sleep on
            # until linger is over.
            self._wake_sender()
            # Nothing more of a lost task is sent, so no memory would come free.
            check()

        started = self._clock_ms()
        waited_ms, self._waited_ms = self._waited_ms, 0.0
        try:
            with self._activity.waiting(MEMORY):
                left_ms = max(self._options.max_block_ms - waited_ms, 0.0)
                buffer = self._allocator.open(shortage.size, left_ms, watch, shortage.first_record)
        except BufferExhaustedError as error:
            if waited_ms < 1.0:
                raise
            raise BufferExhaustedError(
                f"{error}; the wait for metadata had taken {waited_ms:.0f} ms"
            ) from None
        finally:
            self.pool_wait_ms += self._clock_ms() - started
        return Grant(buffer, shortage.stop)

    def batch_room(self, partition: TopicPartition, row_bytes: float) -> BatchCapacity:
        """How many bytes of rows of about ``row_bytes`` the partition's batches take before they are full."""
        new = self._estimates.room_in_new_batch(partition.topic, row_bytes)
        with self._accumulator.planning() as queues:
            tail = queues.open_batch(partition)
            return BatchCapacity(None if tail is None else self._estimates.room_in(tail, row_bytes), new)

    def flush(self, partitions: Collection[TopicPartition] | None = None) -> None:
        """Close and seal every open batch on the task's thread; the sender drains them meanwhile.

        With ``partitions`` only theirs, and later batches linger again.
        """
        with self._accumulator.planning() as queues:
            if partitions is None:
                queues.flushing = True
                closed = queues.open_batches()
            else:
                found = (queues.open_batch(partition) for partition in partitions)
                closed = [batch for batch in found if batch is not None]
            for batch in closed:
                batch.leased = True
                queues.close(batch)
        started = self._clock_ms()
        self.seal(closed)
        self.encode_ms += self._clock_ms() - started
        self._wake_sender()


def _neighbours(runs: list[int]) -> Iterator[tuple[int, int]]:
    """Group ascending numbers without gaps: the first of each group, and one past its last."""
    first = 0
    for index, run in enumerate(runs):
        if index + 1 == len(runs) or runs[index + 1] != run + 1:
            yield runs[first], run + 1
            first = index + 1


def _encode(plan: AppendPlan) -> None:
    ordered, runs = plan.ordered, plan.runs
    timestamps = ordered.timestamps(plan.start, plan.stop)
    if isinstance(timestamps, int):
        latest = [timestamps] * len(runs)
    else:
        latest = np.maximum.reduceat(timestamps, [run.start for run in runs]).tolist()
    encoded = encoder.encode(ordered.columns.slice(plan.start, plan.stop), timestamps, runs)
    for batch, run, records, max_timestamp in zip(plan.batches, runs, encoded, latest, strict=True):
        batch.append(records, run.stop - run.start, max_timestamp)
