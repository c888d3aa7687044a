"""The invariants of a batch's life, one test each: what may never happen, whatever the parts look like."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest

from kafka_sink.cluster.partition import ProducerBatch
from kafka_sink.memory.pool import BufferPool
from kafka_sink.model import TopicPartition
from tests.support.fake_log import RecordBatch, numbers_in, parse_batch
from tests.support.lifecycle_model import DELIVERY_TIMEOUT_MS, TOPIC, Model
from tests.support.queues import limits_of

P = TopicPartition(TOPIC, 0)
OUT_OF_ORDER, TOO_LARGE, NOT_LEADER, UNKNOWN_PRODUCER = 45, 10, 6, 59


def one_more(model: Model, partitions: Iterable[int] = (0,), size: int = 5) -> None:
    """Rows in batches of their own, sent if that may be."""
    model.append([*partitions], size, lambda: None)
    model.flush()
    model.send()


def established(max_message_bytes: int = 500) -> Model:
    """A partition whose first batch is acknowledged, so that several may be in flight."""
    model = Model(max_message_bytes)
    one_more(model)
    acknowledge(model)
    return model


def acknowledge(model: Model) -> None:
    model.arrive(0, 0, append=True)
    model.respond(0)


def again(model: Model) -> None:
    """The next attempt, once any backoff is over."""
    model.now += 1_500
    model.send()


def sent(model: Model) -> list[RecordBatch]:
    """The partition's batches in the requests that have no response yet, as a broker reads them."""
    found = []
    for request in model.pending:
        parsed = parse_batch(TOPIC, 0, b"".join(request.views[P]))
        assert not isinstance(parsed, int)
        found.append(parsed)
    return found


def marks(model: Model) -> list[tuple[int, int, int, list[int]]]:
    """Producer id, epoch, base sequence and rows of each of them."""
    return [
        (one.producer_id, one.producer_epoch, one.base_sequence, numbers_in(one.data)) for one in sent(model)
    ]


@pytest.mark.parametrize("code", [OUT_OF_ORDER, UNKNOWN_PRODUCER, NOT_LEADER, TOO_LARGE])
def test_a_base_sequence_is_fixed_once_the_batch_may_be_written(code: int) -> None:
    """A broker finds duplicates by it."""
    model = established()
    one_more(model)
    first = marks(model)
    model.disconnect(0, unread="late")
    again(model)
    assert marks(model) == first
    batch = next(iter(model.accumulator.live))
    model.arrive(0, code, append=False)
    model.respond(0)
    again(model)
    if batch.terminal:
        assert not model.pending, "its rows went out anew"
    else:
        assert marks(model) == first
    model.zombie()
    model.settle()
    model.check_end()


def test_only_the_first_unacknowledged_batch_of_a_partition_is_sent_again() -> None:
    """Those behind it wait for it, so that they end in the order in which they were appended."""
    model = established()
    for _ in range(3):
        one_more(model)
    assert len(model.pending) == 3
    model.arrive(0, NOT_LEADER, append=False)
    for _ in range(2):
        # The broker misses the first one's sequences.
        model.arrive(0, 0, append=True)
    for _ in range(3):
        model.respond(0)
    ended = [model.acknowledged[:]]
    for _ in range(3):
        again(model)
        again(model)
        assert len(model.pending) == 1, "a batch behind the first was sent before it has ended"
        acknowledge(model)
        ended.append(model.acknowledged[:])
    assert ended == [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3]]
    model.check_end()


def test_after_a_refusal_batches_go_one_by_one_until_one_is_acknowledged() -> None:
    model = established()
    one_more(model)
    model.arrive(0, 19, append=False)
    model.respond(0)
    model.now += 500
    model.send()
    one_more(model)
    assert len(model.pending) == 1
    acknowledge(model)
    one_more(model)
    model.send()
    assert len(model.pending) == 2


def test_an_unknown_producer_restarts_sequences_if_the_log_of_earlier_batches_is_gone() -> None:
    model = established()
    one_more(model)
    one_more(model)
    model.arrive(0, 19, append=False)
    model.arrive(0, 59, append=False, log_start=1_000)
    model.respond(0)
    model.respond(0)
    model.send()
    assert model.identity.producer_epoch == 1
    model.settle()
    model.check_end()
    assert model.acknowledged == [0, 1, 2]


