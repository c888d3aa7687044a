"""Metadata shared by tasks: what is said when, and how often brokers are asked. Times are arguments."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

import pytest

from kafka_sink.clock import COORDINATOR_WAIT_MS, FETCH_SILENCE_MS
from kafka_sink.cluster.metadata import ClusterMetadata
from kafka_sink.cluster.topic_state import MetadataSnapshot, TopicSnapshot
from kafka_sink.coordinator.metadata import (
    ANY_AGE_MS,
    Fetch,
    MetadataChannel,
    NodeHint,
    SnapshotPart,
    TopicHint,
    Topics,
    TopicsFetched,
    TopicsWanted,
    parts_of,
    snapshot_of,
)
from kafka_sink.coordinator.metadata_service import MetadataService, coordinator_idle_ms
from kafka_sink.coordinator.schema import MemoryBudget, Message, decode, deliver, encode
from kafka_sink.errors import ProtocolError
from kafka_sink.kafka_errors import LEADER_NOT_AVAILABLE
from kafka_sink.model import (
    MetadataUpdate,
    PartitionMetadata,
    TopicMetadata,
)
from kafka_sink.options import parse
from tests.support.fake_outbox import FakeOutbox
from tests.support.footprint import traced
from tests.support.metadata_tasks import ID, NODES, NOT_AUTHORIZED, OPTIONS, UNKNOWN, Task, metadata
from tests.support.topic_metadata import topic_of

# Messages and the tasks that they went to.
Pushed = list[tuple[int, Topics]]
DENIED = TopicsWanted({"a": 0.0})


def wide(name: str, partitions: int, epoch: int = 0) -> TopicMetadata:
    return topic_of(name, ID, [PartitionMetadata(name, one, 1, epoch) for one in range(partitions)])


def options(**given: object) -> Any:
    raw = {"kafka.bootstrap.servers": "h:1"}
    return parse(raw | {f"kafka.{name.replace('_', '.')}": str(one) for name, one in given.items()}).options


def known(
    number: int, *topics: TopicMetadata, cluster_id: str | None = None, errors: Mapping[str, int] = {}
) -> TopicsFetched:
    """What a task says that brokers have said, or the first part of it."""
    found = MetadataSnapshot(tuple(TopicSnapshot(one, 0.0) for one in topics), NODES, 0.0, cluster_id)
    return TopicsFetched(number, next(parts_of(found)), dict(errors))


class Coordinator:
    """A service, and tasks whose answers the test gives."""

    def __init__(self, tasks: int = 3, budget: MemoryBudget | None = None, **given: object) -> None:
        self.now_ms = 1_000_000.0
        self.out = FakeOutbox()
        self.service = MetadataService(options(**given), self.out, budget, random=lambda: 0.5)
        self.cache = self.service.cache
        # Those that were asked to fetch, with the message.
        self.asked: list[tuple[int, Fetch]] = []
        # Those that have answered, in turn.
        self.answered: list[int] = []
        for peer in range(1, tasks + 1):
            self.service.on_joined(peer, self.now_ms)

    def receive(self, peer: int, message: Message) -> Pushed:
        deliver(self.service, peer, decode(encode(message)), self.now_ms)
        return self.pushed()

    def want(self, peer: int, *topics: str) -> Pushed:
        return self.receive(peer, TopicsWanted(dict.fromkeys(topics, ANY_AGE_MS)))

    def know(self, *topics: TopicMetadata, users: Iterable[int] = (1,)) -> Coordinator:
        """These tasks use topics that brokers have described."""
        for peer in users:
            self.want(peer, *(one.name for one in topics))
        self.respond(*topics)
        return self

    def deny(self, peer: int, after_ms: float = 1_000.0, for_ms: float = 200.0) -> None:
        """Of topic a brokers deny what this task knows, after a while. What follows within some time?"""
        self.now_ms += after_ms
        assert self.receive(peer, DENIED) == [], "one task's word is not passed on"
        self.after(for_ms)

    def pushed(self) -> Pushed:
        """The messages that tasks are pushed until nothing more is due at this moment."""
        while self.service.next_change_ms(self.now_ms) <= 0:
            self.service.on_time(self.now_ms)
        pushed = []
        for peer, one in self.out.taken():
            if isinstance(one, Fetch):
                self.asked.append((peer, one))
            else:
                assert isinstance(one, Topics)
                pushed.append((peer, one))
        return pushed

    def after(self, ms: float) -> Pushed:
        """The messages that tasks are pushed within the next milliseconds, when they are due."""
        pushed, end_ms = self.pushed(), self.now_ms + ms
        while (delay_ms := self.service.next_change_ms(self.now_ms)) <= end_ms - self.now_ms:
            self.now_ms += delay_ms
            pushed += self.pushed()
        self.now_ms = end_ms
        return pushed

    def respond(
        self, *topics: TopicMetadata, by: int | None = None, cluster_id: str | None = None, **errors: int
    ) -> Pushed:
        """The task that was asked last answers."""
        self.pushed()
        peer, fetch = self.asked.pop()
        self.answered.append(by or peer)
        return self.receive(by or peer, known(fetch.number, *topics, cluster_id=cluster_id, errors=errors))

    def fail(self) -> Pushed:
        self.pushed()
        peer, fetch = self.asked.pop()
        return self.receive(peer, TopicsFetched(fetch.number, failed=True))

    def fetching(self) -> tuple[str, ...]:
        """The topics that are being fetched for the tasks."""
        self.pushed()
        return self.asked[-1][1].topics if self.asked else ()


def names(pushed: Pushed) -> list[tuple[int, list[str]]]:
    return [(peer, sorted(topic.name for topic in one.part.topics)) for peer, one in pushed]


def leaders(pushed: Pushed) -> set[tuple[int, int]]:
    found = (one.metadata for _, message in pushed for one in snapshot_of(message.part).topics)
    return {(one.partitions[0].leader, one.partitions[0].leader_epoch) for one in found}


# -- the coordinator's side -------------------------------------------------------------------------------


def test_a_response_serves_all_waiting_tasks_and_later_ones_at_once() -> None:
    """A thousand workers begin with the same two thousand topics: what all are told is encoded once."""
    coordinator = Coordinator(tasks=50)
    for peer in range(1, 50):
        assert coordinator.want(peer, "a", "b") == []
    assert len(coordinator.asked) == 1
    coordinator.out.encoded = 0
    pushed = coordinator.respond(metadata("a"), metadata("b"))
    assert names(pushed) == [(peer, ["a", "b"]) for peer in range(1, 50)]
    assert coordinator.out.encoded == 1
    coordinator.now_ms -= 5
    ((peer, later),) = coordinator.want(50, "a")
    assert (peer, [(one.name, one.age_ms) for one in later.part.topics]) == (50, [("a", 0.0)])
    assert not coordinator.asked


def test_a_change_is_pushed_to_those_who_use_the_topic_once() -> None:
    coordinator = Coordinator().know(metadata("a"), users=(1, 2))
    coordinator.receive(3, TopicsWanted({"b": None}))
    assert coordinator.fetching() == ("b",), "the service's own copy is refreshed from now on"
    assert names(coordinator.respond(metadata("b"))) == [(3, ["b"])], "it need not be waited for"
    coordinator.deny(1)
    pushed = coordinator.respond(metadata("a", leader=2, epoch=1))
    assert names(pushed) == [(1, ["a"]), (2, ["a"])]
    assert coordinator.pushed() == []
    coordinator.service.on_gone(2, coordinator.now_ms)
    coordinator.deny(1, 0.0, 2_000.0)
    assert names(coordinator.respond(metadata("a", leader=1, epoch=2))) == [(1, ["a"])]


def test_a_task_that_uses_more_before_a_change_is_pushed_is_told_of_it_once() -> None:
    coordinator = Coordinator().know(metadata("a"))
    coordinator.deny(1)
    peer, fetch = coordinator.asked.pop()
    coordinator.out.encoded = 0
    moved = known(fetch.number, metadata("a", leader=2, epoch=1))
    deliver(coordinator.service, peer, moved, coordinator.now_ms)
    assert names(coordinator.receive(1, TopicsWanted({"b": None}))) == [(1, ["a"])]
    assert coordinator.out.encoded == 2, "this, and the fetch of b; topics that nobody uses so are no message"


def test_a_report_that_a_leader_moved_is_checked_and_not_passed_on() -> None:
    """A broker that lags is asked once more when a task is denied again."""
    coordinator = Coordinator().know(metadata("a", epoch=4), users=(1, 2))
    for leader, epoch in ((1, 4), (2, 5)):
        coordinator.deny(1)
        assert coordinator.fetching() == ("a",)
        pushed = coordinator.respond(metadata("a", leader=leader, epoch=epoch))
        assert names(pushed) == [(1, ["a"]), (2, ["a"])]
        assert leaders(pushed) == {(leader, epoch)}
    coordinator.after(1_000)
    denied_before = TopicsWanted({"a": 2_000.0})
    assert names(coordinator.receive(1, denied_before)) == [(1, ["a"])], "only this task lacks it"
    coordinator.after(2_000)
    assert not coordinator.asked


def test_a_task_that_errs_all_the_time_costs_a_request_a_second() -> None:
    coordinator = Coordinator().know(metadata("a", epoch=4))
    begun, responses = coordinator.now_ms, 0
    while coordinator.now_ms < begun + 20_000:
        coordinator.receive(1, DENIED)
        if coordinator.asked:
            coordinator.respond(metadata("a", leader=1, epoch=4))
            responses += 1
        coordinator.after(50)
    assert responses < 25


# -- who fetches ------------------------------------------------------------------------------------------


def test_tasks_fetch_in_turn() -> None:
    """Else one that errs, and connects again and again, could answer for all."""
    coordinator = Coordinator(tasks=3)
    asked = []
    for topic in "abcdef":
        coordinator.want(1, topic)
        asked.append(coordinator.asked[-1])
        coordinator.respond(metadata(topic))
        if topic == "d":
            coordinator.service.on_joined(9, coordinator.now_ms)
    assert [peer for peer, _ in asked] == [1, 2, 3, 1, 2, 3]
    assert len({fetch.number for _, fetch in asked}) == 6


def test_another_task_is_asked_after_a_second_of_silence_and_the_others_wait_on() -> None:
    coordinator = Coordinator(tasks=5)
    coordinator.want(5, "a")
    assert coordinator.after(FETCH_SILENCE_MS - 1) == []
    pushed = coordinator.after(1)
    assert sorted(pushed) == [(peer, Topics(pending=True)) for peer in (1, 2, 3, 4, 5)]
    assert [peer for peer, _ in coordinator.asked] == [1, 2]
    assert coordinator.asked[0][1] == coordinator.asked[1][1]
    # The first one responds after all.
    assert names(coordinator.respond(metadata("a"), by=1)) == [(5, ["a"])]
    assert coordinator.receive(2, known(coordinator.asked[0][1].number)) == []
    coordinator.asked.clear()
    # Whoever waits for what three tasks do not bring asks brokers before.
    coordinator.want(1, "b")
    pushed = coordinator.after(3 * FETCH_SILENCE_MS)
    assert sum(one.pending for _, one in pushed) == 5, "once, so that nobody waits for the third task"
    coordinator.after(5_000)
    assert len({peer for peer, _ in coordinator.asked}) >= 3


def test_a_fetch_whose_task_leaves_goes_to_another_at_once() -> None:
    coordinator = Coordinator(tasks=3)
    coordinator.want(3, "a")
    coordinator.service.on_gone(1, coordinator.now_ms)
    coordinator.pushed()
    assert coordinator.asked[-1][0] == 2
    assert names(coordinator.respond(metadata("a"))) == [(3, ["a"])]


def test_the_only_task_is_given_time_and_as_it_leaves_brokers_do_not_look_unreachable() -> None:
    """Catches: the next task was pushed at once that nothing comes."""
    coordinator = Coordinator(tasks=1)
    coordinator.want(1, "a")
    coordinator.after(1_900)
    assert len(coordinator.asked) == 1
    assert names(coordinator.respond(metadata("a"))) == [(1, ["a"])]
    coordinator.want(1, "c")
    coordinator.service.on_gone(1, coordinator.now_ms)
    coordinator.service.on_joined(2, coordinator.now_ms)
    coordinator.asked.clear()
    assert coordinator.want(2, "b") == []
    coordinator.after(500)
    assert coordinator.asked


def test_a_fetch_that_fails_goes_to_another_task_after_the_backoff() -> None:
    """Catches: up to three tasks were asked at once, one after the other (KIP-526: retry.backoff.ms)."""
    coordinator = Coordinator(tasks=4, retry_backoff_ms=100, retry_backoff_max_ms=1000)
    coordinator.want(3, "a")
    waits, asked, pending = [], [], []
    for _ in range(4):
        asked.append(coordinator.asked[-1][0])
        pending += [one.pending for peer, one in coordinator.fail() if peer == 3]
        waits.append(coordinator.service.next_change_ms(coordinator.now_ms))
        coordinator.after(waits[-1])
    assert waits == [100, 200, 400, 800]
    assert asked == [1, 2, 3, 4]
    assert pending == [True], "once: a task that waits longer asks brokers itself"
    assert coordinator.want(2, "b") == []
    coordinator.fail()
    coordinator.after(1000)
    assert coordinator.fetching() == ("b",), "nobody waits for the other topic any longer"
    assert names(coordinator.respond(metadata("b"))) == [(2, ["b"])]


# -- missing topics ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [UNKNOWN, NOT_AUTHORIZED])
def test_a_topic_with_an_error_is_fetched_again_when_a_task_asks_again(code: int) -> None:
    """Catches: a task that had left kept a missing topic in the metadata, which brokers were asked for on."""
    coordinator = Coordinator(allow_auto_create_topics="false")
    coordinator.want(1, "a")
    assert coordinator.respond(a=code) == []
    coordinator.after(60_000)
    assert not coordinator.asked
    coordinator.want(1, "a")
    assert names(coordinator.respond(metadata("a"))) == [(1, ["a"])]
    coordinator.want(2, "x")
    coordinator.service.on_gone(2, coordinator.now_ms)
    coordinator.pushed()
    coordinator.respond(x=code)
    assert coordinator.cache.names() == ("a",)


@pytest.mark.parametrize("code", [UNKNOWN, LEADER_NOT_AVAILABLE])
def test_a_topic_that_no_task_waits_for_any_longer_is_not_fetched(code: int) -> None:
    """Catches: 360 fetches in six minutes after the only task with rows for the topic had gone."""
    coordinator = Coordinator(allow_auto_create_topics="true")
    coordinator.want(1, "a")
    coordinator.service.on_gone(1, coordinator.now_ms)
    fetches = 0
    for _ in range(100):
        while coordinator.fetching():
            fetches += 1
            coordinator.respond(a=code)
        coordinator.after(600)
    assert fetches <= 6
    coordinator.want(2, "a")
    assert coordinator.fetching() == ("a",)


def test_a_topic_that_brokers_may_be_creating_is_waited_for() -> None:
    coordinator = Coordinator(allow_auto_create_topics="true")
    coordinator.want(1, "a")
    assert coordinator.respond(a=UNKNOWN) == []
    coordinator.after(150)
    assert names(coordinator.respond(metadata("a"))) == [(1, ["a"])]


# -- tasks that err ---------------------------------------------------------------------------------------


MANY = wide("a", 100, 4)


def lied_to(lie: TopicMetadata) -> Coordinator:
    """Two tasks use a topic; the one that was asked to refresh it has just lied."""
    coordinator = Coordinator(tasks=4, retry_backoff_ms=100, retry_backoff_max_ms=100)
    coordinator.know(metadata("a", epoch=4), users=(1, 2)).deny(1, for_ms=100.0)
    coordinator.respond(lie)
    return coordinator


TRUTH = metadata("a", leader=1, epoch=4)


@pytest.mark.parametrize(
    "lie",
    [metadata("a", leader=2, epoch=2**31 - 1), metadata("a", 2, 0, b"x" * 16), metadata("a", 2, 5), MANY],
    ids=["an epoch", "another topic", "a leader", "partitions"],
)
def test_a_fetch_that_lied_misleads_until_the_next_refresh(lie: TopicMetadata) -> None:
    """Catches: merged by its epoch, it would outlive all that brokers say."""
    coordinator = lied_to(lie)
    for _ in range(2):
        coordinator.deny(2, 500.0, 150.0)
        pushed = coordinator.respond(TRUTH)
    assert leaders(pushed) == {(1, 4)}
    assert coordinator.cache.topic("a") == TRUTH
    coordinator.after(5_000)
    while coordinator.asked:
        coordinator.respond(TRUTH)
        coordinator.after(5_000)
    assert coordinator.cache.topic("a") == TRUTH


@pytest.mark.parametrize("said", [metadata("a", 2, 6), MANY], ids=["two elections", "partitions"])
def test_elections_and_new_partitions_need_confirmation_by_a_second_task(said: TopicMetadata) -> None:
    """Catches: keyed rows of all tasks went by a number of partitions that one of them had made up."""
    coordinator = lied_to(said)
    assert coordinator.cache.topic("a") == TRUTH
    liar = coordinator.answered[-1]
    coordinator.after(150)
    assert coordinator.asked[-1][0] != liar, "another one is asked, and soon"
    coordinator.respond(said)
    assert coordinator.cache.topic("a") == said


def test_a_broker_that_lags_convinces_nobody_by_one_response() -> None:
    coordinator = lied_to(metadata("a", leader=2, epoch=5))
    coordinator.deny(2, 500.0, 150.0)
    assert leaders(coordinator.respond(metadata("a", leader=1, epoch=4))) == {(2, 5)}
    coordinator.after(150)
    assert leaders(coordinator.respond(metadata("a", leader=2, epoch=5))) == {(2, 5)}
    coordinator.after(5_000)
    assert not coordinator.asked


def test_a_task_of_another_cluster_convinces_nobody_by_one_response() -> None:
    coordinator = Coordinator(tasks=3, retry_backoff_ms=100)
    coordinator.want(1, "a")
    coordinator.respond(metadata("a"), cluster_id="c-1")
    coordinator.want(1, "b")
    coordinator.respond(metadata("b"), cluster_id="c-2")
    assert coordinator.cache.cluster_id == "c-1"
    assert coordinator.cache.topic("a") is not None
    coordinator.after(200)
    coordinator.respond(metadata("b"), cluster_id="c-1")
    assert coordinator.cache.topic("b") is not None
    assert coordinator.cache.cluster_id == "c-1"
    # Where the bootstrap addresses do lead elsewhere, two responses in a row say so.
    for _ in range(2):
        coordinator.want(1, "c")
        coordinator.after(500)
        coordinator.respond(metadata("c"), cluster_id="c-2")
    assert coordinator.cache.cluster_id == "c-2"


def test_unrequested_responses_are_ignored() -> None:
    coordinator = Coordinator()
    coordinator.want(1, "a")
    peer, fetch = coordinator.asked[-1]
    forged = metadata("a", leader=2)
    assert coordinator.receive(peer + 1, known(fetch.number, forged)) == [], "it was not asked"
    assert coordinator.receive(peer, known(fetch.number + 7, forged)) == []
    coordinator.receive(peer, known(fetch.number, metadata("b"), metadata("a"), errors={"c": UNKNOWN}))
    assert coordinator.cache.topic("a") == metadata("a")
    assert coordinator.cache.names() == ("a",)


@pytest.mark.parametrize(
    "hint",
    [
        TopicHint("a", 0.0, None, bytes(4), b""),
        TopicHint("a", 0.0, None, bytes(3), bytes(3)),
        TopicHint("a", 0.0, bytes(15), b"", b""),
        TopicHint("a", -1.0, None, b"", b""),
        NodeHint(1, "a host\n", 1, None),
        NodeHint(1, "h", 70_000, None),
        NodeHint(-1, "h", 1, None),
    ],
)
def test_hints_that_make_no_sense_are_refused(hint: TopicHint | NodeHint) -> None:
    part = SnapshotPart(topics=(hint,)) if isinstance(hint, TopicHint) else SnapshotPart(nodes=(hint,))
    coordinator = Coordinator()
    coordinator.want(1, "a")
    peer, fetch = coordinator.asked[-1]
    with pytest.raises(ProtocolError):
        coordinator.receive(peer, TopicsFetched(fetch.number, part))
    assert coordinator.cache.topic("a") is None
    with pytest.raises(ProtocolError):
        deliver(Task().channel, decode(encode(Topics(part))), 0.0)


def test_topics_that_make_no_sense_are_refused() -> None:
    # The second takes six bytes in JSON, and so may a Fetch that the coordinator makes of such.
    many = TopicsWanted({f"t{number}": 0.0 for number in range(5001)})
    for wrong in (
        many,
        *(TopicsWanted({name: None}) for name in ("x" * 250, "\x01")),
        TopicsWanted({"a": -1.0}),
    ):
        with pytest.raises(ProtocolError):
            decode(encode(wrong))


def test_a_response_that_there_is_no_capacity_for_is_not_taken() -> None:
    """Catches: two tasks that err made topics larger with each refresh."""
    coordinator = Coordinator(budget=MemoryBudget(limit=40_000), retry_backoff_ms=100)
    coordinator.want(1, "t")
    for number in range(20):
        if coordinator.asked:
            coordinator.respond(wide("t", 1_000 * (1 + number // 2)))
        coordinator.now_ms += 1_000
        coordinator.receive(1, TopicsWanted({"t": 0.0}))
        coordinator.after(150)
    assert 3_000 < coordinator.cache.sizes()[1] <= 6_000


def test_a_snapshot_survives_the_wire_in_several_messages() -> None:
    infos = (PartitionMetadata("", 0, -1, -1), PartitionMetadata("", 1, 2**31 - 1, 7))
    topics = (
        wide("wide", 100_000),
        topic_of("empty", None, ()),
        topic_of("t", ID, infos),
        *(metadata(f"{number:06}".ljust(249, "x")) for number in range(6_000)),
    )
    sent = MetadataSnapshot(tuple(TopicSnapshot(one, 5.0) for one in topics), NODES, 7.0, "c")
    messages = [decode(encode(Topics(part))) for part in parts_of(sent)]
    first, *others = [snapshot_of(one.part) for one in messages if isinstance(one, Topics)]
    assert (first.nodes, first.nodes_age_ms, first.cluster_id) == (NODES, 7.0, "c")
    assert others
    assert not any(one.nodes for one in others)
    assert tuple(one for part in (first, *others) for one in part.topics) == sent.topics


# -- bounds -----------------------------------------------------------------------------------------------


def test_tasks_that_ask_for_ever_new_topics_do_not_fill_the_memory() -> None:
    """Catches: one task's credential made the process grow from 26 MiB to 1,164 MiB in 25 s."""
    budget = MemoryBudget(4 * 2**20)
    groups = [Coordinator(tasks=5, budget=budget) for _ in range(2)]
    with traced() as memory:
        for number in range(15):
            for coordinator in groups:
                for peer in range(1, 6):
                    wanted = [f"{number}-{peer}-{one}".ljust(100, "x") for one in range(500)]
                    coordinator.want(peer, *wanted)
                    coordinator.receive(peer, TopicsWanted(dict.fromkeys(wanted[:250])))
                coordinator.after(10)
                coordinator.asked.clear()
    assert memory.peak < 10 * 2**20, "75,000 names of 100 characters"
    assert budget.used < budget.limit + 2**20
    # Once they stop, there is capacity again.
    for coordinator in groups:
        coordinator.after(5_000)
        for peer in range(1, 6):
            coordinator.service.on_gone(peer, coordinator.now_ms)
        coordinator.service.on_joined(9, coordinator.now_ms)
        coordinator.now_ms += 600_000
        coordinator.pushed()
        coordinator.want(9, "b")
        assert coordinator.cache.names() == ("b",)
        coordinator.service.close()
    assert budget.used == 0


