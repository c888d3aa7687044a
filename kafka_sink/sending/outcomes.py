"""What a broker's answer means for a batch. Pure: facts in, a decision out."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from kafka.errors import for_code

from kafka_sink.errors import AuthenticationError, BrokerVersionError, DeliveryError, RecordTooLargeError
from kafka_sink.model import TopicPartition

# https://kafka.apache.org/protocol#protocol_error_codes
_CORRUPT_MESSAGE = 2
_UNKNOWN_TOPIC_OR_PARTITION = 3
_LEADER_NOT_AVAILABLE = 5
_NOT_LEADER_OR_FOLLOWER = 6
_REQUEST_TIMED_OUT = 7
_MESSAGE_TOO_LARGE = 10
_NETWORK_EXCEPTION = 13
_RECORD_LIST_TOO_LARGE = 18
_NOT_ENOUGH_REPLICAS = 19
_NOT_ENOUGH_REPLICAS_AFTER_APPEND = 20
_UNKNOWN_SERVER_ERROR = -1
_OUT_OF_ORDER_SEQUENCE_NUMBER = 45
_DUPLICATE_SEQUENCE_NUMBER = 46
_KAFKA_STORAGE_ERROR = 56
_UNKNOWN_PRODUCER_ID = 59
_FENCED_LEADER_EPOCH = 74
_THROTTLING_QUOTA_EXCEEDED = 89
_UNKNOWN_TOPIC_ID = 100


class Action(Enum):
    """What the dispatcher does with the batch."""

    SUCCEED = "succeed"
    RETRY = "retry"
    SPLIT = "split"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Attempt:
    """The facts of one answered attempt; ``size`` is the batch in bytes."""

    partition: TopicPartition
    error_code: int
    error_message: str | None = None
    record_errors: tuple[tuple[int, str | None], ...] = ()
    record_count: int = 1
    size: int = 0
    possibly_written: bool = False
    idempotent: bool = True
    is_next_expected: bool = False
    leader_hint_newer: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """``possibly_written``: from now on the batch keeps its sequence and is never split. ``immediate``
    skips the backoff; ``cause`` is the error if this was the last attempt."""

    action: Action
    cause: Exception | None = None
    refresh: bool = False
    immediate: bool = False
    possibly_written: bool = False
    spends_retry: bool = True


# Retried after a refresh of the topic's metadata.
_STALE = frozenset(
    {
        _NOT_LEADER_OR_FOLLOWER,
        _FENCED_LEADER_EPOCH,
        _UNKNOWN_TOPIC_OR_PARTITION,
        _LEADER_NOT_AVAILABLE,
        _UNKNOWN_TOPIC_ID,
        _KAFKA_STORAGE_ERROR,
        _NETWORK_EXCEPTION,
    }
)
_TRANSIENT = frozenset(
    {_NOT_ENOUGH_REPLICAS, _CORRUPT_MESSAGE, _UNKNOWN_SERVER_ERROR, _THROTTLING_QUOTA_EXCEEDED}
)
# The leader has the batch, or may have it, but the answer is not what was asked for.
_WRITTEN_PERHAPS = frozenset({_REQUEST_TIMED_OUT, _NOT_ENOUGH_REPLICAS_AFTER_APPEND})
_ADVICE = {
    87: "a record is invalid for this topic (a compacted topic refuses null keys)",
    32: "a timestamp is outside what the topic's message.timestamp settings allow",
    29: "the principal may not write to this topic",
    31: "the principal may not use an idempotent producer; set kafka.enable.idempotence=false",
}


def classify_response(attempt: Attempt) -> Outcome:
    """Decides by error code; an answer that this table does not know fails the batch, naming the code."""
    code = attempt.error_code
    cause = _cause(attempt)
    if code == 0 or code == _DUPLICATE_SEQUENCE_NUMBER:
        return Outcome(Action.SUCCEED)
    if code in _STALE:
        return Outcome(Action.RETRY, cause, refresh=True, immediate=attempt.leader_hint_newer)
    if code in _TRANSIENT:
        return Outcome(Action.RETRY, cause)
    if code in _WRITTEN_PERHAPS:
        return Outcome(Action.RETRY, cause, possibly_written=True)
    if code in (_MESSAGE_TOO_LARGE, _RECORD_LIST_TOO_LARGE):
        return _too_large(attempt)
    if code == _OUT_OF_ORDER_SEQUENCE_NUMBER and attempt.idempotent and not attempt.is_next_expected:
        # A batch before this one is being retried; the broker takes this one after it.
        return Outcome(Action.RETRY, cause, spends_retry=False)
    return Outcome(Action.FAIL, cause)


def _too_large(attempt: Attempt) -> Outcome:
    if attempt.record_count > 1 and not attempt.possibly_written:
        return Outcome(Action.SPLIT, spends_retry=False)
    if attempt.record_count > 1:
        return Outcome(Action.FAIL, _cause(attempt))
    return Outcome(
        Action.FAIL,
        RecordTooLargeError(
            f"a record of {attempt.size} bytes (compressed, with its batch header) is larger than the broker "
            f"takes for {attempt.partition}; raise the topic's max.message.bytes or send smaller records"
        ),
    )


def classify_failure(cause: Exception, *, possibly_sent: bool) -> Outcome:
    """No answer: disconnect or timeout. The same batch with the same sequence goes again."""
    if is_final(cause):
        return Outcome(Action.FAIL, cause, possibly_written=possibly_sent)
    return Outcome(Action.RETRY, cause, possibly_written=possibly_sent)


def is_final(cause: Exception) -> bool:
    """Whether no other connection would fare better."""
    return isinstance(cause, AuthenticationError | BrokerVersionError)


def expiry(
    partition: TopicPartition, timeout_ms: float, attempts: int, last: Exception | None
) -> DeliveryError:
    """delivery.timeout.ms has passed; after an attempt nobody knows whether the batch was written."""
    tried = f"after {attempts} attempt(s)" if attempts else "before it could be sent"
    reason = f"; last error: {last}" if last is not None else ""
    return DeliveryError(
        f"a batch for {partition} was not acknowledged within kafka.delivery.timeout.ms = "
        f"{timeout_ms:.0f} ms, {tried}{reason}"
    )


def _cause(attempt: Attempt) -> DeliveryError:
    error = for_code(attempt.error_code)
    parts = [f"{error.__name__} (error {attempt.error_code})"]
    if attempt.error_message:
        parts.append(attempt.error_message)
    if attempt.record_errors:
        index, message = attempt.record_errors[0]
        more = f" and {len(attempt.record_errors) - 1} more" if len(attempt.record_errors) > 1 else ""
        parts.append(f"row {index} of the batch: {message or 'no reason given'}{more}")
    advice = _ADVICE.get(attempt.error_code)
    if advice:
        parts.append(advice)
    return DeliveryError(f"{attempt.partition}: " + "; ".join(parts))
