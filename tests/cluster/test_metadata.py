"""KIP-526's rules with plain numbers for the time; what one cache tells another; which addresses are taken.

What one cache tells another counts as if the other had heard it itself, at that time. With TLS and the
system's trust, the coordinator's word alone leads no row to a broker.
"""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kafka_sink.cluster.metadata import ClusterMetadata
from kafka_sink.cluster.topic_state import MetadataSnapshot, TopicSnapshot
from kafka_sink.errors import ClusterChangedError
from kafka_sink.kafka_errors import error_of
from kafka_sink.model import (
    MAX_BROKERS,
    MetadataUpdate,
    Node,
    PartitionMetadata,
    TopicMetadata,
    TopicPartition,
)
from kafka_sink.options import SinkOptions
from tests.support.effort import tries
from tests.support.metadata_model import ANSWERS, NAMES, OK, Pair
from tests.support.topic_metadata import topic_of

MAX_AGE = 300_000.0
IDLE = 300_000.0
NODES = (Node(1, "a", 1), Node(2, "b", 2))


def metadata(max_age_ms: float = MAX_AGE) -> ClusterMetadata:
    times: dict[str, Any] = {"metadata_max_age_ms": int(max_age_ms), "metadata_max_idle_ms": int(IDLE)}
    options = SinkOptions(bootstrap_servers=(), retry_backoff_ms=100, retry_backoff_max_ms=1000, **times)
    return ClusterMetadata(options, random=lambda: 0.5)


def topic(name: str, leader: int = 1, epoch: int = 0, topic_id: bytes | None = b"i" * 16) -> TopicMetadata:
    return topic_of(name, topic_id, (PartitionMetadata(name, 0, leader, epoch),))


SOME_NAMES = tuple(f"t{number:02}" for number in range(30))


def learn(
    made: ClusterMetadata, now: float, *topics: TopicMetadata, nodes: tuple[Node, ...] = NODES, **errors: int
) -> tuple[str, ...]:
    """The request that is due, or else one for these topics, gets this response; what it asked for."""
    asked = made.next_request(now) or tuple(one.name for one in topics)
    made.on_response(MetadataUpdate(nodes, topics, errors, "cluster"), asked, now)
    return asked


def filled(*names: str, now: float = 0.0) -> ClusterMetadata:
    made = metadata()
    made.on_use(names, now)
    learn(made, now, *map(topic, names))
    return made


def leader(made: ClusterMetadata, name: str = "t00") -> tuple[int, int]:
    info = made.leader(TopicPartition(name, 0))
    assert info is not None
    return info.leader, info.leader_epoch


def test_a_leader_hint_counts_only_when_newer_known_and_of_this_topic() -> None:
    made = filled("t00")
    where = TopicPartition("t00", 0)
    assert made.on_leader_hint(where, 2, 5, NODES)
    assert not made.on_leader_hint(where, 1, 5, NODES)
    assert not made.on_leader_hint(where, 9, 6, ()), "the address of broker 9 is unknown"
    assert leader(made) == (2, 5)
    learn(made, 10, topic("t00", topic_id=b"n" * 16))
    assert not made.on_leader_hint(where, 2, 5, NODES, topic_id=b"i" * 16)
    assert made.on_leader_hint(where, 2, 5, NODES, topic_id=b"n" * 16)
    # Brokers do not grow without end.
    assert made.on_leader_hint(where, 3, 6, (Node(3, "c", 3), Node(4, "d", 4)))
    assert set(made.nodes()) == {1, 2, 3}, "only the leader's address is needed"
    for epoch in range(7, 2 * MAX_BROKERS):
        made.on_leader_hint(where, epoch, epoch, (Node(epoch, "x", 9092),))
    assert len(made.nodes()) <= MAX_BROKERS


@pytest.mark.parametrize("is_snapshot", [False, True])
@pytest.mark.parametrize("is_known_here", [True, False])
def test_confirmed_metadata_survives_a_lagging_broker(is_snapshot: bool, is_known_here: bool) -> None:
    """Catches: while the metadata was another cache's, as at each task's start, a lagging broker's took the
    place of all of it, of a leader that a Produce response had named, too."""
    made, lagging = metadata(), topic("t00", 1, 4)
    if is_known_here:
        learn(made, 0.0, lagging)
    made.import_snapshot(snapshot_of(topic("t00", 1, 5)), 10.0)
    assert made.on_leader_hint(TopicPartition("t00", 0), 2, 6, NODES)
    if is_snapshot:
        assert not made.import_topic(lagging, 1.0, 30.0)
    else:
        learn(made, 30.0, lagging)
    assert leader(made) == (2, 6)


