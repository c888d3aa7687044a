"""All that a producer knows of one partition: batches, leader, sequences (KIP-98, KIP-360) and counts.

The accumulator's lock guards its batches, which the task's thread and the sender's share. The sender's thread
writes all else, but for what the task's thread resets between two tasks, while nothing is in flight: the
counts (``TaskDeliveries.begin``) and a transaction's sequences (``TransactionalIdentity.leave``). Times
are monotonic milliseconds.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kafka_sink.clock import OUTCOME_WINDOW_MS
from kafka_sink.cluster.broker import Broker
from kafka_sink.cluster.topic_limits import TopicLimits
from kafka_sink.errors import KafkaSinkError
from kafka_sink.model import NO_TIMESTAMP, TopicPartition
from kafka_sink.records.batch_header import NO_PRODUCER_EPOCH, NO_PRODUCER_ID, NO_SEQUENCE, ProducerSequence

if TYPE_CHECKING:
    from kafka_sink.engine.batch import ProducerBatch


# Brokers remember this many batches of a producer and partition for finding duplicates.
MAX_IN_FLIGHT = 5
_SEQUENCE_RANGE = 1 << 31
# Far below any producer.id.expiration.ms: after this a broker may have forgotten the producer.
_ESTABLISHED_MS = 300_000.0
# Failures with no success in between count together if no more than this lies between two of them.
_STREAK_MS = 600_000.0


# The first and the last offset.
Range = tuple[int, int]


@dataclass(slots=True)
class PartitionCounts:
    """Of a task's acknowledged batches. ``ranges`` are their offsets, in ascending order.

    Of the ``records``, ``dead_letters`` are dead letters, and ``unconfirmed`` ones were sent with acks=0.
    ``compression_rates`` is the sum over batches of compressed bytes per raw byte.
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
        """Add a range. It takes in its neighbours, and batches of a partition's only writer are neighbours.
        Unless the ranges ``may_grow`` in number, the new last one replaces the former last one. Return by how
        many they have grown."""
        ranges = self.ranges
        before = len(ranges)
        at = bisect_left(ranges, (first, last))
        if at < len(ranges) and last + 1 == ranges[at][0]:
            last = ranges.pop(at)[1]
        if at and ranges[at - 1][1] + 1 == first:
            ranges[at - 1] = (ranges[at - 1][0], last)
        else:
            ranges.insert(at, (first, last))
            if not may_grow and len(ranges) > 2:
                del ranges[-2]
        return len(ranges) - before


