"""What one cache tells another counts as if the other had heard it itself, at that time."""

from __future__ import annotations

import pickle
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kafka_sink.errors import ClusterChangedError
from kafka_sink.metadata.cache import MetadataCache
from kafka_sink.metadata.topic_state import MetadataSnapshot, TopicSnapshot
from kafka_sink.model import MetadataUpdate, Node, PartitionInfo, TopicMetadata, TopicPartition

MAX_AGE, IDLE = 300_000.0, 300_000.0
NODES = (Node(1, "a", 1), Node(2, "b", 2))
NAMES = tuple(f"t{number:02}" for number in range(30))


def cache() -> MetadataCache:
    return MetadataCache(
        max_age_ms=MAX_AGE, idle_ms=IDLE, retry_backoff_ms=100, retry_backoff_max_ms=1000, random=lambda: 0.5
    )


def topic(name: str, leader: int = 1, epoch: int = 0, topic_id: bytes = b"i" * 16) -> TopicMetadata:
    return TopicMetadata.of(name, topic_id, (PartitionInfo(name, 0, leader, epoch),))


def learn(made: MetadataCache, now: float, *topics: TopicMetadata, nodes: tuple[Node, ...] = NODES) -> None:
    made.on_response(MetadataUpdate(nodes, topics, {}, "cluster"), tuple(one.name for one in topics), now)


def filled_cache(names: tuple[str, ...], now: float) -> MetadataCache:
    made = cache()
    made.note_use(names, now)
    asked = made.next_request(now) or ()
    learn(made, now, *map(topic, asked))
    return made


def leader(made: MetadataCache, name: str = "t00") -> tuple[int, int]:
    info = made.leader(TopicPartition(name, 0))
    assert info is not None
    return info.leader, info.leader_epoch


@settings(deadline=None)
@given(st.floats(0, MAX_AGE * 0.99), st.floats(0, MAX_AGE), st.floats(-1000, 1000))
def test_a_snapshot_makes_the_same_schedule(age: float, later: float, shift: float) -> None:
    """One cache asked itself; one, whose clock reads otherwise, took over a snapshot ``age`` later."""
    own = filled_cache(NAMES, 1000.0)
    own.note_use(NAMES, 1000.0 + age)
    snapshot = pickle.loads(pickle.dumps(own.snapshot(1000.0 + age)))
    assert snapshot.aged(5.0).topics[0].age_ms == pytest.approx(age + 5.0)
    other = cache()
    now = 1000.0 + age + shift
    assert other.import_snapshot(snapshot, now) == len(NAMES)
    other.note_use(NAMES, now)
    assert other.nodes() == own.nodes()
    assert other.cluster_id == "cluster"
    assert all(other.topic(name) == own.topic(name) for name in NAMES)
    asked = own.next_request(1000.0 + age + later)
    again = other.next_request(now + later)
    # Just at a bound the two clocks' rounding decides.
    if all(abs(when) > 0.01 for when in (age + later - MAX_AGE / 2, age + later - MAX_AGE, later - IDLE)):
        assert set(again or ()) == set(asked or ())


def test_a_topic_with_a_hint_needs_no_request() -> None:
    made = cache()
    made.import_topic(topic("t00"), 10.0, 1000.0)
    made.note_use(["t00", "new"], 1001.0)
    assert made.next_request(1001.0) == ("new",)


def test_what_nobody_uses_is_never_asked_for_and_goes() -> None:
    made = cache()
    made.import_snapshot(filled_cache(NAMES, 0.0).snapshot(0.0), 0.0)
    made.note_use(["t03"], 1000.0)
    assert made.names() == ("t03",)
    made.note_use(["t03"], IDLE - 1)
    assert made.next_request(MAX_AGE * 0.9) is None, "enough topics for a request, but only one is in use"
    assert made.next_request(MAX_AGE) == ("t03",)
    assert made.topic("t00") is None
    assert made.topic("t03") is not None


