"""Batches per partition, shared by the task's thread and the sender under one lock."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from kafka_sink.accumulator.batch_buffer import BatchBuffer, BufferAllocator
from kafka_sink.accumulator.batch_limits import LearntLimits
from kafka_sink.accumulator.batch_queues import BatchQueues, TooLargeBatch
from kafka_sink.accumulator.producer_batch import BatchState, ProducerBatch
from kafka_sink.cluster.broker import Broker
from kafka_sink.cluster.partition import Partition
from kafka_sink.model import TopicPartition
from kafka_sink.options import SinkOptions

# A batch that a broker has, its base offset and its log append time; -1 where the broker did not say.
WrittenBatch = tuple[ProducerBatch, int, int]
# How long a lease usually lasts: a leased batch that has expired is looked at again after it.
LEASE_MS = 5.0


@dataclass(frozen=True, slots=True)
class ReadyCheck:
    """Queues that may be sent, by leader; topics with partitions without a leader; and when to look again.

    ``muted`` are queues by leader that would be ready. ``leaderless`` are muted, too, and have none.
    """

    brokers: dict[Broker, list[Partition]]
    muted: dict[Broker, list[Partition]]
    leaderless: list[Partition]
    unknown_leaders: set[str]
    next_check_delay_ms: float


class RecordAccumulator:
    """Batches by partition, for a task's thread and a sender. Thread-safe.

    One private lock guards the queues and the states, leases and counters of their batches. Every method
    takes it, so none may be called inside ``planning``; methods whose names end in `_locked` need it held.
    """

    def __init__(
        self,
        options: SinkOptions,
        allocator: BufferAllocator,
        limits: LearntLimits | None = None,
    ) -> None:
        """``limits``: what was learnt about the topics before; default nothing."""
        self.options = options
        self._guarantees_order = options.max_in_flight_requests_per_connection == 1
        self.limits = LearntLimits(options.batch_size) if limits is None else limits
        self.allocator = allocator
        self._lock = threading.Lock()  # guards batches and their queues
        # Signalled when batches reach a final state.
        self._completed = threading.Condition(self._lock)
        self._queues = BatchQueues()

    # -- the task's thread --------------------------------------------------------------------------

    @contextmanager
    def planning(self) -> Iterator[BatchQueues]:
        """Hold the lock around a block that plans or ends a turn, and yield the queues for it."""
        with self._lock:
            yield self._queues

    def end_leases(self, batches: Iterable[ProducerBatch]) -> None:
        """The sender may have batches that their task has sealed."""
        with self._lock:
            for batch in batches:
                batch.leased = False

    def begin_task(self) -> None:
        """A task's rows follow: batches linger again."""
        with self._lock:
            self._queues.flushing = False

    def await_completion(self, timeout_s: float, until: Callable[[], bool]) -> bool:
        """Wait until every batch has a final state or ``until`` is true, ``timeout_s`` at most.

        Returns whether that is so. ``until`` is called with the lock held.
        """
        with self._lock:
            if not self._queues.incomplete or until():
                return True
            self._completed.wait(timeout_s)
            return not self._queues.incomplete or until()

    def await_change(self, timeout_s: float) -> None:
        """Wait until a batch reaches a final state or ``wake_waiters`` is called, ``timeout_s`` at most."""
        with self._lock:
            self._completed.wait(timeout_s)

    def wake_waiters(self) -> None:
        """End the waits under way, so that the task looks again."""
        with self._lock:
            self._completed.notify_all()

    @property
    def incomplete(self) -> int:
        """Batches without a final state: queued, open or in flight. Read without the lock."""
        return self._queues.incomplete

    def queued_batches(self, topic: str, partitions: int) -> list[int]:
        """Batches waiting per partition of a topic, for the adaptive partitioner.

        The cost grows with the queued batches only: a call for each of 5,000 partitions took 2 ms.
        """
        counts = [0] * partitions
        with self._lock:
            for (name, partition), queue in self._queues.waiting.items():
                # Rows may still wait for a partition that a recreated topic does not have.
                if name == topic and partition < partitions:
                    counts[partition] = len(queue.batches)
        return counts

    # -- the sender's thread ------------------------------------------------------------------------

    def ready(
        self,
        leader: Callable[[TopicPartition], Broker | None],
        now_ms: float,
        muted: Container[TopicPartition] = (),
        metadata_version: int | None = None,
    ) -> ReadyCheck:
        """Find the queues whose first batch may be sent now.

        It may if it is full, has another batch behind it, has lingered or backed off long enough, or if
        memory or the end of the task waits for it. The circuit breaker's ``muted`` partitions (false if there
        are none) are returned apart. While ``metadata_version`` stays the same, a queue remembers its leader.
        """
        # Asked once, not for each queue.
        muted = muted or ()
        brokers: dict[Broker, list[Partition]] = {}
        held_back: dict[Broker, list[Partition]] = {}
        leaderless: list[Partition] = []
        unknown: set[str] = set()
        delay = math.inf
        with self._lock:
            hurry = self._queues.flushing or self.allocator.pool.queued > 0
            # With thousands of partitions nearly all linger, and this loop is most of the cost of a pass.
            lingers_since = math.inf if hurry else now_ms - self.options.linger_ms
            guarantees_order = self._guarantees_order
            oldest = math.inf
            for queue in self._queues.waiting.values():
                batches = queue.batches
                head = batches[0]
                if (
                    head.created_ms > lingers_since
                    and head.state is BatchState.OPEN
                    and len(batches) == 1
                    and not head.leased
                ):
                    if head.created_ms < oldest:
                        oldest = head.created_ms
                    continue
                if not hurry or head.leased or head.attempts or guarantees_order:
                    wait = self._wait_ms_locked(queue, hurry, now_ms)
                    if wait > 0:
                        delay = min(delay, wait)
                        continue
                if metadata_version is None or queue.metadata_version != metadata_version:
                    queue.refresh_leader(leader, metadata_version)
                is_muted = queue.id in muted
                if queue.leader is not None:
                    (held_back if is_muted else brokers).setdefault(queue.leader, []).append(queue)
                else:
                    unknown.add(queue.id.topic)
                    if is_muted:
                        leaderless.append(queue)
        if oldest < math.inf:
            delay = min(delay, oldest - lingers_since)
        return ReadyCheck(brokers, held_back, leaderless, unknown, delay)

    def _wait_ms_locked(self, queue: Partition, hurry: bool, now_ms: float) -> float:
        """Milliseconds until the first batch may go; infinite while something else must happen first."""
        head = queue.batches[0]
        if head.leased:
            self._queues.leased_batch_skipped = True
            return math.inf
        if self._guarantees_order and queue.in_flight:
            return math.inf
        if head.attempts:
            return queue.retry_at_ms - now_ms
        if hurry or len(queue.batches) > 1 or head.state is not BatchState.OPEN:
            return 0.0
        return head.created_ms + self.options.linger_ms - now_ms

    def drain(
        self,
        broker: Broker,
        queues: Sequence[Partition],
        max_bytes: int,
        may_send: Callable[[ProducerBatch], bool],
        filled: int = 0,
    ) -> list[ProducerBatch]:
        """Take at most one batch per partition for one broker, up to ``max_bytes`` with the ``filled`` bytes
        that its request has already.

        Only a first batch may exceed that. The start rotates, so that no partition starves. Open batches come
        back closed but unsealed: sealing takes time and is done without the lock.
        """
        taken: list[ProducerBatch] = []
        size = filled
        with self._lock:
            begin = broker.rotation % len(queues)
            for step in range(len(queues)):
                index = (begin + step) % len(queues)
                queue = queues[index]
                head = queue.batches[0] if queue.batches else None
                if head is None:
                    continue
                if head.leased:
                    # Leased since ready() looked: the task must wake the sender when the lease ends.
                    self._queues.leased_batch_skipped = True
                    continue
                if not may_send(head):
                    continue
                added = head.estimated_size
                if size and size + added > max_bytes:
                    broker.rotation = index
                    break
                size += added
                taken.append(self._queues.take_first(queue))
            else:
                broker.rotation = begin + 1
        return taken

    def move_unsent(
        self, sources: Iterable[Partition], targets: Callable[[TopicPartition], Sequence[TopicPartition]]
    ) -> dict[TopicPartition, list[ProducerBatch]]:
        """Move batches that no request ever had, and whose rows are free, to other partitions.

        ``targets``: where a partition's batches may go, in any order. Returns what was moved, by where it
        was. Batches keep their age and their memory.
        """
        places = [(queue, targets(queue.id)) for queue in sources]
        with self._lock:
            moved = {
                queue.id: self._queues.move_unsent(queue, choices) for queue, choices in places if choices
            }
        return {partition: batches for partition, batches in moved.items() if batches}

    def put_back(self, batches: Sequence[ProducerBatch]) -> None:
        """Undo ``drain`` for batches that were sealed but not sent."""
        with self._lock:
            for batch in batches:
                self._queues.request_ended(batch)
                self._queues.insert(batch.home, batch)

    def take(self, batch: ProducerBatch) -> bool:
        """Take one batch out of its queue, as ``drain`` does; False if it has failed meanwhile."""
        with self._lock:
            if batch.terminal:
                return False
            self._queues.take(batch)
            return True

    def reenqueue(self, batch: ProducerBatch, retry_at_ms: float) -> None:
        """Put a batch back for another attempt, before all batches that were appended after it."""
        with self._lock:
            self._queues.request_ended(batch)
            if not batch.move_to(BatchState.SEALED):
                self._queues.release(batch)
                return
            queue = batch.home
            self._queues.insert(queue, batch)
            queue.retry_at_ms = max(queue.retry_at_ms, retry_at_ms)

    def reenqueue_split(self, parent: ProducerBatch, pieces: Sequence[ProducerBatch]) -> bool:
        """Put the pieces of a batch that was too large in its place. Return False and release the pieces if
        the batch had failed before."""
        with self._lock:
            self._queues.request_ended(parent)
            first = parent.move_to(BatchState.SPLIT)
            if first:
                queue = parent.home
                for piece in pieces:
                    self._queues.insert(queue, piece)
                self._queues.live.update(pieces)
                self._queues.incomplete += len(pieces) - 1
                # There is no piece if no record is left of the batch.
                self._completed.notify_all()
            else:
                for piece in pieces:
                    piece.buffer.release()
            self._queues.release(parent)
            return first

    def note_too_large(self, batch: ProducerBatch, *, costs_task: bool = False) -> None:
        """Note that a batch, which still has its memory, was too large for its broker."""
        noted = TooLargeBatch(batch.partition.topic, batch.observed_ratio)
        self.limits.note_too_large(noted.topic, batch.size, costs_task=costs_task)
        with self._lock:
            self._queues.too_large_batches.append(noted)

    def succeed(self, written: Sequence[WrittenBatch], record: Callable[[list[WrittenBatch]], None]) -> None:
        """End batches that their broker has. ``record`` gets those that had not failed before.

        All of a response at once, as the lock and waking the task cost more than a small batch. ``record``
        counts their rows before the waiting task can see that they are complete.
        """
        with self._lock:
            queues = self._queues
            first: list[WrittenBatch] = []
            for ended in written:
                queues.request_ended(ended[0])
                if ended[0].move_to(BatchState.SUCCEEDED):
                    first.append(ended)
            record(first)
            queues.incomplete -= len(first)
            self._completed.notify_all()
            queues.release(*[batch for batch, _, _ in written])

    def finish(self, batch: ProducerBatch, state: BatchState, record: Callable[[], None]) -> bool:
        """End a batch by its request's response; False if it had failed before (a late response).

        ``record`` counts the rows. It runs before the waiting task can see that the batch is complete, so
        that the task never finds a row unaccounted for.
        """
        with self._lock:
            self._queues.request_ended(batch)
            first = batch.move_to(state)
            if first:
                self._complete_locked(record)
            self._queues.release(batch)
            return first

    def fail(self, batch: ProducerBatch, record: Callable[[], None]) -> bool:
        """Fail a batch in any state; False if it is terminal or leased.

        The task writes into a leased batch, so its memory must stay: the caller tries again later. Memory
        that a request refers to stays until the response.
        """
        with self._lock:
            if batch.terminal or batch.leased:
                return False
            batch.move_to(BatchState.FAILED)
            self._queues.remove(batch)
            self._complete_locked(record)
            self._queues.release(batch)
            return True

    def abort_incomplete(self, record: Callable[[ProducerBatch], None], *, end_leases: bool) -> None:
        """Fail all batches that are left and release their memory. Every connection must be closed.

        ``end_leases``: the task has ended, so no thread writes into its batches any more.
        """
        with self._lock:
            for batch in list(self._queues.live):
                if batch.leased and not end_leases:
                    continue
                batch.leased = False
                batch.request_references = 0
                if not batch.terminal:
                    batch.move_to(BatchState.FAILED)
                    self._queues.remove(batch)
                    self._complete_locked(partial(record, batch))
                self._queues.release(batch)

    def _complete_locked(self, record: Callable[[], None]) -> None:
        record()
        self._queues.incomplete -= 1
        self._completed.notify_all()

    def owns(self, buffer: BatchBuffer) -> bool:
        """Whether a batch holds this memory. Takes the lock, as every method here does."""
        with self._lock:
            return any(batch.buffer is buffer for batch in self._queues.live)

    @property
    def holds_memory(self) -> bool:
        return bool(self._queues.live)

    def held_bytes(self, muted: Container[TopicPartition]) -> int:
        """Bytes of memory of these partitions' batches, whatever their state."""
        with self._lock:
            return sum(batch.buffer.capacity for batch in self._queues.live if batch.partition in muted)

    def unacknowledged_records(self) -> int:
        """The number of rows that were sent and perhaps written, but have no final state."""
        with self._lock:
            sent = (b for b in self._queues.live if b.attempts and not b.terminal)
            return sum(0 if batch.letters else batch.record_count for batch in sent)

    def waiting_rows(self) -> dict[TopicPartition, tuple[int, float]]:
        """By partition, the rows without a final state, and when the first of them were appended."""
        found: dict[TopicPartition, tuple[int, float]] = {}
        with self._lock:
            for batch in self._queues.live:
                if not batch.terminal and not batch.letters:
                    rows, since_ms = found.get(batch.partition, (0, math.inf))
                    found[batch.partition] = rows + batch.record_count, min(since_ms, batch.created_ms)
        return found

    def expired(self, now_ms: float) -> tuple[list[ProducerBatch], float]:
        """Queued batches older than delivery.timeout.ms, and the milliseconds until there may be others."""
        timeout = self.options.delivery_timeout_ms
        found: list[ProducerBatch] = []
        delay = math.inf
        with self._lock:
            for queue in self._queues.waiting.values():
                for batch in queue.batches:
                    # All of them, as one that came from another partition may be older than those before it.
                    left = batch.created_ms + timeout - now_ms
                    if left > 0:
                        delay = min(delay, left)
                    elif batch.leased:
                        delay = min(delay, LEASE_MS)
                    else:
                        found.append(batch)
        return found, delay

    def queued_batches_snapshot(self) -> list[ProducerBatch]:
        with self._lock:
            return list(self._queues.queued())
