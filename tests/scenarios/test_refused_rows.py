"""errors.tolerance=all: brokers refuse rows, with and without an earlier attempt that had no response."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection
from typing import Any

import pytest

from kafka_sink.cluster.partition import ProducerBatch
from kafka_sink.dead_letters.rejected_rows import DeadLetters
from kafka_sink.errors import DeliveryError
from kafka_sink.model import TopicPartition
from tests.support.effort import tries
from tests.support.fake_log import numbers_in
from tests.support.lifecycle_model import NODES, Model

MESSAGE_TOO_LARGE, RECORD_LIST_TOO_LARGE, INVALID_TIMESTAMP, INVALID_RECORD = 10, 18, 32, 87
REQUEST_TIMED_OUT, NOT_ENOUGH_REPLICAS = 7, 19
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


class Refusing(Model):
    """Brokers never take every seventh row. They look at the rows before they look for duplicates."""

    def write(self, partition: TopicPartition, data: bytes) -> tuple[int, int]:
        if any(number % 7 == 3 for number in numbers_in(data)):
            return INVALID_RECORD, -1
        return super().write(partition, data)

    def _check_rows(self, open_ones: Collection[ProducerBatch]) -> None:
        """Rows that were skipped are counted elsewhere."""


def walk(seed: int) -> str | None:
    """Refused rows and lost connections in any order; why the task failed."""
    chance = random.Random(seed)
    model = Refusing(2_000, dead_letters=DeadLetters(None, 1_000, 1_000))
    steps: list[tuple[int, Callable[[], object]]] = [
        (6, lambda: model.append([chance.randrange(2)] * chance.randint(1, 3), 60, lambda: None)),
        (6, model.flush),
        (10, model.send),
        (10, lambda: model.arrive(chance.randrange(NODES), 0, append=True)),
        (10, lambda: model.respond(chance.randrange(NODES))),
        (2, lambda: setattr(model, "now", model.now + chance.choice([5, 20, 100]))),
        (1, lambda: model.arrive(chance.randrange(NODES), NOT_ENOUGH_REPLICAS, append=False)),
        (1, lambda: model.disconnect(chance.randrange(NODES), unread=chance.choice(["lost", "late"]))),
        (1, model.zombie),
    ]
    weights = [weight for weight, _ in steps]
    for _ in range(150):
        chance.choices(steps, weights)[0][1]()
        model.check()
    model.settle()
    while model.zombies:
        model.zombie()
    failure = model.deliveries._first_failure
    if failure is None:
        for partition, rows in model.appended.items():
            log = [row for batch in model.logs[partition].batches for row in numbers_in(batch.data)]
            assert log == [row for row in rows if row % 7 != 3], f"{seed}: {partition}"
    model.close()
    model.check()
    return None if failure is None else str(failure[1])


def test_a_lost_connection_after_a_refusal_does_not_fail_the_task() -> None:
    """Batches after refused rows were not written: no leader takes a sequence before the one that it expects.

    A refused batch that may have been written itself still fails the task.
    """
    failures = [failure for failure in map(walk, range(tries(300))) if failure is not None]
    assert [text for text in failures if "does not skip these rows" not in text] == []


def test_a_batch_that_was_not_written_goes_before_one_in_doubt_before_a_refused_row() -> None:
    """Catches: with another batch in doubt after the refused row, nothing was sent until
    delivery.timeout.ms."""
    model = Refusing(2_000, dead_letters=DeadLetters(None, 1_000, 1_000))
    append_and_send(model, 1)
    model.arrive(0, 0, append=True)
    model.respond(0)
    append_and_send(model, 4)
    for error in (NOT_ENOUGH_REPLICAS, REQUEST_TIMED_OUT, INVALID_RECORD):
        model.arrive(0, error, append=False)
        model.respond(0)
    model.disconnect(0, unread="lost")
    model.settle()
    assert not model.deliveries.has_failed
    (log,) = (log for log in model.logs.values() if log.batches)
    assert [row for batch in log.batches for row in numbers_in(batch.data)] == [0, 1, 2, 4]


@pytest.mark.parametrize("change", [{"leader_epoch": 1}, {"topic_id": b"recreated"}])
def test_a_batch_in_doubt_after_a_refused_row_fails_if_the_leader_has_changed(change: dict[str, Any]) -> None:
    """Catches: a leader that had lost the producer's state took the batch as its first one, and it was
    written a second time after the restart."""
    model = Refusing(2_000, dead_letters=DeadLetters(None, 1_000, 1_000))
    for _ in range(3):
        append_and_send(model, 1)
        model.arrive(0, 0, append=True)
        model.respond(0)
    append_and_send(model, 2)
    for log in model.logs.values():
        log.forget_producers()
    model.arrive(0, 0, append=True)
    model.respond(0)
    model.arrive(0, 0, append=True)
    model.disconnect(0, unread="lost")
    model.metadata.stale = True
    model.now += 1_000
    model.send()
    for name, value in {"stale": False, **change}.items():
        setattr(model.metadata, name, value)
    model.settle()
    model.check()
    with pytest.raises(
        DeliveryError, match="may have lost its state of this producer, and the batch may have been"
    ):
        model.deliveries.raise_failure(1, 0)


def test_a_batch_after_a_refused_row_that_a_response_put_in_doubt_fails() -> None:
    """Catches: it counted as not written, although a leader with the producer's state would have rejected
    its sequence, and was written a second time after the restart."""
    model = Refusing(2_000, dead_letters=DeadLetters(None, 1_000, 1_000))
    for count in (1, 1, 1, 2):
        append_and_send(model, count)
        if count == 1:
            model.arrive(0, 0, append=True)
            model.respond(0)
    for log in model.logs.values():
        log.forget_producers()
    model.arrive(0, 0, append=True)
    model.respond(0)
    model.arrive(0, REQUEST_TIMED_OUT, append=True)
    model.respond(0)
    model.settle()
    model.check()
    with pytest.raises(DeliveryError, match="records before this batch were rejected, and the batch may"):
        model.deliveries.raise_failure(1, 0)


def test_a_batch_in_doubt_fails_if_one_before_it_was_taken_while_a_refused_row_waited_for_room() -> None:
    """Catches: the leader had lost its state and taken both, and the second was written twice."""

    class Full(DeadLetters):
        has_room = False  # type: ignore[assignment]

    dead_letters = Full("dead-letters", 1_000, 1_000)
    model = Refusing(2_000, dead_letters=dead_letters)
    for count in (1, 1, 1, 3):
        append_and_send(model, count)
        if count == 1:
            model.arrive(0, 0, append=True)
            model.respond(0)
    for log in model.logs.values():
        log.forget_producers()
    for _ in range(2):
        model.arrive(0, 0, append=True)
        model.respond(0)
    model.arrive(0, 0, append=True)
    model.disconnect(0, unread="lost")
    assert model.responses.awaiting_dead_letters
    dead_letters.has_room = True  # type: ignore[misc]
    model.responses.resume_skipping()
    model.settle()
    model.check()
    with pytest.raises(DeliveryError, match="the leader lost its state of this producer, and the batch may"):
        model.deliveries.raise_failure(1, 0)


@pytest.mark.parametrize("is_transaction", [False, True])
def test_no_batch_gets_the_sequence_of_one_that_a_leader_without_state_took(is_transaction: bool) -> None:
    """Catches: after a refused row the sequences went on before those of the batch that was taken, so the
    leader took a later batch for a copy of it, and acknowledged rows that it had not written."""
    model = Refusing(2_000, dead_letters=DeadLetters(None, 1_000, 1_000))
    model.identity.transactional_id = "t" if is_transaction else None
    for count in (1, 1, 1, 2):
        append_and_send(model, count)
        if count == 1:
            model.arrive(0, 0, append=True)
            model.respond(0)
    for log in model.logs.values():
        log.forget_producers()
    for _ in range(2):
        model.arrive(0, 0, append=True)
    for _ in range(2):
        model.respond(0)
    for _ in range(2):
        model.append([0], 5, lambda: None)
        model.flush()
        model.send()
    model.settle()
    (log,) = (log for log in model.logs.values() if log.batches)
    written = [row for batch in log.batches for row in numbers_in(batch.data)]
    assert model.deliveries.has_failed == is_transaction
    assert model.acknowledged == written == [0, 1, 2, 4, *([] if is_transaction else [5, 6])]


def append_and_send(model: Model, count: int) -> None:
    """Rows for broker 0, each in a request of its own."""
    for _ in range(count):
        model.append([0], 5, lambda: None)
        model.flush()
        model.send()
    assert len(model.pending) == count
