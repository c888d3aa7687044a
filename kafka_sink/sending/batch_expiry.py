"""delivery.timeout.ms, and max.block.ms for rows of partitions that their topic no longer has."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping

from kafka_sink.accumulator.producer_batch import ProducerBatch
from kafka_sink.accumulator.record_accumulator import LEASE_MS, RecordAccumulator
from kafka_sink.breaker.send_policy import SendPolicy
from kafka_sink.errors import DeliveryError
from kafka_sink.metadata.cluster_metadata import ClusterMetadata
from kafka_sink.model import Node, TopicPartition
from kafka_sink.sending import response_classifier
from kafka_sink.sending.batch_completion import BatchCompletion
from kafka_sink.sending.producer_identity import ProducerIdentity

_log = logging.getLogger(__name__)


class BatchExpiry:
    """Used by the sender's thread. Times are monotonic milliseconds."""

    def __init__(
        self,
        completion: BatchCompletion,
        accumulator: RecordAccumulator,
        cluster: ClusterMetadata,
        identity: ProducerIdentity | None,
        policy: SendPolicy,
        connection_errors: Callable[[], Mapping[Node, Exception]],
    ) -> None:
        self._completion = completion
        self._accumulator = accumulator
        self._cluster = cluster
        self._identity = identity
        self._policy = policy
        self._connection_errors = connection_errors
        # Since when each partition with queued rows has been missing from its topic.
        self._missing_since_ms: dict[TopicPartition, float] = {}
        # With thousands of partitions, a look at every batch would be most of a pass's cost.
        self._none_expires_before_ms = 0.0

    def expire(self, now_ms: float) -> float:
        """Fails batches older than delivery.timeout.ms; returns the milliseconds until the next may be."""
        if now_ms < self._none_expires_before_ms:
            return self._none_expires_before_ms - now_ms
        expired, delay = self._accumulator.expired(now_ms)
        timeout = self._accumulator.settings.delivery_timeout_ms
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
        timeout = self._accumulator.settings.delivery_timeout_ms
        muted = self._policy.explain(batch.partition)
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
        """Fails rows of ``topics`` whose partition has been missing for max.block.ms.

        A topic that is recreated with fewer partitions leaves such rows behind. The partition may come back,
        but a task that fails soon is run again, and its rows then go to the partitions that exist.
        """
        if not topics:
            self._missing_since_ms.clear()
            return
        snapshot = self._accumulator.queued_batches_snapshot()
        queued = [batch for batch in snapshot if batch.partition.topic in topics]
        partitions = {batch.partition for batch in queued}
        missing = {partition for partition in partitions if self._partitions_without(partition) is not None}
        since_ms = {partition: self._missing_since_ms.get(partition, now_ms) for partition in missing}
        self._missing_since_ms = since_ms
        max_block_ms = self._accumulator.settings.max_block_ms
        for batch in queued:
            if now_ms - since_ms.get(batch.partition, now_ms) >= max_block_ms:
                reason = f"{self._obstacle(batch.partition)}, for kafka.max.block.ms = {max_block_ms:.0f} ms"
                self._completion.fail(batch, DeliveryError(f"{batch.partition}: {reason}"))

    def _partitions_without(self, partition: TopicPartition) -> int | None:
        """How many partitions the topic has, where it lacks this one; else None."""
        topic = self._cluster.topic(partition.topic)
        if topic is None or partition.partition < len(topic.partitions):
            return None
        return len(topic.partitions)

    def _obstacle(self, partition: TopicPartition) -> str | None:
        """Why a batch was never sent, as far as that is known."""
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
