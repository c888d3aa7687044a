"""KIP-526's rules with plain numbers for the time."""

from __future__ import annotations

import math

from kafka_sink.cluster.metadata import MetadataCache, MetadataUpdate
from kafka_sink.model import Node, PartitionInfo, TopicMetadata, TopicPartition

MAX_AGE = 300_000.0
IDLE = 300_000.0
NODES = (Node(1, "a", 1), Node(2, "b", 2))


def cache() -> MetadataCache:
    return MetadataCache(
        max_age_ms=MAX_AGE, idle_ms=IDLE, retry_backoff_ms=100, retry_backoff_max_ms=1000, random=lambda: 0.5
    )


def topic(name: str, leader: int = 1, epoch: int = 0, topic_id: bytes | None = b"i" * 16) -> TopicMetadata:
    return TopicMetadata(name, topic_id, (PartitionInfo(name, 0, leader, epoch),))


def answer(*topics: TopicMetadata, **errors: int) -> MetadataUpdate:
    return MetadataUpdate(NODES, topics, errors)


def filled(count: int, now: float = 0.0) -> MetadataCache:
    made = cache()
    names = [f"t{number:05}" for number in range(count)]
    made.note_use(names, now)
    asked = made.next_request(now)
    assert asked is not None
    made.on_response(answer(*map(topic, asked)), asked, now)
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


def test_idle_topics_are_forgotten() -> None:
    made = filled(3)
    made.note_use(["t00001"], IDLE - 1)
    made.next_request(IDLE)
    assert made.topic("t00000") is None
    assert made.topic("t00001") is not None


def test_an_older_epoch_never_overwrites_a_newer_one() -> None:
    made = filled(1)
    made.on_response(answer(topic("t00000", leader=2, epoch=7)), (), 10)
    made.on_response(answer(topic("t00000", leader=1, epoch=6)), (), 20)
    info = made.leader(TopicPartition("t00000", 0))
    assert info is not None
    assert (info.leader, info.leader_epoch) == (2, 7)


def test_a_recreated_topic_replaces_all_and_stays() -> None:
    made = filled(1)
    made.on_response(answer(topic("t00000", leader=1, epoch=9)), (), 10)
    made.on_response(answer(topic("t00000", leader=2, epoch=0, topic_id=b"n" * 16)), (), 20)
    info = made.leader(TopicPartition("t00000", 0))
    assert info is not None
    assert (info.leader, info.leader_epoch) == (2, 0)
    made.on_response(answer(topic("t00000", leader=1, epoch=10)), (), 30)
    late = made.topic("t00000")
    assert late is not None
    assert late.topic_id == b"n" * 16, "a late answer brought the old topic back"


def test_errors_keep_a_topic_urgent_with_growing_backoff() -> None:
    made = cache()
    made.note_use(["missing"], 0)
    waits = []
    now = 0.0
    for _ in range(5):
        asked = made.next_request(now)
        assert asked == ("missing",)
        made.on_response(answer(missing=3), asked, now)
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
    made.on_response(answer(secret=29), asked, 0)
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
            made.on_response(answer(topic("t00000")), names, float(now))
    assert asked <= 10


def test_a_leader_hint_counts_only_when_newer_and_known() -> None:
    made = filled(1)
    where = TopicPartition("t00000", 0)
    assert made.leader_hint(where, 2, 5, NODES)
    assert not made.leader_hint(where, 1, 5, NODES)
    assert not made.leader_hint(where, 9, 6, ()), "nobody told where broker 9 is"
    info = made.leader(where)
    assert info is not None
    assert info.leader == 2
