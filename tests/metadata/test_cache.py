"""KIP-526's rules with plain numbers for the time."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable

import pytest

from kafka_sink.metadata.cache import MetadataCache
from kafka_sink.model import MAX_BROKERS, MetadataUpdate, Node, PartitionInfo, TopicMetadata, TopicPartition

MAX_AGE = 300_000.0
IDLE = 300_000.0
NODES = (Node(1, "a", 1), Node(2, "b", 2))


def cache() -> MetadataCache:
    return MetadataCache(
        max_age_ms=MAX_AGE, idle_ms=IDLE, retry_backoff_ms=100, retry_backoff_max_ms=1000, random=lambda: 0.5
    )


def topic(name: str, leader: int = 1, epoch: int = 0, topic_id: bytes | None = b"i" * 16) -> TopicMetadata:
    return TopicMetadata.of(name, topic_id, (PartitionInfo(name, 0, leader, epoch),))


def response(*topics: TopicMetadata, **errors: int) -> MetadataUpdate:
    return MetadataUpdate(NODES, topics, errors)


def filled(count: int, now: float = 0.0) -> MetadataCache:
    made = cache()
    names = [f"t{number:05}" for number in range(count)]
    made.note_use(names, now)
    asked = made.next_request(now)
    assert asked is not None
    made.on_response(response(*map(topic, asked)), asked, now)
    return made


def test_all_unknown_topics_go_into_one_request() -> None:
    made = cache()
    made.note_use((f"t{number}" for number in range(2000)), 0)
    assert len(made.next_request(0) or ()) == 2000
    assert made.next_request(0) is None, "one request at a time"
    assert made.next_request_delay_ms(0) == math.inf


def test_nothing_is_asked_while_fresh() -> None:
    made = filled(10)
    assert made.next_request(1000) is None
    assert made.next_request_delay_ms(1000) > 0


def test_old_topics_become_urgent_at_max_age() -> None:
    made = filled(10)
    for now in range(0, int(MAX_AGE), 10_000):
        made.note_use([f"t{number:05}" for number in range(10)], now)
        assert made.next_request(now) is None
    assert len(made.next_request(MAX_AGE) or ()) == 10


def test_non_urgent_topics_fill_a_request_oldest_first() -> None:
    made = filled(15)
    late = MAX_AGE * 0.6
    made.note_use([f"t{number:05}" for number in range(15)], late)
    made.note_use(["new"], late)
    asked = made.next_request(late) or ()
    assert asked[0] == "new"
    assert len(asked) == 16, "15 non-urgent ones ride along: 16 is below the target of 20"


def test_enough_non_urgent_topics_make_a_request_of_their_own() -> None:
    made = filled(25)
    made.note_use([f"t{number:05}" for number in range(25)], MAX_AGE * 0.4)
    assert made.next_request(MAX_AGE * 0.45) is None
    assert len(made.next_request(MAX_AGE * 0.51) or ()) == 20


def test_target_size_follows_the_number_of_topics() -> None:
    made = filled(9000)
    asked = made.next_request(MAX_AGE * 0.51) or ()
    assert len(asked) == int(9000 / (MAX_AGE / 1000) * 10)


def test_what_has_been_idle_does_not_make_the_delay_zero_for_ever() -> None:
    """A caller that asks first whether anything is wanted would turn in a loop without a pause."""
    made = MetadataCache(
        max_age_ms=10 * IDLE,
        idle_ms=IDLE,
        retry_backoff_ms=100,
        retry_backoff_max_ms=1000,
        random=lambda: 0.5,
    )
    made.note_use(["t"], 0)
    made.on_response(response(topic("t")), made.next_request(0) or (), 0)
    made.note_use(["t"], IDLE - 1)
    for now in (IDLE, IDLE + 1, 2 * IDLE, 2 * IDLE + 1):
        assert not made.is_wanting(now)
        assert made.next_request_delay_ms(now) > 0
    assert made.topic("t") is None


def test_idle_topics_are_forgotten() -> None:
    made = filled(3)
    made.note_use(["t00001"], IDLE - 1)
    made.next_request(IDLE)
    assert made.topic("t00000") is None
    assert made.topic("t00001") is not None


def test_an_older_epoch_never_overwrites_a_newer_one() -> None:
    made = filled(1)
    made.on_response(response(topic("t00000", leader=2, epoch=7)), (), 10)
    made.on_response(response(topic("t00000", leader=1, epoch=6)), (), 20)
    info = made.leader(TopicPartition("t00000", 0))
    assert info is not None
    assert (info.leader, info.leader_epoch) == (2, 7)


def test_a_recreated_topic_replaces_all_and_stays() -> None:
    made = filled(1)
    made.on_response(response(topic("t00000", leader=1, epoch=9)), (), 10)
    made.on_response(response(topic("t00000", leader=2, epoch=0, topic_id=b"n" * 16)), (), 20)
    info = made.leader(TopicPartition("t00000", 0))
    assert info is not None
    assert (info.leader, info.leader_epoch) == (2, 0)
    made.on_response(response(topic("t00000", leader=1, epoch=10)), (), 30)
    late = made.topic("t00000")
    assert late is not None
    assert late.topic_id == b"n" * 16, "a late response brought the old topic back"


def test_errors_keep_a_topic_urgent_with_growing_backoff() -> None:
    made = cache()
    made.note_use(["missing"], 0)
    waits = []
    now = 0.0
    for _ in range(5):
        asked = made.next_request(now)
        assert asked == ("missing",)
        made.on_response(response(missing=3), asked, now)
        wait = made.next_request_delay_ms(now)
        waits.append(wait)
        assert made.next_request(now + wait - 1) is None
        now += wait
        made.note_use(["missing"], now)
    assert waits == [100, 200, 400, 800, 1000]
    assert made.topic_error("missing") == 3


def test_final_errors_are_not_asked_again() -> None:
    made = cache()
    made.note_use(["secret"], 0)
    asked = made.next_request(0) or ()
    made.on_response(response(secret=29), asked, 0)
    made.note_use(["secret"], 10)
    assert made.next_request(10_000) is None
    assert made.topic_error("secret") == 29


def test_a_failed_request_is_asked_again_after_the_backoff() -> None:
    made = cache()
    made.note_use(["t"], 0)
    assert made.next_request(0)
    made.on_failure(0)
    assert made.next_request(99) is None
    assert made.next_request(100) == ("t",)


def test_a_stale_mark_does_not_ask_hundreds_of_times_a_second() -> None:
    made = filled(1)
    asked = 0
    for now in range(1000):
        made.mark_stale("t00000", float(now))
        names = made.next_request(float(now))
        if names:
            asked += 1
            made.on_response(response(topic("t00000")), names, float(now))
    assert asked <= 10


def test_a_leader_hint_counts_only_when_newer_and_known() -> None:
    made = filled(1)
    where = TopicPartition("t00000", 0)
    assert made.leader_hint(where, 2, 5, NODES)
    assert not made.leader_hint(where, 1, 5, NODES)
    assert not made.leader_hint(where, 9, 6, ()), "the address of broker 9 is unknown"
    info = made.leader(where)
    assert info is not None
    assert info.leader == 2


def test_leader_hints_do_not_add_brokers_without_end() -> None:
    made = filled(1)
    where = TopicPartition("t00000", 0)
    assert made.leader_hint(where, 3, 1, (Node(3, "c", 3), Node(4, "d", 4)))
    assert set(made.nodes()) == {1, 2, 3}, "only the leader's address is needed"
    for epoch in range(2, 2 * MAX_BROKERS):
        made.leader_hint(where, epoch, epoch, (Node(epoch, "x", 9092),))
    assert len(made.nodes()) <= MAX_BROKERS


def test_used_topics_outlive_idle_ones_by_their_last_use() -> None:
    made = filled(3)
    for now in range(0, int(3 * IDLE), 60_000):
        made.note_use(["t00001"], now)
        asked = made.next_request(now)
        if asked:
            made.on_response(response(*map(topic, asked)), asked, now)
    assert made.names() == ("t00001",)
    made.next_request(3 * IDLE + IDLE)
    assert made.names() == ()


def test_a_topic_that_is_evicted_while_it_is_asked_for_stays_away() -> None:
    made = cache()
    made.note_use(["t"], 0)
    asked = made.next_request(0) or ()
    assert made.next_request(IDLE) is None
    made.on_response(response(topic("t")), asked, IDLE)
    assert made.topic("t") is None


def test_a_mark_during_a_request_outlives_a_response_that_says_the_same() -> None:
    made = filled(1)
    made.mark_stale("t00000", 1000)
    asked = made.next_request(1000) or ()
    made.mark_stale("t00000", 1001)
    made.on_response(response(topic("t00000")), asked, 1002)
    assert made.next_request_delay_ms(1002) == 100, "asked again after the backoff"
    asked = made.next_request(1102) or ()
    made.mark_stale("t00000", 1103)
    made.on_response(response(topic("t00000", leader=2, epoch=1)), asked, 1104)
    assert made.next_request_delay_ms(1104) > 1000, "the response brought what the mark missed"


def test_stale_topics_gather_after_a_response_but_new_ones_go_at_once() -> None:
    made = filled(30)
    made.mark_stale("t00000", 1000)
    asked = made.next_request(1000) or ()
    made.on_response(response(*map(topic, asked)), asked, 1010)
    for number in range(1, 11):
        made.mark_stale(f"t{number:05}", 1010 + number)
        assert made.next_request(1010 + number) is None
    assert len(made.next_request(1110) or ()) == 10
    made.on_failure(1110)
    made.note_use(["new"], 1500)
    assert "new" in (made.next_request(1500) or ())


def test_a_missing_topic_does_not_hold_back_others() -> None:
    made = cache()
    made.note_use(["missing"], 0)
    for now in (0, 100, 300):
        asked = made.next_request(now) or ()
        made.on_response(response(missing=3), asked, now)
    made.note_use(["other"], 301)
    assert made.next_request(301) == ("other",)


def test_a_partition_without_a_leader_is_asked_for_a_while_and_then_only_when_rows_wait() -> None:
    made = filled(1)
    now, requests = 1000.0, 0
    made.mark_stale("t00000", now)
    while now < MAX_AGE / 2:
        asked = made.next_request(now)
        if asked:
            requests += 1
            made.on_response(response(topic("t00000", leader=-1, epoch=1)), asked, now)
        now += 50
    assert requests == 9
    info = made.leader(TopicPartition("t00000", 0))
    assert info is not None
    assert info.leader == -1
    made.mark_stale("t00000", now)
    assert made.next_request(now) == ("t00000",)


def test_a_leader_that_is_no_known_broker_counts_as_none() -> None:
    made = filled(1)
    made.on_response(MetadataUpdate(NODES[:1], (topic("t00000", leader=2, epoch=1),)), (), 10)
    info = made.leader(TopicPartition("t00000", 0))
    assert info is not None
    assert info.leader == -1
    made.forget_nodes()
    made.on_response(response(topic("t00000", leader=2, epoch=1)), (), 20)
    info = made.leader(TopicPartition("t00000", 0))
    assert info is not None
    assert info.leader == 2


def test_a_hint_of_a_former_topic_is_refused() -> None:
    made = filled(1)
    made.on_response(response(topic("t00000", topic_id=b"n" * 16)), (), 10)
    where = TopicPartition("t00000", 0)
    assert not made.leader_hint(where, 2, 5, NODES, topic_id=b"i" * 16)
    assert made.leader_hint(where, 2, 5, NODES, topic_id=b"n" * 16)


def test_final_errors_are_asked_again_after_max_age() -> None:
    made = cache()
    made.note_use(["secret"], 0)
    asked = made.next_request(0) or ()
    made.on_response(response(secret=29), asked, 0)
    for now in range(0, int(MAX_AGE), 50_000):
        made.note_use(["secret"], now)
    made.note_use(["secret"], MAX_AGE)
    assert made.next_request(MAX_AGE) == ("secret",)


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
    for count in (100, 10_000):
        made = filled(count)
        # Each refreshed at a time of its own, as after an hour.
        for number in range(count):
            name = f"t{number:05}"
            made.on_response(response(topic(name, epoch=1)), (name,), number * 60_000 / count)
        now = 60_000.0

        def send(made: MetadataCache = made, start: float = now) -> None:
            for step in range(200):
                made.note_use([f"t{step % 50:05}"], start + step)
                made.next_request_delay_ms(start + step)
                made.next_request(start + step)

        costs.append(calls_of(send))
    assert costs[1] < 1.5 * costs[0], f"{costs[0]} calls with 100 topics, {costs[1]} with 10,000"


def test_wanting_is_waiting_for_a_response_or_for_the_backoff() -> None:
    made = filled(1)
    assert not made.is_wanting(1000)
    made.mark_stale("t00000", 1000)
    assert made.is_wanting(1000)
    asked = made.next_request(1000) or ()
    assert made.is_wanting(1000)
    made.on_failure(1000)
    assert made.next_request(1050) is None
    assert made.is_wanting(1050), "the backoff is no reason not to want"
    made.next_request(1100)
    made.on_response(response(topic("t00000")), asked, 1100)
    assert not made.is_wanting(1100)


@pytest.mark.parametrize("code", [17, 29])
def test_one_refusal_in_a_refresh_leaves_what_is_known(code: int) -> None:
    """A broker that has not loaded its authorizer's rules refuses what it allows a second later."""
    made = filled(1)
    made.mark_stale("t00000", 1000)
    asked = made.next_request(1000) or ()
    made.on_response(response(t00000=code), asked, 1000)
    assert made.topic("t00000") is not None
    assert made.topic_error("t00000") is None
    assert made.lookup_error("t00000") == code
    assert made.next_request(1099) is None
    assert made.next_request(1100) == ("t00000",)
    made.on_response(response(topic("t00000", 2, 1)), ("t00000",), 1110)
    assert made.lookup_error("t00000") is None