def snapshot_of(*topics: TopicMetadata) -> MetadataSnapshot:
    return MetadataSnapshot(tuple(TopicSnapshot(one, 0.0) for one in topics), NODES, 0.0, "cluster")


def test_a_leader_that_a_broker_names_confirms_nothing_else() -> None:
    def partitions(count: int, leader: int, epoch: int) -> TopicMetadata:
        infos = [PartitionMetadata("t00", number, leader, epoch) for number in range(count)]
        return topic_of("t00", b"i" * 16, infos)

    made = metadata()
    made.import_snapshot(snapshot_of(partitions(3, 1, 9)), 10.0)
    assert made.on_leader_hint(TopicPartition("t00", 0), 2, 10, NODES)
    learn(made, 30.0, partitions(2, 2, 5))
    found = made.topic("t00")
    assert found is not None
    assert [(one.leader, one.leader_epoch) for one in found.partitions] == [(2, 10), (2, 5)]


def test_a_topic_that_is_evicted_while_it_is_asked_for_stays_away() -> None:
    made = metadata()
    made.on_use(["t"], 0)
    asked = made.next_request(0) or ()
    assert made.next_request(IDLE) is None
    made.on_response(MetadataUpdate(NODES, (topic("t"),), {}), asked, IDLE)
    assert made.topic("t") is None


def test_a_partition_without_a_leader_is_asked_for_a_while_and_then_only_when_rows_wait() -> None:
    made = filled("t00")
    now, requests = 1000.0, 0
    made.mark_stale("t00", now)
    while now < MAX_AGE / 2:
        if made.next_request_delay_ms(now) == 0:
            requests += bool(learn(made, now, topic("t00", leader=-1, epoch=1)))
        now += 50
    assert requests == 9
    assert leader(made)[0] == -1
    made.mark_stale("t00", now)
    assert made.next_request(now) == ("t00",)


@pytest.mark.parametrize("is_known", [False, True], ids=["never known", "deleted"])
def test_a_topic_that_brokers_do_not_know_is_requested_only_while_rows_wait(is_known: bool) -> None:
    """Catches: one request a second until metadata.max.idle.ms after the last row (303 in 300 s)."""
    made, now = filled("t00", "t01", now=-10_000.0), 0.0
    name = "t00" if is_known else "missing"

    def requests_until(end: float, wait: Callable[[float], None]) -> int:
        nonlocal now
        count = 0
        while now < end:
            wait(now)
            if asked := made.next_request(now):
                made.on_response(MetadataUpdate(NODES, (), {name: 3}), asked, now)
                count += 1
            now += 50
        return count

    assert requests_until(20_000, lambda at: made.mark_stale(name, at)) > 15
    assert requests_until(20_000 + IDLE / 2, lambda at: made.on_use(["t01"], at)) <= 3
    assert not made.has_request_due(now)
    made.on_use([name], now)
    assert name in (made.next_request(now) or ())


def test_a_refused_topic_is_asked_for_again_while_rows_wait() -> None:
    made = metadata()
    made.on_use(["secret"], 0)
    now, waits = 0.0, []
    for _ in range(5):
        assert learn(made, now, secret=29) == ("secret",)
        assert made.next_request_delay_ms(now) > 10_000
        made.mark_stale("secret", now)
        waits.append(made.next_request_delay_ms(now))
        now += waits[-1]
    assert waits == [100, 200, 400, 800, 1000]
    learn(made, now, topic("secret"))
    assert made.topic("secret") is not None


def test_a_leader_that_is_no_known_broker_counts_as_none() -> None:
    made = filled("t00")
    made.on_response(MetadataUpdate(NODES[:1], (topic("t00", leader=2, epoch=1),)), (), 10)
    assert leader(made)[0] == -1
    made.forget_nodes()
    learn(made, 20, topic("t00", leader=2, epoch=1))
    assert leader(made)[0] == 2


