"""A task's side of shared metadata: what it asks for, reports and fetches. Times are arguments."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from kafka_sink.clock import COORDINATOR_WAIT_MS
from kafka_sink.cluster.metadata import ClusterMetadata
from kafka_sink.cluster.producer_metadata import ProducerMetadata
from kafka_sink.cluster.topic_state import MetadataSnapshot, TopicSnapshot
from kafka_sink.coordinator.metadata import (
    ANY_AGE_MS,
    Fetch,
    MetadataChannel,
    Topics,
    TopicsFetched,
    TopicsWanted,
    parts_of,
    snapshot_of,
)
from kafka_sink.coordinator.schema import decode, deliver, encode
from kafka_sink.errors import MetadataTimeoutError
from kafka_sink.model import (
    MAX_BROKERS,
    MetadataUpdate,
    Node,
    Partitions,
    TopicMetadata,
)
from tests.support.metadata_tasks import NODES, OPTIONS, UNKNOWN, Task, metadata


def test_requests_are_sent_at_once_and_uses_are_gathered() -> None:
    task = Task()
    assert task.send() is None
    assert task.channel.next_message_delay_ms(0.0) == math.inf, "at rest it sends nothing"
    assert task.channel.ask(["a"])
    assert task.woken == 1
    assert task.channel.is_waiting
    assert task.send() == TopicsWanted({"a": ANY_AGE_MS})
    task.channel.on_use(["a", "b"])
    task.channel.on_use(["b"])
    assert task.woken == 2
    assert task.send() is None
    task.now_ms = 500
    assert task.channel.next_message_delay_ms(500) == 59_500
    task.channel.ask(["c"])
    assert task.send() == TopicsWanted({"a": None, "b": None, "c": ANY_AGE_MS}), "with what is asked"
    task.channel.on_use(["a", "b"])
    task.now_ms = 60_500
    assert task.send() == TopicsWanted({"a": None, "b": None})
    assert task.channel.next_message_delay_ms(60_500) == math.inf


def test_names_that_no_topic_can_have_are_left_to_brokers() -> None:
    """Catches: a row with such a name made the coordinator end the task's connection again and again."""
    task = Task()
    wrong = ("x" * 250, "\ud800")
    assert task.channel.ask([*wrong, "a"])
    assert task.send() == TopicsWanted({"a": ANY_AGE_MS})
    assert not task.channel.ask(wrong)
    task.channel.on_use(wrong)
    for name in wrong:
        task.channel.report_stale(name)
    assert task.send() is None
    assert task.channel.next_message_delay_ms(0.0) == math.inf


def test_a_leader_that_moved_is_reported_at_once() -> None:
    task = Task()
    task.channel.report_stale("x")
    assert task.send() == TopicsWanted({"x": 0.0})
    task.channel.report_stale("a")
    task.now_ms = 50
    task.channel.report_stale("b")
    assert task.channel.next_message_delay_ms(50) == 0
    assert not task.channel.is_waiting
    assert task.send() == TopicsWanted({"a": 50.0, "b": 0.0})
    # A topic without metadata is needed whatever was reported before.
    task.channel.report_stale("a")
    task.channel.ask(["a"])
    assert task.send() == TopicsWanted({"a": ANY_AGE_MS})
    assert task.channel.is_waiting
    task.channel.report_stale("a")
    assert task.channel.next_message(43) == TopicsWanted({"a": 0}), "found while that clock was read"


def test_brokers_count_for_the_size_of_a_message() -> None:
    """Catches: thousands of brokers with long racks beside topics, which made a message larger than 2 MiB."""
    nodes = tuple(Node(number, f"{number:0250}", 9092, "\x01" * 100) for number in range(MAX_BROKERS))
    topics = tuple(
        TopicSnapshot(TopicMetadata(f"{number}", None, Partitions("t", (1,) * 100, (1,) * 100)), 0.0)
        for number in range(1_500)
    )
    parts = list(parts_of(MetadataSnapshot(topics, nodes, 0.0, "c")))
    assert sum(len(part.topics) for part in parts) == 1_500
    assert all(part.topics for part in parts), "one without says that there is no capacity"
    for part in parts:
        decode(encode(Topics(part)))


def test_the_largest_messages_are_taken_by_the_coordinator() -> None:
    many = [f"{number:05}".ljust(249, "x") for number in range(7_500)]
    task = Task()
    for tell in (
        task.channel.ask,
        task.channel.on_use,
        lambda names: [*map(task.channel.report_stale, names)],
    ):
        task.now_ms += 3_600_000.0
        tell(many)
        sent: list[str] = []
        for _ in range(2):
            message = task.send()
            assert isinstance(message, TopicsWanted)
            assert decode(encode(message)) == message
            sent += message.topics
        assert sent == many
        assert task.send() is None


def test_requests_are_held_as_long_as_metadata_may_come() -> None:
    task = Task()
    task.channel.ask(["a", "b"])
    task.send()
    deliver(task.channel, Topics(pending=True), 100.0)
    assert task.cache.held_until_ms == 100 + COORDINATOR_WAIT_MS
    (part,) = parts_of(MetadataSnapshot((TopicSnapshot(metadata("a"), 0.0),), NODES))
    deliver(task.channel, Topics(part), 200.0)
    assert task.cache.taken
    assert task.cache.held_until_ms == 100 + COORDINATOR_WAIT_MS, "one of them is still to come"
    (part,) = parts_of(MetadataSnapshot((TopicSnapshot(metadata("b"), 0.0),), NODES))
    deliver(task.channel, Topics(part), 300.0)
    assert task.cache.held_until_ms == 300
    assert not task.channel.is_waiting
    deliver(task.channel, Topics(pending=True), 400.0)
    assert task.cache.held_until_ms == 300, "that is for others"