class Partition:
    """One for each partition that a producer has written to.

    A batch keeps its sequence until it is acknowledged. The exceptions are a restart, after a broker has lost
    its state of this producer, and a gap, after records were dropped: then batches that were surely not
    written get new sequences, once none of them is in flight.
    """

    __slots__ = (
        *("_assigned", "_assigned_as", "_failed", "_failed_before", "_failed_ms", "_streak"),
        *("_taken", "_taken_before", "_taken_ms", "_window_ends_ms"),
        *("taken_after_gap", "topic_id", "batches", "counts", "established_until_ms", "gap", "has_taken"),
        *("id", "in_flight", "last_offset", "leader", "limits", "metadata_version", "missing_since_ms"),
        *("needs_restart", "next_sequence", "producer", "restarts", "retry_at_ms"),
        *("transaction", "unacknowledged"),
    )

    def __init__(self, partition: TopicPartition, limits: TopicLimits) -> None:
        self.id = partition
        # Its topic's.
        self.limits = limits
        # Queued, oldest first; the last may be open. The backoff of the first ends at ``retry_at_ms``.
        self.batches: deque[ProducerBatch] = deque()
        # Batches that the sender has taken out of the queue, until their attempt ends, also while it seals or
        # splits them. ``is_in_flight`` is about those with a sequence only.
        self.in_flight = 0
        self.retry_at_ms = 0.0
        # As of this version of the metadata.
        self.leader: Broker | None = None
        self.metadata_version: int | None = None
        # Of the topic that its batches were sent to; None before they are and where brokers send no ids.
        self.topic_id: bytes | None = None
        # Whether a broker has taken a batch of this producer.
        self.has_taken = False
        # Batches that brokers took, and failures, in the window that ends at ``_window_ends_ms`` and in the
        # one before it.
        self._taken = self._taken_before = self._failed = self._failed_before = 0
        self._window_ends_ms = 0.0
        # Failures since the last success; when a success and a failure last counted.
        self._streak = 0
        self._taken_ms = self._failed_ms = -math.inf
        # The number of the last transaction that it was added to, under protocol 1.
        self.transaction = 0
        # Since when rows have waited for it though its topic has no such partition.
        self.missing_since_ms: float | None = None
        # Of the present task; None before its first acknowledgement.
        self.counts: PartitionCounts | None = None
        self.forget_sequences()

    def forget_sequences(self) -> None:
        """Begin as a partition that was never written to."""
        # The id and epoch that the sequences belong to.
        self.producer = (NO_PRODUCER_ID, NO_PRODUCER_EPOCH)
        self.next_sequence = 0
        # Until then the leader surely remembers the producer, as it has acknowledged a batch.
        self.established_until_ms = -math.inf
        # The last offset that the leader acknowledged, -1 where there is none.
        self.last_offset = -1
        self.restarts = 0
        # Whether the broker and this producer disagree about the next sequence.
        self.needs_restart = False
        # The first sequence of records that were dropped. Later batches have sequences that are too high.
        self.gap: int | None = None
        # Whether a leader has taken a batch after the gap, which it does only if it has lost its state.
        self.taken_after_gap = False
        # Batches with a sequence and without an acknowledgement, in sequence order.
        self.unacknowledged: deque[ProducerBatch] = deque()
        # How many batches have got a sequence, and the place of each unacknowledged one among them. Pieces
        # have the place of the batch that they were part of.
        self._assigned = 0
        self._assigned_as: dict[ProducerBatch, int] = {}

    def insert(self, batch: ProducerBatch) -> None:
        """Put a batch back in append order: retries of several in-flight batches may return in any order."""
        place = 0
        for queued in self.batches:
            if queued.ordinal > batch.ordinal:
                break
            place += 1
        self.batches.insert(place, batch)

    def belongs_to(self, topic_id: bytes) -> None:
        """Its topic has this id. A topic that took the place of a deleted one does not know the producer, so
        its first batch goes alone, as a partition's first one does."""
        if self.topic_id not in (None, topic_id):
            self.established_until_ms, self.last_offset = -math.inf, -1
        self.topic_id = topic_id

    # -- outcomes: the evidence of the breaker's failure rate ------------------------------------------
    #
    # A batch fails as a whole, so a batch of a thousand rows is no more evidence than one of ten, and
    # failures of a slow stream count as much as those of a fast one. Batches in flight together count as one
    # success and one failure at most, as a lost connection fails them all for one reason.

    def outcomes(self, now_ms: float) -> tuple[int, int]:
        """Failures of the last seconds, and failures and successes together."""
        if now_ms >= self._window_ends_ms:
            self._enter_window(now_ms)
        failures = max(self._failed + self._failed_before, self._streak)
        return failures, failures + self._taken + self._taken_before

    def count_failure(self, sent_ms: float, now_ms: float) -> None:
        """A batch that was sent then has failed for a reason that blames its broker."""
        if sent_ms < self._failed_ms:
            return
        if now_ms >= self._window_ends_ms:
            self._enter_window(now_ms)
        self._streak = self._streak + 1 if now_ms - self._failed_ms < _STREAK_MS else 1
        self._failed_ms = now_ms
        self._failed += 1

    def is_failing(self, now_ms: float) -> bool:
        """Whether its last attempt failed recently for a reason that blames its broker."""
        return self._streak > 0 and now_ms - self._failed_ms < 2 * OUTCOME_WINDOW_MS

    def forget_outcomes(self) -> None:
        self._taken = self._taken_before = self._failed = self._failed_before = self._streak = 0

    def _enter_window(self, now_ms: float) -> None:
        """Called once the present one is over."""
        follows = now_ms < self._window_ends_ms + OUTCOME_WINDOW_MS
        self._taken_before, self._failed_before = (self._taken, self._failed) if follows else (0, 0)
        self._taken = self._failed = 0
        self._window_ends_ms = (now_ms // OUTCOME_WINDOW_MS + 1) * OUTCOME_WINDOW_MS

    # -- sequences ----------------------------------------------------------------------------------

    def may_send(self, batch: ProducerBatch, now_ms: float) -> bool:
        """Whether the batch may be sent now without risk to the partition's order.

        A batch that was sent before is sent again only as the oldest unacknowledged one. A partition's first
        batch, and the first after an error, is sent alone: a broker without state of this producer accepts
        any sequence as the first, so a second batch could overtake a rejected first one and be written before
        it (seen on a real broker that responded NOT_LEADER_OR_FOLLOWER to a new topic's first batch only).
        No more than four batches pass one whose outcome is unknown, however often that one is sent: a broker
        that has taken five others no longer knows whether it has it.
        """
        if self.gap is not None:
            # Whether earlier batches were written has to be known before the sequences after the gap change.
            return (
                batch.possibly_written and batch is self.unacknowledged[0] and not self._is_after_gap(batch)
            )
        if not self.unacknowledged:
            return True
        if self.needs_restart:
            return False
        first = self.unacknowledged[0]
        if batch.sequence is not NO_SEQUENCE:
            return first is batch
        if now_ms >= self.established_until_ms or len(self.unacknowledged) >= MAX_IN_FLIGHT:
            return False
        # How many got a sequence after the first unacknowledged one, those acknowledged since included.
        return self._assigned - self._assigned_as[first] < MAX_IN_FLIGHT - 1

    def assign(self, batch: ProducerBatch, producer: tuple[int, int]) -> None:
        """Give a batch its sequence under this id and epoch."""
        if self.producer != producer and not self.unacknowledged:
            # Another partition's restart raised the epoch. This one follows when all is acknowledged.
            self.producer = producer
            self.next_sequence = 0
            self.established_until_ms = -math.inf
        batch.assign_sequence(ProducerSequence(*self.producer, self.next_sequence))
        self.unacknowledged.append(batch)
        self._assigned += 1
        self._assigned_as[batch] = self._assigned
        self.next_sequence = (self.next_sequence + batch.record_count) % _SEQUENCE_RANGE

    def acknowledged(self, batch: ProducerBatch, last_offset: int, sent_ms: float, now_ms: float) -> None:
        """The broker has the batch, which was sent at ``sent_ms``. ``last_offset`` is its last record's
        offset, -1 where unknown."""
        self.has_taken = True
        self._streak = 0
        if sent_ms >= self._taken_ms:
            if now_ms >= self._window_ends_ms:
                self._enter_window(now_ms)
            self._taken_ms = now_ms
            self._taken += 1
        self.established_until_ms = now_ms + _ESTABLISHED_MS
        self.taken_after_gap |= self.gap is not None and self._is_after_gap(batch)
        self.last_offset = max(self.last_offset, last_offset)
        if self.unacknowledged and self.unacknowledged[0] is batch:
            self.unacknowledged.popleft()
            del self._assigned_as[batch]
            return
        if batch not in self.unacknowledged:
            return
        for earlier in self.unacknowledged:
            if earlier is batch:
                break
            # A broker accepts sequences in order, so it has these too. Their own responses are late or lost.
            earlier.possibly_written = True
        self.unacknowledged.remove(batch)
        del self._assigned_as[batch]

    def attempt_failed(self) -> None:
        """Until the next acknowledgement the partition's batches are sent one by one."""
        self.established_until_ms = -math.inf

    def is_next(self, batch: ProducerBatch) -> bool:
        """Whether every earlier batch is acknowledged, and no earlier record was dropped."""
        return self.gap is None and bool(self.unacknowledged) and self.unacknowledged[0] is batch

    @property
    def is_in_flight(self) -> bool:
        """Whether the sender has taken a batch that has a sequence and no acknowledgement."""
        return any(batch.request_references for batch in self.unacknowledged)

    @property
    def restarted(self) -> bool:
        """Whether the sequences were restarted and nothing was acknowledged since."""
        return self.restarts > 0 and self.established_until_ms == -math.inf

    @property
    def unresolved(self) -> list[ProducerBatch]:
        """Batches that may have been written. No restart may change their sequences."""
        return [batch for batch in self.unacknowledged if batch.possibly_written]

    def restart(self) -> None:
        """Take the sequences back: they start at 0 with the next id or epoch.

        Raises KafkaSinkError and changes nothing where a batch is in flight or may have been written.
        """
        if self.is_in_flight or self.unresolved:
            raise KafkaSinkError(f"{self.id} has unresolved batches, which keep their sequences")
        for batch in self.unacknowledged:
            batch.withdraw_sequence()
        self.unacknowledged.clear()
        self._assigned_as.clear()
        self.producer = (NO_PRODUCER_ID, NO_PRODUCER_EPOCH)
        self.restarts += 1
        self.established_until_ms = -math.inf
        self.needs_restart = self.taken_after_gap = False
        self.gap = None

    def replaced(self, batch: ProducerBatch, pieces: list[ProducerBatch]) -> None:
        """The pieces of a batch that was surely not written take over its sequences."""
        place = self.unacknowledged.index(batch)
        del self.unacknowledged[place]
        number = self._assigned_as.pop(batch)
        at = batch.sequence.base_sequence
        for offset, piece in enumerate(pieces):
            piece.assign_sequence(batch.sequence._replace(base_sequence=at))
            self.unacknowledged.insert(place + offset, piece)
            self._assigned_as[piece] = number
            at = (at + piece.record_count) % _SEQUENCE_RANGE

    def shrunk(self, batch: ProducerBatch, pieces: list[ProducerBatch]) -> None:
        """A batch that was surely not written lost records. ``pieces`` contain the others and take over its
        first sequences.

        The broker expects the sequence after them next, so it rejects what is in flight behind them. Nothing
        more is sent to the partition until ``close_gap``.
        """
        self.replaced(batch, pieces)
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
        """Settle that the batches after dropped records were not written, although responses were lost.

        The leader had the producer's state when they were sent, since several batches were in flight, and so
        takes none of them before the dropped records. A copy that arrives late may find that their sequences
        are the next ones, so ``restart`` has to follow: brokers reject the former epoch then.
        """
        for batch in self.after_gap:
            batch.possibly_written = False

    def close_gap(self) -> None:
        """Batches behind dropped records take over their sequences.

        Raises KafkaSinkError and changes nothing where one of them is in flight or may have been written.
        """
        behind, at = self.after_gap, self.gap
        if any(batch.request_references or batch.possibly_written for batch in behind):
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
    """Whether a sequence is ``other`` or follows it. Sequences wrap around."""
    return (sequence - other) % _SEQUENCE_RANGE < _SEQUENCE_RANGE // 2
