"""Batches per partition: where the task's thread and the sender meet, under one lock."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field

from kafka_sink.accumulator.batch_buffer import BufferAllocator
from kafka_sink.accumulator.producer_batch import BatchState, ProducerBatch
from kafka_sink.model import CompressionType, PartitionInfo, TopicPartition


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

    ``guarded`` holds a partition back while a batch of it is in flight and order asks for that.
    ``retry_at_ms`` is when the first batch's backoff has passed.
    """

    partition: TopicPartition
    batches: deque[ProducerBatch] = field(default_factory=deque)
    in_flight: int = 0
    retry_at_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class ReadyCheck:
    """What the sender may do now: queues by leader, topics without one, and when to look again."""

    nodes: dict[int, list[PartitionQueue]]
    unknown_leaders: set[str]
    next_check_delay_ms: float


class RecordAccumulator:
    """Queues of batches by partition. ``lock`` guards queues, batch states and counters."""

    def __init__(self, settings: AccumulatorSettings, allocator: BufferAllocator) -> None:
        self.settings = settings
        self.allocator = allocator
        self.lock = threading.Lock()
        # Signalled when batches reach a final state; the flushing task waits on it.
        self.completed = threading.Condition(self.lock)
        self.flushing = False
        self._queues: dict[TopicPartition, PartitionQueue] = {}
        # Queues that hold batches, so that a check costs what is buffered, not what was ever written.
        self._waiting: dict[TopicPartition, PartitionQueue] = {}
        self._incomplete = 0
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
        self._incomplete += 1

    def open_batches(self) -> list[ProducerBatch]:
        """Batches that still take rows."""
        tails = (queue.batches[-1] for queue in self._waiting.values())
        return [batch for batch in tails if batch.state is BatchState.OPEN]

    @property
    def incomplete(self) -> int:
        """Batches without a final state: queued, open or in flight."""
        return self._incomplete

    def queued_batches(self, topic: str, partitions: int) -> list[int]:
        """Batches waiting per partition of a topic, for the adaptive partitioner."""
        counts = []
        for partition in range(partitions):
            queue = self._waiting.get(TopicPartition(topic, partition))
            counts.append(0 if queue is None else len(queue.batches))
        return counts

    # -- the sender's thread ------------------------------------------------------------------------

    def ready(
        self,
        leader: Callable[[TopicPartition], PartitionInfo | None],
        now_ms: float,
        muted: Collection[TopicPartition] = (),
    ) -> ReadyCheck:
        """Which brokers have something to get: a head batch that is full or has another behind it,
        lingered or backed off long enough, or must go because memory or the task waits. ``muted``
        partitions (the circuit breaker's) are left out."""
        nodes: dict[int, list[PartitionQueue]] = {}
        unknown: set[str] = set()
        delay = math.inf
        with self.lock:
            hurry = self.flushing or self.allocator.queued > 0
            for queue in self._waiting.values():
                if muted and queue.partition in muted:
                    continue
                wait = self._wait_ms(queue, hurry, now_ms)
                if wait > 0:
                    delay = min(delay, wait)
                    continue
                info = leader(queue.partition)
                if info is None or info.leader < 0:
                    unknown.add(queue.partition.topic)
                else:
                    nodes.setdefault(info.leader, []).append(queue)
        return ReadyCheck(nodes, unknown, delay)

    def _wait_ms(self, queue: PartitionQueue, hurry: bool, now_ms: float) -> float:
        """Until the head batch may go; infinite while something else must happen first."""
        head = queue.batches[0]
        if head.leased or (self.settings.guarantee_order and queue.in_flight):
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
    ) -> list[ProducerBatch]:
        """Takes at most one batch per partition for one broker, up to ``max_bytes`` together.

        Only a first batch may exceed it. The start rotates, so that no partition starves. Batches that
        were still open come back closed but unsealed: sealing takes time and happens outside the lock.
        """
        taken: list[ProducerBatch] = []
        size = 0
        with self.lock:
            begin = self._rotation.get(node, 0) % len(queues)
            for step in range(len(queues)):
                index = (begin + step) % len(queues)
                queue = queues[index]
                head = queue.batches[0] if queue.batches else None
                if head is None or head.leased or not may_send(head):
                    continue
                if taken and size + head.size > max_bytes:
                    self._rotation[node] = index
                    break
                size += head.size
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
        queue.in_flight += 1
        batch.request_references += 1
        return batch

    def requeue(self, batch: ProducerBatch, retry_at_ms: float) -> None:
        """Puts a batch back for another attempt, before everything that was appended after it."""
        with self.lock:
            self._answered(batch)
            if not batch.move_to(BatchState.SEALED):
                self._settle(batch)
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

    def put_pieces(self, parent: ProducerBatch, pieces: Sequence[ProducerBatch]) -> None:
        """Replaces a batch that was too large by its pieces, in its place."""
        with self.lock:
            self._answered(parent)
            if not parent.move_to(BatchState.SPLIT):
                for piece in pieces:
                    piece.buffer.release()
            else:
                queue = self._queues[parent.partition]
                for piece in pieces:
                    self._insert(queue, piece)
                self._incomplete += len(pieces)
                self._incomplete -= 1
            self._settle(parent)

    def finish(self, batch: ProducerBatch, state: BatchState) -> bool:
        """A request's answer settles its batch; False where it had failed before (a late answer)."""
        with self.lock:
            self._answered(batch)
            first = batch.move_to(state)
            if first:
                self._incomplete -= 1
                self.completed.notify_all()
            self._settle(batch)
            return first

    def _answered(self, batch: ProducerBatch) -> None:
        batch.request_references -= 1
        self._queues[batch.partition].in_flight -= 1

    def _settle(self, batch: ProducerBatch) -> None:
        batch.release_if_unused()

    def fail(self, batch: ProducerBatch) -> bool:
        """Fails a batch wherever it is. Memory that a request still refers to stays until its answer."""
        with self.lock:
            if batch.terminal:
                return False
            batch.move_to(BatchState.FAILED)
            queue = self._queues[batch.partition]
            if batch in queue.batches:
                queue.batches.remove(batch)
                if not queue.batches:
                    self._waiting.pop(queue.partition, None)
            self._incomplete -= 1
            self._settle(batch)
            self.completed.notify_all()
            return True

    def expired(self, now_ms: float) -> tuple[list[ProducerBatch], float]:
        """Queued batches older than delivery.timeout.ms, and when the next will be (ms from now)."""
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
                    if not batch.leased:
                        found.append(batch)
        return found, delay

    def queued(self) -> Iterator[ProducerBatch]:
        """Every batch that waits to be sent. The caller holds the lock."""
        for queue in self._waiting.values():
            yield from queue.batches
