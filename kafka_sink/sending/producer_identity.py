"""The idempotent producer: its id, and each partition's sequence numbers (KIP-98).

A failed batch fails its task, whose producer is then discarded with its id. So within one identity every
sequence that was given out is sent until it is acknowledged, and none is ever changed or given twice.
"""

from __future__ import annotations

from collections import deque

from kafka_sink.accumulator.producer_batch import ProducerBatch
from kafka_sink.backoff import ExponentialBackoff
from kafka_sink.errors import DeliveryError, KafkaSinkError
from kafka_sink.model import TopicPartition
from kafka_sink.network.requests import ProducerIdAnswer
from kafka_sink.records import batch_header

# Brokers remember this many batches of a producer and partition for finding duplicates.
MAX_IN_FLIGHT = 5
_SEQUENCE_RANGE = 1 << 31
# CLUSTER_AUTHORIZATION_FAILED, TRANSACTIONAL_ID_AUTHORIZATION_FAILED, UNSUPPORTED_VERSION
_FINAL_ERRORS = frozenset({31, 53, 35})


class _Sequence:
    __slots__ = ("established", "next", "unacknowledged")

    def __init__(self) -> None:
        self.next = 0
        # The broker has acknowledged a batch, so it knows this producer's sequence.
        self.established = False
        self.unacknowledged: deque[int] = deque()


class ProducerIdentity:
    """Used by the sender's thread only. Times are milliseconds."""

    def __init__(self, backoff: ExponentialBackoff) -> None:
        self.producer_id = batch_header.NO_PRODUCER_ID
        self.producer_epoch = batch_header.NO_PRODUCER_EPOCH
        self._backoff = backoff
        self._failures = 0
        self._not_before_ms = 0.0
        self._requested = False
        self._sequences: dict[TopicPartition, _Sequence] = {}

    @property
    def ready(self) -> bool:
        """Whether there is an id to write with."""
        return self.producer_id != batch_header.NO_PRODUCER_ID

    def may_request(self, now_ms: float) -> bool:
        """Whether an InitProducerId request should go now."""
        return not self.ready and not self._requested and now_ms >= self._not_before_ms

    def retry_delay_ms(self, now_ms: float) -> float:
        """Until may_request may be true; infinite while a request is under way."""
        return float("inf") if self._requested else max(0.0, self._not_before_ms - now_ms)

    def requested(self) -> None:
        """A request is under way."""
        self._requested = True

    def on_response(self, answer: ProducerIdAnswer, now_ms: float) -> KafkaSinkError | None:
        """Takes the id; returns an error where no retry can help."""
        self._requested = False
        if answer.error_code in _FINAL_ERRORS:
            return DeliveryError(
                f"the broker gave no producer id (error {answer.error_code}); "
                "grant IdempotentWrite or Write, or set kafka.enable.idempotence=false"
            )
        if answer.error_code:
            self.on_failure(now_ms)
            return None
        self.producer_id, self.producer_epoch = answer.producer_id, answer.producer_epoch
        return None

    def on_failure(self, now_ms: float) -> None:
        """No id yet; ask again after the backoff."""
        self._requested = False
        self._failures += 1
        self._not_before_ms = now_ms + self._backoff.delay_ms(self._failures)

    def may_send(self, batch: ProducerBatch) -> bool:
        """Whether the batch may go now without risk to the partition's order.

        What was sent before goes again only as the first in line. A partition's first batch goes
        alone: a broker without state of this producer takes any sequence for the first, so a second
        batch that overtakes a refused first one would be written before it (seen on a real broker
        that answered NOT_LEADER_OR_FOLLOWER to the first batch of a new topic only).
        """
        sequence = self._sequences.get(batch.partition)
        if sequence is None or not sequence.unacknowledged:
            return True
        if batch.base_sequence != batch_header.NO_SEQUENCE:
            return sequence.unacknowledged[0] == batch.base_sequence
        return sequence.established and len(sequence.unacknowledged) < MAX_IN_FLIGHT

    def assign(self, batch: ProducerBatch) -> bool:
        """Gives a batch its id and sequence, once. True where it got them now."""
        if batch.base_sequence != batch_header.NO_SEQUENCE:
            return False
        sequence = self._sequences.setdefault(batch.partition, _Sequence())
        batch.producer_id = self.producer_id
        batch.producer_epoch = self.producer_epoch
        batch.base_sequence = sequence.next
        sequence.unacknowledged.append(sequence.next)
        sequence.next = (sequence.next + batch.record_count) % _SEQUENCE_RANGE
        return True

    def acknowledged(self, batch: ProducerBatch) -> None:
        """The broker has the batch."""
        sequence = self._sequences[batch.partition]
        sequence.established = True
        if batch.base_sequence in sequence.unacknowledged:
            sequence.unacknowledged.remove(batch.base_sequence)

    def is_next(self, batch: ProducerBatch) -> bool:
        """Whether every earlier batch of the partition is acknowledged."""
        sequence = self._sequences.get(batch.partition)
        return (
            sequence is not None
            and bool(sequence.unacknowledged)
            and sequence.unacknowledged[0] == batch.base_sequence
        )

    def replaced(self, batch: ProducerBatch, pieces: list[ProducerBatch]) -> None:
        """A batch that was surely not written goes on in pieces, which share its sequences."""
        sequence = self._sequences[batch.partition]
        place = sequence.unacknowledged.index(batch.base_sequence)
        del sequence.unacknowledged[place]
        at = batch.base_sequence
        for offset, piece in enumerate(pieces):
            piece.producer_id, piece.producer_epoch = batch.producer_id, batch.producer_epoch
            piece.base_sequence = at
            sequence.unacknowledged.insert(place + offset, at)
            at = (at + piece.record_count) % _SEQUENCE_RANGE
