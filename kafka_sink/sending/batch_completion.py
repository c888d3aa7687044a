"""How a batch ends: acknowledged, failed or expired, and what that does to its partition's sequences."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

from kafka_sink.accumulator.producer_batch import BatchState, ProducerBatch
from kafka_sink.accumulator.record_accumulator import LEASE_MS, RecordAccumulator, WrittenBatch
from kafka_sink.breaker.breaker import Breaker
from kafka_sink.cluster.broker import Broker
from kafka_sink.cluster.metadata import ClusterMetadata
from kafka_sink.cluster.partition import Partition
from kafka_sink.errors import DeliveryError
from kafka_sink.model import Node, TopicPartition
from kafka_sink.sending import response_classifier
from kafka_sink.sending.producer_identity import ProducerIdentity
from kafka_sink.sending.task_deliveries import TaskDeliveries
from kafka_sink.sending.telemetry import ClientTelemetry

_log = logging.getLogger(__name__)


class BatchCompletion:
    """Used by the sender's thread. ``deliveries`` is replaced between tasks, when no batch is left.

    ``brokers``: by id, with the batches that were sent and have no response yet. These expire like queued
    ones, but keep their memory until the response, because the socket may still read it.
    """

    def __init__(
        self,
        accumulator: RecordAccumulator,
        brokers: Mapping[int, Broker],
        telemetry: ClientTelemetry | None = None,
    ) -> None:
        self.deliveries = TaskDeliveries()
        self._accumulator = accumulator
        self._brokers = brokers
        self._telemetry = telemetry

    def in_flight(self) -> list[ProducerBatch]:
        return [batch for broker in self._brokers.values() for batch in broker.batches()]

    def sent(self, broker: Broker, batches: Collection[ProducerBatch], now_ms: float) -> None:
        if _log.isEnabledFor(logging.DEBUG):
            size = sum(batch.size for batch in batches)
            _log.debug("broker %d: request with %d batch(es) of %d bytes", broker.id, len(batches), size)
        queue_ms = [now_ms - batch.created_ms for batch in batches if batch.attempts == 1]
        self.deliveries.sent(queue_ms)
        if self._telemetry is not None:
            self._telemetry.on_sent(queue_ms)

    def succeed(self, batches: Sequence[WrittenBatch], *, confirmed: bool) -> None:
        """Brokers have these batches; see TaskDeliveries.acknowledged."""
        self._accumulator.succeed(batches, partial(self.deliveries.acknowledged, confirmed=confirmed))

    def fail_taken(self, batch: ProducerBatch, cause: Exception) -> None:
        """Fail a batch that the sender has taken from its queue."""
        self._accumulator.finish(batch, BatchState.FAILED, self._record_failure(batch, cause))

    def fail(self, batch: ProducerBatch, cause: Exception) -> bool:
        """Fail a batch without a response, wherever it is; False where it is leased or has ended."""
        return self._accumulator.fail(batch, self._record_failure(batch, cause))

    def retry(self, batch: ProducerBatch, at_ms: float) -> None:
        """Queue the batch again, for an attempt at ``at_ms`` or later."""
        self.deliveries.count(retries=1)
        self._accumulator.reenqueue(batch, at_ms)

    def put_back(self, batch: ProducerBatch) -> None:
        """Queue the batch again. It is not to be sent."""
        self._accumulator.reenqueue(batch, 0.0)

    def replace(self, batch: ProducerBatch, pieces: Collection[ProducerBatch]) -> None:
        self.deliveries.count(splits=1)
        self._accumulator.reenqueue_split(batch, [*pieces])

    def shrink(self, batch: ProducerBatch, pieces: Collection[ProducerBatch]) -> None:
        """Queue what is left of a batch without the records that became dead letters."""
        self._accumulator.reenqueue_split(batch, [*pieces])

    def fail_all(self, cause: Exception) -> None:
        """Fail every batch: the producer cannot go on (authentication failed, no producer id)."""
        self.deliveries.failed(None, 0, cause)
        for batch in [*self._accumulator.queued_batches_snapshot(), *self.in_flight()]:
            self.fail(batch, cause)

    def abort_incomplete(self, *, end_leases: bool) -> None:
        """Fail what is left and give its memory back. Only after the connections are closed."""
        closed = DeliveryError("the producer was closed")

        def record(batch: ProducerBatch) -> None:
            self.deliveries.failed(batch.partition, _rows(batch), closed)

        for broker in list(self._brokers.values()):
            broker.sent.clear()
        self._accumulator.abort_incomplete(record, end_leases=end_leases)

    def _record_failure(self, batch: ProducerBatch, cause: Exception) -> Callable[[], None]:
        return partial(self.deliveries.failed, batch.partition, _rows(batch), cause)


def _rows(batch: ProducerBatch) -> int:
    """The task's rows that end with the batch. Dead letters are none: their rows are counted as skipped."""
    return 0 if batch.letters else batch.record_count


