"""The idempotent producer: its id and epoch, and each partition's sequence numbers (KIP-98, KIP-360).

A batch keeps its sequence until it is acknowledged. The one exception is a restart, after a broker has lost
its state of this producer: then the partition's batches that were surely not written get new sequences, from
0 under the next epoch, once none of them is in flight.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from operator import attrgetter

from kafka_sink import kafka_errors
from kafka_sink.accumulator.producer_batch import ProducerBatch
from kafka_sink.clock import ExponentialBackoff
from kafka_sink.errors import DeliveryError, KafkaSinkError
from kafka_sink.model import TopicPartition
from kafka_sink.network.requests import ProducerIdResponse
from kafka_sink.records.batch_header import NO_PRODUCER_EPOCH, NO_PRODUCER_ID, ProducerSequence

# Brokers remember this many batches of a producer and partition for finding duplicates.
MAX_IN_FLIGHT = 5
_SEQUENCE_RANGE = 1 << 31
_LAST_EPOCH = (1 << 15) - 1
# Far below any producer.id.expiration.ms: after this a broker may have forgotten the producer.
_ESTABLISHED_MS = 300_000.0
_FINAL_ERRORS = frozenset(
    {
        kafka_errors.CLUSTER_AUTHORIZATION_FAILED,
        kafka_errors.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
        kafka_errors.UNSUPPORTED_VERSION,
    }
)
_NO_ID = (NO_PRODUCER_ID, NO_PRODUCER_EPOCH)


class _PartitionSequences:
    """One partition's sequences. ``producer`` is the id and epoch that they belong to."""

    __slots__ = (
        *("established_until_ms", "last_offset", "next", "numbers", "producer"),
        *("restarts", "started", "unacknowledged"),
    )

    def __init__(self) -> None:
        self.producer = _NO_ID
        self.next = 0
        # Until then the leader surely remembers the producer, as it has acknowledged a batch.
        self.established_until_ms = -math.inf
        self.last_offset = -1
        self.restarts = 0
        # Batches with a sequence and without an acknowledgement, in sequence order.
        self.unacknowledged: deque[ProducerBatch] = deque()
        # How many batches got a sequence, and for each unacknowledged one how many had when it did. Pieces
        # have the number of the batch that they were part of.
        self.started = 0
        self.numbers: dict[ProducerBatch, int] = {}

    @property
    def passing(self) -> int:
        """How many batches come after the first unacknowledged one, acknowledged ones included."""
        return self.started - self.numbers[self.unacknowledged[0]]


