"""Every row of the table of broker responses, and what is outside of it."""

from __future__ import annotations

from typing import Any

import pytest

from kafka_sink.engine.response_classifier import (
    Action,
    AttemptFacts,
    Verdict,
    classify_failure,
    classify_response,
    expiry,
)
from kafka_sink.errors import AuthenticationError, RecordTooLargeError
from kafka_sink.kafka_errors import ERRORS
from kafka_sink.model import RecordErrors, TopicPartition

PARTITION = TopicPartition("t", 3)
SUCCEED, RETRY, SPLIT, RESTART, FAIL = Action


def verdict(code: int, **facts: Any) -> Verdict:
    return classify_response(AttemptFacts(partition=PARTITION, error_code=code, **facts))


def action(code: int, **facts: Any) -> Action:
    return verdict(code, **facts).action


@pytest.mark.parametrize(
    ("codes", "refresh", "possibly_written"),
    [
        pytest.param((3, 5, 6, 74, 100), True, False, id="stale metadata"),
        pytest.param((13, 56), True, True, id="a leader that broke down and may have the batch"),
        pytest.param((8, 9, 72, 80, 83, 84, 103), True, True, id="other stale metadata"),
        pytest.param((14, 15, 16, 41, 75, 78, 88), False, True, id="other retriable codes"),
        pytest.param((19, 2, 89), False, False, id="what passes"),
        pytest.param((7, 20, -1), False, True, id="an unknown outcome"),
    ],
)
def test_the_batch_goes_again(codes: tuple[int, ...], refresh: bool, possibly_written: bool) -> None:
    for code in codes:
        found = verdict(code, record_count=5)
        assert found.action is RETRY, code
        assert (found.refresh, found.possibly_written) == (refresh, possibly_written), code
        assert not found.immediate
        # At once where the response itself named another leader.
        assert verdict(code, leader_hint_newer=True).immediate == (refresh and not possibly_written), code


@pytest.mark.parametrize("code", [35, 42, 43])
def test_a_topic_that_takes_no_transactions_is_named_as_such(code: int) -> None:
    """Catches: "INVALID_REQUEST (42)" of a diskless topic, and nothing that tells what to do."""
    cause = str(verdict(code, transactional=True).cause)
    assert "diskless" in cause
    assert "delivery.guarantee=at-least-once" in cause
    assert action(code, transactional=True) is FAIL
    assert "diskless" not in str(verdict(code).cause)


def test_an_offset_beside_an_error_fixes_the_sequence_but_where_nothing_was_appended() -> None:
    """A leader that was deposed while it waited for its replicas has appended the batch.

    Catches, too: kfake, which sends offset 0 with errors, and a topic that is deleted and made again there:
    the new one takes the producer from sequence 0 on only, as Kafka 4.5 does (KAFKA-15591).
    """
    for code in (6, 19, 3):
        found = verdict(code, base_offset=40)
        assert (found.action, found.possibly_written) == (RETRY, True)
        assert action(10, record_count=5, base_offset=40) is FAIL
    gone = verdict(100, base_offset=0)
    assert (gone.action, gone.possibly_written) == (RETRY, False)
    rejected = verdict(45, base_offset=0, is_next_expected=True)
    assert (rejected.action, rejected.possibly_written) == (RESTART, False)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("is_next", [False, True])
def test_possibly_written_batch_is_neither_split_nor_renumbered(count: int, is_next: bool) -> None:
    for code in ERRORS:
        pinned: list[dict[str, Any]] = [{"possibly_written": True}]
        if code not in (45, 100):
            pinned.append({"base_offset": 3})
        for facts in pinned:
            found = verdict(code, record_count=count, is_next_expected=is_next, restarted=True, **facts)
            assert found.action in (SUCCEED, RETRY, FAIL), (code, facts)
            assert found.possibly_written, (code, facts)


def test_a_duplicate_is_a_success() -> None:
    assert action(46) is SUCCEED


@pytest.mark.parametrize("code", [10, 18])
def test_too_large_splits_only_what_was_surely_not_written(code: int) -> None:
    split = verdict(code, record_count=2)
    assert (split.action, split.spends_retry) == (SPLIT, False)
    assert action(code, record_count=2, possibly_written=True) is FAIL
    single = verdict(code, record_count=1, size=4711)
    assert single.action is FAIL
    assert isinstance(single.cause, RecordTooLargeError)
    assert "4711" in str(single.cause)
    assert "max.message.bytes" in str(single.cause)


@pytest.mark.parametrize("code", [45, 59])
def test_out_of_order_behind_a_retry_waits_and_in_front_restarts(code: int) -> None:
    behind = verdict(code, is_next_expected=False)
    assert (behind.action, behind.spends_retry) == (RETRY, False)
    front = verdict(code, is_next_expected=True)
    assert (front.action, front.spends_retry) == (RESTART, True)
    doubtful = verdict(code, is_next_expected=True, possibly_written=True)
    assert doubtful.action is FAIL
    assert "may have been written" in str(doubtful.cause)
    assert action(code, idempotent=False) is FAIL
    # An epoch of the producer's own making would be fenced: the attempt fails, and Spark runs another.
    facts = {"is_next_expected": True, "restarted": True, "log_start_offset": 9}
    assert action(code, **facts, transactional=True) is FAIL


def test_an_unknown_producer_restarts_where_the_log_moved_past_its_last_write() -> None:
    moved = {"log_start_offset": 100, "last_acknowledged_offset": 99}
    assert action(59, **moved) is RESTART
    assert action(45, **moved) is RETRY
    assert action(59, log_start_offset=99, last_acknowledged_offset=99) is RETRY
    # A response has no offset if the partition has just moved away.
    assert action(59, log_start_offset=-1) is RETRY
    assert action(59, restarted=True) is RESTART


FINAL = {
    29: "may not write to this topic",
    31: "enable.idempotence=false",
    32: "timestamp",
    35: "UNSUPPORTED",
    47: "INVALID_PRODUCER_EPOCH",
    76: "UNSUPPORTED",
    87: "a record is invalid",
    90: "PRODUCER_FENCED",
    4242: "error 4242",
}


def test_final_responses_fail_and_are_named() -> None:
    refused = RecordErrors((7,), "bad")
    for code, text in FINAL.items():
        found = verdict(code, error_message="broker's words", record_errors=refused)
        assert found.action is FAIL
        for part in (text, "t-3", f"error {code}", "broker's words", "row 7"):
            assert part in str(found.cause), code


def test_no_response_keeps_batch_and_sequence() -> None:
    for possibly_sent in (True, False):
        found = classify_failure(ConnectionResetError("gone"), possibly_sent=possibly_sent)
        assert (found.action, found.possibly_written) == (RETRY, possibly_sent)
    assert classify_failure(AuthenticationError("no"), possibly_sent=False).action is FAIL


def test_expiry_names_option_attempts_and_last_error() -> None:
    text = str(expiry(PARTITION, 3000.0, 2, ValueError("why")))
    for part in ("kafka.delivery.timeout.ms = 3000 ms", "2 attempt", "why"):
        assert part in text
    assert "before it could be sent" in str(expiry(PARTITION, 3000.0, 0, None))


def test_a_partition_that_cannot_join_the_transaction_at_the_moment_is_tried_again_soon() -> None:
    """A transaction's first batches go to several brokers at once, which add partitions one by one."""
    found = verdict(51, record_count=5, transactional=True)
    assert (found.action, found.possibly_written) == (RETRY, False)
    assert found.longest_wait_ms <= 20