class BatchExpiry:
    """Used by the sender's thread. Times are monotonic milliseconds."""

    def __init__(
        self,
        completion: BatchCompletion,
        accumulator: RecordAccumulator,
        cluster: ClusterMetadata,
        identity: ProducerIdentity | None,
        breaker: Breaker,
        connection_errors: Callable[[], Mapping[Node, Exception]],
    ) -> None:
        self._completion = completion
        self._accumulator = accumulator
        self._cluster = cluster
        self._identity = identity
        self._breaker = breaker
        self._connection_errors = connection_errors
        # Partitions with queued rows that are missing from their topic.
        self._missing: set[Partition] = set()
        # With thousands of partitions, a look at every batch would be most of a pass's cost.
        self._none_expires_before_ms = 0.0

    def expire(self, now_ms: float) -> float:
        """Fail batches older than delivery.timeout.ms; return the milliseconds until the next may be."""
        if now_ms < self._none_expires_before_ms:
            return self._none_expires_before_ms - now_ms
        expired, delay = self._accumulator.expired(now_ms)
        timeout = self._accumulator.options.delivery_timeout_ms
        for batch in self._completion.in_flight():
            left = batch.created_ms + timeout - now_ms
            if left <= 0:
                expired.append(batch)
            else:
                delay = min(delay, left)
        for batch in expired:
            if not self._expire(batch, now_ms) and not batch.terminal:
                # The batch was leased. The lease may have ended since.
                delay = min(delay, LEASE_MS)
        # A batch that is opened from now on expires later than every batch seen here.
        delay = min(delay, timeout)
        self._none_expires_before_ms = now_ms + delay
        return delay

    def _expire(self, batch: ProducerBatch, now_ms: float) -> bool:
        last = batch.last_error or self._obstacle(batch.partition)
        if lookup_error := self._cluster.describe_lookup_error(batch.partition.topic):
            last = f"{last}; the topic's metadata: {lookup_error}"
        timeout = self._accumulator.options.delivery_timeout_ms
        muted = self._breaker.explain(batch.partition)
        if _log.isEnabledFor(logging.DEBUG):
            _log.debug(
                "%s: %d record(s) expired %.0f ms after they were appended, after %d attempt(s): %s",
                batch.partition,
                batch.record_count,
                now_ms - batch.created_ms,
                batch.attempts,
                last,
            )
        cause = response_classifier.expiry(batch.partition, timeout, batch.attempts, last, muted)
        return self._completion.fail(batch, cause)

    def expire_missing(self, topics: Collection[str], now_ms: float) -> None:
        """Fail rows of ``topics`` whose partition has been missing for max.block.ms.

        A topic that is recreated with fewer partitions leaves such rows behind. The partition may come back,
        but a task that fails soon is run again, and its rows then go to the partitions that exist.
        """
        if not topics and not self._missing:
            return
        snapshot = self._accumulator.queued_batches_snapshot() if topics else []
        queued = [batch for batch in snapshot if batch.partition.topic in topics]
        partitions = {batch.home for batch in queued}
        missing = {one for one in partitions if self._partitions_without(one.id) is not None}
        for partition in self._missing - missing:
            partition.missing_since_ms = None
        for partition in missing:
            if partition.missing_since_ms is None:
                partition.missing_since_ms = now_ms
        self._missing = missing
        max_block_ms = self._accumulator.options.max_block_ms
        for batch in queued:
            since_ms = batch.home.missing_since_ms
            if since_ms is not None and now_ms - since_ms >= max_block_ms:
                reason = f"{self._obstacle(batch.partition)}, for kafka.max.block.ms = {max_block_ms:.0f} ms"
                self._completion.fail(batch, DeliveryError(f"{batch.partition}: {reason}"))

    def _partitions_without(self, partition: TopicPartition) -> int | None:
        topic = self._cluster.topic(partition.topic)
        if topic is None or partition.partition < len(topic.partitions):
            return None
        return len(topic.partitions)

    def _obstacle(self, partition: TopicPartition) -> str | None:
        if self._identity is not None and not self._identity.ready:
            return self._identity.last_error
        count = self._partitions_without(partition)
        if count is not None:
            return f"the topic has {count} partition(s) and not this one"
        info = self._cluster.leader(partition)
        if info is None or info.leader < 0:
            return "the partition has no leader"
        errors = self._connection_errors()
        return next((f"{node}: {error}" for node, error in errors.items() if node.id == info.leader), None)


def restart_sequences(identity: ProducerIdentity, completion: BatchCompletion) -> None:
    """Restart every partition that asked for it and has nothing in flight.

    A batch that may have been written fails: under a new sequence it could be written twice.
    """
    for partition in identity.restarts_due():
        unresolved = partition.unresolved
        for batch in unresolved:
            last = f"{batch.last_error}; " if batch.last_error is not None else ""
            reason = "the leader lost its state of this producer, and the batch may have been written"
            completion.fail(batch, DeliveryError(f"{last}{partition.id}: {reason}"))
        if not unresolved:
            identity.restart(partition)
            _log.warning("the sequences of %s restart, because its leader rejected them", partition.id)


def close_sequence_gaps(identity: ProducerIdentity, completion: BatchCompletion) -> None:
    """Renumber the batches behind dropped records in every partition that has nothing in flight.

    A batch that may have been written fails: under a new sequence it could be written twice.
    """
    for partition in identity.gaps_due():
        unresolved = [batch for batch in partition.after_gap if batch.possibly_written]
        for batch in unresolved:
            last = f"{batch.last_error}; " if batch.last_error is not None else ""
            reason = "records before this batch were rejected, and the batch may have been written"
            completion.fail(batch, DeliveryError(f"{last}{partition.id}: {reason}"))
        if not unresolved:
            identity.close_gap(partition)
