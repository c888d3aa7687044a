"""The record accumulator: each partition's queue of batches, shared by the task's thread and the sender."""

from __future__ import annotations

import heapq
import math
import threading
from collections import deque
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from operator import attrgetter

from kafka_sink.cluster.broker import Broker
from kafka_sink.cluster.partition import TERMINAL, BatchState, Partition, ProducerBatch, open_batch_of
from kafka_sink.cluster.topic_limits import LimitStore, TopicLimits
from kafka_sink.engine.deliveries import TaskDeliveries, WrittenBatch
from kafka_sink.memory.allocator import BufferAllocator
from kafka_sink.memory.pool import BufferPool, LentChunks
from kafka_sink.model import TopicPartition
from kafka_sink.options import SinkOptions
from kafka_sink.records.compression import BlockCodec, codec_for

# How long the task's thread usually holds a batch. A batch that expires while it is held is checked again
# after this time.
HOLD_MS = 5.0


class RecordAccumulator:
    """The batches of all partitions, between the task's thread, which fills them, and the sender's thread,
    which sends them. Thread-safe.

    A batch is made by the task's thread (``enqueue``), waits in its partition's queue until the sender takes
    it (``ready``, then ``drain``), and goes back there if it has to be sent again (``reenqueue``) or in
    pieces (``reenqueue_split``). ``complete`` and ``fail`` end it and return its memory.

    ``lock`` guards the queues, and of each batch its state and whether it is held. Both threads write them:
    without the lock the sender could take a batch while the task writes into it. Only the states SEALED and
    IN_FLIGHT are set without the lock, by the one thread that has the batch at that time. The task takes the
    lock itself to plan and to end an append pass. Every method takes it, except those that document that the
    caller holds it, and those whose names end in `_locked`.
    """

    def __init__(
        self,
        options: SinkOptions,
        allocator: BufferAllocator,
        limit_store: LimitStore | None = None,
    ) -> None:
        self.options = options
        self._guarantees_order = options.max_in_flight_requests_per_connection == 1
        self.codec = codec_for(options.compression_type, options.compression_level)
        self._limit_store = limit_store
        self._kept_limits = {} if limit_store is None else limit_store.read()
        # Whether brokers have taught a size limit of any topic. Only the sender's thread sets and reads it.
        self.any_learnt = bool(self._kept_limits)
        self._limits: dict[str, TopicLimits] = {}
        self.allocator = allocator
        self.deliveries = TaskDeliveries()
        self.lock = threading.Lock()  # guards batches and their queues: see the class
        # Signalled when batches reach a final state.
        self._completed = threading.Condition(self.lock)
        self.partitions: dict[TopicPartition, Partition] = {}
        # The partitions with queued batches, in the order in which they got their first one. The cost of a
        # pass therefore grows with the buffered partitions, not with all partitions ever written to.
        self.waiting: dict[Partition, None] = {}
        # The partitions' leaders in this version of the metadata. Only the sender's thread uses them.
        self._leaders: dict[Partition, Broker | None] = {}
        self._leaders_version: int | None = None
        # Every batch that has memory, in its queue or in a request. A closing producer must release them all.
        self.live: set[ProducerBatch] = set()
        # The number of batches without a final state: open, queued or in flight.
        self.incomplete = 0
        # The task sets this when it has no more rows for now: every batch may then be sent at once.
        self.flushing = False
        # The sender sets this when it skips a held batch, and the task clears it when it lets its batches go
        # and wakes the sender. Without it the sender would sleep although the batch may now be sent.
        self.held_batch_skipped = False
        # Batches that were too large for their brokers: the topic's limits and the batch's compression ratio.
        # The sender adds to the list, and the task's thread empties it when it plans its next append pass.
        self.too_large_batches: list[tuple[TopicLimits, float, float]] = []

    # -- the task's thread --------------------------------------------------------------------------

    def begin(self) -> None:
        """Begin a new task with the estimates of a new worker, so that equal rows make equal batches."""
        with self.lock:
            self.flushing = False
            self.too_large_batches.clear()
            for limits in self._limits.values():
                limits.begin()
        if isinstance(self.codec, BlockCodec):
            self.codec.begin()

    def partition(self, name: TopicPartition) -> Partition:
        """Return the partition, which is made when it is first used. The caller holds the lock."""
        partition = self.partitions.get(name)
        if partition is None:
            limits = self._limits.get(name.topic)
            if limits is None:
                size, learnt = self.options.batch_size, self._kept_limits.get(name.topic)
                limits = TopicLimits(name.topic, size, self.codec, self._limit_store, learnt)
                self._limits[name.topic] = limits
            partition = self.partitions[name] = Partition(name, limits)
        return partition

    def enqueue(self, partition: Partition, batch: ProducerBatch) -> None:
        """Add a new batch to its partition's queue. The caller holds the lock."""
        partition.batches.append(batch)
        self.waiting[partition] = None
        self.live.add(batch)
        self.incomplete += 1

    def await_change(self, timeout_s: float, is_over: Callable[[], bool] = lambda: False) -> None:
        """Wait until a batch reaches a final state or ``wake_waiters`` is called, for at most ``timeout_s``.
        Do not wait if ``is_over``, which is called with the lock held."""
        with self.lock:
            if not is_over():
                self._completed.wait(timeout_s)

    def wake_waiters(self) -> None:
        """End the waits under way."""
        with self.lock:
            self._completed.notify_all()

    def queued_batches(self, topic: str, partitions: int) -> list[int]:
        """The number of queued batches of each partition of a topic, for the adaptive partitioner. One call
        for all of them, because calls for 5,000 partitions took 2 ms."""
        counts = [0] * partitions
        with self.lock:
            for waiting in self.waiting:
                name, number = waiting.id
                # The topic may have been recreated with fewer partitions while rows wait for an old one.
                if name == topic and number < partitions:
                    counts[number] = len(waiting.batches)
        return counts

    # -- the sender's thread ------------------------------------------------------------------------

    def ready(
        self,
        leader: Callable[[Partition], Broker | None],
        now_ms: float,
        metadata_version: int | None = None,
    ) -> tuple[dict[Broker, list[Partition]], list[Partition], float]:
        """The partitions whose first batch may be sent now, by leader and without a leader, and the
        milliseconds until more batches may be ready.

        A batch may be sent if it is full, if another batch is queued after it, if it has lingered or backed
        off long enough, or if the task is flushing or waits for memory. ``leader`` is called once for each
        partition, as long as ``metadata_version`` stays the same.
        """
        if metadata_version is None or metadata_version != self._leaders_version:
            self._leaders, self._leaders_version = {}, metadata_version
        leaders = self._leaders
        ready: dict[Broker, list[Partition]] = {}
        leaderless: list[Partition] = []
        delay = math.inf
        with self.lock:
            hurry = self.flushing or self.allocator.pool.queued > 0
            # With thousands of partitions nearly all batches linger, and this loop is most of the cost of a
            # pass. Batches that only linger are therefore skipped by the first test.
            lingers_since = math.inf if hurry else now_ms - self.options.linger_ms
            guarantees_order = self._guarantees_order
            oldest = math.inf
            for partition in self.waiting:
                batches = partition.batches
                head = batches[0]
                if (
                    head.created_ms > lingers_since
                    and head.state is BatchState.OPEN
                    and len(batches) == 1
                    and not head.held
                ):
                    if head.created_ms < oldest:
                        oldest = head.created_ms
                    continue
                if not hurry or head.held or head.attempts or guarantees_order:
                    wait = self._wait_ms_locked(partition, hurry, now_ms)
                    if wait > 0:
                        delay = min(delay, wait)
                        continue
                try:
                    broker = leaders[partition]
                except KeyError:
                    broker = leaders[partition] = leader(partition)
                if broker is None:
                    leaderless.append(partition)
                else:
                    ready.setdefault(broker, []).append(partition)
        if oldest < math.inf:
            delay = min(delay, oldest - lingers_since)
        return ready, leaderless, delay

    def _wait_ms_locked(self, partition: Partition, hurry: bool, now_ms: float) -> float:
        """Milliseconds until the first batch may be sent; infinite if an event has to come first."""
        head = partition.batches[0]
        if head.held:
            self.held_batch_skipped = True
            return math.inf
        if self._guarantees_order and partition.in_flight:
            return math.inf
        if head.attempts:
            return partition.retry_at_ms - now_ms
        if hurry or len(partition.batches) > 1 or head.state is not BatchState.OPEN:
            return 0.0
        return head.created_ms + self.options.linger_ms - now_ms

    def drain(
        self,
        broker: Broker,
        partitions: Sequence[Partition],
        max_bytes: int,
        may_send: Callable[[ProducerBatch], bool],
        filled: int = 0,
    ) -> list[ProducerBatch]:
        """Take batches for one request to a broker: at most one per partition, and ``max_bytes`` in total
        with the ``filled`` bytes that the request already has.

        Only the first batch of a request may exceed ``max_bytes``. Each call begins at another partition, so
        that none starves. Open batches are closed but not sealed: sealing takes time, so the caller does it
        without the lock.
        """
        taken: list[ProducerBatch] = []
        size = filled
        with self.lock:
            begin = broker.rotation % len(partitions)
            for step in range(len(partitions)):
                index = (begin + step) % len(partitions)
                partition = partitions[index]
                head = partition.batches[0] if partition.batches else None
                if head is None:
                    continue
                if head.held:
                    # The task has taken hold of it since `ready` returned.
                    self.held_batch_skipped = True
                    continue
                if not may_send(head):
                    continue
                added = head.estimated_size
                if size and size + added > max_bytes:
                    broker.rotation = index
                    break
                size += added
                taken.append(head)
                partition.take(head)
                if not partition.batches:
                    del self.waiting[partition]
                if head.state is BatchState.OPEN:
                    head.move_to(BatchState.CLOSED)
            else:
                broker.rotation = begin + 1
        return taken

    def _insert_locked(self, batch: ProducerBatch) -> None:
        batch.queue.insert(batch)
        self.waiting[batch.queue] = None

    def _remove_locked(self, batch: ProducerBatch) -> None:
        queue = batch.queue
        if batch in queue.batches:
            queue.batches.remove(batch)
            if not queue.batches:
                self.waiting.pop(queue, None)

    def _release_locked(self, *batches: ProducerBatch) -> None:
        """Return the memory of ended batches, unless a request still refers to it (KAFKA-19012)."""
        returned: dict[BufferPool, list[LentChunks]] = {}
        try:
            for batch in batches:
                if batch.state in TERMINAL and not batch.in_request and batch in self.live:
                    self.live.discard(batch)
                    batch.buffer.release(returned)
        finally:
            for pool, lent in returned.items():
                pool.give_all(lent)

    def move_unwritten(
        self, sources: Iterable[Partition], targets: Mapping[str, Sequence[TopicPartition]]
    ) -> dict[TopicPartition, list[ProducerBatch]]:
        """Move batches that were surely not written, and whose rows may go to any partition, to other
        partitions.

        ``targets`` lists the partitions that a topic's batches may move to, in any order: each batch goes to
        the one with the shortest queue. Returns the moved batches by the partition they came from. Batches
        keep their order, age and memory. A moved batch is appended to the target's queue, so neither it nor
        an open batch that was last there takes any more rows. Batches that the task holds stay, and so do all
        batches if the task holds the open batch of every target.
        """
        with self.lock:
            moved = {source.id: self._move_locked(source, targets[source.id.topic]) for source in sources}
        return {name: batches for name, batches in moved.items() if batches}

    def _move_locked(self, source: Partition, names: Sequence[TopicPartition]) -> list[ProducerBatch]:
        moving = [batch for batch in source.batches if batch.can_move and not batch.held]
        targets = [self.partition(name) for name in names] if moving else []
        # The queue length and index of each target, except targets whose open batch is held.
        lengths = []
        for index, target in enumerate(targets):
            tail = open_batch_of(target)
            if tail is None or not tail.held:
                lengths.append((len(target.batches), index))
        heapq.heapify(lengths)
        moved = moving if lengths else []
        if moved:
            gone = set(moved)
            source.batches = deque(batch for batch in source.batches if batch not in gone)
            if not source.batches:
                del self.waiting[source]
        for batch in moved:
            queued, index = lengths[0]
            heapq.heapreplace(lengths, (queued + 1, index))
            target = targets[index]
            for tail in (batch, open_batch_of(target)):
                if tail is not None and tail.state is BatchState.OPEN:
                    tail.move_to(BatchState.CLOSED)
            batch.move_to_partition(target)
            target.batches.append(batch)
            self.waiting[target] = None
        self.held_batch_skipped |= bool(names) and any(batch.can_move for batch in source.batches)
        return moved

    def put_back(self, batches: Sequence[ProducerBatch]) -> None:
        """Put back batches that ``drain`` took, and that were sealed but not sent."""
        with self.lock:
            for batch in batches:
                batch.queue.give_back(batch)
                self._insert_locked(batch)

    def take(self, batch: ProducerBatch) -> bool:
        """Take one batch out of its queue, as ``drain`` does. Return False if it has failed meanwhile."""
        with self.lock:
            if batch.terminal:
                return False
            batch.queue.take(batch)
            if not batch.queue.batches:
                del self.waiting[batch.queue]
            return True

    def reenqueue(self, batch: ProducerBatch, retry_at_ms: float) -> None:
        """Put a batch back for another attempt, in front of all batches that were appended after it."""
        with self.lock:
            batch.queue.give_back(batch)
            if not batch.move_to(BatchState.SEALED):
                self._release_locked(batch)
                return
            self._insert_locked(batch)
            batch.queue.retry_at_ms = max(batch.queue.retry_at_ms, retry_at_ms)

    def reenqueue_split(self, parent: ProducerBatch, pieces: Sequence[ProducerBatch]) -> None:
        """Put the pieces of a batch in its place, or release them if the batch had failed before."""
        with self.lock:
            parent.queue.give_back(parent)
            if parent.move_to(BatchState.SPLIT):
                for piece in pieces:
                    self._insert_locked(piece)
                self.live.update(pieces)
                self.incomplete += len(pieces) - 1
                # There are no pieces if every record of the batch became a dead letter. Then the batch ends.
                self._completed.notify_all()
            else:
                for piece in pieces:
                    piece.buffer.release()
            self._release_locked(parent)

    def on_too_large(self, batch: ProducerBatch, *, costs_task: bool = False) -> None:
        """Learn from a batch that was too large for its broker. The batch still has its memory."""
        batch.queue.limits.on_too_large(batch.size, costs_task=costs_task)
        self.any_learnt = True
        with self.lock:
            self.too_large_batches.append((batch.queue.limits, batch.observed_ratio, batch.ratio))

    def on_taken(self, batches: Iterable[ProducerBatch], now_ms: float) -> None:
        """Let the learnt limits of topics rise again, because brokers have taken these batches."""
        for batch in batches:
            if batch.queue.limits.may_rise(batch.size, now_ms):
                with self.lock:
                    batch.queue.limits.rise()

    def complete(self, written: Sequence[WrittenBatch], *, confirmed: bool = True) -> None:
        """End batches that their broker has; ``confirmed`` unless acks is 0. A batch that had failed before
        stays failed.

        All batches of a response end in one call, because taking the lock and waking the task cost more than
        a small batch does.
        """
        with self.lock:
            first: list[WrittenBatch] = []
            for ended in written:
                batch = ended[0]
                batch.queue.give_back(batch)
                if batch.move_to(BatchState.SUCCEEDED):
                    first.append(ended)
            # First the deliveries: a task whose batches are all complete must find every row counted.
            self.deliveries.on_acknowledged(first, confirmed=confirmed)
            self.incomplete -= len(first)
            self._completed.notify_all()
            self._release_locked(*[batch for batch, _, _ in written])

    def fail(self, batch: ProducerBatch, cause: Exception, *, taken: bool = False) -> bool:
        """Fail a batch in any state. Return False if it has a final state already or is held.

        The task writes into a held batch, so its memory must stay: the caller tries again later. Memory that
        a request refers to stays until the response. ``taken`` means that the sender has the batch, and that
        the request it was in, if any, has ended.
        """
        with self.lock:
            if taken:
                batch.queue.give_back(batch)
            first = not (batch.terminal or batch.held)
            if first:
                self._fail_locked(batch, cause)
            self._release_locked(batch)
            return first

    def abort_incomplete(self, cause: Exception, *, include_held: bool) -> None:
        """Fail all remaining batches and release their memory. Every connection must be closed. After the
        task's end no thread writes into batches that it held (``include_held``)."""
        with self.lock:
            for batch in list(self.live):
                if batch.held and not include_held:
                    continue
                batch.held = False
                if batch.in_request:
                    batch.queue.give_back(batch)
                if not batch.terminal:
                    self._fail_locked(batch, cause)
                self._release_locked(batch)

    def _fail_locked(self, batch: ProducerBatch, cause: Exception) -> None:
        batch.move_to(BatchState.FAILED)
        self._remove_locked(batch)
        # The deliveries come first, as in `complete`.
        self.deliveries.on_failed(batch.topic_partition, batch.rows, cause)
        self.incomplete -= 1
        self._completed.notify_all()

    def memory_of(self, partitions: Container[TopicPartition]) -> int:
        """The bytes of memory that these partitions' batches have, in any state."""
        with self.lock:
            return sum(batch.buffer.capacity for batch in self.live if batch.topic_partition in partitions)

    def unacknowledged_records(self) -> int:
        """The number of rows that were sent, so that brokers may have them, but have no final state."""
        with self.lock:
            return sum(batch.rows for batch in self.live if batch.attempts and not batch.terminal)

    def waiting_rows(self) -> dict[TopicPartition, tuple[int, float]]:
        """For each partition, the rows without a final state and when the first of them were appended."""
        waiting: dict[TopicPartition, tuple[int, float]] = {}
        with self.lock:
            for batch in self.live:
                if not batch.terminal and not batch.dead_letters:
                    rows, since_ms = waiting.get(batch.topic_partition, (0, math.inf))
                    waiting[batch.topic_partition] = (
                        rows + batch.record_count,
                        min(since_ms, batch.created_ms),
                    )
        return waiting

    def expired(self, now_ms: float) -> tuple[list[ProducerBatch], float]:
        """The batches older than delivery.timeout.ms, and the milliseconds until another one is."""
        # Batches that are opened from now on expire even later.
        delay: float = self.options.delivery_timeout_ms
        expired: list[ProducerBatch] = []
        for batch in self.unfinished():
            left = batch.created_ms + self.options.delivery_timeout_ms - now_ms
            if left > 0:
                delay = min(delay, left)
            elif batch.held:
                delay = min(delay, HOLD_MS)
            else:
                expired.append(batch)
        return expired, delay

    def unfinished(self) -> list[ProducerBatch]:
        """Every batch without a final state, in append order."""
        with self.lock:
            unfinished = [batch for batch in self.live if not batch.terminal]
        return sorted(unfinished, key=attrgetter("ordinal"))