def test_a_topic_for_which_there_is_no_capacity_is_asked_for_by_its_task() -> None:
    coordinator = Coordinator(budget=MemoryBudget(limit=4_000))
    assert coordinator.want(1, "a", "b", "c") == []
    coordinator.respond(metadata("a"), metadata("b"), metadata("c"))
    assert coordinator.want(2, "d") == [(2, Topics())]
    assert names(coordinator.want(2, "a", "e")) == [(2, []), (2, ["a"])]
    assert sorted(coordinator.cache.names()) == ["a", "b", "c"]
    task = Task()
    task.channel.ask(["d"])
    deliver(task.channel, Topics(), 100.0)
    assert task.cache.held_until_ms == 100, "it asks brokers at once"


def test_topics_beyond_a_message_are_fetched_next_and_waited_for() -> None:
    """Catches: with 2,000 topics of 100 partitions each, all tasks asked brokers for the last of them."""
    coordinator = Coordinator(retry_backoff_ms=100)
    topics = {f"{one:06}": wide(f"{one:06}", 40) for one in range(5_000)}
    coordinator.want(3, *topics)
    pending: list[list[bool]] = []
    while coordinator.asked:
        peer, fetch = coordinator.asked.pop()
        pushed = coordinator.receive(peer, known(fetch.number, *map(topics.__getitem__, fetch.topics)))
        pending.append([one.pending for to, one in pushed if to == 3 and one.pending])
        coordinator.after(1_000)
    assert coordinator.cache.sizes() == (5_000, 200_000)
    assert pending[:-1] == [[True]] * (len(pending) - 1)
    assert len(pending) > 1
    assert pending[-1] == []
    coordinator.cache.on_use(map(str, range(6_000)), coordinator.now_ms)
    assert len(coordinator.fetching()) == 5_000, "as many as a message holds"