class ProducerIdentity:
    """Used by the sender's thread only. Times are milliseconds."""

    transactional_id: str | None = None
    # Whether partitions are added to the transaction before their first batch: transaction protocol 1.
    adds_partitions = False

    def __init__(self, backoff: ExponentialBackoff) -> None:
        self.producer_id, self.producer_epoch = _NO_ID
        self.last_error: str | None = None
        # Increases when the id is given up.
        self.generation = 0
        self._backoff = backoff
        self._failures = 0
        self._not_before_ms = 0.0
        self._requested = False
        self._sequences: dict[TopicPartition, _PartitionSequences] = {}
        self._to_restart: set[TopicPartition] = set()
        # The first sequence of records that were dropped. Later batches have sequences that are too high.
        self._gaps: dict[TopicPartition, int] = {}

    # -- the id -----------------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """Whether there is an id to write with."""
        return self.producer_id != NO_PRODUCER_ID

    def may_request(self, now_ms: float) -> bool:
        """Whether an InitProducerId request should go now."""
        return not self.ready and not self._requested and now_ms >= self._not_before_ms

    def retry_delay_ms(self, now_ms: float) -> float:
        """Milliseconds until may_request may be true; infinite while a request is in flight."""
        return math.inf if self._requested else max(0.0, self._not_before_ms - now_ms)

    def requested(self) -> None:
        """A request is in flight."""
        self._requested = True

    def on_response(self, response: ProducerIdResponse, now_ms: float) -> KafkaSinkError | None:
        """Take the id; return an error where no retry can help."""
        self._requested = False
        if response.error_code in _FINAL_ERRORS:
            return DeliveryError(
                f"the broker gave no producer id ({kafka_errors.error_of(response.error_code).label}); "
                "grant IdempotentWrite or Write, or set kafka.enable.idempotence=false"
            )
        if response.error_code:
            self.on_failure(now_ms, kafka_errors.error_of(response.error_code).label)
            return None
        self._failures = 0
        self.last_error = None
        self.producer_id, self.producer_epoch = response.producer_id, response.producer_epoch
        return None

    def on_failure(self, now_ms: float, cause: object) -> None:
        """The request failed; the next one waits for the backoff."""
        self._requested = False
        self._failures += 1
        self.last_error = f"no producer id yet: {cause}"
        self._not_before_ms = now_ms + self._backoff.delay_ms(self._failures)

    def forget(self) -> None:
        """Give up the id, or the request for one, because another cluster gave it.

        Raises KafkaSinkError where a batch has been sent with it.
        """
        if self._sequences:
            raise KafkaSinkError("a producer id that was written with is kept")
        self.producer_id, self.producer_epoch = _NO_ID
        self.generation += 1
        self._requested = False

    # -- sequences --------------------------------------------------------------------------------

    def may_send(self, batch: ProducerBatch, now_ms: float) -> bool:
        """Whether the batch may be sent now without risk to the partition's order.

        A batch that was sent before is sent again only as the oldest unacknowledged one. A partition's first
        batch, and the first after an error, is sent alone: a broker without state of this producer accepts
        any sequence as the first, so a second batch could overtake a rejected first one and be written before
        it (seen on a real broker that responded NOT_LEADER_OR_FOLLOWER to a new topic's first batch only).
        No more than four batches pass one whose outcome is unknown, however often that one is sent: a broker
        that has taken five others no longer knows whether it has it.
        """
        if self._gaps and batch.partition in self._gaps:
            return False
        sequence = self._sequences.get(batch.partition)
        if sequence is None or not sequence.unacknowledged:
            return True
        if batch.partition in self._to_restart:
            return False
        if batch.has_sequence:
            return sequence.unacknowledged[0] is batch
        if now_ms >= sequence.established_until_ms or len(sequence.unacknowledged) >= MAX_IN_FLIGHT:
            return False
        return sequence.passing < MAX_IN_FLIGHT - 1

    def assign(self, batch: ProducerBatch) -> None:
        """Give a batch its id, epoch and sequence, unless it has them from an earlier attempt."""
        if batch.has_sequence:
            return
        sequence = self._sequences.get(batch.partition)
        if sequence is None:
            sequence = self._sequences[batch.partition] = _PartitionSequences()
        current = (self.producer_id, self.producer_epoch)
        if sequence.producer != current and not sequence.unacknowledged:
            # Another partition's restart raised the epoch. This one follows when all is acknowledged.
            sequence.producer = current
            sequence.next = 0
            sequence.established_until_ms = -math.inf
        batch.assign_sequence(ProducerSequence(*sequence.producer, sequence.next))
        sequence.unacknowledged.append(batch)
        sequence.started += 1
        sequence.numbers[batch] = sequence.started
        sequence.next = (sequence.next + batch.record_count) % _SEQUENCE_RANGE

    def acknowledged(self, batch: ProducerBatch, last_offset: int, now_ms: float) -> None:
        """The broker has the batch. ``last_offset`` is its last record's offset, -1 where unknown."""
        sequence = self._sequences[batch.partition]
        sequence.established_until_ms = now_ms + _ESTABLISHED_MS
        sequence.last_offset = max(sequence.last_offset, last_offset)
        if sequence.unacknowledged and sequence.unacknowledged[0] is batch:
            sequence.unacknowledged.popleft()
            del sequence.numbers[batch]
            return
        if batch not in sequence.unacknowledged:
            return
        for earlier in sequence.unacknowledged:
            if earlier is batch:
                break
            # A broker accepts sequences in order, so it has these too. Their own responses are late or lost.
            earlier.set_possibly_written()
        sequence.unacknowledged.remove(batch)
        del sequence.numbers[batch]

    def attempt_failed(self, batch: ProducerBatch) -> None:
        """An attempt failed. Until the next acknowledgement the partition's batches are sent one by one."""
        self._sequences[batch.partition].established_until_ms = -math.inf

    def is_next(self, batch: ProducerBatch) -> bool:
        """Whether every earlier batch of the partition is acknowledged, and no earlier record was dropped."""
        sequence = self._sequences.get(batch.partition)
        if batch.partition in self._gaps:
            return False
        return sequence is not None and bool(sequence.unacknowledged) and sequence.unacknowledged[0] is batch

    def last_acknowledged_offset(self, partition: TopicPartition) -> int:
        """The last offset that the leader acknowledged, -1 where there is none."""
        sequence = self._sequences.get(partition)
        return -1 if sequence is None else sequence.last_offset

    def restarted(self, partition: TopicPartition) -> bool:
        """Whether the partition's sequences were restarted and nothing was acknowledged since."""
        sequence = self._sequences.get(partition)
        return sequence is not None and sequence.restarts > 0 and sequence.established_until_ms == -math.inf

    def replaced(self, batch: ProducerBatch, pieces: list[ProducerBatch]) -> None:
        """The pieces of a batch that was surely not written take over its sequences."""
        sequence = self._sequences[batch.partition]
        place = sequence.unacknowledged.index(batch)
        del sequence.unacknowledged[place]
        number = sequence.numbers.pop(batch)
        at = batch.sequence.base_sequence
        for offset, piece in enumerate(pieces):
            piece.assign_sequence(batch.sequence._replace(base_sequence=at))
            sequence.unacknowledged.insert(place + offset, piece)
            sequence.numbers[piece] = number
            at = (at + piece.record_count) % _SEQUENCE_RANGE

    # -- dropped records --------------------------------------------------------------------------

    def shrunk(self, batch: ProducerBatch, pieces: list[ProducerBatch]) -> None:
        """A batch that was surely not written lost records. ``pieces`` contain the others and take over its
        first sequences.

        The broker expects the sequence after them next, so it rejects what is in flight behind them. Nothing
        more is sent to the partition until ``close_gap``.
        """
        self.replaced(batch, pieces)
        gap = (batch.sequence.base_sequence + sum(piece.record_count for piece in pieces)) % _SEQUENCE_RANGE
        known = self._gaps.get(batch.partition, gap)
        self._gaps[batch.partition] = known if _is_after(gap, known) else gap

    def gaps_due(self) -> list[TopicPartition]:
        """Partitions with dropped records and nothing in flight."""
        return [
            partition
            for partition in self._gaps
            if not any(batch.request_references for batch in self._sequences[partition].unacknowledged)
        ]

    def after_gap(self, partition: TopicPartition) -> list[ProducerBatch]:
        """The batches whose sequences ``close_gap`` would change."""
        gap = self._gaps[partition]
        batches = self._sequences[partition].unacknowledged
        return [batch for batch in batches if _is_after(batch.sequence.base_sequence, gap)]

    def close_gap(self, partition: TopicPartition) -> None:
        """Batches behind dropped records take over their sequences.

        Raises KafkaSinkError and changes nothing where one of them is in flight or may have been written.
        """
        behind = self.after_gap(partition)
        if any(batch.request_references or batch.possibly_written for batch in behind):
            raise KafkaSinkError(f"{partition} has unresolved batches, which keep their sequences")
        at = self._gaps.pop(partition)
        for batch in behind:
            moved = batch.sequence._replace(base_sequence=at)
            batch.withdraw_sequence()
            batch.assign_sequence(moved)
            at = (at + batch.record_count) % _SEQUENCE_RANGE
        self._sequences[partition].next = at

    # -- restarts ---------------------------------------------------------------------------------

    def request_restart(self, partition: TopicPartition) -> None:
        """The broker and this producer disagree about the partition's next sequence."""
        self._to_restart.add(partition)

    def unresolved(self, partition: TopicPartition) -> list[ProducerBatch]:
        """Batches of the partition that may have been written. No restart may change their sequences."""
        return [batch for batch in self._sequences[partition].unacknowledged if batch.possibly_written]

    def restarts_due(self) -> list[TopicPartition]:
        """Partitions whose restart was requested and that have nothing in flight."""
        return [
            partition
            for partition in self._to_restart
            if not any(batch.request_references for batch in self._sequences[partition].unacknowledged)
        ]

    def restart(self, partition: TopicPartition) -> None:
        """Start a partition's sequences at 0 under the next epoch, or under a new id after the last epoch.

        Raises KafkaSinkError and changes nothing where a batch is in flight or may have been written.
        """
        sequence = self._sequences[partition]
        if any(batch.request_references or batch.possibly_written for batch in sequence.unacknowledged):
            raise KafkaSinkError(f"{partition} has unresolved batches, which keep their sequences")
        for batch in sequence.unacknowledged:
            batch.withdraw_sequence()
        sequence.unacknowledged.clear()
        sequence.numbers.clear()
        sequence.producer = _NO_ID
        sequence.restarts += 1
        sequence.established_until_ms = -math.inf
        self._to_restart.discard(partition)
        self._gaps.pop(partition, None)
        if self.producer_epoch >= _LAST_EPOCH:
            self.producer_id, self.producer_epoch = _NO_ID
        elif self.ready:
            self.producer_epoch += 1

    @property
    def settled(self) -> bool:
        """Whether every sequence is acknowledged. Only then may another task use the id."""
        return (
            not self._to_restart
            and not self._gaps
            and not any(map(attrgetter("unacknowledged"), self._sequences.values()))
        )


