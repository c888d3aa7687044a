"""Responses about one topic, in any order of arrival."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from kafka_sink.metadata.topic_state import TopicIdentity, TopicIdHistory, TopicState, merge
from kafka_sink.model import UNKNOWN_EPOCH, PartitionInfo, TopicMetadata

NEVER = float("-inf")
OLD, NEW = b"o" * 16, b"n" * 16


def topic(*leaders: tuple[int, int], topic_id: bytes | None = OLD) -> TopicMetadata:
    infos = (PartitionInfo("t", number, leader, epoch) for number, (leader, epoch) in enumerate(leaders))
    return TopicMetadata.of("t", topic_id, tuple(infos))


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


def test_a_lagging_brokers_old_topic_is_refused_until_it_insists() -> None:
    """Should the wrong of two new ids have been taken first, the right one must win in the end."""
    ids = TopicIdHistory()
    assert ids.judge(OLD, NEW) is TopicIdentity.REPLACES
    for _ in range(4):
        assert ids.judge(NEW, OLD) is TopicIdentity.FORMER
    assert ids.judge(NEW, OLD) is TopicIdentity.REPLACES
    assert ids.judge(OLD, NEW) is TopicIdentity.FORMER


def test_the_present_topic_confirmed_ends_the_insistence() -> None:
    ids = TopicIdHistory()
    ids.judge(OLD, NEW)
    for _ in range(4):
        ids.judge(NEW, OLD)
    assert ids.judge(NEW, NEW) is TopicIdentity.SAME
    assert ids.judge(NEW, OLD) is TopicIdentity.FORMER


def test_a_recreated_topic_takes_nothing_from_the_old_one() -> None:
    state = TopicState(0.0)
    assert state.merge_response(topic((1, 9), (2, 9)), 1.0)
    assert state.merge_response(topic((2, 0), topic_id=NEW), 2.0)
    assert state.metadata == topic((2, 0), topic_id=NEW)
    assert not state.merge_response(topic((1, 10), (2, 10)), 3.0)
    assert state.metadata == topic((2, 0), topic_id=NEW)


def test_a_recreated_topic_without_ids_is_accepted_once_responses_insist() -> None:
    """Brokers before 2.8 tell no ids; the epochs of a topic that is created again start at 0."""
    state = TopicState(0.0)
    before, after = topic((1, 9), (2, 7), topic_id=None), topic((2, 0), (1, 0), topic_id=None)
    assert state.merge_response(before, 1.0)
    for now in range(2, 6):
        assert not state.merge_response(after, now)
        assert state.metadata == before
    assert state.merge_response(after, 6.0)
    assert state.metadata == after
    assert state.merge_response(topic((2, 1), (1, 0), topic_id=None), 7.0)


def test_a_broker_before_ids_that_lags_convinces_nobody() -> None:
    state = TopicState(0.0)
    known, lagging = topic((1, 9), topic_id=None), topic((2, 8), topic_id=None)
    state.merge_response(known, 1.0)
    for now in range(2, 30):
        assert state.merge_response(lagging if now % 4 else known, now) == (now % 4 == 0)
        assert state.metadata == known


def test_what_a_broker_before_ids_knows_more_of_is_taken_from_a_response_that_is_refused() -> None:
    state = TopicState(0.0)
    state.merge_response(topic((1, 9), (2, 3), (1, 1), topic_id=None), 1.0)
    assert not state.merge_response(topic((2, 8), (1, 4), topic_id=None), 2.0)
    assert state.metadata == topic((1, 9), (1, 4), (1, 1), topic_id=None)


def test_the_former_topic_does_not_come_back_by_a_hint_and_the_new_one_comes_by_it() -> None:
    """Without ids: what was observed before the topic was found to be recreated is of another topic."""
    before, after = topic((1, 9), topic_id=None), topic((2, 0), topic_id=None)
    state = TopicState(0.0)
    state.merge_response(before, 1.0)
    for now in range(2, 7):
        state.merge_response(after, now)
    assert not state.merge_snapshot(before, 5.0, NEVER)
    assert state.metadata == after
    other = TopicState(0.0)
    other.merge_response(before, 1.0)
    assert other.merge_snapshot(after, 8.0, state.replaced_ms)
    assert other.metadata == after
    assert not other.merge_snapshot(before, 5.0, NEVER)
    assert other.metadata == after