def test_known_topics_are_refreshed_even_without_capacity_for_more() -> None:
    """Catches: once others had used up the memory, no leader that moved came to the tasks, and each group's
    tasks asked brokers for it again and again."""
    budget = MemoryBudget(limit=50_000)
    coordinator, other = Coordinator(budget=budget).know(metadata("a")), Coordinator(1, budget)
    coordinator.now_ms += 5_000.0
    coordinator.receive(1, TopicsWanted({"a": 0.0, "b": ANY_AGE_MS}))
    other.want(1, *(f"t-{number}" for number in range(100)))
    assert budget.used >= budget.limit
    pushed = coordinator.respond(metadata("a", leader=2, epoch=1), metadata("b")) + coordinator.after(200)
    assert leaders(pushed) == {(2, 1)}
    assert coordinator.cache.topic("b") is None
    assert coordinator.cache.age_ms(coordinator.now_ms) == 200.0, "so are brokers"
    asked = len(coordinator.asked)
    coordinator.after(10_000)
    assert len(coordinator.asked) == asked


@pytest.mark.parametrize(("count", "message"), [(50_000, [(1, ["t-0"])]), (60_000, [])])
def test_the_topics_of_a_task_are_bounded(count: int, message: list[tuple[int, list[str]]]) -> None:
    coordinator = Coordinator(tasks=1)
    for start in range(0, count, 5_000):
        coordinator.receive(1, TopicsWanted(dict.fromkeys(f"t-{one}" for one in range(start, start + 5_000))))
    assert [one for one in names(coordinator.respond(metadata("t-0"))) if one[1]] == message


