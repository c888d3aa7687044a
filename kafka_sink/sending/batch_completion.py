"""What becomes of batches that were sent: answers, failures and expiry lead to one dispatcher."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from functools import partial

from kafka.errors import for_code

from kafka_sink.accumulator.producer_batch import BatchState, ProducerBatch
from kafka_sink.accumulator.record_accumulator import LEASE_MS, RecordAccumulator
from kafka_sink.backoff import ExponentialBackoff
from kafka_sink.breaker.send_policy import SendPolicy
from kafka_sink.errors import BrokerRefusedError, BufferExhaustedError, DeliveryError
from kafka_sink.metadata.cluster_metadata import ClusterMetadata
from kafka_sink.model import Node, TopicPartition
from kafka_sink.network import produce
from kafka_sink.network.client import RequestFailed, ResponseReceived
from kafka_sink.sending import response_classifier
from kafka_sink.sending.deliveries import Deliveries
from kafka_sink.sending.produce_requests import ProduceTag
from kafka_sink.sending.producer_identity import ProducerIdentity
from kafka_sink.sending.settings import SenderSettings
from kafka_sink.sending.splitting import split_batch

_log = logging.getLogger(__name__)
_AGAIN = (response_classifier.Action.RETRY, response_classifier.Action.RESTART)


class BatchCompletion:
    """Used by the sender's thread. ``deliveries`` is replaced between tasks, when nothing is under way."""

    def __init__(
        self,
        settings: SenderSettings,
        accumulator: RecordAccumulator,
        cluster: ClusterMetadata,
        identity: ProducerIdentity | None,
        backoff: ExponentialBackoff,
        observer: SendPolicy,
        connection_errors: Callable[[], Mapping[Node, Exception]],
    ) -> None:
        self.deliveries = Deliveries()
        self._settings = settings
        self._accumulator = accumulator
        self._cluster = cluster
        self._identity = identity
        self._backoff = backoff
        self._observer = observer
        self._connection_errors = connection_errors
        # Sent and unanswered batches; they expire too, though their memory stays until the answer.
        self._in_flight: dict[int, ProducerBatch] = {}
        # Partitions with rows that their topics have no more, and since when.
        self._missing_since_ms: dict[TopicPartition, float] = {}
        # Looking at each batch in every pass is what passes would cost with thousands of partitions.
        self._none_expires_before_ms = 0.0

    def sent(self, node_id: int, batches: Collection[ProducerBatch], now_ms: float) -> None:
        """A Produce request with these batches goes out."""
        if _log.isEnabledFor(logging.DEBUG):
            size = sum(batch.size for batch in batches)
            _log.debug("broker %d: request with %d batch(es) of %d bytes", node_id, len(batches), size)
        self.deliveries.count(requests=1)
        self._observer.on_request(node_id, now_ms)
        for batch in batches:
            self._in_flight[id(batch)] = batch
            self._observer.on_send(node_id, batch.partition, batch.record_count, now_ms)

    # -- expiry -----------------------------------------------------------------------------------

    def expire(self, now_ms: float) -> float:
        """Fails what delivery.timeout.ms has passed for; returns the milliseconds until the next may."""
        if now_ms < self._none_expires_before_ms:
            return self._none_expires_before_ms - now_ms
        expired, delay = self._accumulator.expired(now_ms)
        timeout = self._accumulator.settings.delivery_timeout_ms
        for batch in self._in_flight.values():
            left = batch.created_ms + timeout - now_ms
            if left <= 0:
                expired.append(batch)
            else:
                delay = min(delay, left)
        for batch in expired:
            last = batch.last_error or self._obstacle(batch.partition)
            if refused := self._cluster.describe_lookup_error(batch.partition.topic):
                last = f"{last}; the topic's metadata: {refused}"
            muted = self._observer.explain(batch.partition)
            cause = response_classifier.expiry(batch.partition, timeout, batch.attempts, last, muted)
            if _log.isEnabledFor(logging.DEBUG):
                _log.debug(
                    "%s: %d record(s) expired %.0f ms after they were appended, after %d attempt(s): %s",
                    batch.partition,
                    batch.record_count,
                    now_ms - batch.created_ms,
                    batch.attempts,
                    last,
                )
            if not self._fail(batch, cause) and not batch.terminal:
                # It was under a lease, which may have ended since.
                delay = min(delay, LEASE_MS)
        # What is appended from now on expires later than all that is here.
        delay = min(delay, timeout)
        self._none_expires_before_ms = now_ms + delay
        return delay

    def expire_missing(self, topics: Collection[str], now_ms: float) -> None:
        """Fails rows of ``topics`` for partitions that have been missing for max.block.ms.

        A topic that is recreated with fewer partitions leaves such rows behind. They may come back, but a
        task that fails soon is run again, and its rows go to the partitions that there are.
        """
        if not topics:
            self._missing_since_ms.clear()
            return
        with self._accumulator.lock:
            queued = [batch for batch in self._accumulator.queued() if batch.partition.topic in topics]
        missing = {batch.partition for batch in queued if self._known_count(batch.partition) is not None}
        since_ms = {one: self._missing_since_ms.get(one, now_ms) for one in missing}
        self._missing_since_ms = since_ms
        for batch in queued:
            if now_ms - since_ms.get(batch.partition, now_ms) >= self._accumulator.settings.max_block_ms:
                reason = f"{self._obstacle(batch.partition)}, for kafka.max.block.ms = "
                cause = DeliveryError(
                    f"{batch.partition}: {reason}{self._accumulator.settings.max_block_ms:.0f} ms"
                )
                self._fail(batch, cause)

    def _known_count(self, partition: TopicPartition) -> int | None:
        """How many partitions the topic has, where this is none of them."""
        topic = self._cluster.topic(partition.topic)
        if topic is None or partition.partition < len(topic.partitions):
            return None
        return len(topic.partitions)

    def _obstacle(self, partition: TopicPartition) -> str | None:
        """Why a batch without an attempt may not have been sent."""
        if self._identity is not None and not self._identity.ready:
            return self._identity.last_error
        count = self._known_count(partition)
        if count is not None:
            return f"the topic has {count} partition(s) and not this one"
        info = self._cluster.leader(partition)
        if info is None or info.leader < 0:
            return "the partition has no leader"
        errors = self._connection_errors()
        return next((f"{node}: {error}" for node, error in errors.items() if node.id == info.leader), None)

    def _fail(self, batch: ProducerBatch, cause: Exception) -> bool:
        return self._accumulator.fail(batch, self._record_failure(batch, cause))

    def _record_failure(self, batch: ProducerBatch, cause: Exception) -> Callable[[], None]:
        return partial(self.deliveries.failed, batch.partition, batch.record_count, cause)

    def fail_all(self, cause: Exception) -> None:
        """The producer cannot go on (authentication, no producer id): everything queued is lost."""
        self.deliveries.failed(None, 0, cause)
        with self._accumulator.lock:
            queued = [batch for batch in self._accumulator.queued() if not batch.leased]
        for batch in [*queued, *self._in_flight.values()]:
            self._fail(batch, cause)

    def abandon(self, *, end_leases: bool) -> None:
        """The connections are closed: nothing that is left will be answered, and its memory goes back."""
        closed = DeliveryError("the producer was closed")

        def record(batch: ProducerBatch) -> None:
            self.deliveries.failed(batch.partition, batch.record_count, closed)

        self._in_flight.clear()
        self._accumulator.abandon(record, end_leases=end_leases)

    def restart_sequences(self) -> None:
        """Partitions whose sequences a broker refuses start anew, once nothing of them is in flight."""
        identity = self._identity
        if identity is None:
            return
        for partition in identity.restarts_due():
            unresolved = identity.unresolved(partition)
            for batch in unresolved:
                cause = f"{batch.last_error}; " if batch.last_error is not None else ""
                self._fail(
                    batch,
                    DeliveryError(
                        f"{cause}{partition} lost its place, and nobody knows whether this batch is in"
                    ),
                )
            if not unresolved:
                identity.restart(partition)
                _log.warning("the sequences of %s start anew, as its leader refused them", partition)

    # -- what the network reports -------------------------------------------------------------------

    def on_failure(self, event: RequestFailed, tag: ProduceTag, now_ms: float) -> None:
        """No answer will come."""
        self._observer.on_request_done(tag.node_id, now_ms)
        for batch in tag.batches.values():
            self._cluster.mark_stale(batch.partition.topic, now_ms)
            outcome = response_classifier.classify_failure(event.cause, possibly_sent=event.possibly_sent)
            self._apply(batch, tag.node_id, outcome, now_ms)

    def on_response(self, event: ResponseReceived, tag: ProduceTag, now_ms: float) -> None:
        """An answer, or with acks=0 that the request is written."""
        self._observer.on_request_done(tag.node_id, now_ms)
        if self._settings.acks == 0:
            for batch in tag.batches.values():
                self._succeed(batch, tag.node_id, now_ms, confirmed=False)
            return
        response = event.response
        pending = dict(tag.batches)
        for answer in response.partitions:
            topic = answer.topic if answer.topic is not None else tag.names.get(answer.topic_id or b"", "")
            answered = pending.pop(TopicPartition(topic, answer.partition), None)
            if answered is None:
                _log.warning("an answer for %s-%d, which was not sent", topic, answer.partition)
                continue
            self._on_answer(answered, tag.node_id, answer, response.node_endpoints, now_ms)
        for batch in pending.values():
            cause = DeliveryError(f"the broker's answer left out {batch.partition}")
            self._apply(
                batch, tag.node_id, response_classifier.classify_failure(cause, possibly_sent=True), now_ms
            )

    def _on_answer(
        self,
        batch: ProducerBatch,
        node_id: int,
        answer: produce.ProducePartitionResponse,
        nodes: Iterable[Node],
        now_ms: float,
    ) -> None:
        if answer.error_code == 0:
            self._succeed(batch, node_id, now_ms, answer.base_offset, answer.log_append_time_ms)
            return
        newer = False
        if answer.current_leader is not None:
            newer = self._cluster.leader_hint(batch.partition, *answer.current_leader, nodes, answer.topic_id)
        attempt = response_classifier.Attempt(
            partition=batch.partition,
            error_code=answer.error_code,
            error_message=answer.error_message,
            record_errors=answer.record_errors,
            record_count=batch.record_count,
            size=batch.size,
            possibly_written=batch.possibly_written,
            idempotent=self._identity is not None,
            leader_hint_newer=newer,
            base_offset=answer.base_offset,
            log_start_offset=answer.log_start_offset,
        )
        if self._identity is not None:
            attempt = replace(
                attempt,
                is_next_expected=self._identity.is_next(batch),
                last_acknowledged_offset=self._identity.last_acknowledged_offset(batch.partition),
                restarted=self._identity.restarted(batch.partition),
                transactional=self._identity.transactional_id is not None,
            )
        self._apply(batch, node_id, response_classifier.classify_response(attempt), now_ms)

    # -- the dispatcher -----------------------------------------------------------------------------

    def _succeed(
        self,
        batch: ProducerBatch,
        node_id: int,
        now_ms: float,
        base_offset: int = -1,
        log_append_time_ms: int = -1,
        *,
        confirmed: bool = True,
    ) -> None:
        self._in_flight.pop(id(batch), None)
        self._observer.on_complete(node_id, batch.partition, batch.record_count, None, now_ms)
        if self._identity is not None:
            last_offset = base_offset + batch.record_count - 1 if base_offset >= 0 else -1
            self._identity.acknowledged(batch, last_offset, now_ms)
        record = partial(
            self.deliveries.acknowledged,
            batch.partition,
            records=batch.record_count,
            raw_bytes=batch.raw_bytes,
            wire_bytes=batch.size,
            base_offset=base_offset,
            log_append_time_ms=log_append_time_ms,
            confirmed=confirmed,
        )
        self._accumulator.finish(batch, BatchState.SUCCEEDED, record)

    def _apply(
        self, batch: ProducerBatch, node_id: int, outcome: response_classifier.Decision, now_ms: float
    ) -> None:
        """The one dispatcher: does what the classifier decided."""
        if outcome.action is response_classifier.Action.SUCCEED:
            self._succeed(batch, node_id, now_ms)
            return
        self._in_flight.pop(id(batch), None)
        cause = outcome.cause or DeliveryError("the broker refused the batch")
        self._observer.on_complete(node_id, batch.partition, batch.record_count, cause, now_ms)
        batch.possibly_written |= outcome.possibly_written
        batch.last_error = outcome.cause
        if outcome.refresh:
            self._cluster.mark_stale(batch.partition.topic, now_ms)
        if outcome.too_large:
            self._accumulator.refused(batch, costs_task=outcome.action is response_classifier.Action.FAIL)
        if self._identity is not None:
            self._identity.refused(batch)
        retries_left = not outcome.spends_retry or batch.attempts <= self._settings.retries
        if outcome.action is response_classifier.Action.SPLIT:
            self._split(batch, cause, now_ms)
        elif outcome.action in _AGAIN and retries_left:
            if outcome.action is response_classifier.Action.RESTART and self._identity is not None:
                self._identity.request_restart(batch.partition)
                if _log.isEnabledFor(logging.DEBUG):
                    _log.debug(
                        "%s: sequences restart once nothing is in flight: %s",
                        batch.partition,
                        _error_name(cause),
                    )
            self._retry(
                batch, cause, 0.0 if outcome.immediate else self._backoff.delay_ms(batch.attempts), now_ms
            )
        else:
            self._accumulator.finish(batch, BatchState.FAILED, self._record_failure(batch, cause))

    def _retry(self, batch: ProducerBatch, cause: Exception, wait_ms: float, now_ms: float) -> None:
        if _log.isEnabledFor(logging.DEBUG):
            _log.debug(
                "%s: attempt %d failed with %s; retry in %.0f ms, %s",
                batch.partition,
                batch.attempts,
                _error_name(cause),
                wait_ms,
                "possibly written" if batch.possibly_written else "not written",
            )
        self.deliveries.count(retries=1)
        self._accumulator.reenqueue(batch, now_ms + wait_ms)

    def _split(self, batch: ProducerBatch, cause: Exception, now_ms: float) -> None:
        """MESSAGE_TOO_LARGE: the records go on in smaller batches with consecutive sequences."""
        if batch.terminal:
            # The answer is late: whoever failed the batch has told the task.
            self._accumulator.finish(batch, BatchState.FAILED, self._record_failure(batch, cause))
            return
        try:
            pieces = split_batch(batch, self._settings.batch_size, self._accumulator.allocator)
        except BufferExhaustedError as error:
            # Memory comes free with other answers; if it never does, delivery.timeout.ms ends this.
            batch.last_error = DeliveryError(f"{cause}; the batch could not be split: {error}")
            wait_ms = self._backoff.delay_ms(batch.attempts)
            if _log.isEnabledFor(logging.DEBUG):
                _log.debug(
                    "%s: no memory to split a batch of %d bytes; retry in %.0f ms: %s",
                    batch.partition,
                    batch.size,
                    wait_ms,
                    error,
                )
            self.deliveries.count(retries=1)
            self._accumulator.reenqueue(batch, now_ms + wait_ms)
            return
        if _log.isEnabledFor(logging.DEBUG):
            _log.debug(
                "%s: split a batch of %d bytes and %d records into %d of %s bytes",
                batch.partition,
                batch.size,
                batch.record_count,
                len(pieces),
                [piece.size for piece in pieces],
            )
        if self._identity is not None:
            self._identity.replaced(batch, pieces)
        self.deliveries.count(splits=1)
        self._accumulator.reenqueue_split(batch, pieces)


def _error_name(cause: Exception) -> str:
    """Kafka's name and number of a broker's error, or the exception."""
    if isinstance(cause, BrokerRefusedError):
        return f"{for_code(cause.error_code).__name__} (error {cause.error_code})"
    return repr(cause)