def test_epochs_win_over_ages_and_ids_go_by_age() -> None:
    made = filled_cache(("t00",), 10_000.0)
    assert made.import_topic(topic("t00", 2, 5), 9_000.0, 10_100.0), "a newer epoch, though heard before ours"
    assert leader(made) == (2, 5)
    learn(made, 10_150.0, topic("t00", 2, 5))
    assert not made.import_topic(topic("t00", 1, 4), 0.0, 10_200.0)
    assert not made.import_topic(topic("t00", 1, 0, b"n" * 16), 9_000.0, 10_300.0), "another id, and older"
    assert leader(made) == (2, 5)
    assert made.import_topic(topic("t00", 1, 0, b"n" * 16), 50.0, 10_400.0)
    assert leader(made) == (1, 0)
    learn(made, 10_450.0, topic("t00", 1, 0, b"n" * 16))
    assert not made.import_topic(topic("t00", 2, 9), 0.0, 10_500.0), "the former topic does not come back"


def test_a_hint_mends_a_stale_topic_when_it_is_news_or_younger_than_the_mark() -> None:
    made = filled_cache(("t00",), 0.0)
    made.mark_stale("t00", 5_000.0)
    assert not made.import_topic(topic("t00"), 1_000.0, 5_050.0), "heard before the mark"
    assert made.next_request_delay_ms(5_050.0) == 0
    assert made.import_topic(topic("t00", 2, 1), 2_000.0, 5_060.0)
    assert made.next_request(5_060.0) is None
    made.mark_stale("t00", 9_000.0)
    assert not made.import_topic(topic("t00", 2, 1), 100.0, 9_200.0)
    assert made.next_request(9_200.0) is None, "heard after the mark: an own request would have said so too"


def test_brokers_of_a_later_snapshot_replace_ours() -> None:
    made = filled_cache(("t00",), 10_000.0)
    other = filled_cache(("t00",), 0.0)
    learn(other, 0.0, nodes=(Node(1, "old", 9), Node(3, "c", 3)))
    made.import_snapshot(other.snapshot(0.0).aged(10_000.0), 10_500.0)
    assert made.nodes()[1] == NODES[0], "where we heard it later, it is there"
    assert made.nodes()[3] == Node(3, "c", 3), "but what only they know can be reached"
    learn(other, 10_400.0, nodes=(Node(1, "moved", 5),))
    made.import_snapshot(other.snapshot(10_450.0), 10_500.0)
    assert made.nodes() == {1: Node(1, "moved", 5)}


def test_a_snapshot_of_some_topics_holds_those_that_are_known() -> None:
    made = filled_cache(NAMES, 0.0)
    assert {one.metadata.name for one in made.snapshot(5.0, ["t01", "nobody", "t07"]).topics} == {
        "t01",
        "t07",
    }


def test_requests_wait_while_another_is_asked() -> None:
    made = cache()
    made.note_use(["t00"], 0.0)
    made.defer_requests(200.0)
    assert made.next_request(199.0) is None
    assert made.next_request_delay_ms(50.0) == 150.0
    made.defer_requests(0.0)
    assert made.next_request(60.0) == ("t00",)


def of_cluster(name: str, *topics: TopicMetadata, nodes: tuple[Node, ...] = NODES) -> MetadataUpdate:
    return MetadataUpdate(nodes, topics, {}, name)


def test_hints_of_another_cluster_are_refused() -> None:
    """Its brokers have the same ids: rows for one cluster would go to the other's."""
    made, other = filled_cache(("t00",), 0.0), cache()
    other.note_use(["t00"], 1000.0)
    other.next_request(1000.0)
    elsewhere = (Node(1, "elsewhere", 1),)
    other.on_response(of_cluster("other", topic("t00", 1, 9), nodes=elsewhere), ("t00",), 1000.0)
    before = made.snapshot(2000.0)
    assert made.import_snapshot(other.snapshot(2000.0), 2000.0) == 0
    assert made.snapshot(2000.0) == before
    assert made.nodes() == {node.id: node for node in NODES}