def test_tasks_that_wait_for_the_same_topics_share_them_and_an_answer() -> None:
    """Catches: 100 tasks that asked for 10,000 topics took 60 MiB until the response came."""
    coordinator = Coordinator(tasks=50)
    topics = [f"orders-{number}" for number in range(2_000)]
    coordinator.want(1, *topics)
    with traced() as memory:
        for peer in range(2, 31):
            coordinator.want(peer, *topics)
    assert memory.held < 2**20
    coordinator.respond(*map(metadata, topics))
    coordinator.out.encoded = 0
    for peer in range(31, 51):
        assert coordinator.want(peer, *topics) == [], "others may begin with them now"
    assert len(coordinator.after(100)) == 20
    assert coordinator.out.encoded == 1


def test_long_answers_are_sent_in_parts() -> None:
    """Catches: 2,000 tasks with topics of their own hold the loop for seconds after each response."""
    coordinator = Coordinator(tasks=600)
    for peer in range(1, 601):
        coordinator.receive(peer, TopicsWanted(dict.fromkeys(f"t{(peer + one) % 600}" for one in range(50))))
    coordinator.respond(*(metadata(f"t{number}") for number in range(600)))
    coordinator.pushed()
    peer, fetch = coordinator.asked.pop()
    assert len(fetch.topics) > 500
    message = known(fetch.number, *map(metadata, fetch.topics))
    deliver(coordinator.service, peer, message, coordinator.now_ms)
    rounds = 0
    while coordinator.service.next_change_ms(coordinator.now_ms) <= 0:
        before = coordinator.out.encoded
        coordinator.service.on_time(coordinator.now_ms)
        assert coordinator.out.encoded - before <= 150
        rounds += 1
    assert rounds > 3


