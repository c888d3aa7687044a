"""errors.tolerance=all: brokers refuse rows, with and without an earlier attempt that had no response."""

from __future__ import annotations

import pytest

from kafka_sink.dead_letters.rejected_rows import DeadLetters
from kafka_sink.errors import DeliveryError
from tests.support.lifecycle_model import Model

MESSAGE_TOO_LARGE, RECORD_LIST_TOO_LARGE, INVALID_TIMESTAMP, INVALID_RECORD = 10, 18, 32, 87
REFUSALS = [MESSAGE_TOO_LARGE, RECORD_LIST_TOO_LARGE, INVALID_TIMESTAMP, INVALID_RECORD]


def refused(error: int, *, in_doubt: bool) -> Model:
    """A row for broker 0, which refuses it; where it is ``in_doubt``, after an attempt without a response."""
    model = Model(dead_letters=DeadLetters(None, 100, 1_000))
    model.append([0], 5, lambda: None)
    model.flush()
    model.send()
    if in_doubt:
        model.disconnect(0, unread="lost")
        model.now += 150.0
        model.send()
    model.arrive(0, error, append=False)
    model.respond(0)
    return model


@pytest.mark.parametrize("error", REFUSALS)
def test_a_refusal_after_a_lost_response_fails_the_task_and_says_why(error: int) -> None:
    """Kafka validates before it looks for duplicates: a refusal proves nothing of the first attempt."""
    model = refused(error, in_doubt=True)
    assert not model.accumulator.incomplete
    with pytest.raises(DeliveryError, match=r"errors\.tolerance=all does not skip these rows") as caught:
        model.deliveries.raise_failure(1, 0)
    assert "set errors.tolerance=all" not in str(caught.value)
    assert model.dead_letters is not None
    assert model.dead_letters.rows == 0


@pytest.mark.parametrize("error", REFUSALS)
def test_rows_that_were_surely_not_written_are_skipped(error: int) -> None:
    model = refused(error, in_doubt=False)
    assert not model.deliveries.has_failed
    assert model.dead_letters is not None
    assert model.dead_letters.rows == 1


@pytest.mark.parametrize("error", REFUSALS)
def test_a_refusal_of_rows_that_have_failed_changes_nothing(error: int) -> None:
    """Catches: rows that counted as failed and as skipped, or a late split."""
    model = Model(dead_letters=DeadLetters(None, 100, 1_000))
    model.append([0], 5, lambda: None)
    model.append([0], 5, lambda: None)
    model.flush()
    model.send()
    model.arrive(0, error, append=False)
    model.fail_all()
    model.respond(0)
    counts = model.deliveries.counts()
    assert (counts.failed, counts.splits, counts.retries, model.accumulator.incomplete) == (2, 0, 0, 0)
    assert model.dead_letters is not None
    assert (model.dead_letters.rows, model.pool.metrics().used_bytes) == (0, 0)


def test_a_batch_that_waited_for_room_goes_on_though_the_task_rejects_rows_at_that_moment() -> None:
    """Catches: it was put back a second time, which ended the sender."""
    looks = [False, True, False]

    class Looks(DeadLetters):
        @property
        def has_room(self) -> bool:
            """At the response there was none, and the task's thread is as fast as resume_skipping."""
            return looks.pop(0)

    dead_letters = Looks("dead-letters", 100, 1_000)
    model = Model(dead_letters=dead_letters)
    model.append([0], 5, lambda: None)
    model.flush()
    model.send()
    model.arrive(0, INVALID_RECORD, append=False)
    model.respond(0)
    assert (len(model.responses.awaiting_dead_letters), dead_letters.rows) == (1, 0)
    model.responses.resume_skipping()
    assert (model.responses.awaiting_dead_letters, dead_letters.rows, model.accumulator.incomplete) == (
        {},
        1,
        0,
    )
