"""The batches of one producer by partition: plain data, which the accumulator's lock guards."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kafka_sink.accumulator.buffer_pool import LentChunks, give_all
from kafka_sink.accumulator.producer_batch import BatchState, ProducerBatch
from kafka_sink.cluster.partition import Partition
from kafka_sink.model import TopicPartition


@dataclass(frozen=True, slots=True)
class TooLargeBatch:
    """A batch that was too large for its broker. ``ratio`` is compressed bytes per raw byte."""

    topic: str
    ratio: float


class BatchQueues:
    """Queues, counters and notes between the two threads. Not thread-safe: the accumulator's lock is held
    around every use, and the accumulator's own methods must not be called meanwhile, as they take that lock.

    A task gets it from ``RecordAccumulator.planning``.
    """

    def __init__(self) -> None:
        self.by_partition: dict[TopicPartition, Partition] = {}
        # Queues with batches, so that the cost of a check grows with the buffered partitions, not with all
        # that were ever written to.
        self.waiting: dict[TopicPartition, Partition] = {}
        # Every batch with memory, wherever it is. A closing producer must release all of them.
        self.live: set[ProducerBatch] = set()
        # Batches without a final state: queued, open or in flight.
        self.incomplete = 0
        # The task has no more rows: every batch may be sent at once.
        self.flushing = False
        # The sender has passed over a leased batch, so the task must wake it afterwards.
        self.leased_batch_skipped = False
        # Batches too large for their brokers that the task has not learnt from yet.
        self.too_large_batches: list[TooLargeBatch] = []
        # Bytes that open batches of a whole-batch codec hold raw.
        self.open_raw_bytes = 0

    def queue(self, partition: TopicPartition) -> Partition:
        """The partition's queue, made at first use."""
        found = self.by_partition.get(partition)
        if found is None:
            found = self.by_partition[partition] = Partition(partition)
        return found

    def enqueue(self, queue: Partition, batch: ProducerBatch) -> None:
        queue.batches.append(batch)
        self.waiting[queue.id] = queue
        self.live.add(batch)
        self.incomplete += 1

    def insert(self, queue: Partition, batch: ProducerBatch) -> None:
        """Put a batch back in append order: retries of several in-flight batches may return in any order."""
        queue.insert(batch)
        self.waiting[queue.id] = queue

    def take_first(self, queue: Partition) -> ProducerBatch:
        """Take the oldest batch for a request. An open batch comes back closed but unsealed."""
        batch = queue.batches.popleft()
        if not queue.batches:
            del self.waiting[queue.id]
        if batch.state is BatchState.OPEN:
            self.close(batch)
        queue.in_flight += 1
        batch.request_references += 1
        return batch

    def take(self, batch: ProducerBatch) -> None:
        """Take a sealed batch out of its queue, wherever it is there, as if for a request."""
        self.remove(batch)
        batch.home.in_flight += 1
        batch.request_references += 1

    def request_ended(self, batch: ProducerBatch) -> None:
        """A batch's request has a response, has failed or was never sent."""
        batch.request_references -= 1
        batch.home.in_flight -= 1

    def remove(self, batch: ProducerBatch) -> None:
        queue = batch.home
        if batch in queue.batches:
            queue.batches.remove(batch)
            if not queue.batches:
                self.waiting.pop(queue.id, None)

    def move_unsent(self, source: Partition, targets: Sequence[TopicPartition]) -> list[ProducerBatch]:
        """Append the batches of a queue that may move to these partitions, the shortest queue first.

        Their order is kept. They come behind what is queued there, so they and an open batch there take no
        more rows. Batches stay where they are while their task writes into them, or into every target's open
        batch.
        """
        kept: list[ProducerBatch] = []
        moved: list[ProducerBatch] = []
        lengths: list[tuple[int, int]] | None = None
        for batch in source.batches:
            if batch.may_move and not batch.leased:
                if lengths is None:
                    lengths = self._lengths(targets)
                if lengths:
                    queued, index = lengths[0]
                    heapq.heapreplace(lengths, (queued + 1, index))
                    self._append_moved(batch, self.queue(targets[index]))
                    moved.append(batch)
                    continue
            self.leased_batch_skipped |= batch.may_move
            kept.append(batch)
        source.batches = deque(kept)
        if not kept:
            self.waiting.pop(source.id, None)
        return moved

    def _lengths(self, targets: Sequence[TopicPartition]) -> list[tuple[int, int]]:
        """A heap of queue lengths by place in ``targets``, without those whose open batch is leased."""
        lengths = []
        for index, partition in enumerate(targets):
            queue = self.queue(partition)
            tail = queue.batches[-1] if queue.batches else None
            if tail is None or tail.state is not BatchState.OPEN or not tail.leased:
                lengths.append((len(queue.batches), index))
        heapq.heapify(lengths)
        return lengths

    def _append_moved(self, batch: ProducerBatch, queue: Partition) -> None:
        for one in (batch, *((queue.batches[-1],) if queue.batches else ())):
            if one.state is BatchState.OPEN:
                self.close(one)
        batch.move_to_partition(queue)
        queue.batches.append(batch)
        self.waiting[queue.id] = queue

    def close(self, batch: ProducerBatch) -> None:
        batch.move_to(BatchState.CLOSED)
        if batch.counted_raw:
            self.uncount_raw(batch)

    def release(self, *batches: ProducerBatch) -> None:
        """Give the memory of terminal batches back, unless a request still refers to it."""
        returned: list[LentChunks] = []
        try:
            for batch in batches:
                if batch.counted_raw:
                    self.uncount_raw(batch)
                if batch.release_if_unused(returned):
                    self.live.discard(batch)
        finally:
            give_all(returned)

    def count_raw(self, batch: ProducerBatch) -> None:
        """Update ``open_raw_bytes`` by what an open batch holds now."""
        held = batch.raw_tail
        self.open_raw_bytes += held - batch.counted_raw
        batch.counted_raw = held

    def uncount_raw(self, batch: ProducerBatch) -> None:
        """Take a batch that is no longer open out of ``open_raw_bytes``."""
        self.open_raw_bytes -= batch.counted_raw
        batch.counted_raw = 0

    def open_batch(self, partition: TopicPartition) -> ProducerBatch | None:
        """The partition's batch that still takes rows, if it has one."""
        queue = self.waiting.get(partition)
        tail = queue.batches[-1] if queue is not None else None
        return tail if tail is not None and tail.state is BatchState.OPEN else None

    def open_batches(self) -> list[ProducerBatch]:
        tails = [queue.batches[-1] for queue in self.waiting.values()]
        return [batch for batch in tails if batch.state is BatchState.OPEN]

    def queued(self) -> Iterator[ProducerBatch]:
        for queue in self.waiting.values():
            yield from queue.batches