@pytest.mark.parametrize("idle_ms", [5_000, 300_000])
@pytest.mark.parametrize("pause", [0.01, 0.34, 0.99])
def test_a_topic_in_use_is_never_forgotten_by_the_coordinator(idle_ms: float, pause: float) -> None:
    """``pause``: from one use to the next, as a part of metadata.max.idle.ms."""
    coordinator, task = Coordinator(metadata_max_idle_ms=idle_ms), Task(idle_ms)
    begun = coordinator.now_ms
    task.channel.ask(["a"])
    asked = task.send()
    assert asked is not None
    coordinator.receive(1, asked)
    coordinator.respond(metadata("a"))
    use_ms = 0.0
    messages = 0
    while task.now_ms < 5 * idle_ms:
        if task.now_ms >= use_ms:
            task.channel.on_use(["a"])
            use_ms += pause * idle_ms
        said = task.send()
        coordinator.now_ms = begun + task.now_ms
        if said is not None:
            messages += 1
            coordinator.receive(1, said)
        coordinator.pushed()
        if coordinator.asked:
            coordinator.respond(metadata("a"))
        assert coordinator.cache.topic("a") is not None, f"forgotten at {task.now_ms} ms"
        task.now_ms += 50
    assert messages <= 5 * 15, "a task need not tell of each use"
    coordinator.now_ms += coordinator_idle_ms(idle_ms)
    coordinator.pushed()
    assert coordinator.cache.topic("a") is None


