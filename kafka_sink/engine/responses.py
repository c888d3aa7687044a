"""Handles the responses to Produce requests: ends batches, or returns them to their queues."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import numpy as np

from kafka_sink import clock
from kafka_sink.breaker.breaker import Breaker
from kafka_sink.clock import ExponentialBackoff
from kafka_sink.cluster.broker import Broker
from kafka_sink.cluster.partition import BatchState, Partition, ProducerBatch
from kafka_sink.cluster.producer_metadata import ProducerMetadata
from kafka_sink.dead_letters.rejected_rows import MAX_WAITING_BYTES, DeadLetters
from kafka_sink.dead_letters.row_rejection import rows_of_records
from kafka_sink.engine import response_classifier
from kafka_sink.engine.accumulator import HOLD_MS, RecordAccumulator
from kafka_sink.engine.deliveries import WrittenBatch
from kafka_sink.engine.identity import ProducerIdentity
from kafka_sink.engine.response_classifier import Action, AttemptFacts, Verdict
from kafka_sink.engine.splitting import split, take_out
from kafka_sink.errors import BrokerRefusedError, DeliveryError, RecordTooLargeError, TooManyDeadLettersError
from kafka_sink.kafka_errors import TOPIC_AUTHORIZATION_FAILED, error_of
from kafka_sink.model import Node, TopicPartition
from kafka_sink.network import produce
from kafka_sink.printable import printable_list
from kafka_sink.records.batch_header import NO_SEQUENCE

_log = logging.getLogger(__name__)
# A batch follows a leader that a response points to without a backoff, but only for this many attempts.
# Otherwise two brokers that point to each other would be asked as fast as they respond.
_MAX_ATTEMPTS_AT_ONCE = 3


class ResponseHandler:
    """Decides what happens with each batch after an attempt. Only the sender's thread uses it. Times are
    monotonic milliseconds.

    The network calls ``on_produce`` with a response or ``on_failure`` without one. A batch without an error
    ends in ``_succeed``. Otherwise `response_classifier` turns the attempt's facts into a verdict, and
    ``_apply`` carries it out.

    Some batches wait for an event other than a response, which the sender checks in each pass:

    - ``expire`` fails batches that are older than delivery.timeout.ms. If they are in a request, they keep
      their memory until its response, because the socket may still read it.
    - ``expire_missing`` fails batches of partitions that their topic no longer has.
    - ``repair_sequences`` restarts sequences and closes gaps once nothing of the partition is in flight.
    - ``resume_skipping`` makes dead letters of rejected batches once there is room for them.

    ``connection_errors`` returns the reasons why connections failed.
    """

    def __init__(
        self,
        accumulator: RecordAccumulator,
        cluster: ProducerMetadata,
        identity: ProducerIdentity | None,
        backoff: ExponentialBackoff,
        breaker: Breaker,
        connection_errors: Callable[[], Mapping[Node, Exception]] = dict,
    ) -> None:
        self._options = accumulator.options
        self._accumulator = accumulator
        self._cluster = cluster
        self._identity = identity
        self._backoff = backoff
        self._breaker = breaker
        self._connection_errors = connection_errors
        # The dead letters of the current task; None if a row that cannot be written fails the task.
        self.dead_letters: DeadLetters | None = None
        # The partitions with queued rows that their topics do not have, and since when.
        self.missing: dict[Partition, float] = {}
        # No batch expires before this time. With thousands of partitions, checking every batch in every pass
        # would be most of the cost of a pass.
        self.expires_ms = 0.0
        # When the first and the last response showed that a topic is not authorized.
        self._unauthorized_topics: dict[str, tuple[float, float]] = {}
        # Rejected batches that wait in their queues until there is room for their dead letters, with the
        # positions of the rejected records and the cause. They must not be sent.
        self.awaiting_dead_letters: dict[ProducerBatch, tuple[Sequence[int], Exception]] = {}
        # The number of responses after which a broker has all batches and takes the next request.
        self.acknowledgements = 0

    def on_failure(self, broker: Broker, cause: Exception, possibly_sent: bool, now_ms: float) -> None:
        """Handle a request that will get no response. It is the broker's oldest one."""
        sent = broker.on_failure()
        self._breaker.on_failure(sent)
        for batch in sent.batches:
            self._cluster.mark_stale(batch.topic_partition.topic, now_ms)
            verdict = response_classifier.classify_failure(cause, possibly_sent=possibly_sent)
            self._apply(batch, broker, verdict, now_ms)

    def on_produce(self, broker: Broker, answered: produce.ProduceResponse | None, now_ms: float) -> None:
        """Handle the response to a broker's oldest request. With acks=0 there is no response: then the
        request has been written to the socket, and ``answered`` is None."""
        sent = broker.on_response(now_ms)
        self._breaker.on_response(broker, sent, now_ms)
        if answered is None:
            unconfirmed = [(batch, -1, -1) for batch in sent.batches]
            self._succeed(unconfirmed, broker, now_ms, confirmed=False)
            self.acknowledgements += 1
            return
        # Look-ups use plain tuples: they equal a TopicPartition and are made in a tenth of the time.
        pending: dict[tuple[str, int], ProducerBatch] = {
            batch.topic_partition: batch for batch in sent.batches
        }
        succeeded: list[WrittenBatch] = []
        unknown: list[TopicPartition] = []
        for response in answered.partitions:
            topic = response.topic
            if topic is None:
                # From version 13 on, responses contain topic ids instead of names.
                topic = sent.names.get(response.topic_id or b"", "")
            batch = pending.pop((topic, response.partition), None)
            if batch is None:
                unknown.append(TopicPartition(topic, response.partition))
            elif response.error_code == 0:
                succeeded.append((batch, response.base_offset, response.log_append_time_ms))
            else:
                self._on_error(batch, broker, response, answered.node_endpoints, now_ms)
        self._succeed(succeeded, broker, now_ms)
        if unknown:
            _log.warning(
                "broker %d sent a response for %d partitions that were not in the request: %s",
                broker.id,
                len(unknown),
                printable_list(map(str, unknown)),
            )
        for batch in pending.values():
            cause = DeliveryError(f"the broker's response does not contain {batch.topic_partition}")
            verdict = response_classifier.classify_failure(cause, possibly_sent=True)
            self._apply(batch, broker, verdict, now_ms)
        connection = broker.connection
        if connection is not None and now_ms >= connection.throttled_until_ms:
            self.acknowledgements += len(succeeded) == len(sent.batches)

    def _on_error(
        self,
        batch: ProducerBatch,
        broker: Broker,
        response: produce.ProducePartitionResponse,
        nodes: Iterable[Node],
        now_ms: float,
    ) -> None:
        newer = False
        if response.current_leader is not None:
            newer = self._cluster.on_leader_hint(
                batch.topic_partition, *response.current_leader, nodes, response.topic_id
            )
        identity, queue = self._identity, batch.queue
        attempt = AttemptFacts(
            partition=batch.topic_partition,
            error_code=response.error_code,
            error_message=response.error_message,
            record_errors=response.record_errors,
            record_count=batch.record_count,
            size=batch.size,
            possibly_written=batch.possibly_written,
            idempotent=identity is not None,
            is_next_expected=queue.is_next(batch),
            transactional=identity is not None and identity.transactional_id is not None,
            leader_hint_newer=newer and batch.attempts <= _MAX_ATTEMPTS_AT_ONCE,
            base_offset=response.base_offset,
            log_start_offset=response.log_start_offset,
            last_acknowledged_offset=queue.last_offset,
            restarted=queue.restarted,
        )
        self._apply(batch, broker, response_classifier.classify_response(attempt), now_ms)

    def _succeed(
        self,
        batches: Sequence[WrittenBatch],
        broker: Broker,
        now_ms: float,
        *,
        confirmed: bool = True,
    ) -> None:
        """End batches that a broker has."""
        if not batches:
            return
        taken = [batch for batch, _, _ in batches]
        self._breaker.on_complete(broker, taken, None, now_ms)
        for batch, base_offset, _ in batches:
            last_offset = base_offset + batch.record_count - 1 if base_offset >= 0 else -1
            batch.queue.on_acknowledged(batch, last_offset, broker.request_sent_ms, now_ms)
        if broker.slow_starts:
            broker.slow_starts.on_taken(taken)
        if self._accumulator.any_learnt:
            self._accumulator.on_taken(taken, now_ms)
        if self._unauthorized_topics:
            for batch in taken:
                self._unauthorized_topics.pop(batch.topic_partition.topic, None)
        self._accumulator.complete(batches, confirmed=confirmed)

    def _apply(self, batch: ProducerBatch, broker: Broker, verdict: Verdict, now_ms: float) -> None:
        """Carry out the classifier's verdict. Nothing else ends a failed attempt."""
        if verdict.action is Action.SUCCEED:
            self._succeed([(batch, -1, -1)], broker, now_ms)
            return
        cause = verdict.cause or DeliveryError("the broker rejected the batch")
        self._on_failed_attempt(batch, broker, verdict, cause, now_ms)
        if batch.terminal:
            # The response is late: the batch has failed before, and the task knows.
            self._accumulator.fail(batch, cause, taken=True)
        elif verdict.action is Action.SPLIT:
            split(self._accumulator, batch)
        elif self._may_still_be_authorized(batch, cause, now_ms):
            self._retry(batch, cause, verdict, now_ms)
        elif (
            self.dead_letters is not None
            and verdict.unwritable is not None
            # A dead letter that is rejected fails the task.
            and not (batch.possibly_written or batch.dead_letters)
        ):
            self._skip_records(batch, verdict.unwritable, cause)
        elif verdict.action is Action.FAIL or (
            verdict.spends_retry and batch.retries_spent > self._options.retries
        ):
            self._accumulator.fail(batch, self._with_reason(batch, verdict, cause), taken=True)
        else:
            if verdict.action is Action.RESTART and self._identity is not None:
                _log.debug(
                    "%s: sequences restart once nothing is in flight: %s",
                    batch.topic_partition,
                    _error_name(cause),
                )
                self._identity.request_restart(batch.queue)
            self._retry(batch, cause, verdict, now_ms)

    def _on_failed_attempt(
        self, batch: ProducerBatch, broker: Broker, verdict: Verdict, cause: Exception, now_ms: float
    ) -> None:
        self._breaker.on_complete(broker, [batch], cause, now_ms)
        broker.slow_starts.on_refused(batch, _code_of(cause), now_ms)
        if verdict.possibly_written:
            batch.possibly_written = True
        batch.last_error = verdict.cause
        batch.retries_spent += verdict.spends_retry
        if verdict.refresh:
            self._cluster.mark_stale(batch.topic_partition.topic, now_ms)
        if verdict.too_large:
            self._accumulator.on_too_large(batch, costs_task=verdict.action is Action.FAIL)
        if self._identity is not None:
            batch.queue.on_attempt_failed()

    def _retry(self, batch: ProducerBatch, cause: Exception, verdict: Verdict, now_ms: float) -> None:
        failures = batch.retries_spent if verdict.spends_retry else batch.attempts
        wait_ms = 0.0 if verdict.immediate else self._backoff.delay_ms(failures)
        wait_ms = min(wait_ms, verdict.longest_wait_ms)
        if _log.isEnabledFor(logging.DEBUG):
            _log.debug(
                "%s: attempt %d failed with %s; retry in %.0f ms, %s",
                batch.topic_partition,
                batch.attempts,
                _error_name(cause),
                wait_ms,
                "possibly written" if batch.possibly_written else "not written",
            )
        self._accumulator.deliveries.count(retries=1)
        self._accumulator.reenqueue(batch, now_ms + wait_ms)

    def _may_still_be_authorized(self, batch: ProducerBatch, cause: Exception, now_ms: float) -> bool:
        """Whether to retry a batch whose topic is not authorized. Only with errors.tolerance=all.

        Brokers also respond TOPIC_AUTHORIZATION_FAILED while they load their ACLs. Without the tolerance the
        task fails and Spark runs it again, but rows that are skipped are lost.
        """
        if self.dead_letters is None or _code_of(cause) != TOPIC_AUTHORIZATION_FAILED:
            return False
        wait_ms = min(clock.UNAUTHORIZED_TOPIC_MS, self._options.delivery_timeout_ms / 2)
        topic = batch.topic_partition.topic
        since_ms, last_ms = self._unauthorized_topics.get(topic, (now_ms, now_ms))
        if now_ms - last_ms > 2 * wait_ms:
            since_ms = now_ms
        self._unauthorized_topics[topic] = since_ms, now_ms
        return now_ms - since_ms < wait_ms

    def _with_reason(self, batch: ProducerBatch, verdict: Verdict, cause: Exception) -> Exception:
        """Return ``cause``, with the reason if rows are not skipped that could be, or with advice if a row or
        a dead letter is too large for its topic."""
        if self.dead_letters is None:
            if not isinstance(cause, RecordTooLargeError):
                return cause
            return RecordTooLargeError(
                f"{cause}, or set errors.tolerance=all to skip such rows "
                "(errors.deadletterqueue.topic.name keeps them)"
            )
        if not batch.dead_letters and batch.possibly_written and verdict.unwritable is not None:
            # Brokers validate a batch before they check whether it is a duplicate. So it may have been
            # written before the topic's settings or ACLs changed, or before timestamps left the range.
            return DeliveryError(
                f"{cause}. errors.tolerance=all does not skip these rows, because they may have been "
                "written: an earlier attempt had no response, and brokers also reject rows that they have "
                "written if the topic's settings or ACLs have changed since then, or if timestamps are now "
                "out of range. The next attempt of the task writes or skips them"
            )
        if not batch.dead_letters or not isinstance(cause, RecordTooLargeError):
            return cause
        return RecordTooLargeError(
            f"a dead letter of {batch.size} bytes is larger than errors.deadletterqueue.topic.name = "
            f"{batch.topic_partition.topic!r} accepts. Raise that topic's max.message.bytes to 1048588, "
            f"Kafka's default: dead letters are cut to {self.dead_letters.max_bytes} bytes"
        )

    def _skip_records(self, batch: ProducerBatch, positions: Sequence[int], cause: Exception) -> None:
        """Make dead letters of these records. The other records of the batch are sent again."""
        if not positions and batch.record_count > 1:
            # The broker did not list the invalid records. In the end each record has a batch of its own, and
            # then the response is about that record.
            split(self._accumulator, batch)
            return
        dead_letters = self.dead_letters
        assert dead_letters is not None
        try:
            # Check the limit before the records are decoded, which takes long if there are many.
            dead_letters.require_room(len(positions), str(cause))
        except TooManyDeadLettersError as too_many:
            self._accumulator.fail(batch, too_many, taken=True)
            return
        # A batch of the dead letter topic itself must not wait: the dead letters after it would wait for it.
        # A batch that has already waited does not wait again, even if the task's thread has rejected rows
        # since then and there is no room any more.
        may_wait = batch.state is BatchState.IN_FLIGHT and batch.topic_partition.topic != dead_letters.topic
        if may_wait and not dead_letters.has_room:
            self._await_dead_letters(batch, positions, cause)
            return
        pieces, records = take_out(batch, positions or (0,), MAX_WAITING_BYTES)
        ends, times = (np.array(numbers, dtype=np.int64) for numbers in (records.ends, records.timestamps_ms))
        # The error's name in Kafka, or the class of the exception.
        code = _code_of(cause)
        error = error_of(code).name if code else type(cause).__name__
        rejected = rows_of_records(
            records.bodies, ends, times, batch.topic_partition, str(cause), error, dead_letters.max_bytes
        )
        try:
            dead_letters.add(rejected)
        except TooManyDeadLettersError as too_many:
            for piece in pieces:
                piece.buffer.release()
            self._accumulator.fail(batch, too_many, taken=True)
            return
        # The batch has no sequence if it was withdrawn while the batch waited.
        if self._identity is not None and batch.sequence is not NO_SEQUENCE:
            self._identity.on_shrunk(batch, pieces)
        self._accumulator.reenqueue_split(batch, pieces)

    def _await_dead_letters(self, batch: ProducerBatch, positions: Sequence[int], cause: Exception) -> None:
        """Keep the batch in its queue, unsent, until dead letters of other rows are written. If that never
        happens, the batch fails after delivery.timeout.ms."""
        dead_letters = self.dead_letters
        assert dead_letters is not None
        _log.debug(
            "%s: the batch waits until the dead letters of other rows are written: %s",
            batch.topic_partition,
            _error_name(cause),
        )
        batch.last_error = DeliveryError(
            f"{cause}; its dead letters waited until the dead letters of other rows are written to "
            f"errors.deadletterqueue.topic.name = {dead_letters.topic!r}"
        )
        self.awaiting_dead_letters[batch] = positions, cause
        # Its dead letters contain the partition that rejected them.
        batch.is_movable = False
        self._accumulator.reenqueue(batch, 0.0)

    def resume_skipping(self) -> None:
        """Make dead letters of the batches that wait, while there is room for them."""
        dead_letters = self.dead_letters
        while self.awaiting_dead_letters and dead_letters is not None and dead_letters.has_room:
            batch = next(iter(self.awaiting_dead_letters))
            positions, cause = self.awaiting_dead_letters.pop(batch)
            # The batch may have failed meanwhile.
            if self._accumulator.take(batch):
                self._skip_records(batch, positions, cause)

    def fail_all(self, cause: Exception) -> None:
        """Fail every batch: the producer cannot go on (authentication failed, no producer id)."""
        self._accumulator.deliveries.on_failed(None, 0, cause)
        for batch in self._accumulator.unfinished():
            self._accumulator.fail(batch, cause)

    def abort_incomplete(self, *, include_held: bool) -> None:
        """Fail all remaining batches and return their memory. The connections must be closed before."""
        for broker in list(self._cluster.brokers.values()):
            broker.sent.clear()
        closed = DeliveryError("the producer was closed")
        self._accumulator.abort_incomplete(closed, include_held=include_held)

    def expire(self, now_ms: float) -> None:
        """Fail batches older than delivery.timeout.ms, and set ``expires_ms`` anew."""
        expired, delay = self._accumulator.expired(now_ms)
        for batch in expired:
            last = batch.last_error or self.obstacle(batch.topic_partition)
            if lookup_error := self._cluster.describe_lookup_error(batch.topic_partition.topic):
                last = f"{last}; the topic's metadata: {lookup_error}"
            if throttled := self._throttling(batch):
                last = f"{last}; {throttled}" if last else throttled
            _log.debug(
                "%s: %d record(s) expired %.0f ms after they were appended, after %d attempt(s): %s",
                batch.topic_partition,
                batch.record_count,
                now_ms - batch.created_ms,
                batch.attempts,
                last,
            )
            timeout, muted = self._options.delivery_timeout_ms, self._breaker.explain(batch.topic_partition)
            cause = response_classifier.expiry(batch.topic_partition, timeout, batch.attempts, last, muted)
            if not self._accumulator.fail(batch, cause):
                # The task has taken hold of the batch since then.
                delay = min(delay, HOLD_MS)
        self.expires_ms = now_ms + delay

    def expire_missing(self, topics: Collection[str], now_ms: float) -> None:
        """Find the partitions that ``topics`` lack, and fail their batches after max.block.ms.

        If a topic is recreated with fewer partitions, the rows for its former partitions cannot be sent. The
        sender moves keyless rows that were surely not written. For other rows the partition may come back,
        but a task that fails soon is run again, and its rows then go to the partitions that exist.
        """
        unfinished = self._accumulator.unfinished() if topics else []
        queued = [
            batch for batch in unfinished if batch.topic_partition.topic in topics and not batch.in_request
        ]
        self.missing = {
            partition: self.missing.get(partition, now_ms)
            for partition in {batch.queue for batch in queued}
            if self._partitions_without(partition.id) is not None
        }
        for partition in self.missing:
            partition.release_unwritten()
        max_block_ms = self._options.max_block_ms
        for batch in queued:
            if now_ms - self.missing.get(batch.queue, math.inf) >= max_block_ms:
                reason = (
                    f"{self.obstacle(batch.topic_partition)}, for kafka.max.block.ms = {max_block_ms:.0f} ms"
                )
                self._accumulator.fail(batch, DeliveryError(f"{batch.topic_partition}: {reason}"))

    def _partitions_without(self, partition: TopicPartition) -> int | None:
        topic = self._cluster.topic(partition.topic)
        if topic is None or partition.partition < len(topic.partitions):
            return None
        return len(topic.partitions)

    def obstacle(self, partition: TopicPartition) -> str | None:
        """The reason why nothing can be sent to the partition, if there is one."""
        identity = self._identity
        if identity is not None and identity.delays(partition):
            return identity.last_error
        count = self._partitions_without(partition)
        if count is not None:
            return f"the topic has only {count} partition(s)"
        info = self._cluster.leader(partition)
        if info is None or info.leader < 0:
            return "the partition has no leader"
        errors = self._connection_errors()
        return next((f"{node}: {error}" for node, error in errors.items() if node.id == info.leader), None)

    def _throttling(self, batch: ProducerBatch) -> str | None:
        """A text for the error if the leader has throttled this task during the batch's life."""
        info = self._cluster.leader(batch.topic_partition)
        broker = None if info is None else self._cluster.brokers.get(info.leader)
        # If the broker never throttled, ``throttled_until_ms`` is the time of its last response.
        if broker is None or not broker.counts.throttle_ms:
            return None
        if broker.counts.throttled_until_ms <= batch.created_ms:
            return None
        return (
            f"broker {broker.id} has throttled this task for {broker.counts.throttle_ms / 1000:.1f} s in all "
            "because of a quota (producer_byte_rate or request_percentage of the user or of kafka.client.id)"
        )

    def repair_sequences(self, identity: ProducerIdentity) -> None:
        """Restart sequences that leaders have rejected, and close gaps that dropped records have left, of
        every partition that has nothing in flight."""
        for partition in identity.repairable():
            # A leader that took a batch after dropped records took it as the producer's first one. Under the
            # same epoch, it would take another batch with that sequence for a copy, and not write it.
            if partition.needs_restart or partition.taken_after_gap:
                reason = "the leader lost its state of this producer"
                if self._fail_unresolved(partition, partition.unresolved, reason):
                    continue
                if identity.transactional_id is not None:
                    # A transaction has only one epoch.
                    self.fail_all(DeliveryError(f"{partition.id}: {reason}"))
                    continue
                identity.restart(partition)
                _log.warning("the sequences of %s restart, because %s", partition.id, reason)
            elif partition.gap is not None:
                self._repair_gap(identity, partition)

    def _repair_gap(self, identity: ProducerIdentity, partition: Partition) -> None:
        after_gap, unresolved = partition.after_gap, partition.unresolved
        in_doubt = [batch for batch in unresolved if batch in after_gap]
        if not in_doubt:
            identity.close_gap(partition)
        elif identity.transactional_id is not None or any(
            isinstance(batch.last_error, BrokerRefusedError) for batch in in_doubt
        ):
            # The batches cannot get new sequences: a leader that lost its state may have taken one, according
            # to its response, or the transaction has only one epoch, under which a late copy could still be
            # accepted.
            self._fail_unresolved(partition, in_doubt, "records before this batch were rejected")
        elif len(in_doubt) == len(unresolved) and not self._cluster.is_stale(partition.id.topic):
            # The metadata has been refreshed since the failures.
            topic = self._cluster.topic(partition.id.topic)
            topic_id = None if topic is None else topic.topic_id
            partition.set_leader(self._cluster.leader(partition.id), topic_id)
            if not partition.is_known_to_leader:
                reason = (
                    "records before this batch were rejected by a leader that may have lost its state of this"
                    " producer"
                )
                self._fail_unresolved(partition, in_doubt, reason)
                return
            partition.disprove_after_gap()
            identity.restart(partition)
            _log.warning(
                "the sequences of %s restart, because its leader rejected records and the response to later "
                "records was lost",
                partition.id,
            )

    def _fail_unresolved(self, partition: Partition, batches: Sequence[ProducerBatch], reason: str) -> bool:
        """Fail batches that may have been written, because with a new sequence they could be written twice.
        Return whether there are any."""
        for batch in batches:
            last = "" if batch.last_error is None else f"{batch.last_error}; "
            text = f"{last}{partition.id}: {reason}, and the batch may have been written"
            self._accumulator.fail(batch, DeliveryError(text))
        return bool(batches)


def _code_of(cause: Exception) -> int:
    """Kafka's error code; 0 for other exceptions."""
    return cause.error_code if isinstance(cause, BrokerRefusedError) else 0


def _error_name(cause: Exception) -> str:
    """The name and number of Kafka's error, or the exception's repr."""
    code = _code_of(cause)
    return f"{error_of(code).name} ({code})" if code else repr(cause)