def test_another_clusters_response_replaces_all_that_was_known_before_rows_were_sent() -> None:
    made = filled_cache(("t00", "t01"), 0.0)
    made.mark_stale("t00", 1000.0)
    assert made.next_request(1000.0) == ("t00",)
    elsewhere = (Node(1, "elsewhere", 1),)
    response = of_cluster("other", topic("t00", 1, 0, b"n" * 16), nodes=elsewhere)
    assert made.on_response(response, ("t00",), 1001.0)
    assert made.cluster_id == "other"
    assert made.nodes() == {1: elsewhere[0]}
    assert made.topic("t01") is None
    assert leader(made) == (1, 0)
    assert made.next_request(1001.0) == ("t01",)
    assert not made.on_response(of_cluster("other", topic("t01")), ("t01",), 1002.0)


def test_another_clusters_response_is_refused_once_rows_were_sent() -> None:
    made = filled_cache(("t00",), 0.0)
    made.pinned = True
    made.mark_stale("t00", 1000.0)
    assert made.next_request(1000.0)
    before = made.snapshot(2000.0)
    with pytest.raises(ClusterChangedError, match="cluster other now, and rows were sent to cluster"):
        made.on_response(of_cluster("other", topic("t00", 1, 9)), ("t00",), 1001.0)
    assert made.snapshot(2000.0) == before
    assert made.next_request(1101.0) == ("t00",)
    assert not made.on_response(MetadataUpdate(NODES, (topic("t00"),), {}, None), ("t00",), 1102.0)


@pytest.mark.parametrize("partitions", [0, 1, 10_000])
def test_a_snapshot_is_the_same_after_pickling_and_small(partitions: int) -> None:
    """Catches: half a megabyte of leaders in every task of a write to a topic of 10,000 partitions."""
    chance = random.Random(1)
    found = tuple(
        PartitionInfo("t", index, chance.randrange(-1, 60), chance.choice((-1, 7)))
        for index in range(partitions)
    )
    topic = TopicSnapshot(TopicMetadata.of("t", b"i" * 16, found), 5.0)
    snapshot = MetadataSnapshot((topic,), (Node(1, "h", 9092),), 3.0, "c")
    pickled = pickle.dumps(snapshot)
    assert pickle.loads(pickled) == snapshot
    assert len(pickled) < 400 + 2 * partitions


LIES = [
    topic("t00", 2, 2**31 - 1),
    topic("t00", 2, 0, b"x" * 16),
    TopicMetadata.of("t00", b"i" * 16, tuple(PartitionInfo("t00", number, 2, 9) for number in range(100))),
]


@pytest.mark.parametrize("lie", LIES, ids=["epoch", "id", "partitions"])
def test_what_brokers_say_replaces_what_others_said(lie: TopicMetadata) -> None:
    """Catches: by its epoch or id, what one task invented would outlive all that brokers say."""
    made = filled_cache(("t00",), 0.0)
    assert made.import_topic(lie, 0.0, 1_000.0)
    assert leader(made)[0] == 2
    made.mark_stale("t00", 2_000.0)
    assert made.next_request(2_000.0) == ("t00",)
    learn(made, 2_001.0, topic("t00", 1, 3))
    assert leader(made) == (1, 3)
    learn(made, 2_002.0, topic("t00", 2, 2))
    assert leader(made) == (1, 3), "among brokers epochs decide"
    assert not made.import_topic(topic("t00", 2, 0, b"x" * 16), 5_000.0, 3_000.0)


@pytest.mark.parametrize("lie", LIES, ids=["epoch", "id", "partitions"])
def test_what_others_say_later_replaces_what_others_said(lie: TopicMetadata) -> None:
    """Catches: an invented number of partitions stayed until the task asked brokers itself."""
    made = filled_cache(("t00",), 0.0)
    assert made.import_topic(lie, 0.0, 1_000.0)
    assert not made.import_topic(topic("t00", 1, 3), 500.0, 1_100.0), "that was before"
    assert made.import_topic(topic("t00", 1, 3), 0.0, 2_000.0)
    assert made.topic("t00") == topic("t00", 1, 3)


def test_a_hint_that_was_on_its_way_when_the_topic_was_marked_does_not_mend_it() -> None:
    """Its age does not count the way."""
    made = filled_cache(("t00",), 0.0)
    made.mark_stale("t00", 2_000.0)
    assert not made.import_topic(topic("t00"), 0.0, 2_040.0)
    assert made.next_request(2_200.0) == ("t00",)