# -- a whole job (KIP-526) --------------------------------------------------------------------------------


class Job:
    """Tasks with their metadata and channels, a service, and a cluster that counts requests and responds
    within 5 ms."""

    def __init__(self, tasks: int) -> None:
        self.now_ms = 0.0
        self.requests: list[tuple[str, ...]] = []
        self.out = FakeOutbox()
        self.service = MetadataService(options(), self.out, random=lambda: 0.5)
        self.caches: list[ClusterMetadata] = []
        self.channels: list[MetadataChannel] = []
        self.responses: deque[tuple[float, ClusterMetadata, tuple[str, ...]]] = deque()
        for number in range(tasks):
            cache = ClusterMetadata(OPTIONS, random=lambda: 0.5)
            channel = cache.coordinator = MetadataChannel(cache, lambda: self.now_ms, 300_000)
            self.caches.append(cache)
            self.channels.append(channel)
            self.service.on_joined(number, 0.0)
            channel.on_connected(0.0)

    def use(self, *topics: str) -> None:
        """All tasks do as await_topics does."""
        for cache, channel in zip(self.caches, self.channels, strict=True):
            channel.on_use(topics)
            cache.on_use(topics, self.now_ms)
            lacking = [one for one in topics if cache.topic(one) is None]
            if lacking and channel.ask(lacking):
                cache.pause_requests(self.now_ms + COORDINATOR_WAIT_MS)

    def step(self, ms: float) -> None:
        for number, channel in enumerate(self.channels):
            while (message := channel.next_message(self.now_ms)) is not None:
                deliver(self.service, number, decode(encode(message)), self.now_ms)
        while self.service.next_change_ms(self.now_ms) <= 0:
            self.service.on_time(self.now_ms)
        for peer, message in self.out.taken():
            deliver(self.channels[peer], message, self.now_ms)
        for cache in self.caches:
            if cache.next_request_delay_ms(self.now_ms) <= 0 and (topics := cache.next_request(self.now_ms)):
                self.requests.append(topics)
                self.responses.append((self.now_ms + 5.0, cache, topics))
        while self.responses and self.responses[0][0] <= self.now_ms:
            _, cache, topics = self.responses.popleft()
            cache.on_response(
                MetadataUpdate(NODES, tuple(map(metadata, topics)), {}, "c"), topics, self.now_ms
            )
        self.now_ms += ms

    def run(self, ms: float, by_ms: float = 1.0) -> None:
        until_ms = self.now_ms + ms
        while self.now_ms < until_ms:
            self.step(by_ms)


