"""All that a producer knows about one partition: batches, leader, sequences (KIP-98, KIP-360) and counts.
A ``Partition`` and its batches refer to each other, so ``ProducerBatch`` is also in this module.

The accumulator's lock guards the queue of batches, which the task's thread and the sender's thread share.
Only the sender's thread writes the other attributes, with two exceptions: between two tasks, while no request
is in flight, the task's thread resets the counts (``TaskDeliveries.begin``) and a transaction's sequences
(``TransactionalIdentity.leave``). Times are monotonic milliseconds.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections import deque
from dataclasses import dataclass, field
from enum import Enum

from kafka_sink.cluster.records_builder import SAFETY, RecordsBuilder
from kafka_sink.cluster.topic_limits import TopicLimits
from kafka_sink.errors import IllegalTransitionError, KafkaSinkError
from kafka_sink.model import (
    IDEMPOTENT_IN_FLIGHT,
    NO_LEADER,
    NO_TIMESTAMP,
    UNKNOWN_EPOCH,
    PartitionMetadata,
    TopicPartition,
)
from kafka_sink.outcomes import RecentOutcomes
from kafka_sink.records import batch_header
from kafka_sink.records.batch_header import NO_PRODUCER_EPOCH, NO_PRODUCER_ID, NO_SEQUENCE, ProducerSequence
from kafka_sink.records.encoder import Records

_SEQUENCE_RANGE = 1 << 31
# After this time a broker may have forgotten the producer. It is far below any producer.id.expiration.ms.
_ESTABLISHED_MS = 300_000.0


class BatchState(Enum):
    """The states of a batch. ``TRANSITIONS`` lists the legal moves."""

    OPEN = "open"  # takes rows
    CLOSED = "closed"  # takes no more rows, not yet compressed
    SEALED = "sealed"  # its bytes are final except the header; it waits to be sent (again)
    IN_FLIGHT = "in flight"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    SPLIT = "split"  # its records live on in smaller batches

    # Enum's own hash is a Python function, which took 2 of the 45 us that a batch of a few rows costs.
    __hash__ = object.__hash__


TRANSITIONS: dict[BatchState, frozenset[BatchState]] = {
    BatchState.OPEN: frozenset({BatchState.CLOSED, BatchState.FAILED}),
    BatchState.CLOSED: frozenset({BatchState.SEALED, BatchState.FAILED}),
    BatchState.SEALED: frozenset({BatchState.IN_FLIGHT, BatchState.FAILED, BatchState.SPLIT}),
    BatchState.IN_FLIGHT: frozenset(
        {BatchState.SEALED, BatchState.SUCCEEDED, BatchState.FAILED, BatchState.SPLIT}
    ),
    # A response after a failure is late, which is legal and changes nothing. After a success it is a bug.
    BatchState.FAILED: frozenset(
        {BatchState.FAILED, BatchState.SUCCEEDED, BatchState.SEALED, BatchState.SPLIT}
    ),
    BatchState.SUCCEEDED: frozenset(),
    BatchState.SPLIT: frozenset(),
}
_ordinals = itertools.count()
TERMINAL = frozenset({BatchState.SUCCEEDED, BatchState.FAILED, BatchState.SPLIT})


@dataclass(slots=True, eq=False)
class ProducerBatch(RecordsBuilder):
    """Rows of one partition that are sent as one record batch.

    Which attributes may go together:

    - OPEN, CLOSED: the batch may be held. Only the task's thread uses a held batch. If it is not held, the
      task may take hold of it while it is open, and the sender may take or fail it. If an exception ends an
      append pass, its batches stay held, because they may lack rows; only
      RecordAccumulator.abort_incomplete lets them go.
    - SEALED: the batch is held until the task lets it go. Then the sender may take it, with or without a
      sequence.
    - IN_FLIGHT: the header has the batch's sequence, and one request refers to its memory.
    - SUCCEEDED, FAILED, SPLIT: the memory is released once no request refers to it.

    The sequence of the idempotent producer (NO_SEQUENCE without idempotence) is

    - not assigned until the first attempt, or, for a piece, until its parent is split;
    - then assigned: while no request is in flight, it may be replaced (KIP-360);
    - and fixed once ``possibly_written`` is true: a request has failed, but the broker may have carried it
      out. From then on neither the sequence nor the rows change.
    """

    # The partition in whose queue it waits, and to which it goes back after a failed attempt.
    queue: Partition
    created_ms: float
    # Whether all rows may go to any partition of the topic, because neither a key nor a column chose this
    # one.
    is_movable: bool = False
    # Whether the records are dead letters, which do not count as rows of the task.
    dead_letters: bool = False
    # Whether the task's thread has it: see the class. The task sets and clears it under the accumulator's
    # lock. Without it the sender could send the batch while rows are written into it.
    held: bool = False
    state: BatchState = field(init=False, default=BatchState.OPEN)
    topic_partition: TopicPartition = field(init=False)
    # The append order within the partition, which retries keep. A piece's ordinal extends its parent's.
    ordinal: tuple[int, ...] = field(init=False)
    attempts: int = field(init=False, default=0)
    # Whether its rows were in a request, perhaps as part of the batch that this one is a piece of.
    was_sent: bool = field(init=False, default=False)
    # Failed attempts that count against ``retries``. An attempt that failed only because of an earlier batch
    # does not count.
    retries_spent: int = field(init=False, default=0)
    # True from when the sender takes the batch out of its queue until no request refers to its memory. Only
    # ``Partition.take`` and ``Partition.give_back`` write it, under the accumulator's lock. Without it the
    # memory of a batch that expires could be reused while the socket still reads it.
    in_request: bool = field(init=False, default=False)
    last_error: Exception | None = field(init=False, default=None)
    # Whether the broker may have written it, although no response confirms it. Neither the sequence nor the
    # rows change from then on.
    possibly_written: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        # A dataclass with slots is another class than the one that ``super()`` refers to.
        RecordsBuilder.__post_init__(self)
        self.topic_partition = self.queue.id
        self.ordinal = (next(_ordinals),)

    # -- filling: the task's thread, outside the lock -------------------------------------------

    def append(self, records: Records, count: int, max_timestamp: int) -> None:
        """Add ``count`` encoded records. The append pass has reserved room and memory for them.

        Raises IllegalTransitionError if the batch is not held.
        """
        if not self.held:
            raise IllegalTransitionError(
                f"append to a batch of {self.topic_partition} that is {self.state.value}"
            )
        self.add(records, count, max_timestamp)

    def seal(self) -> None:
        """Compress the raw tail and return unused memory. The thread that closed the batch calls it."""
        if self.state is not BatchState.CLOSED:
            raise IllegalTransitionError(f"seal a batch of {self.topic_partition} that is {self.state.value}")
        self.compress()
        self.move_to(BatchState.SEALED)

    # -- its sequence: the sender's thread --------------------------------------------------------

    def assign_sequence(self, sequence: ProducerSequence) -> None:
        """Give the batch its sequence. Raises IllegalTransitionError if it has one."""
        if self.sequence is not NO_SEQUENCE:
            raise IllegalTransitionError(
                f"a batch of {self.topic_partition} has the sequence {self.sequence}"
            )
        self.sequence = sequence

    def withdraw_sequence(self) -> None:
        """Take the sequence back, for another one. Raises IllegalTransitionError if it is fixed."""
        if self.possibly_written or self.in_request:
            raise IllegalTransitionError(f"the sequence {self.sequence} of {self.topic_partition} is in use")
        self.sequence = NO_SEQUENCE

    # -- sizes ----------------------------------------------------------------------------------

    @property
    def rows(self) -> int:
        """The number of records that are rows of the task."""
        return 0 if self.dead_letters else self.record_count

    @property
    def estimated_size(self) -> int:
        """The bytes on the wire, which are estimated until the batch is sealed (estimatedSizeInBytes in
        Kafka)."""
        if self.codec is None or self.state not in (BatchState.OPEN, BatchState.CLOSED):
            return self.buffer.size
        return batch_header.SIZE + int(self.raw_bytes * min(1.0, self.ratio * SAFETY))

    # -- states ---------------------------------------------------------------------------------

    def move_to(self, state: BatchState) -> bool:
        """Change the state. Return False if the move is legal but late: then nothing changes.

        Raises IllegalTransitionError and changes nothing if the move is not in the table.
        """
        if state not in TRANSITIONS[self.state]:
            raise IllegalTransitionError(
                f"a batch of {self.topic_partition} cannot go from {self.state.value} to {state.value}"
            )
        if self.state is BatchState.FAILED:
            return False
        self.state = state
        return True

    @property
    def can_move(self) -> bool:
        """Whether the batch may go to another partition: its rows may go to any, and it was surely not
        written. A batch with a sequence has its place among the other batches of the partition."""
        return self.is_movable and not self.possibly_written and self.sequence is NO_SEQUENCE

    def move_to_partition(self, queue: Partition) -> None:
        """Append the batch anew to another partition. Its bytes do not contain the partition, so they stay.

        Raises IllegalTransitionError if the batch may not move or its task writes into it.
        """
        if not self.can_move or self.held or self.terminal:
            raise IllegalTransitionError(
                f"a batch of {self.topic_partition} that is {self.state.value} cannot move"
            )
        self.queue = queue
        self.topic_partition = queue.id
        self.ordinal = (next(_ordinals),)

    @property
    def terminal(self) -> bool:
        return self.state in TERMINAL


def open_batch_of(partition: Partition) -> ProducerBatch | None:
    """The batch of the partition that still takes rows, if there is one. The caller holds the accumulator's
    lock."""
    tail = partition.batches[-1] if partition.batches else None
    return tail if tail is not None and tail.state is BatchState.OPEN else None


# The first and the last offset.
Range = tuple[int, int]


@dataclass(slots=True)
class PartitionCounts:
    """Counts of a task's acknowledged batches. ``ranges`` are their offsets, in ascending order.

    ``dead_letters`` and ``unconfirmed`` are the numbers of ``records`` that are dead letters, and that were
    sent with acks=0. ``compression_rates`` is the sum over batches of compressed bytes per raw byte.
    """

    records: int = 0
    dead_letters: int = 0
    unconfirmed: int = 0
    batches: int = 0
    sent_bytes: int = 0
    raw_bytes: int = 0
    max_batch_bytes: int = 0
    compression_rates: float = 0.0
    log_append_time_ms: int = NO_TIMESTAMP
    ranges: list[Range] = field(default_factory=list)

    def extend(self, first: int, last: int, *, may_grow: bool = True) -> int:
        """Add a range, and return by how much the number of ranges has grown.

        The range is joined with adjacent ranges. If this producer is the partition's only writer, there is
        therefore one range. If the number of ranges must not grow (``may_grow``), the new last range replaces
        the former last one.
        """
        ranges = self.ranges
        before = len(ranges)
        at = bisect_left(ranges, (first, last))
        if at < len(ranges) and last + 1 == ranges[at][0]:
            last = ranges.pop(at)[1]
        if at and ranges[at - 1][1] + 1 == first:
            ranges[at - 1] = (ranges[at - 1][0], last)
        else:
            ranges.insert(at, (first, last))
            if not may_grow and len(ranges) > max(2, before):
                del ranges[-2]
        return len(ranges) - before


class Partition:
    """One partition that a producer has written to.

    A batch keeps its sequence until it is acknowledged, with three exceptions: a restart, after a broker has
    lost its state of this producer; a gap, after records were dropped; and a topic that was created again
    without the partition. In all cases batches that were certainly not written get new sequences, once none
    of them is in flight.
    """

    __slots__ = (
        *("_assigned", "_assigned_as", "_assigned_before_leader", "_led_by", "is_known_to_leader"),
        *("taken_after_gap", "topic_id", "batches", "counts", "established_until_ms", "gap", "has_taken"),
        *("id", "in_flight", "last_offset", "limits"),
        *("needs_restart", "next_sequence", "outcomes", "producer", "restarts", "retry_at_ms"),
        *("transaction", "unacknowledged"),
    )

    def __init__(self, partition: TopicPartition, limits: TopicLimits) -> None:
        self.id = partition
        self.limits = limits
        # The queued batches, oldest first. The last one may be open. The first one's backoff ends at
        # ``retry_at_ms``.
        self.batches: deque[ProducerBatch] = deque()
        # The number of batches that the sender has taken out of the queue and whose attempt has not ended,
        # even while it seals or splits them. ``is_in_flight`` considers only batches with a sequence.
        self.in_flight = 0
        self.retry_at_ms = 0.0
        # The id of the topic to which batches were sent. None before the first batch, or if brokers send no
        # topic ids.
        self.topic_id: bytes | None = None
        # The leader, its epoch and the topic id that were last seen.
        self._led_by: tuple[int, int, bytes | None] | None = None
        # Whether a broker has taken a batch of this producer.
        self.has_taken = False
        # The evidence of the breaker's failure rate.
        self.outcomes = RecentOutcomes()
        # The number of the last transaction to which the partition was added, under protocol 1.
        self.transaction = 0
        # Counts of the current task; None until its first acknowledgement.
        self.counts: PartitionCounts | None = None
        self.forget_sequences()

    def forget_sequences(self) -> None:
        """Begin again, like a partition that was never written to."""
        # The producer id and epoch that the sequences belong to.
        self.producer = (NO_PRODUCER_ID, NO_PRODUCER_EPOCH)
        self.next_sequence = 0
        # Until this time the leader certainly remembers the producer, because it has acknowledged a batch.
        self.established_until_ms = -math.inf
        # The last offset that the leader acknowledged; -1 if there is none.
        self.last_offset = -1
        self.restarts = 0
        # Whether the broker and this producer disagree about the next sequence.
        self.needs_restart = False
        # The first sequence of records that were dropped. The sequences of later batches are too high.
        self.gap: int | None = None
        # Whether a leader has taken a batch after the gap. It does so only if it has lost its state.
        self.taken_after_gap = False
        # Batches with a sequence and without an acknowledgement, in sequence order.
        self.unacknowledged: deque[ProducerBatch] = deque()
        # How many batches have been given a sequence, and the ordinal of each unacknowledged batch among
        # them. A piece of a split batch has the ordinal of that batch.
        self._assigned = 0
        self._assigned_as: dict[ProducerBatch, int] = {}
        # The value of ``_assigned`` when the leader last changed or the sequences restarted, and whether a
        # batch that was given its sequence since then was acknowledged.
        self._assigned_before_leader = 0
        self.is_known_to_leader = False

    def take(self, batch: ProducerBatch) -> None:
        """Take a batch out of the queue for the sender, until ``give_back``. The caller holds the lock."""
        self.batches.remove(batch)
        self.in_flight += 1
        batch.in_request = True

    def give_back(self, batch: ProducerBatch) -> None:
        """End what ``take`` began: no request refers to the batch any more. The caller holds the lock."""
        self.in_flight -= 1
        batch.in_request = False

    def insert(self, batch: ProducerBatch) -> None:
        """Put a batch back in append order. Batches that were in flight together may return in any order."""
        place = 0
        for queued in self.batches:
            if queued.ordinal > batch.ordinal:
                break
            place += 1
        self.batches.insert(place, batch)

    def set_leader(self, info: PartitionMetadata | None, topic_id: bytes | None) -> None:
        """Record the partition's leader and the id of its topic, as the metadata contains them.

        If the topic was deleted and created again, the new topic's leader does not know the producer, so the
        first batch is sent alone (see ``may_send``). A new leader after an unclean election may not know it
        either (see ``disprove_after_gap``).
        """
        if topic_id is not None:
            if self.topic_id not in (None, topic_id):
                self.established_until_ms, self.last_offset = -math.inf, -1
            self.topic_id = topic_id
        leader, epoch = (NO_LEADER, UNKNOWN_EPOCH) if info is None else (info.leader, info.leader_epoch)
        led_by = leader, epoch, self.topic_id
        if led_by != self._led_by:
            self._led_by = led_by
            self._await_first_of_leader()

    def _await_first_of_leader(self) -> None:
        """Assume that the leader does not know the producer until it acknowledges a batch that gets its
        sequence from now on. An acknowledgement of an earlier batch may come from a former leader."""
        self._assigned_before_leader = self._assigned
        self.is_known_to_leader = False

    def may_send(self, batch: ProducerBatch, now_ms: float) -> bool:
        """Whether the batch may be sent now without risk to the partition's order.

        A batch that was sent before is sent again only if it is the oldest unacknowledged batch.

        A partition's first batch, and the first batch after an error, is sent alone. A broker without state
        of this producer accepts any sequence as the first, so a second batch could overtake a rejected first
        batch and be written before it. This was seen on a real broker that responded NOT_LEADER_OR_FOLLOWER
        only to the first batch of a new topic.

        At most four later batches are sent while the outcome of a batch is unknown, however often that batch
        is sent. A broker that has taken five later batches no longer knows whether it has this one.
        """
        if self.gap is not None:
            # It must be known whether earlier batches were written before the sequences after the gap change.
            # A batch that was not written is also sent if it precedes such a batch.
            return (
                bool(self.unacknowledged)
                and batch is self.unacknowledged[0]
                and any(not self._is_after_gap(earlier) for earlier in self.unresolved)
            )
        if not self.unacknowledged:
            return True
        if self.needs_restart:
            return False
        first = self.unacknowledged[0]
        if batch.sequence is not NO_SEQUENCE:
            return first is batch
        if now_ms >= self.established_until_ms or len(self.unacknowledged) >= IDEMPOTENT_IN_FLIGHT:
            return False
        # The number of batches that were given a sequence after the first unacknowledged batch, including
        # batches that were acknowledged since.
        return self._assigned - self._assigned_as[first] < IDEMPOTENT_IN_FLIGHT - 1

    def assign(self, batch: ProducerBatch, producer: tuple[int, int]) -> None:
        """Give a batch its sequence under this producer id and epoch."""
        if self.producer != producer and not self.unacknowledged:
            # Another partition's restart raised the epoch. This partition uses the new epoch once all its
            # batches are acknowledged.
            self.producer = producer
            self.next_sequence = 0
            self.established_until_ms = -math.inf
        batch.assign_sequence(ProducerSequence(*self.producer, self.next_sequence))
        self.unacknowledged.append(batch)
        self._assigned += 1
        self._assigned_as[batch] = self._assigned
        self.next_sequence = (self.next_sequence + batch.record_count) % _SEQUENCE_RANGE

    def on_acknowledged(self, batch: ProducerBatch, last_offset: int, sent_ms: float, now_ms: float) -> None:
        """Record that the broker has the batch, which was sent at ``sent_ms``. ``last_offset`` is the offset
        of its last record; -1 if it is unknown."""
        self.has_taken = True
        self.outcomes.on_success(sent_ms, now_ms)
        self.established_until_ms = now_ms + _ESTABLISHED_MS
        self.taken_after_gap |= self.gap is not None and self._is_after_gap(batch)
        self.last_offset = max(self.last_offset, last_offset)
        number = self._assigned_as.pop(batch, 0)
        self.is_known_to_leader |= number > self._assigned_before_leader
        if not number:
            return
        for earlier in self.unacknowledged:
            if earlier is batch:
                break
            # A broker accepts sequences in order, so it also has these batches. Their own responses are late
            # or lost.
            earlier.possibly_written = True
        self.unacknowledged.remove(batch)

    def on_attempt_failed(self) -> None:
        """Send the partition's batches one by one until the next acknowledgement."""
        self.established_until_ms = -math.inf

    def is_next(self, batch: ProducerBatch) -> bool:
        """Whether every earlier batch is acknowledged, and no earlier record was dropped."""
        return self.gap is None and bool(self.unacknowledged) and self.unacknowledged[0] is batch

    @property
    def is_in_flight(self) -> bool:
        """Whether the sender has taken a batch that has a sequence and no acknowledgement."""
        return any(batch.in_request for batch in self.unacknowledged)

    @property
    def restarted(self) -> bool:
        """Whether the sequences were restarted and no batch was acknowledged since."""
        return self.restarts > 0 and self.established_until_ms == -math.inf

    @property
    def unresolved(self) -> list[ProducerBatch]:
        """Batches that may have been written. No restart may change their sequences."""
        return [batch for batch in self.unacknowledged if batch.possibly_written]

    def restart(self) -> None:
        """Withdraw all sequences, so that they start at 0 with the next producer id or epoch.

        Raises KafkaSinkError and changes nothing if a batch is in flight or may have been written.
        """
        if self.is_in_flight or self.unresolved:
            raise KafkaSinkError(f"{self.id} has unresolved batches, which keep their sequences")
        self._withdraw_all()
        self._await_first_of_leader()
        self.producer = (NO_PRODUCER_ID, NO_PRODUCER_EPOCH)
        self.restarts += 1
        self.established_until_ms = -math.inf
        self.needs_restart = self.taken_after_gap = False
        self.gap = None

    def release_unwritten(self) -> None:
        """Withdraw all sequences without a restart, so that the batches can go to other partitions.

        This does nothing if a batch is in flight or may have been written, or if sequences need a repair.
        Otherwise the leader has every batch before the first unacknowledged one and none after it, so the
        next batch of this partition gets that one's sequence.
        """
        if self.gap is None and not (self.needs_restart or self.is_in_flight or self.unresolved):
            if self.unacknowledged:
                self.next_sequence = self.unacknowledged[0].sequence.base_sequence
            self._withdraw_all()

    def _withdraw_all(self) -> None:
        for batch in self.unacknowledged:
            batch.withdraw_sequence()
        self.unacknowledged.clear()
        self._assigned_as.clear()

    def on_split(self, batch: ProducerBatch, pieces: list[ProducerBatch]) -> None:
        """Give the sequences of a batch that was certainly not written to its pieces."""
        place = self.unacknowledged.index(batch)
        del self.unacknowledged[place]
        number = self._assigned_as.pop(batch)
        at = batch.sequence.base_sequence
        for offset, piece in enumerate(pieces):
            piece.assign_sequence(batch.sequence._replace(base_sequence=at))
            self.unacknowledged.insert(place + offset, piece)
            self._assigned_as[piece] = number
            at = (at + piece.record_count) % _SEQUENCE_RANGE

    def on_shrunk(self, batch: ProducerBatch, pieces: list[ProducerBatch]) -> None:
        """Record that some records of a batch were dropped, which was certainly not written. ``pieces``
        contain the remaining records and get the batch's first sequences.

        The broker expects the sequence after the pieces next, so it rejects later batches that are in flight.
        Nothing more is sent to the partition until ``close_gap``.
        """
        self.on_split(batch, pieces)
        # A later batch was acknowledged while this one waited for its dead letters.
        self.taken_after_gap |= batch.possibly_written
        gap = (batch.sequence.base_sequence + sum(piece.record_count for piece in pieces)) % _SEQUENCE_RANGE
        if self.gap is None or not _is_after(gap, self.gap):
            self.gap = gap

    @property
    def after_gap(self) -> list[ProducerBatch]:
        """The batches whose sequences ``close_gap`` would change."""
        return [batch for batch in self.unacknowledged if self._is_after_gap(batch)]

    def _is_after_gap(self, batch: ProducerBatch) -> bool:
        return self.gap is not None and _is_after(batch.sequence.base_sequence, self.gap)

    def disprove_after_gap(self) -> None:
        """Record that the batches after dropped records were not written, although their responses were lost.

        The leader must be known to have the producer's state (``is_known_to_leader``). It therefore rejects
        all of these batches as long as the dropped records are missing. Without the state it could take such
        a batch as the producer's first one. A copy of such a batch that arrives late could still find that
        its sequence is the next one. So ``restart`` has to follow: after it, brokers reject the former epoch.

        Raises KafkaSinkError and changes nothing if the leader may lack the state.
        """
        if not self.is_known_to_leader:
            raise KafkaSinkError(f"the leader of {self.id} may have written batches after dropped records")
        for batch in self.after_gap:
            batch.possibly_written = False

    def close_gap(self) -> None:
        """Give the sequences of dropped records to the batches after them.

        Raises KafkaSinkError and changes nothing if one of these batches is in flight or may have been
        written.
        """
        behind, at = self.after_gap, self.gap
        if any(batch.in_request or batch.possibly_written for batch in behind):
            raise KafkaSinkError(f"{self.id} has unresolved batches, which keep their sequences")
        if at is None:
            return
        for batch in behind:
            moved = batch.sequence._replace(base_sequence=at)
            batch.withdraw_sequence()
            batch.assign_sequence(moved)
            at = (at + batch.record_count) % _SEQUENCE_RANGE
        self.next_sequence = at
        self.gap, self.taken_after_gap = None, False


def _is_after(sequence: int, other: int) -> bool:
    """Whether a sequence equals ``other`` or follows it. Sequences wrap around."""
    return (sequence - other) % _SEQUENCE_RANGE < _SEQUENCE_RANGE // 2