def _success(model: Model) -> None:
    one_more(model, [0, 1, 2])
    model.settle()


def _error(model: Model) -> None:
    one_more(model)
    model.arrive(0, 87, append=False)
    model.respond(0)


def _timeout_in_the_queue(model: Model) -> None:
    model.append([0], 5, lambda: None)
    model.flush()
    model.now += DELIVERY_TIMEOUT_MS + 1
    model.expire()


def _timeout_in_flight(model: Model) -> None:
    one_more(model)
    model.now += DELIVERY_TIMEOUT_MS + 1
    model.expire()
    acknowledge(model)


def _disconnect(model: Model) -> None:
    one_more(model)
    model.disconnect(0, unread="lost")
    model.settle()


def _split(model: Model) -> None:
    one_more(model, [0] * 8, 60)
    model.arrive(0, 0, append=True)
    model.respond(0)
    model.settle()
    assert model.deliveries.counts().splits


def _split_that_fails(model: Model) -> None:
    one_more(model, [0] * 8, 60)
    model.arrive(0, 0, append=True)
    model.respond(0)
    model.fail_all()


def _late_refusal(model: Model) -> None:
    """The batch has failed when its broker says that it is too large."""
    one_more(model, [0] * 8, 60)
    model.now += DELIVERY_TIMEOUT_MS + 1
    model.expire()
    acknowledge(model)


def _close_with_a_request_in_flight(model: Model) -> None:
    one_more(model)
    model.append([0, 1], 5, lambda: None)
    model.close()


def _no_memory(model: Model) -> None:
    while not model.exhausted:
        model.append([0, 1, 2] * 8, 300, lambda: None)


PATHS: list[Callable[[Model], None]] = [
    _success,
    _error,
    _timeout_in_the_queue,
    _timeout_in_flight,
    _disconnect,
    _split,
    _split_that_fails,
    _late_refusal,
    _close_with_a_request_in_flight,
    _no_memory,
]


@pytest.mark.usefixtures("allocation_strategy")
@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.__name__.strip("_"))
def test_a_chunk_is_returned_exactly_once(path: Callable[[Model], None]) -> None:
    """A second return raises BufferOwnershipError."""
    model = Model()
    path(model)
    model.close()
    metrics = model.pool.metrics()
    assert (metrics.used_bytes, metrics.heap_bytes, model.pool.open_batches) == (0, 0, 0)
    assert not model.accumulator.live


@pytest.mark.usefixtures("allocation_strategy")
def test_appender_never_waits_for_memory_while_holding_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sender could then not send that batch, whose memory may be what the wait is for."""
    model = Model()
    held: list[list[ProducerBatch]] = []
    take = BufferPool.take

    def taking(pool: BufferPool, *arguments: object, **named: object) -> object:
        held.append([batch for batch in model.accumulator.live if batch.held])
        return take(pool, *arguments, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(BufferPool, "take", taking)
    while not model.exhausted:
        model.append([0, 1, 2] * 8, 60, lambda: None)
    assert held, "memory was never waited for"
    assert not any(held)


@pytest.mark.parametrize("end", ["lost", "late"])
def test_no_batch_that_may_be_written_is_split(end: str) -> None:
    """Brokers find duplicates of whole batches only. Its topic's limit has fallen since it was sent."""
    model = established(max_message_bytes=2_000)
    one_more(model, [0] * 8, 60)
    whole = sent(model)
    assert len(numbers_in(whole[0].data)) == 8
    model.disconnect(0, unread=end)
    # Another batch has taught what the brokers take now, so batches are split before they are sent.
    limits_of(model.accumulator, TOPIC).on_too_large(len(whole[0].data) // 2, costs_task=False)
    model.accumulator.any_learnt = True
    again(model)
    assert [one.data for one in sent(model)] == [one.data for one in whole]
    model.arrive(0, TOO_LARGE, append=False)
    model.respond(0)
    again(model)
    assert not model.pending, "a part of it was sent"
    assert model.deliveries.has_failed
    assert model.deliveries.counts().splits == 0
    model.zombie()
    model.check_end()