def _is_after(sequence: int, other: int) -> bool:
    """Whether a sequence is ``other`` or follows it. Sequences wrap around."""
    return (sequence - other) % _SEQUENCE_RANGE < _SEQUENCE_RANGE // 2


class TransactionalIdentity(ProducerIdentity):
    """The id and epoch of one transaction, which the task's transaction client got.

    It never requests an id, and never restarts sequences: a broker would fence an epoch that it did not
    give. ``adopt`` is called by the task's thread while nothing is queued.
    """

    def __init__(self, backoff: ExponentialBackoff) -> None:
        super().__init__(backoff)
        # Under protocol 1. ``partitions_to_add``: batches wait for these, in the order of their first batch.
        self.partitions_to_add: dict[TopicPartition, None] = {}
        self._added: set[TopicPartition] = set()

    @property
    def transaction(self) -> tuple[str | None, int, int]:
        """The transactional id, producer id and epoch."""
        return self.transactional_id, self.producer_id, self.producer_epoch

    def adopt(
        self, transactional_id: str, producer_id: int, epoch: int, *, adds_partitions: bool = False
    ) -> None:
        """Write with these from now on."""
        self.leave()
        self.transactional_id = transactional_id
        self.producer_epoch = epoch
        self.adds_partitions = adds_partitions
        # Last, as it makes the identity ready.
        self.producer_id = producer_id

    def leave(self) -> None:
        """Write nothing until the next transaction."""
        self.producer_id, self.producer_epoch = _NO_ID
        self.transactional_id = None
        self._sequences.clear()
        self._gaps.clear()
        self.partitions_to_add.clear()
        self._added.clear()

    def may_send(self, batch: ProducerBatch, now_ms: float) -> bool:
        """As ProducerIdentity's, and under protocol 1 only to partitions that belong to the transaction."""
        if self.adds_partitions and batch.partition not in self._added:
            self.partitions_to_add[batch.partition] = None
            return False
        return super().may_send(batch, now_ms)

    def added(self, partitions: Iterable[TopicPartition]) -> None:
        """These belong to the transaction now."""
        for one in partitions:
            self.partitions_to_add.pop(one, None)
            self._added.add(one)

    def may_request(self, now_ms: float) -> bool:
        return False

    def retry_delay_ms(self, now_ms: float) -> float:
        return math.inf
