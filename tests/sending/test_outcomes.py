"""Every row of the table of broker answers, and what stands outside of it."""

from __future__ import annotations

import pytest

from kafka_sink.errors import AuthenticationError, RecordTooLargeError
from kafka_sink.model import TopicPartition
from kafka_sink.sending.outcomes import Action, Attempt, classify_failure, classify_response, expiry

PARTITION = TopicPartition("t", 3)


def attempt(code: int, **facts: object) -> Attempt:
    return Attempt(partition=PARTITION, error_code=code, **facts)  # type: ignore[arg-type]


@pytest.mark.parametrize("code", [3, 5, 6, 13, 56, 74, 100])
def test_stale_metadata_is_refreshed_and_the_batch_goes_again(code: int) -> None:
    outcome = classify_response(attempt(code, record_count=5))
    assert (outcome.action, outcome.refresh, outcome.possibly_written) == (Action.RETRY, True, False)
    assert not outcome.immediate
    assert classify_response(attempt(code, leader_hint_newer=True)).immediate


@pytest.mark.parametrize("code", [19, 2, -1, 89])
def test_what_passes_is_retried(code: int) -> None:
    outcome = classify_response(attempt(code))
    assert (outcome.action, outcome.refresh, outcome.possibly_written) == (Action.RETRY, False, False)


@pytest.mark.parametrize("code", [7, 20])
def test_an_unknown_outcome_pins_the_batch(code: int) -> None:
    outcome = classify_response(attempt(code))
    assert (outcome.action, outcome.possibly_written) == (Action.RETRY, True)


def test_a_duplicate_is_a_success() -> None:
    assert classify_response(attempt(46)).action is Action.SUCCEED


@pytest.mark.parametrize("code", [10, 18])
def test_too_large_splits_only_what_was_surely_not_written(code: int) -> None:
    split = classify_response(attempt(code, record_count=2))
    assert (split.action, split.spends_retry) == (Action.SPLIT, False)
    assert classify_response(attempt(code, record_count=2, possibly_written=True)).action is Action.FAIL
    single = classify_response(attempt(code, record_count=1, size=4711))
    assert single.action is Action.FAIL
    assert isinstance(single.cause, RecordTooLargeError)
    assert "4711" in str(single.cause)
    assert "max.message.bytes" in str(single.cause)


def test_out_of_order_behind_a_retry_waits_and_in_front_fails() -> None:
    behind = classify_response(attempt(45, is_next_expected=False))
    assert (behind.action, behind.spends_retry) == (Action.RETRY, False)
    assert classify_response(attempt(45, is_next_expected=True)).action is Action.FAIL
    assert classify_response(attempt(45, idempotent=False)).action is Action.FAIL


@pytest.mark.parametrize("code", [29, 31, 32, 35, 47, 59, 87, 90, 4242])
def test_final_answers_fail_and_are_named(code: int) -> None:
    outcome = classify_response(attempt(code, error_message="broker's words", record_errors=((7, "bad"),)))
    assert outcome.action is Action.FAIL
    text = str(outcome.cause)
    assert "t-3" in text
    assert f"error {code}" in text
    assert "broker's words" in text
    assert "row 7" in text


def test_no_answer_keeps_batch_and_sequence() -> None:
    sent = classify_failure(ConnectionResetError("gone"), possibly_sent=True)
    assert (sent.action, sent.possibly_written) == (Action.RETRY, True)
    unsent = classify_failure(ConnectionResetError("gone"), possibly_sent=False)
    assert (unsent.action, unsent.possibly_written) == (Action.RETRY, False)
    assert classify_failure(AuthenticationError("no"), possibly_sent=False).action is Action.FAIL


def test_expiry_names_option_attempts_and_last_error() -> None:
    text = str(expiry(PARTITION, 3000.0, 2, ValueError("why")))
    assert "kafka.delivery.timeout.ms = 3000 ms" in text
    assert "2 attempt" in text
    assert "why" in text
    assert "before it could be sent" in str(expiry(PARTITION, 3000.0, 0, None))
