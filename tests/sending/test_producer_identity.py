"""Sequences and epochs, at exact times and without sockets."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kafka_sink.accumulator.buffer_pool import BufferPool
from kafka_sink.accumulator.chunked_buffer import IncrementalAllocator
from kafka_sink.accumulator.producer_batch import ProducerBatch
from kafka_sink.clock import ExponentialBackoff
from kafka_sink.cluster.partition import Partition
from kafka_sink.errors import DeliveryError, KafkaSinkError
from kafka_sink.model import CompressionType, TopicPartition
from kafka_sink.network.requests import ProducerIdResponse
from kafka_sink.records.batch_header import ProducerSequence
from kafka_sink.sending.producer_identity import ProducerIdentity, TransactionalIdentity

ALLOCATOR = IncrementalAllocator(BufferPool(1 << 22, 128, clock_ms=lambda: 0.0))
P0, P1 = Partition(TopicPartition("t", 0)), Partition(TopicPartition("t", 1))


def identity(epoch: int = 0) -> ProducerIdentity:
    """With an id, and partitions that were never written to."""
    P0.forget_sequences()
    P1.forget_sequences()
    made = ProducerIdentity(ExponentialBackoff(100, 1000, lambda: 0.5))
    assert made.on_response(ProducerIdResponse(0, 7, epoch), 0) is None
    return made


def batch(records: int = 1, partition: Partition = P0) -> ProducerBatch:
    buffer = ALLOCATOR.try_open(100)
    assert buffer is not None
    made = ProducerBatch(partition, buffer, None, CompressionType.NONE, 1.0, 0, 0.0)
    made.record_count = records
    return made


def sent(of: ProducerIdentity, one: ProducerBatch) -> ProducerBatch:
    """As the sender does it."""
    assert of.may_send(one, 0)
    of.assign(one)
    one.request_references += 1
    one.attempts += 1
    return one


def fail(one: ProducerBatch) -> None:
    one.request_references -= 1
    one.home.attempt_failed()


def acknowledge(one: ProducerBatch, now_ms: float = 0) -> None:
    one.request_references -= 1
    one.home.acknowledged(one, -1, now_ms)


def ended(one: ProducerBatch, last_offset: int = 0) -> None:
    """Acknowledged, while its request still refers to it."""
    one.home.acknowledged(one, last_offset, 0)


def marks(one: ProducerBatch) -> ProducerSequence:
    return one.sequence


# -- the id -------------------------------------------------------------------------------------------


def test_an_id_is_asked_for_once_and_again_after_growing_waits() -> None:
    of = ProducerIdentity(ExponentialBackoff(100, 1000, lambda: 0.5))
    assert (of.ready, of.may_request(0), of.retry_delay_ms(0)) == (False, True, 0)
    of.requested()
    assert (of.may_request(1e9), of.retry_delay_ms(0)) == (False, float("inf"))
    assert of.on_response(ProducerIdResponse(14, -1, -1), 1000) is None
    assert (of.may_request(1099), of.may_request(1100), of.retry_delay_ms(1040)) == (False, True, 60)
    assert "error 14" in str(of.last_error)
    of.on_failure(2000, ConnectionResetError("cut"))
    assert (of.may_request(2199), of.may_request(2200)) == (False, True)
    assert "cut" in str(of.last_error)
    assert of.on_response(ProducerIdResponse(0, 5, 0), 3000) is None
    assert (of.ready, of.last_error) == (True, None)


@pytest.mark.parametrize("code", [31, 53, 35])
def test_some_refusals_are_final(code: int) -> None:
    of = ProducerIdentity(ExponentialBackoff(100, 1000, lambda: 0.5))
    failure = of.on_response(ProducerIdResponse(code, -1, -1), 0)
    assert isinstance(failure, DeliveryError)
    assert f"error {code}" in str(failure)
    assert "kafka.enable.idempotence=false" in str(failure)


# -- sequences ----------------------------------------------------------------------------------------


def test_a_sequence_is_given_once_and_counts_records() -> None:
    of = identity()
    first = sent(of, batch(10))
    acknowledge(first)
    second, other = sent(of, batch(3)), sent(of, batch(3, P1))
    assert [marks(one) for one in (first, second, other)] == [(7, 0, 0), (7, 0, 10), (7, 0, 0)]
    of.assign(second)
    assert marks(second) == (7, 0, 10)


def test_sequences_wrap_to_zero() -> None:
    of = identity()
    acknowledge(sent(of, batch(2**31 - 3)))
    numbers = []
    for count in (2, 1, 4):
        one = sent(of, batch(count))
        numbers.append(one.sequence.base_sequence)
        acknowledge(one)
    assert numbers == [2**31 - 3, 2**31 - 1, 0]


@given(st.lists(st.integers(1, 2**30), min_size=1, max_size=20))
def test_sequences_always_follow_each_other(counts: list[int]) -> None:
    of = identity()
    expected = 0
    for count in counts:
        one = sent(of, batch(count))
        assert one.sequence.base_sequence == expected
        assert 0 <= one.sequence.base_sequence < 2**31
        expected = (expected + count) % 2**31
        acknowledge(one)
        one.buffer.release()


def test_the_first_batch_goes_alone_then_up_to_five() -> None:
    of = identity()
    first = sent(of, batch())
    assert not of.may_send(batch(), 0)
    assert of.may_send(batch(partition=P1), 0)
    acknowledge(first)
    for _ in range(5):
        sent(of, batch())
    assert not of.may_send(batch(), 0)


def test_a_broker_may_forget_so_after_a_long_silence_the_first_goes_alone_again() -> None:
    of = identity()
    acknowledge(sent(of, batch()), 1000)
    sent(of, batch())
    assert of.may_send(batch(), 1000 + 299_999)
    assert not of.may_send(batch(), 1000 + 300_000)


def test_after_an_error_batches_go_one_by_one_and_old_ones_in_order() -> None:
    of = identity()
    acknowledge(sent(of, batch()))
    one, two = sent(of, batch()), sent(of, batch())
    fail(two)
    assert not of.may_send(two, 0)
    assert not of.may_send(batch(), 0)
    fail(one)
    assert of.may_send(one, 0)
    assert (one.home.is_next(one), two.home.is_next(two)) == (True, False)
    one.request_references += 1
    acknowledge(one)
    assert (of.may_send(two, 0), two.home.is_next(two)) == (True, True)


def test_no_more_than_four_batches_pass_one_of_unknown_outcome() -> None:
    """However often it is sent again: a broker remembers the last five batches."""
    of = identity()
    acknowledge(sent(of, batch()))
    unknown, *others = [sent(of, batch()) for _ in range(3)]
    unknown.set_possibly_written()
    fail(unknown)
    for one in others:
        acknowledge(one)
    assert of.may_send(unknown, 0)
    unknown.request_references += 1
    for _ in range(2):
        acknowledge(sent(of, batch()))
    assert not of.may_send(batch(), 0), "four have passed it"
    acknowledge(unknown)
    for _ in range(5):
        sent(of, batch())


def test_pieces_are_passed_by_no_more_than_their_parent() -> None:
    of = identity()
    acknowledge(sent(of, batch()))
    parent, *others = [sent(of, batch(2)) for _ in range(4)]
    pieces = [batch(), batch()]
    parent.home.replaced(parent, pieces)
    for one in others:
        one.request_references -= 1
        one.home.acknowledged(one, -1, 0)
    acknowledge_piece(of, pieces[0])
    sent(of, batch())
    assert not of.may_send(batch(), 0), "four have passed the second piece"
    acknowledge_piece(of, pieces[1])
    assert of.may_send(batch(), 0)


def acknowledge_piece(of: ProducerIdentity, piece: ProducerBatch) -> None:
    assert of.may_send(piece, 0)
    piece.request_references += 1
    acknowledge(piece)


def test_an_acknowledgement_means_that_earlier_batches_are_written_too() -> None:
    of = identity()
    acknowledge(sent(of, batch()))
    one, two, three = (sent(of, batch()) for _ in range(3))
    acknowledge(two)
    assert (one.possibly_written, three.possibly_written) == (True, False)
    assert one.home.is_next(one)


def test_pieces_share_their_parents_sequences_in_its_place() -> None:
    of = identity()
    acknowledge(sent(of, batch()))
    parent, behind = sent(of, batch(10)), sent(of, batch(1))
    pieces = [batch(4), batch(6)]
    parent.home.replaced(parent, pieces)
    assert [marks(piece) for piece in pieces] == [(7, 0, 1), (7, 0, 5)]
    assert (of.may_send(pieces[0], 0), of.may_send(pieces[1], 0), of.may_send(behind, 0)) == (
        True,
        False,
        False,
    )
    assert behind.sequence.base_sequence == 11


# -- restarts -----------------------------------------------------------------------------------------


def test_a_restart_waits_for_what_is_in_flight_and_renumbers_the_rest() -> None:
    of = identity()
    acknowledge(sent(of, batch(5)))
    one, two = sent(of, batch(3)), sent(of, batch(4))
    fail(one)
    of.request_restart(P0)
    assert of.restarts_due() == []
    assert not of.may_send(one, 0)
    assert not of.settled
    fail(two)
    assert of.restarts_due() == [P0]
    of.restart(P0)
    assert of.restarts_due() == []
    assert P0.restarted
    sent(of, one)
    assert marks(one) == (7, 1, 0)
    assert not of.may_send(two, 0)  # the first of an epoch goes alone
    acknowledge(one)
    sent(of, two)
    assert marks(two) == (7, 1, 3)
    assert not P0.restarted


@pytest.mark.parametrize("doubt", ["in flight", "possibly written"])
def test_a_restart_refuses_to_renumber_what_is_in_doubt(doubt: str) -> None:
    of = identity()
    one = sent(of, batch())
    if doubt == "possibly written":
        fail(one)
        one.set_possibly_written()
        of.request_restart(P0)
        assert P0.unresolved == [one]
    with pytest.raises(KafkaSinkError, match="keep their sequences"):
        of.restart(P0)
    assert marks(one) == (7, 0, 0)
    assert of.producer_epoch == 0


def test_other_partitions_follow_to_the_new_epoch_when_nothing_of_theirs_is_under_way() -> None:
    of = identity()
    acknowledge(sent(of, batch(5, P1)))
    under_way = sent(of, batch(5, P1))
    fail(sent(of, batch()))
    of.request_restart(P0)
    of.restart(P0)
    old = sent(of, batch(5, P1))
    assert marks(old) == (7, 0, 10)
    acknowledge(under_way)
    acknowledge(old)
    assert marks(sent(of, batch(1, P1))) == (7, 1, 0)
    assert not of.may_send(batch(1, P1), 0)


def test_after_the_last_epoch_a_new_id_is_asked_for() -> None:
    of = identity(epoch=2**15 - 1)
    one = sent(of, batch())
    fail(one)
    of.request_restart(P0)
    of.restart(P0)
    assert (of.ready, of.may_request(0)) == (False, True)
    of.requested()
    of.on_response(ProducerIdResponse(0, 8, 0), 0)
    assert marks(sent(of, one)) == (8, 0, 0)


def test_settled_means_that_every_sequence_is_acknowledged() -> None:
    of = identity()
    assert of.settled
    one = sent(of, batch())
    assert not of.settled
    fail(one)
    assert not of.settled
    one.request_references += 1
    acknowledge(one)
    assert of.settled


def test_a_transactions_identity_asks_for_no_id_and_starts_sequences_with_each_transaction() -> None:
    P0.forget_sequences()
    made = TransactionalIdentity(ExponentialBackoff(100, 1000, lambda: 0.5))
    assert not made.ready
    assert not made.may_request(0)
    assert made.retry_delay_ms(0) == math.inf
    for epoch in (3, 5):
        made.adopt("x", 8, epoch)
        assert (made.ready, made.transactional_id) == (True, "x")
        one = sent(made, batch(5))
        assert marks(one) == (8, epoch, 0)
        acknowledge(one)
    made.leave()
    assert not made.ready
    assert made.transactional_id is None


# -- dropped records ----------------------------------------------------------------------------------


def test_batches_behind_dropped_records_take_over_their_sequences() -> None:
    of = identity()
    ended(sent(of, batch(1)))
    first, dropped, behind = sent(of, batch(2)), sent(of, batch(5)), sent(of, batch(3))
    behind.write_header()
    start = first.sequence.base_sequence
    fail(dropped)
    left = batch(4)
    of.shrunk(dropped, [left])
    assert left.sequence.base_sequence == start + 2
    assert not of.may_send(left, 0)
    assert not behind.home.is_next(behind), "its refusal is no reason to restart"
    assert of.gaps_due() == [], "two batches are in flight"
    first.request_references -= 1
    first.home.acknowledged(first, 1, 0)
    fail(behind)
    assert of.gaps_due() == [P0]
    of.close_gap(P0)
    assert behind.sequence.base_sequence == start + 6
    behind.write_header()
    header = b"".join(behind.buffer.views())
    assert int.from_bytes(header[53:57], "big") == start + 6, "the header has the old one"
    assert of.gaps_due() == []
    assert not of.settled
    for one in (left, behind):
        ended(sent(of, one), -1)
    assert of.settled
    assert sent(of, batch(1)).sequence.base_sequence == start + 9


def test_a_gap_keeps_a_batch_that_may_have_been_written() -> None:
    of = identity()
    ended(sent(of, batch(1)))
    dropped, behind = sent(of, batch(1)), sent(of, batch(1))
    fail(dropped)
    of.shrunk(dropped, [])
    fail(behind)
    behind.set_possibly_written()
    assert P0.after_gap == [behind]
    with pytest.raises(KafkaSinkError, match="keep their sequences"):
        of.close_gap(P0)


def test_two_gaps_close_at_once() -> None:
    of = identity()
    ended(sent(of, batch(1)))
    one, two, three = (sent(of, batch(1)) for _ in range(3))
    for dropped in (two, one):
        fail(dropped)
        of.shrunk(dropped, [])
    fail(three)
    of.close_gap(P0)
    assert three.sequence == one.sequence