def calls_of(work: Callable[[], object]) -> int:
    """Python and C calls made: a measure of work that no other load disturbs."""
    count = 0

    def note(_frame: object, event: str, _arg: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


def test_work_does_not_grow_with_the_topics_that_are_cached() -> None:
    costs = []
    for count in (100, 3_000):
        made = filled(*(f"t{number:05}" for number in range(count)))
        # Each refreshed at a time of its own, as after an hour.
        for number in range(count):
            name = f"t{number:05}"
            learn(made, number * 60_000 / count, topic(name, epoch=1))
        now = 60_000.0

        def send(made: ClusterMetadata = made, start: float = now) -> None:
            for step in range(200):
                made.on_use([f"t{step % 50:05}"], start + step)
                made.next_request_delay_ms(start + step)
                made.next_request(start + step)

        costs.append(calls_of(send))
    assert costs[1] < 1.5 * costs[0], f"{costs[0]} calls with 100 topics, {costs[1]} with 3,000"


def test_a_request_is_due_while_it_is_in_flight_or_backs_off() -> None:
    made = filled("t00")
    assert not made.has_request_due(1000)
    made.mark_stale("t00", 1000)
    assert made.has_request_due(1000)
    asked = made.next_request(1000) or ()
    assert made.has_request_due(1000)
    made.on_failure(1000)
    assert made.next_request(1050) is None
    assert made.has_request_due(1050), "during the backoff"
    made.next_request(1100)
    made.on_response(MetadataUpdate(NODES, (topic("t00"),), {}), asked, 1100)
    assert not made.has_request_due(1100)


@pytest.mark.parametrize("code", [17, 29])
def test_a_refusal_in_a_refresh_keeps_the_metadata(code: int) -> None:
    """A broker that has not loaded its authorizer's rules refuses what it allows a second later."""
    made = filled("t00")
    made.mark_stale("t00", 1000)
    assert learn(made, 1000, t00=code) == ("t00",)
    assert made.topic("t00") is not None
    assert error_of(code).name in (made.describe_lookup_error("t00") or "")
    assert made.next_request(1099) is None
    assert made.next_request(1100) == ("t00",)
    learn(made, 1110, topic("t00", 2, 1))
    assert made.describe_lookup_error("t00") is None


def test_non_urgent_topics_are_left_to_another_cache_that_refreshes_them() -> None:
    names = [f"t{number:05}" for number in range(50)]
    made = filled(*names)
    made.share_refreshes(True)
    for now in range(0, int(MAX_AGE), 10_000):
        made.on_use(names, now)
        assert made.next_request(now) is None
        assert made.next_request_delay_ms(now) > 0
    made.on_use(["new"], MAX_AGE - 1)
    assert made.next_request(MAX_AGE - 1) == ("new",)
    made.on_response(MetadataUpdate(NODES, (topic("new"),), {}), ("new",), MAX_AGE - 1)
    assert set(made.next_request(MAX_AGE) or ()) == set(names), "unless it fails to"
    lost = filled(*names)
    lost.share_refreshes(True)
    lost.on_use(names, MAX_AGE * 0.6)
    assert lost.next_request(MAX_AGE * 0.6) is None
    assert lost.next_request_delay_ms(MAX_AGE * 0.6) > 0
    lost.share_refreshes(False)
    assert lost.next_request_delay_ms(MAX_AGE * 0.6) == 0
    assert len(lost.next_request(MAX_AGE * 0.6) or ()) == 20


# -- against a slow model ----------------------------------------------------------------------------------

SOME = st.tuples(st.integers(0, 35), st.integers(1, 36))
STEP = st.one_of(
    st.tuples(st.just("use"), SOME),
    st.tuples(st.just("use"), st.just((0, 36))),
    st.tuples(st.just("mark"), st.integers(0, 35)),
    st.tuples(
        st.just("advance"), st.sampled_from([1, 20, 99, 100, 101, 400, 1500, 5000, 20_000, 31_000, 150_000])
    ),
    st.tuples(st.just("respond"), st.lists(st.sampled_from(ANSWERS), min_size=1, max_size=8)),
    st.tuples(st.just("respond"), st.just([OK])),
    st.tuples(st.just("fail"), st.none()),
)


@settings(max_examples=tries(300), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from([10_000.0, 60_000.0, 300_000.0]), st.sampled_from([5_000.0, 300_000.0]), st.data())
def test_every_decision_is_the_models(max_age: float, idle: float, data: st.DataObject) -> None:
    pair = Pair(max_age, idle)
    for kind, what in data.draw(st.lists(STEP, max_size=60)):
        if kind == "use":
            names = NAMES[what[0] : what[0] + what[1]]
            pair.cache.on_use(names, pair.now)
            for name in names:
                pair.model.use(name, pair.now)
        elif kind == "mark":
            pair.cache.mark_stale(NAMES[what], pair.now)
            pair.model.mark(NAMES[what], pair.now)
        elif kind == "advance":
            pair.advance(what)
        elif kind == "respond":
            pair.respond(lambda index, what=what: what[index % len(what)])
        else:
            pair.fail()
        pair.look()


# -- what one tells another --------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.floats(0, MAX_AGE * 0.99), st.floats(0, MAX_AGE), st.floats(-1000, 1000))
def test_a_snapshot_makes_the_same_schedule(age: float, later: float, shift: float) -> None:
    """One cache asked itself; one, whose clock reads otherwise, took over a snapshot ``age`` later."""
    own = filled(*SOME_NAMES, now=1000.0)
    own.on_use(SOME_NAMES, 1000.0 + age)
    snapshot = pickle.loads(pickle.dumps(own.snapshot(1000.0 + age)))
    assert snapshot.aged(5.0).topics[0].age_ms == pytest.approx(age + 5.0)
    other = metadata()
    now = 1000.0 + age + shift
    assert other.import_snapshot(snapshot, now) == len(SOME_NAMES)
    other.on_use(SOME_NAMES, now)
    assert other.nodes() == own.nodes()
    assert other.cluster_id == "cluster"
    assert all(other.topic(name) == own.topic(name) for name in SOME_NAMES)
    asked = own.next_request(1000.0 + age + later)
    again = other.next_request(now + later)
    # Just at a bound the two clocks' rounding decides.
    if all(abs(when) > 0.01 for when in (age + later - MAX_AGE / 2, age + later - MAX_AGE, later - IDLE)):
        assert set(again or ()) == set(asked or ())


def test_unused_topics_are_never_requested_and_expire() -> None:
    made = metadata()
    made.import_snapshot(filled(*SOME_NAMES).snapshot(0.0), 0.0)
    made.on_use(["t03"], 1000.0)
    assert made.names() == ("t03",)
    made.on_use(["t03"], IDLE - 1)
    assert made.next_request(MAX_AGE * 0.9) is None, "enough topics for a request, but only one is in use"
    assert made.next_request(MAX_AGE) == ("t03",)
    assert made.topic("t00") is None
    assert made.topic("t03") is not None


def test_epochs_win_over_ages_and_ids_go_by_age() -> None:
    made = filled("t00", now=10_000.0)
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
    made = filled("t00")
    made.mark_stale("t00", 5_000.0)
    assert not made.import_topic(topic("t00"), 1_000.0, 5_050.0), "heard before the mark"
    assert made.next_request_delay_ms(5_050.0) == 0
    assert made.import_topic(topic("t00", 2, 1), 2_000.0, 5_060.0)
    assert made.next_request(5_060.0) is None
    made.mark_stale("t00", 9_000.0)
    assert not made.import_topic(topic("t00", 2, 1), 100.0, 9_200.0)
    assert made.next_request(9_200.0) is None, "heard after the mark: an own request would have said so too"


def test_brokers_of_a_later_snapshot_replace_ours() -> None:
    made = filled("t00", now=10_000.0)
    other = filled("t00")
    learn(other, 0.0, nodes=(Node(1, "old", 9), Node(3, "c", 3)))
    made.import_snapshot(other.snapshot(0.0).aged(10_000.0), 10_500.0)
    assert made.nodes()[1] == NODES[0], "where we heard it later, it is there"
    assert made.nodes()[3] == Node(3, "c", 3), "but what only they know can be reached"
    learn(other, 10_400.0, nodes=(Node(1, "moved", 5),))
    made.import_snapshot(other.snapshot(10_450.0), 10_500.0)
    assert made.nodes() == {1: Node(1, "moved", 5)}


def test_a_snapshot_of_some_topics_holds_those_that_are_known() -> None:
    made = filled(*SOME_NAMES)
    some = made.snapshot(5.0, ["t01", "nobody", "t07"])
    assert {one.metadata.name for one in some.topics} == {"t01", "t07"}


def test_requests_wait_while_another_is_asked() -> None:
    made = metadata()
    made.on_use(["t00"], 0.0)
    made.pause_requests(200.0)
    assert made.next_request(199.0) is None
    assert made.next_request_delay_ms(50.0) == 150.0
    made.pause_requests(0.0)
    assert made.next_request(60.0) == ("t00",)


def of_cluster(name: str, *topics: TopicMetadata, nodes: tuple[Node, ...] = NODES) -> MetadataUpdate:
    return MetadataUpdate(nodes, topics, {}, name)


def test_hints_of_another_cluster_are_refused() -> None:
    """Its brokers have the same ids: rows for one cluster would go to the other's."""
    made, other = filled("t00"), metadata()
    other.on_use(["t00"], 1000.0)
    other.next_request(1000.0)
    elsewhere = (Node(1, "elsewhere", 1),)
    other.on_response(of_cluster("other", topic("t00", 1, 9), nodes=elsewhere), ("t00",), 1000.0)
    before = made.snapshot(2000.0)
    assert made.import_snapshot(other.snapshot(2000.0), 2000.0) == 0
    assert made.snapshot(2000.0) == before
    assert made.nodes() == {node.id: node for node in NODES}


def test_another_clusters_response_replaces_all_that_was_known_before_rows_were_sent() -> None:
    made = filled("t00", "t01")
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
    made = filled("t00")
    made.pinned = True
    made.mark_stale("t00", 1000.0)
    assert made.next_request(1000.0)
    before = made.snapshot(2000.0)
    with pytest.raises(ClusterChangedError, match="leads to cluster other, but rows were already sent"):
        made.on_response(of_cluster("other", topic("t00", 1, 9)), ("t00",), 1001.0)
    assert made.snapshot(2000.0) == before
    assert made.next_request(1101.0) == ("t00",)
    assert not made.on_response(MetadataUpdate(NODES, (topic("t00"),), {}, None), ("t00",), 1102.0)


@pytest.mark.parametrize("partitions", [0, 1, 10_000])
def test_a_snapshot_is_the_same_after_pickling_and_small(partitions: int) -> None:
    """Catches: half a megabyte of leaders in every task of a write to a topic of 10,000 partitions."""
    chance = random.Random(1)
    found = tuple(
        PartitionMetadata("t", index, chance.randrange(-1, 60), chance.choice((-1, 7)))
        for index in range(partitions)
    )
    topic = TopicSnapshot(topic_of("t", b"i" * 16, found), 5.0)
    snapshot = MetadataSnapshot((topic,), (Node(1, "h", 9092),), 3.0, "c")
    pickled = pickle.dumps(snapshot)
    assert pickle.loads(pickled) == snapshot
    assert len(pickled) < 400 + 2 * partitions


LIES = [
    topic("t00", 2, 2**31 - 1),
    topic("t00", 2, 0, b"x" * 16),
    topic_of("t00", b"i" * 16, tuple(PartitionMetadata("t00", number, 2, 9) for number in range(100))),
]


@pytest.mark.parametrize("lie", LIES, ids=["epoch", "id", "partitions"])
def test_a_response_replaces_what_other_tasks_reported(lie: TopicMetadata) -> None:
    """Catches: by its epoch or id, what one task invented would outlive all that brokers say."""
    made = filled("t00")
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
def test_a_later_snapshot_replaces_an_earlier_one(lie: TopicMetadata) -> None:
    """Catches: an invented number of partitions stayed until the task asked brokers itself."""
    made = filled("t00")
    assert made.import_topic(lie, 0.0, 1_000.0)
    assert not made.import_topic(topic("t00", 1, 3), 500.0, 1_100.0), "that was before"
    assert made.import_topic(topic("t00", 1, 3), 0.0, 2_000.0)
    assert made.topic("t00") == topic("t00", 1, 3)


def test_a_hint_sent_before_the_topic_was_marked_leaves_it_stale() -> None:
    """Its age does not count the way."""
    made = filled("t00")
    made.mark_stale("t00", 2_000.0)
    assert not made.import_topic(topic("t00"), 0.0, 2_040.0)
    assert made.next_request(2_200.0) == ("t00",)


# -- which addresses are taken -----------------------------------------------------------------------------

FORGED, REAL = Node(1, "evil.example", 9093), Node(1, "broker.example", 9093)
REAL_TOPIC = topic_of("t", bytes([7] * 16), (PartitionMetadata("t", 0, 1, 3),))


def hint(node: Node) -> MetadataSnapshot:
    return MetadataSnapshot((TopicSnapshot(REAL_TOPIC, 0.0),), (node,), 0.0, "c")


def address(view: ClusterMetadata) -> str | None:
    leader = view.leader(TopicPartition("t", 0))
    nodes = view.nodes()
    return None if leader is None or leader.leader not in nodes else nodes[leader.leader].host


def test_an_address_that_no_broker_has_named_is_not_taken() -> None:
    """Catches: rows acknowledged by a broker of whoever knows the coordinator's secret."""
    view = metadata()
    view.confirmed_nodes_only = True
    assert view.import_snapshot(hint(FORGED), 0.0) == 0
    assert address(view) is None
    view.on_response(MetadataUpdate((REAL,), (REAL_TOPIC,), {}, "c"), ("t",), 1.0)
    assert view.import_snapshot(hint(FORGED), 2.0) == 0
    assert view.nodes()[1] == REAL
    assert view.import_snapshot(hint(REAL), 3.0) == 1
    assert address(view) == "broker.example"


def test_elsewhere_certificates_or_nothing_tell_brokers_apart() -> None:
    view = metadata()
    view.confirmed_nodes_only = False
    assert view.import_snapshot(hint(FORGED), 0.0) == 1
    assert address(view) == "evil.example"