def test_a_refused_topic_is_asked_for_again_while_rows_wait() -> None:
    made = cache()
    made.note_use(["secret"], 0)
    now, waits = 0.0, []
    for _ in range(5):
        asked = made.next_request(now) or ()
        made.on_response(response(secret=29), asked, now)
        assert made.next_request_delay_ms(now) > 10_000
        made.mark_stale("secret", now)
        waits.append(made.next_request_delay_ms(now))
        now += waits[-1]
    assert waits == [100, 200, 400, 800, 1000]
    made.on_response(response(topic("secret")), made.next_request(now) or (), now)
    assert made.topic("secret") is not None


def test_non_urgent_topics_are_left_to_another_cache_that_refreshes_them() -> None:
    made = filled(50)
    made.share_refreshes(True)
    names = [f"t{number:05}" for number in range(50)]
    for now in range(0, int(MAX_AGE), 10_000):
        made.note_use(names, now)
        assert made.next_request(now) is None
        assert made.next_request_delay_ms(now) > 0
    made.note_use(["new"], MAX_AGE - 1)
    assert made.next_request(MAX_AGE - 1) == ("new",)
    made.on_response(response(topic("new")), ("new",), MAX_AGE - 1)
    assert set(made.next_request(MAX_AGE) or ()) == set(names), "unless it fails to"
    lost = filled(50)
    lost.share_refreshes(True)
    lost.note_use(names, MAX_AGE * 0.6)
    assert lost.next_request(MAX_AGE * 0.6) is None
    assert lost.next_request_delay_ms(MAX_AGE * 0.6) > 0
    lost.share_refreshes(False)
    assert lost.next_request_delay_ms(MAX_AGE * 0.6) == 0
    assert len(lost.next_request(MAX_AGE * 0.6) or ()) == 20
