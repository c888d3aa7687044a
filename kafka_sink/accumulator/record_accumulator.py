"""Batches per partition: where the task's thread and the sender meet, under one lock."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from kafka_sink.accumulator.batch_buffer import BatchBuffer, BufferAllocator
from kafka_sink.accumulator.batch_size_limits import BatchSizeLimits
from kafka_sink.accumulator.producer_batch import BatchState, ProducerBatch
from kafka_sink.model import CompressionType, PartitionInfo, TopicPartition

# What is leased cannot be failed; a lease lasts about so long.
LEASE_MS = 5.0


@dataclass(frozen=True, slots=True)
class AccumulatorSettings:
    """Sizes in bytes, times in milliseconds; the options of the same names."""

    batch_size: int
    linger_ms: float
    max_block_ms: float
    delivery_timeout_ms: float
    buffer_memory: int
    compression: CompressionType
    guarantee_order: bool  # one batch of a partition in flight at a time


@dataclass(slots=True)
class PartitionQueue:
    """One partition's batches, oldest first; the last may be open. Guarded by the accumulator's lock.

    ``retry_at_ms`` is when the first batch's backoff has passed.
    """

    partition: TopicPartition
    batches: deque[ProducerBatch] = field(default_factory=deque)
    in_flight: int = 0
    retry_at_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class TooLargeBatch:
    """A batch that was too large for its broker: ``ratio`` compressed bytes per raw byte."""

    topic: str
    ratio: float


@dataclass(frozen=True, slots=True)
class ReadyCheck:
    """What the sender may do now: queues by leader, topics without one, and when to look again.

    ``held`` are queues by leader that are ready but muted.
    """

    nodes: dict[int, list[PartitionQueue]]
    held: dict[int, list[PartitionQueue]]
    unknown_leaders: set[str]
    next_check_delay_ms: float


class RecordAccumulator:
    """Queues of batches by partition. ``lock`` guards queues, batch states and counters."""

    def __init__(
        self,
        settings: AccumulatorSettings,
        allocator: BufferAllocator,
        limits: BatchSizeLimits | None = None,
    ) -> None:
        """``limits``: what was learnt about the topics before; default nothing."""
        self.settings = settings
        self.limits = BatchSizeLimits(settings.batch_size) if limits is None else limits
        self.allocator = allocator
        self.lock = threading.Lock()
        # Signalled when batches reach a final state; the flushing task waits on it.
        self.completed = threading.Condition(self.lock)
        self.flushing = False
        # Whether the sender has passed over a leased batch, so that the task must wake it afterwards.
        self.leased_batch_skipped = False
        # Batches too large for their brokers that the task has not learnt from yet.
        self.too_large_batches: list[TooLargeBatch] = []
        # Bytes that open batches of a whole-batch codec hold raw.
        self.open_raw_bytes = 0
        self._queues: dict[TopicPartition, PartitionQueue] = {}
        # Queues that hold batches, so that a check costs what is buffered, not what was ever written.
        self._waiting: dict[TopicPartition, PartitionQueue] = {}
        self._incomplete = 0
        # Every batch that holds memory, wherever it is: what a closing producer must give back.
        self._live: set[ProducerBatch] = set()
        self._rotation: dict[int, int] = {}

    # -- the task's thread; the caller holds the lock -----------------------------------------------

    def queue(self, partition: TopicPartition) -> PartitionQueue:
        """The partition's queue, made at first use."""
        found = self._queues.get(partition)
        if found is None:
            found = self._queues[partition] = PartitionQueue(partition)
        return found

    def enqueue(self, queue: PartitionQueue, batch: ProducerBatch) -> None:
        """Adds a new batch as the partition's last."""
        queue.batches.append(batch)
        self._waiting[queue.partition] = queue
        self._live.add(batch)
        self._incomplete += 1

    def open_batch(self, partition: TopicPartition) -> ProducerBatch | None:
        """The partition's batch that still takes rows, if it has one."""
        queue = self._waiting.get(partition)
        tail = queue.batches[-1] if queue is not None else None
        return tail if tail is not None and tail.state is BatchState.OPEN else None

    def count_raw(self, batch: ProducerBatch) -> None:
        """What an open batch holds raw has changed."""
        held = batch.raw_tail
        self.open_raw_bytes += held - batch.counted_raw
        batch.counted_raw = held

    def uncount_raw(self, batch: ProducerBatch) -> None:
        """A batch is no longer open."""
        self.open_raw_bytes -= batch.counted_raw
        batch.counted_raw = 0

    def open_batches(self) -> list[ProducerBatch]:
        """Batches that still take rows."""
        tails = (queue.batches[-1] for queue in self._waiting.values())
        return [batch for batch in tails if batch.state is BatchState.OPEN]

    @property
    def incomplete(self) -> int:
        """Batches without a final state: queued, open or in flight."""
        return self._incomplete

    def queued_batches(self, topic: str, partitions: int) -> list[int]:
        """Batches waiting per partition of a topic, for the adaptive partitioner. Takes the lock.

        Costs what waits, not what the topic has: asking for each of 5,000 partitions took 2 ms.
        """
        counts = [0] * partitions
        with self.lock:
            for (name, partition), queue in self._waiting.items():
                # Rows may still wait for a partition that a recreated topic does not have.
                if name == topic and partition < partitions:
                    counts[partition] = len(queue.batches)
        return counts

    # -- the sender's thread ------------------------------------------------------------------------

    def ready(
        self,
        leader: Callable[[TopicPartition], PartitionInfo | None],
        now_ms: float,
        muted: Container[TopicPartition] = (),
    ) -> ReadyCheck:
        """Which brokers have something to get: a head batch that is full or has another behind it,
        lingered or backed off long enough, or must go because memory or the task waits. ``muted``
        partitions (the circuit breaker's; false where there are none) are set apart."""
        nodes: dict[int, list[PartitionQueue]] = {}
        held: dict[int, list[PartitionQueue]] = {}
        unknown: set[str] = set()
        delay = math.inf
        with self.lock:
            hurry = self.flushing or self.allocator.queued > 0
            # With thousands of partitions nearly all linger, and this loop is what a pass costs.
            lingers_since = math.inf if hurry else now_ms - self.settings.linger_ms
            oldest = math.inf
            for queue in self._waiting.values():
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
                wait = self._wait_ms(queue, hurry, now_ms)
                if wait > 0:
                    delay = min(delay, wait)
                    continue
                info = leader(queue.partition)
                if info is None or info.leader < 0:
                    unknown.add(queue.partition.topic)
                elif muted and queue.partition in muted:
                    held.setdefault(info.leader, []).append(queue)
                else:
                    nodes.setdefault(info.leader, []).append(queue)
        if oldest < math.inf:
            delay = min(delay, oldest - lingers_since)
        return ReadyCheck(nodes, held, unknown, delay)

    def _wait_ms(self, queue: PartitionQueue, hurry: bool, now_ms: float) -> float:
        """Until the head batch may go; infinite while something else must happen first."""
        head = queue.batches[0]
        if head.leased:
            self.leased_batch_skipped = True
            return math.inf
        if self.settings.guarantee_order and queue.in_flight:
            return math.inf
        if head.attempts:
            return queue.retry_at_ms - now_ms
        if hurry or len(queue.batches) > 1 or head.state is not BatchState.OPEN:
            return 0.0
        return head.created_ms + self.settings.linger_ms - now_ms

    def drain(
        self,
        node: int,
        queues: Sequence[PartitionQueue],
        max_bytes: int,
        may_send: Callable[[ProducerBatch], bool],
        filled: int = 0,
    ) -> list[ProducerBatch]:
        """Takes at most one batch per partition for one broker, up to ``max_bytes`` with the ``filled`` bytes
        that its request has already.

        Only a first batch may exceed that. The start rotates, so that no partition starves. Batches that
        were still open come back closed but unsealed: sealing takes time and happens outside the lock.
        """
        taken: list[ProducerBatch] = []
        size = filled
        with self.lock:
            begin = self._rotation.get(node, 0) % len(queues)
            for step in range(len(queues)):
                index = (begin + step) % len(queues)
                queue = queues[index]
                head = queue.batches[0] if queue.batches else None
                if head is None:
                    continue
                if head.leased:
                    # Leased since ready() looked: the task must say when it ends.
                    self.leased_batch_skipped = True
                    continue
                if not may_send(head):
                    continue
                if size and size + head.estimated_size > max_bytes:
                    self._rotation[node] = index
                    break
                size += head.estimated_size
                taken.append(self._take(queue, head))
            else:
                self._rotation[node] = begin + 1
        return taken

    def _take(self, queue: PartitionQueue, batch: ProducerBatch) -> ProducerBatch:
        queue.batches.popleft()
        if not queue.batches:
            del self._waiting[queue.partition]
        if batch.state is BatchState.OPEN:
            batch.move_to(BatchState.CLOSED)
            self.uncount_raw(batch)
        queue.in_flight += 1
        batch.request_references += 1
        return batch

    def put_back(self, batches: Sequence[ProducerBatch]) -> None:
        """Undoes ``drain`` for batches that have been sealed since and not been sent."""
        with self.lock:
            for batch in batches:
                self._answered(batch)
                self._insert(self._queues[batch.partition], batch)

    def reenqueue(self, batch: ProducerBatch, retry_at_ms: float) -> None:
        """Puts a batch back for another attempt, before everything that was appended after it."""
        with self.lock:
            self._answered(batch)
            if not batch.move_to(BatchState.SEALED):
                self._release(batch)
                return
            queue = self._queues[batch.partition]
            self._insert(queue, batch)
            queue.retry_at_ms = max(queue.retry_at_ms, retry_at_ms)

    def _insert(self, queue: PartitionQueue, batch: ProducerBatch) -> None:
        """Keeps append order among batches: retries of several in-flight batches may come back in any."""
        place = 0
        for queued in queue.batches:
            if queued.ordinal > batch.ordinal:
                break
            place += 1
        queue.batches.insert(place, batch)
        self._waiting[queue.partition] = queue

    def reenqueue_split(self, parent: ProducerBatch, pieces: Sequence[ProducerBatch]) -> bool:
        """Replaces a batch that was too large by its pieces, in its place; False, with the pieces'
        memory given back, where it had failed before."""
        with self.lock:
            self._answered(parent)
            first = parent.move_to(BatchState.SPLIT)
            if first:
                queue = self._queues[parent.partition]
                for piece in pieces:
                    self._insert(queue, piece)
                self._live.update(pieces)
                self._incomplete += len(pieces) - 1
            else:
                for piece in pieces:
                    piece.buffer.release()
            self._release(parent)
            return first

    def refused(self, batch: ProducerBatch, *, costs_task: bool = False) -> None:
        """A batch, whose memory is still there, was too large for its broker."""
        refusal = TooLargeBatch(batch.partition.topic, batch.observed_ratio)
        self.limits.refused(refusal.topic, batch.size, costs_task=costs_task)
        with self.lock:
            self.too_large_batches.append(refusal)

    def finish(self, batch: ProducerBatch, state: BatchState, record: Callable[[], None]) -> bool:
        """A request's answer settles its batch; False where it had failed before (a late answer).

        ``record`` writes down what became of the rows. It runs before the waiting task can see that the
        batch is complete, so that the task never finds a row unaccounted for.
        """
        with self.lock:
            self._answered(batch)
            first = batch.move_to(state)
            if first:
                self._complete(record)
            self._release(batch)
            return first

    def fail(self, batch: ProducerBatch, record: Callable[[], None]) -> bool:
        """Fails a batch wherever it is, except under a lease: the task writes into it, so its memory must
        stay, and the caller comes again. Memory that a request refers to stays until its answer."""
        with self.lock:
            if batch.terminal or batch.leased:
                return False
            batch.move_to(BatchState.FAILED)
            self._unqueue(batch)
            self._complete(record)
            self._release(batch)
            return True

    def abandon(self, record: Callable[[ProducerBatch], None], *, end_leases: bool) -> None:
        """Fails all that is left and gives back its memory. Only once every connection is closed.

        ``end_leases``: the task has ended, so nobody writes into its batches any more.
        """
        with self.lock:
            for batch in list(self._live):
                if batch.leased and not end_leases:
                    continue
                batch.leased = False
                batch.request_references = 0
                if not batch.terminal:
                    batch.move_to(BatchState.FAILED)
                    self._unqueue(batch)
                    self._complete(partial(record, batch))
                self._release(batch)

    def _answered(self, batch: ProducerBatch) -> None:
        batch.request_references -= 1
        self._queues[batch.partition].in_flight -= 1

    def _unqueue(self, batch: ProducerBatch) -> None:
        queue = self._queues[batch.partition]
        if batch in queue.batches:
            queue.batches.remove(batch)
            if not queue.batches:
                self._waiting.pop(queue.partition, None)

    def _complete(self, record: Callable[[], None]) -> None:
        record()
        self._incomplete -= 1
        self.completed.notify_all()

    def _release(self, batch: ProducerBatch) -> None:
        self.uncount_raw(batch)
        if batch.release_if_unused():
            self._live.discard(batch)

    def owns(self, buffer: BatchBuffer) -> bool:
        """Whether a batch holds this memory."""
        with self.lock:
            return any(batch.buffer is buffer for batch in self._live)

    @property
    def holds_memory(self) -> bool:
        """Whether any batch has not given its memory back."""
        return bool(self._live)

    def held_bytes(self, muted: Container[TopicPartition]) -> int:
        """Memory of the batches of these partitions, wherever they are."""
        with self.lock:
            return sum(batch.buffer.capacity for batch in self._live if batch.partition in muted)

    def unanswered_records(self) -> int:
        """Rows that were sent, perhaps written, and have neither an answer nor a final state."""
        with self.lock:
            return sum(b.record_count for b in self._live if b.attempts and not b.terminal)

    def expired(self, now_ms: float) -> tuple[list[ProducerBatch], float]:
        """Queued batches older than delivery.timeout.ms, and when there may be others (ms from now)."""
        timeout = self.settings.delivery_timeout_ms
        found: list[ProducerBatch] = []
        delay = math.inf
        with self.lock:
            for queue in self._waiting.values():
                for batch in queue.batches:
                    left = batch.created_ms + timeout - now_ms
                    if left > 0:
                        delay = min(delay, left)
                        break
                    if batch.leased:
                        delay = min(delay, LEASE_MS)
                    else:
                        found.append(batch)
        return found, delay

    def queued(self) -> Iterator[ProducerBatch]:
        """Every batch that waits to be sent. The caller holds the lock."""
        for queue in self._waiting.values():
            yield from queue.batches
