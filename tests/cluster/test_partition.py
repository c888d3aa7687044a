"""What is known of one partition: its sequences, at exact times and without sockets."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kafka_sink.errors import KafkaSinkError
from kafka_sink.model import TopicPartition
from kafka_sink.records.batch_header import NO_SEQUENCE
from tests.support.queues import partition_of
from tests.support.sequences import P0, P1, acknowledge, batch, ended, fail, identity, marks, sent


def test_a_sequence_is_given_once_and_counts_records() -> None:
    of = identity()
    first = sent(of, batch(10))
    acknowledge(first)
    second, other = sent(of, batch(3)), sent(of, batch(3, P1))
    assert [marks(one) for one in (first, second, other)] == [(7, 0, 0), (7, 0, 10), (7, 0, 0)]
    of.assign(second)
    assert marks(second) == (7, 0, 10)


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
    assert (one.queue.is_next(one), two.queue.is_next(two)) == (True, False)
    one.in_request = True
    acknowledge(one)
    assert (of.may_send(two, 0), two.queue.is_next(two)) == (True, True)


def test_no_more_than_four_batches_pass_one_of_unknown_outcome() -> None:
    """However often it is sent again: a broker remembers the last five batches."""
    of = identity()
    acknowledge(sent(of, batch()))
    unknown, *others = [sent(of, batch()) for _ in range(3)]
    unknown.possibly_written = True
    fail(unknown)
    for one in others:
        acknowledge(one)
    assert of.may_send(unknown, 0)
    unknown.in_request = True
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
    parent.queue.on_split(parent, pieces)
    for one in others:
        one.in_request = False
        one.queue.on_acknowledged(one, -1, 0, 0)
    for piece, full in zip(pieces, (False, True), strict=True):
        assert of.may_send(piece, 0)
        piece.in_request = True
        acknowledge(piece)
        if not full:
            sent(of, batch())
        assert of.may_send(batch(), 0) is full, "four have passed the second piece"


def test_an_acknowledgement_means_that_earlier_batches_are_written_too() -> None:
    of = identity()
    acknowledge(sent(of, batch()))
    one, two, three = (sent(of, batch()) for _ in range(3))
    acknowledge(two)
    assert (one.possibly_written, three.possibly_written) == (True, False)
    assert one.queue.is_next(one)


def test_pieces_share_their_parents_sequences_in_its_place() -> None:
    of = identity()
    acknowledge(sent(of, batch()))
    parent, behind = sent(of, batch(10)), sent(of, batch(1))
    pieces = [batch(4), batch(6)]
    parent.queue.on_split(parent, pieces)
    assert [marks(piece) for piece in pieces] == [(7, 0, 1), (7, 0, 5)]
    assert (of.may_send(pieces[0], 0), of.may_send(pieces[1], 0), of.may_send(behind, 0)) == (
        True,
        False,
        False,
    )
    assert behind.sequence.base_sequence == 11


def test_batches_behind_dropped_records_take_over_their_sequences() -> None:
    of = identity()
    ended(sent(of, batch(1)))
    first, dropped, behind = sent(of, batch(2)), sent(of, batch(5)), sent(of, batch(3))
    behind.write_header()
    start = first.sequence.base_sequence
    fail(dropped)
    left = batch(4)
    of.on_shrunk(dropped, [left])
    assert left.sequence.base_sequence == start + 2
    assert not of.may_send(left, 0)
    assert not behind.queue.is_next(behind), "its refusal is no reason to restart"
    assert of.repairable() == [], "two batches are in flight"
    first.in_request = False
    first.queue.on_acknowledged(first, 1, 0, 0)
    fail(behind)
    assert of.repairable() == [P0]
    of.close_gap(P0)
    assert behind.sequence.base_sequence == start + 6
    behind.write_header()
    header = b"".join(behind.buffer.views())
    assert int.from_bytes(header[53:57], "big") == start + 6, "the header has the old one"
    assert of.repairable() == []
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
    of.on_shrunk(dropped, [])
    fail(behind)
    behind.possibly_written = True
    assert P0.after_gap == [behind]
    with pytest.raises(KafkaSinkError, match="keep their sequences"):
        of.close_gap(P0)


def test_sequences_that_are_released_are_given_again() -> None:
    """Catches: a sequence that the leader does not expect, which costs a restart, and a transaction."""
    of = identity()
    acknowledge(sent(of, batch(3)))
    one, two = sent(of, batch(2)), sent(of, batch(1))
    fail(one)
    P0.release_unwritten()
    assert (marks(one), marks(two)) == ((7, 0, 3), (7, 0, 5)), "a batch is in flight"
    fail(two)
    two.possibly_written = True
    P0.release_unwritten()
    assert marks(one) == (7, 0, 3), "a batch may have been written"
    two.possibly_written = False
    P0.release_unwritten()
    assert one.sequence is two.sequence is NO_SEQUENCE
    assert marks(sent(of, two)) == (7, 0, 3)


def test_two_gaps_close_at_once() -> None:
    of = identity()
    ended(sent(of, batch(1)))
    one, two, three = (sent(of, batch(1)) for _ in range(3))
    for dropped in (two, one):
        fail(dropped)
        of.on_shrunk(dropped, [])
    fail(three)
    of.close_gap(P0)
    assert three.sequence == one.sequence


def test_batches_come_back_in_append_order() -> None:
    partition = partition_of(TopicPartition("t", 0))
    batches = [batch(1, partition) for _ in range(4)]
    partition.batches.extend((batches[1], batches[3]))
    for one in (batches[2], batches[0]):
        partition.insert(one)
    assert list(partition.batches) == batches