def test_a_thousand_tasks_that_start_together_with_an_empty_plan_ask_once() -> None:
    job = Job(1_000)
    job.use("a", "b")
    job.run(20)
    assert job.requests == [("a", "b")]
    assert all(cache.topic(one) is not None for cache in job.caches for one in "ab")


def test_tasks_together_refresh_topics_as_often_as_one() -> None:
    """Catches: each of them asks, too, when a topic comes of age."""
    topics, requests = [f"t{number}" for number in range(25)], []
    for tasks in (1, 3):
        job = Job(tasks)
        while job.now_ms < 900_000.0:
            job.use(*topics)
            job.run(1_000.0, 100.0)
        assert [cache.requests for cache in job.caches] == [0] * tasks, "they ask for the coordinator only"
        requests.append(len(job.requests))
    assert requests[0] == requests[1] < 10


@pytest.mark.parametrize(("count", "refreshes"), [(1, 1.2), (100, 2.1)])
def test_topics_are_refreshed_no_more_often_than_by_a_producer_by_itself(
    count: int, refreshes: float
) -> None:
    """Few topics when they are nearly over-aged, many from half of that on (KIP-526)."""
    coordinator = Coordinator(tasks=2)
    max_age_ms, asked, begun = 300_000.0, 0, coordinator.now_ms
    topics_of = [f"t{number}" for number in range(count)]
    while (passed_ms := coordinator.now_ms - begun) < 10 * max_age_ms:
        # Topics come one after the other over the first age.
        coordinator.cache.on_use(topics_of[: int(count * passed_ms / max_age_ms) + 1], coordinator.now_ms)
        coordinator.pushed()
        if coordinator.asked:
            topics = coordinator.asked[-1][1].topics
            asked += len(topics) * (passed_ms > 2 * max_age_ms)
            coordinator.respond(*map(metadata, topics))
        coordinator.now_ms += min(max(1.0, coordinator.service.next_change_ms(coordinator.now_ms)), 10_000)
    assert asked / 8 / count <= refreshes