def test_a_task_without_its_coordinator_requests_nothing_until_it_is_back() -> None:
    task = Task()
    task.channel.ask(["a"])
    assert task.cache.shared, "refreshing is left to the coordinator"
    task.channel.on_lost(10)
    assert task.cache.held_until_ms == 10
    assert not task.cache.shared
    assert not task.channel.ask(["b"])
    task.channel.on_connected(20)
    assert task.cache.shared
    assert task.send() == TopicsWanted({"a": None}), "it is in use"
    assert task.channel.ask(["b"])
    task.send()
    for task.now_ms in (30, 40):
        task.channel.on_lost(task.now_ms)
        task.channel.on_connected(task.now_ms)
        task.channel.on_use(["a"])
        assert task.send() == TopicsWanted({"a": None}), "a new coordinator does not know"


def test_a_task_fetches_for_others_and_says_what_brokers_said() -> None:
    task = Task()
    cache = task.cache
    cache.coordinator = task.channel
    deliver(task.channel, Fetch(7, ("a", "b")), 0.0)
    assert cache.next_request_delay_ms(0.0) == 0.0
    assert cache.next_request(0.0) == ("a", "b")
    assert task.channel.next_message_delay_ms(0.0) == math.inf
    cache.on_response(MetadataUpdate(NODES, (metadata("a"),), {"b": UNKNOWN}, "c"), ("a", "b"), 1.0)
    assert task.channel.next_message_delay_ms(0.0) == 0.0, "between tasks, too"
    said = task.send()
    assert isinstance(said, TopicsFetched)
    assert (said.number, said.errors) == (7, {"b": UNKNOWN})
    assert snapshot_of(said.part).topics == (TopicSnapshot(metadata("a"), 0.0),)
    assert snapshot_of(said.part).nodes == NODES
    assert cache.names() == ()
    assert cache.topic("a") is None, "it is not this task's topic"
    for number in range(8, 1_000):
        deliver(task.channel, Fetch(number, (f"t{number}",)), 1.0)
    assert cache.next_request(1.0) == ("t8",), "however often it is asked"
    cache.on_failure(2.0)
    assert task.send() == TopicsFetched(8, failed=True)


def test_late_response_completes_a_later_fetch() -> None:
    """Catches: where brokers took longer than the coordinator waits, each response answered the fetch before,
    so it never learned of the topics and asked again and again."""
    task = Task()
    cache = task.cache
    cache.coordinator = task.channel
    deliver(task.channel, Fetch(7, ("a", "b")), 0.0)
    assert cache.next_request(0.0) == ("a", "b")
    deliver(task.channel, Fetch(8, ("b",)), 3_200.0)
    cache.on_response(MetadataUpdate(NODES, (metadata("b"),), {}, "c"), ("a", "b"), 3_500.0)
    said = task.send()
    assert isinstance(said, TopicsFetched)
    assert (said.number, [one.name for one in said.part.topics]) == (8, ["b"])
    assert cache.next_request(3_500.0) is None


def test_hints_that_are_awaited_leave_half_of_max_block_for_brokers() -> None:
    """However often the coordinator says that it is at it."""

    now_ms, asked_ms = 0.0, math.inf
    network: Any = SimpleNamespace(wakeup=lambda: None, describe_brokers=lambda: "")
    cache = ProducerMetadata(OPTIONS, lambda: now_ms, network)
    cache.coordinator = MetadataChannel(cache, lambda: now_ms, 300_000)

    def hold_again() -> None:
        nonlocal asked_ms, now_ms
        cache.pause_requests(now_ms + COORDINATOR_WAIT_MS)
        if cache.next_request(now_ms):
            asked_ms = min(asked_ms, now_ms)
        now_ms += 50

    with pytest.raises(MetadataTimeoutError):
        cache.await_topics(["a"], 400, hold_again)
    assert asked_ms == 200


def test_fetches_for_other_tasks_do_not_count_as_use() -> None:
    cache = ClusterMetadata(replace(OPTIONS, metadata_max_age_ms=10_000), random=lambda: 0.5)
    own = [f"own-{number}" for number in range(25)]
    cache.on_use(own, 0.0)
    asked = cache.next_request(0.0) or ()
    cache.on_response(MetadataUpdate(NODES, tuple(map(metadata, asked)), {}), asked, 0.0)
    others = [f"other-{number}" for number in range(500)]
    cache.request_for_other_tasks(others)
    asked = cache.next_request(6_000.0) or ()
    assert set(asked) >= set(others)
    assert len([one for one in asked if one in own]) == 25, "as many as without them"
    cache.on_response(MetadataUpdate(NODES, tuple(map(metadata, asked)), {}), asked, 6_001.0)
    assert sorted(cache.names()) == sorted(own)
    assert cache.sizes() == (25, 25)
    assert (cache.requests, cache.fetches) == (2, 1)
