"""Responses about one topic, in any order of arrival."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kafka_sink.cluster.topic_state import TopicState, merge
from kafka_sink.model import UNKNOWN_EPOCH, PartitionMetadata, TopicMetadata
from tests.support.topic_metadata import topic_of

OLD, NEW = b"o" * 16, b"n" * 16


def topic(*leaders: tuple[int, int], topic_id: bytes | None = OLD) -> TopicMetadata:
    infos = (PartitionMetadata("t", number, leader, epoch) for number, (leader, epoch) in enumerate(leaders))
    return topic_of("t", topic_id, tuple(infos))


# A broker's history of a topic: the leader of an epoch is always the same one.
def at_epochs(epochs: list[int]) -> TopicMetadata:
    return topic(*((epoch % 3, epoch) for epoch in epochs))


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=4), min_size=1, max_size=6), st.randoms())
def test_the_order_of_arrival_does_not_matter(responses: list[list[int]], random: object) -> None:
    """Without recreation, any order ends in the highest epoch of each partition."""
    shuffled = list(responses)
    random.shuffle(shuffled)  # type: ignore[attr-defined]  # hypothesis' Random
    known = at_epochs(shuffled[0])
    for epochs in shuffled[1:]:
        known = merge(known, at_epochs(epochs), later=True)
    most = max(map(len, responses))
    highest = [max(epochs[p] for epochs in responses if p < len(epochs)) for p in range(most)]
    assert known == at_epochs(highest)


def test_without_epochs_the_later_response_is_believed() -> None:
    known, update = topic((1, UNKNOWN_EPOCH)), topic((2, UNKNOWN_EPOCH))
    assert merge(known, update, later=True) == update
    assert merge(known, update, later=False) == known


def test_an_equal_epoch_goes_by_time() -> None:
    assert merge(topic((1, 4)), topic((-1, 4)), later=True) == topic((-1, 4))
    assert merge(topic((1, 4)), topic((-1, 4)), later=False) == topic((1, 4))


def test_without_ids_a_smaller_topic_is_believed_when_later() -> None:
    known = topic((1, 1), (2, 1), topic_id=None)
    update = topic((1, 2), topic_id=None)
    assert merge(known, update, later=True) == update
    assert merge(known, topic((1, 1), (2, 1), topic_id=OLD), later=True).topic_id == OLD


def test_a_recreated_topic_takes_nothing_from_the_old_one_until_brokers_insist() -> None:
    """Should the wrong of two new ids have been taken first, the right one must win in the end."""
    state, old, new = TopicState(0.0), topic((1, 9), (2, 9)), topic((2, 0), topic_id=NEW)
    assert state.merge_response(old, 1.0)
    for _ in range(10):
        assert state.merge_response(new, 2.0)
    for is_old in [True] * 4 + [False] + [True] * 4:
        assert state.merge_response(old if is_old else new, 3.0) is not is_old
        assert state.metadata == new
    assert state.merge_response(old, 4.0)
    assert state.metadata == old
    assert not state.merge_response(new, 5.0)
    for number in range(100):
        assert state.merge_response(topic((1, 0), topic_id=bytes([number]) * 16), 6.0)
    assert len(state.former_ids) == 8


@pytest.mark.parametrize("topic_id", [OLD, None], ids=["an epoch that no cluster has", "created again"])
def test_lower_epochs_are_accepted_once_responses_insist(topic_id: bytes | None) -> None:
    """Brokers before 2.8 tell no ids; the epochs of a topic that is created again start at 0."""
    state = TopicState(0.0)
    before, after = topic((1, 9), (2, 7), topic_id=topic_id), topic((2, 0), (1, 0), topic_id=topic_id)
    state.merge_response(before, 1.0)
    for now in range(2, 6):
        state.merge_response(after, now)
        assert state.metadata == before
    state.merge_response(after, 6.0)
    assert state.metadata == after
    state.merge_response(before, 7.0)
    assert state.metadata == before


@pytest.mark.parametrize("topic_id", [OLD, None])
def test_a_broker_that_lags_convinces_nobody(topic_id: bytes | None) -> None:
    state = TopicState(0.0)
    known, lagging = topic((1, 9), topic_id=topic_id), topic((2, 8), topic_id=topic_id)
    state.merge_response(known, 1.0)
    for now in range(2, 30):
        state.merge_response(lagging if now % 4 else known, now)
        assert state.metadata == known


def test_newer_epochs_of_a_lagging_broker_are_taken() -> None:
    state = TopicState(0.0)
    state.merge_response(topic((1, 9), (2, 3), (1, 1)), 1.0)
    state.merge_response(topic((2, 8), (1, 4)), 2.0)
    assert state.metadata == topic((1, 9), (1, 4), (1, 1))
