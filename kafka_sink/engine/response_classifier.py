"""Decides what a broker's response means for a batch. Pure functions turn facts into a verdict."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import Enum

from kafka_sink import kafka_errors
from kafka_sink.errors import BrokerRefusedError, DeliveryError, RecordTooLargeError, is_final
from kafka_sink.model import NO_RECORD_ERRORS, RecordErrors, TopicPartition

# Kafka's own producer waits this long when it adds partitions with AddPartitionsToTxn requests.
_JOINING_WAIT_MS = 20.0


class Action(Enum):
    """The actions that ResponseHandler takes with a batch."""

    SUCCEED = "succeed"
    RETRY = "retry"
    SPLIT = "split"
    # The partition's sequences restart at 0 under a new epoch once none of its batches is in flight.
    RESTART = "restart"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class AttemptFacts:
    """The facts of an attempt that got a response. ``size`` is in bytes; offsets are -1 if unknown.

    - ``possibly_written`` is about earlier attempts.
    - A ``base_offset`` in a response with an error means that the leader appended the batch and failed later.
    - ``is_next_expected`` means that every earlier batch of the partition is acknowledged.
    - ``restarted`` means that the partition's sequences were restarted and nothing was acknowledged since.
    - ``transactional`` means that the epoch belongs to the transaction, so sequences cannot restart.
    """

    partition: TopicPartition
    error_code: int
    error_message: str | None = None
    record_errors: RecordErrors = NO_RECORD_ERRORS
    record_count: int = 1
    size: int = 0
    possibly_written: bool = False
    idempotent: bool = True
    is_next_expected: bool = False
    transactional: bool = False
    leader_hint_newer: bool = False
    base_offset: int = -1
    log_start_offset: int = -1
    last_acknowledged_offset: int = -1
    restarted: bool = False


@dataclass(frozen=True, slots=True)
class Verdict:
    """The action, and how to take it.

    - ``cause`` is the error if this was the last attempt.
    - ``refresh`` requests the topic's metadata.
    - ``immediate`` skips the backoff, and ``longest_wait_ms`` limits it.
    - ``possibly_written``: from now on the batch keeps its sequence and is never split.
    - Without ``spends_retry`` the attempt does not count against ``retries``.
    - ``too_large`` means that smaller batches may pass.
    - ``unwritable`` are the positions of records that no attempt can write; it is empty if the broker did not
      list them, and None if there are no such records.
    """

    action: Action
    cause: Exception | None = None
    refresh: bool = False
    immediate: bool = False
    longest_wait_ms: float = math.inf
    possibly_written: bool = False
    spends_retry: bool = True
    too_large: bool = False
    unwritable: tuple[int, ...] | None = None


Rule = Callable[[AttemptFacts, Exception], Verdict]

# Verdicts for errors that decide alone; ``classify_response`` adds the cause. If other facts also matter, the
# rule is a function.
_SUCCEED = Verdict(Action.SUCCEED)
_FAIL = Verdict(Action.FAIL)
_RETRY = Verdict(Action.RETRY)
# Another partition is being added to the transaction, which takes milliseconds.
_RETRY_SOON = Verdict(Action.RETRY, longest_wait_ms=_JOINING_WAIT_MS)
# The leader has the batch or may have it, but could not confirm it as acks requires.
_RETRY_POSSIBLY_WRITTEN = Verdict(Action.RETRY, possibly_written=True)
_RETRY_REFRESHED_POSSIBLY_WRITTEN = Verdict(Action.RETRY, refresh=True, possibly_written=True)


def _retry_refreshed(attempt: AttemptFacts, cause: Exception) -> Verdict:
    newer = attempt.leader_hint_newer
    return Verdict(Action.RETRY, cause, refresh=not newer, immediate=newer)


def _too_large(attempt: AttemptFacts, cause: Exception) -> Verdict:
    if attempt.record_count > 1 and not attempt.possibly_written:
        return Verdict(Action.SPLIT, cause, spends_retry=False, too_large=True)
    if attempt.record_count > 1:
        return Verdict(Action.FAIL, cause, too_large=True)
    return Verdict(
        Action.FAIL,
        RecordTooLargeError(
            f"a record of {attempt.size} bytes (compressed, with its batch header) is larger than the broker "
            f"accepts for {attempt.partition}; raise the topic's max.message.bytes or send smaller records"
        ),
        spends_retry=False,
        unwritable=(0,),
    )


def _invalid_records(attempt: AttemptFacts, cause: Exception) -> Verdict:
    named = sorted({place for place in attempt.record_errors.places if 0 <= place < attempt.record_count})
    return Verdict(Action.FAIL, cause, spends_retry=False, unwritable=tuple(named))


def _fail_topic(attempt: AttemptFacts, cause: Exception) -> Verdict:
    everything = tuple(range(attempt.record_count))
    return Verdict(Action.FAIL, cause, spends_retry=False, unwritable=everything)


def _out_of_order(attempt: AttemptFacts, cause: Exception) -> Verdict:
    if not attempt.idempotent:
        return Verdict(Action.FAIL, cause)
    if not attempt.is_next_expected:
        # An earlier batch is being retried or has lost records. The broker will accept this batch after the
        # earlier one, so this batch waits for the earlier one and needs no backoff.
        return Verdict(Action.RETRY, cause, immediate=True, spends_retry=False)
    return _restart(attempt, cause)


def _unknown_producer_id(attempt: AttemptFacts, cause: Exception) -> Verdict:
    """Restart if retention may have deleted all batches of this producer from the log, so that the broker
    has forgotten the producer (KIP-360)."""
    state_deleted = attempt.log_start_offset > attempt.last_acknowledged_offset
    if attempt.idempotent and (attempt.restarted or (attempt.log_start_offset >= 0 and state_deleted)):
        return _restart(attempt, cause)
    return _out_of_order(attempt, cause)


def _restart(attempt: AttemptFacts, cause: Exception) -> Verdict:
    """Restart the sequences, but fail a batch that may have been written: with a new sequence it could be
    written twice."""
    if attempt.transactional:
        return Verdict(Action.FAIL, cause, possibly_written=attempt.possibly_written)
    if attempt.possibly_written:
        return Verdict(
            Action.FAIL,
            DeliveryError(f"{cause}; an earlier attempt may have been written, so it is not sent again"),
            possibly_written=True,
        )
    return Verdict(Action.RESTART, cause)


RULES: Mapping[int, Verdict | Rule] = {
    kafka_errors.NONE: _SUCCEED,
    kafka_errors.DUPLICATE_SEQUENCE_NUMBER: _SUCCEED,
    kafka_errors.NOT_LEADER_OR_FOLLOWER: _retry_refreshed,
    kafka_errors.FENCED_LEADER_EPOCH: _retry_refreshed,
    kafka_errors.UNKNOWN_TOPIC_OR_PARTITION: _retry_refreshed,
    kafka_errors.LEADER_NOT_AVAILABLE: _retry_refreshed,
    kafka_errors.UNKNOWN_TOPIC_ID: _retry_refreshed,
    kafka_errors.NOT_ENOUGH_REPLICAS: _RETRY,
    kafka_errors.CORRUPT_MESSAGE: _RETRY,
    kafka_errors.THROTTLING_QUOTA_EXCEEDED: _RETRY,
    kafka_errors.CONCURRENT_TRANSACTIONS: _RETRY_SOON,
    # Any failure of an append causes it, even after bytes have reached the log.
    kafka_errors.UNKNOWN_SERVER_ERROR: _RETRY_POSSIBLY_WRITTEN,
    kafka_errors.MESSAGE_TOO_LARGE: _too_large,
    kafka_errors.RECORD_LIST_TOO_LARGE: _too_large,
    kafka_errors.OUT_OF_ORDER_SEQUENCE_NUMBER: _out_of_order,
    kafka_errors.UNKNOWN_PRODUCER_ID: _unknown_producer_id,
    kafka_errors.INVALID_RECORD: _invalid_records,
    kafka_errors.INVALID_TIMESTAMP: _invalid_records,
    kafka_errors.TOPIC_AUTHORIZATION_FAILED: _fail_topic,
    kafka_errors.INVALID_TOPIC_EXCEPTION: _fail_topic,
}
# Kafka raises these before it appends anything (ReplicaManager.getPartitionOrException, ProducerAppendInfo),
# so an offset in the same response means nothing. kfake, franz-go's imitation of a broker, sends 0.
_NOTHING_APPENDED = frozenset({kafka_errors.UNKNOWN_TOPIC_ID, kafka_errors.OUT_OF_ORDER_SEQUENCE_NUMBER})
_ENDED = (
    "in a transaction: another attempt or run took it over, or it was open for longer than "
    "kafka.transaction.timeout.ms"
)
# What the user can do about an error.
ADVICE = {
    kafka_errors.INVALID_PRODUCER_EPOCH: _ENDED,
    kafka_errors.INVALID_TXN_STATE: _ENDED,
    kafka_errors.PRODUCER_FENCED: _ENDED,
    kafka_errors.TRANSACTION_ABORTABLE: _ENDED,
    kafka_errors.INVALID_RECORD: (
        "a record is invalid for this topic (for example, a compacted topic accepts no null keys)"
    ),
    kafka_errors.INVALID_TIMESTAMP: (
        "a timestamp is outside what the topic's message.timestamp settings allow"
    ),
    kafka_errors.TOPIC_AUTHORIZATION_FAILED: "the principal may not write to this topic",
    kafka_errors.CLUSTER_AUTHORIZATION_FAILED: (
        "the principal may not use an idempotent producer; set kafka.enable.idempotence=false"
    ),
    kafka_errors.UNSUPPORTED_COMPRESSION_TYPE: (
        "the broker or the topic does not accept this kafka.compression.type; set another one"
    ),
}
_NO_TRANSACTIONS = (
    "the topic may not support transactions, for example because it is diskless (on object storage); set "
    "delivery.guarantee=at-least-once, or write to another topic"
)
ADVICE_IN_TRANSACTIONS = {
    **ADVICE,
    kafka_errors.INVALID_REQUEST: _NO_TRANSACTIONS,
    kafka_errors.UNSUPPORTED_VERSION: _NO_TRANSACTIONS,
    kafka_errors.UNSUPPORTED_FOR_MESSAGE_FORMAT: _NO_TRANSACTIONS,
}


def classify_response(attempt: AttemptFacts) -> Verdict:
    """Decide according to the rule of the error code."""
    appended = attempt.base_offset >= 0 and attempt.error_code not in _NOTHING_APPENDED
    if appended and not attempt.possibly_written:
        # A leader that is deposed while it waits for replicas responds with the same error as a broker that
        # never led the partition, but with the batch's offset (Kafka's DelayedProduce).
        attempt = replace(attempt, possibly_written=True)
    rule = RULES.get(attempt.error_code) or _rule_of(kafka_errors.error_of(attempt.error_code))
    if rule is _SUCCEED:
        outcome = _SUCCEED
    else:
        cause = _cause(attempt)
        outcome = replace(rule, cause=cause) if isinstance(rule, Verdict) else rule(attempt, cause)
    if attempt.possibly_written and not outcome.possibly_written:
        return replace(outcome, possibly_written=True)
    return outcome


def _rule_of(error: kafka_errors.KafkaError) -> Verdict:
    """The verdict for an error that has no rule. After a retriable error the batch may have been written,
    because nothing proves that it was not. Any other error fails the batch."""
    if not error.retriable:
        return _FAIL
    return _RETRY_REFRESHED_POSSIBLY_WRITTEN if error.is_of_metadata else _RETRY_POSSIBLY_WRITTEN


def classify_failure(cause: Exception, *, possibly_sent: bool) -> Verdict:
    """The verdict after a disconnect or a timeout: the batch is sent again with the same sequence, unless
    every other connection would fail as well."""
    if is_final(cause):
        return Verdict(Action.FAIL, cause, possibly_written=possibly_sent)
    return Verdict(Action.RETRY, cause, possibly_written=possibly_sent)


def expiry(
    partition: TopicPartition,
    timeout_ms: float,
    attempts: int,
    last: Exception | str | None,
    muted: str | None = None,
) -> DeliveryError:
    """The error of a batch that is older than delivery.timeout.ms. An attempt may have written it.

    ``last`` is the error of the last attempt, or the reason why the batch was never sent. ``muted`` is the
    reason why the circuit breaker mutes the partition, if it does.
    """
    tried = f"after {attempts} attempt(s)" if attempts else "before it could be sent"
    reason = f"; {muted}" if muted else ""
    if last and str(last) not in reason:
        reason += f"; last error: {last}"
    return DeliveryError(
        f"a batch for {partition} was not acknowledged within kafka.delivery.timeout.ms = "
        f"{timeout_ms:.0f} ms, {tried}{reason}. Look at the broker that leads it and at its replicas, or "
        "raise kafka.delivery.timeout.ms if they are merely slow"
    )


def _cause(attempt: AttemptFacts) -> BrokerRefusedError:
    parts = [kafka_errors.error_of(attempt.error_code).label]
    if attempt.error_message:
        parts.append(attempt.error_message)
    places, reason = attempt.record_errors
    if places:
        more = f" and {len(places) - 1} more" if len(places) > 1 else ""
        parts.append(f"row {places[0]} of the batch: {reason or 'no reason given'}{more}")
    advice = (ADVICE_IN_TRANSACTIONS if attempt.transactional else ADVICE).get(attempt.error_code)
    if advice:
        parts.append(advice)
    return BrokerRefusedError(f"{attempt.partition}: " + "; ".join(parts), attempt.error_code)
