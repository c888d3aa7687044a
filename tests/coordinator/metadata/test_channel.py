"""Both sides of metadata by themselves: what is said when, with time as an argument and no socket."""

from __future__ import annotations

import math
import tracemalloc
from collections.abc import Iterable
from typing import Any

import pytest

from kafka_sink.coordinator.metadata import handler as metadata_handler
from kafka_sink.coordinator.metadata.channel import MetadataChannel
from kafka_sink.coordinator.metadata.handler import MetadataHandler
from kafka_sink.coordinator.metadata.messages import (
    coordinator_idle_ms,
    decode_snapshot,
    encode_snapshot,
)
from kafka_sink.coordinator.transport.connections import ServerBounds
from kafka_sink.coordinator.transport.handlers import Push, Reply, ServerMessage
from kafka_sink.coordinator.transport.session import FrameReader, Session
from kafka_sink.errors import MetadataTimeoutError, ProtocolError
from kafka_sink.metadata.cluster_metadata import ClusterMetadata, HintSource
from kafka_sink.metadata.topic_state import MetadataSnapshot
from kafka_sink.model import MetadataUpdate, Node, PartitionInfo, TopicMetadata, TopicPartition
from kafka_sink.timing_bounds import GIVE_UP_MS, HINT_WAIT_MS

UNKNOWN, NOT_AUTHORIZED = 3, 29
NODES = (Node(1, "one", 9092), Node(2, "two", 9092))


def metadata(name: str, leader: int = 1, epoch: int = 0) -> TopicMetadata:
    return TopicMetadata.of(name, bytes(16), (PartitionInfo(name, 0, leader, epoch),))


class Coordinator:
    """A handler with its view, whose responses the test gives as the fetcher would."""

    def __init__(self, *, auto_create: bool = False, idle_ms: float = 300_000) -> None:
        self.now_ms = 1_000_000.0
        self.view = ClusterMetadata(
            lambda: self.now_ms,
            lambda: None,
            lambda: "",
            lambda: 0.5,
            max_age_ms=300_000,
            idle_ms=coordinator_idle_ms(idle_ms),
            retry_backoff_ms=100,
            retry_backoff_max_ms=1000,
        )
        self.woken = self.fetches = 0
        self.handler = MetadataHandler(self.view, self._fetch, self._wake, auto_create=auto_create)
        self.requests = 0

    def _wake(self) -> None:
        self.woken += 1

    def _fetch(self) -> None:
        self.fetches += 1

    def hears(self, peer: int, **body: Any) -> list[ServerMessage]:
        self.requests += 1
        return list(self.handler.on_message(peer, self.requests, body, self.now_ms))

    def respond(self, *topics: TopicMetadata, **errors: int) -> list[ServerMessage]:
        asked = self.view.next_request(self.now_ms)
        assert asked is not None
        self.view.on_response(MetadataUpdate(NODES, topics, errors), asked, self.now_ms)
        self.handler.on_response(asked)
        return list(self.handler.on_time(self.now_ms))


def names(outgoing: Iterable[ServerMessage]) -> list[tuple[int, list[str]]]:
    return [(one.task, sorted(topic[0] for topic in one.body["topics"])) for one in outgoing]


def test_one_response_serves_all_waiting_tasks_and_later_ones_at_once() -> None:
    coordinator = Coordinator()
    for peer in (1, 2):
        (reply,) = coordinator.hears(peer, ask=["a", "b"])
        assert isinstance(reply, Reply)
        assert not reply.last
    sent = coordinator.respond(metadata("a"), metadata("b"))
    assert names(sent) == [(1, ["a", "b"]), (2, ["a", "b"])]
    assert all(isinstance(one, Reply) and one.last for one in sent)
    assert coordinator.view.next_request(coordinator.now_ms) is None
    (reply,) = coordinator.hears(3, ask=["a"])
    assert isinstance(reply, Reply)
    assert reply.last


def test_a_change_is_pushed_to_those_who_use_the_topic_once() -> None:
    coordinator = Coordinator()
    coordinator.hears(1, ask=["a"])
    coordinator.hears(2, ask=["a"])
    coordinator.hears(3, ask=["b"])
    coordinator.respond(metadata("a"), metadata("b"))
    coordinator.now_ms += 1000
    coordinator.hears(1, stale=[["a", 0.0]])
    coordinator.now_ms += 200
    sent = coordinator.respond(metadata("a", leader=2, epoch=1))
    assert all(isinstance(one, Push) for one in sent)
    assert names(sent) == [(1, ["a"]), (2, ["a"])]
    assert not coordinator.handler.on_time(coordinator.now_ms)
    coordinator.handler.on_disconnect(2, coordinator.now_ms)
    coordinator.hears(1, stale=[["a", 0.0]])
    coordinator.now_ms += 2000
    assert names(coordinator.respond(metadata("a", leader=1, epoch=2))) == [(1, ["a"])]


def claimed(epoch: int) -> Coordinator:
    """Two tasks use a topic with epoch 4; then one names leader 2 with this epoch."""
    coordinator = Coordinator()
    coordinator.hears(1, ask=["a"])
    coordinator.hears(2, ask=["a"])
    coordinator.respond(metadata("a", epoch=4))
    coordinator.now_ms += 1000
    coordinator.fetches = 0
    sent = coordinator.hears(1, stale=[["a", 0.0]], leaders=[["a", bytes(16).hex(), 0, 2, epoch]])
    assert not names(sent)[0][1]
    assert not coordinator.handler.on_time(coordinator.now_ms), "one task's word is not passed on"
    assert coordinator.fetches == 1
    return coordinator


def test_a_leader_that_a_task_named_is_asked_for_until_a_broker_that_lags_confirms_it() -> None:
    coordinator = claimed(epoch=5)
    for _ in range(3):
        sent = coordinator.respond(metadata("a", leader=1, epoch=4))
        assert {tuple(one.body["topics"][0][3][0]) for one in sent} == {(1, 4)}
        coordinator.now_ms += coordinator.view.next_request_delay_ms(coordinator.now_ms)
    sent = coordinator.respond(metadata("a", leader=2, epoch=5))
    assert names(sent) == [(1, ["a"]), (2, ["a"])]
    assert {tuple(one.body["topics"][0][3][0]) for one in sent} == {(2, 5)}
    coordinator.now_ms += 2000
    assert coordinator.view.next_request(coordinator.now_ms) is None


def test_one_task_that_errs_does_not_mislead_the_others() -> None:
    """Its epoch, taken as it is, would outlive all that brokers say."""
    coordinator = claimed(epoch=2**31 - 1)
    begun, responses = coordinator.now_ms, 0
    while coordinator.view.next_request_delay_ms(coordinator.now_ms) < 60_000:
        coordinator.now_ms += coordinator.view.next_request_delay_ms(coordinator.now_ms)
        sent = coordinator.respond(metadata("a", leader=1, epoch=4))
        assert {tuple(one.body["topics"][0][3][0]) for one in sent} == {(1, 4)}
        responses += 1
    assert responses <= 6
    assert coordinator.now_ms - begun < 5000
    assert coordinator.view.topic("a") == metadata("a", leader=1, epoch=4)


def test_a_task_that_errs_all_the_time_costs_a_request_a_second() -> None:
    coordinator = claimed(epoch=5)
    begun, responses = coordinator.now_ms, 0
    while coordinator.now_ms < begun + 20_000:
        epoch = 6 + int(coordinator.now_ms - begun)
        coordinator.hears(1, leaders=[["a", bytes(16).hex(), 0, 2, epoch]])
        if coordinator.view.next_request_delay_ms(coordinator.now_ms) == 0:
            coordinator.respond(metadata("a", leader=1, epoch=4))
            responses += 1
        coordinator.now_ms += 50
    assert responses < 25


@pytest.mark.parametrize(
    "named",
    [["a", bytes(16).hex(), 0, 2, 4], ["a", "01" * 16, 0, 2, 9], ["a", None, 7, 2, 9], ["b", None, 0, 2, 9]],
)
def test_a_leader_that_is_known_already_is_not_passed_on(named: list[Any]) -> None:
    coordinator = Coordinator()
    coordinator.hears(1, ask=["a"])
    coordinator.hears(2, ask=["a"])
    coordinator.respond(metadata("a", epoch=4))
    coordinator.hears(1, leaders=[named])
    assert not coordinator.handler.on_time(coordinator.now_ms)


def test_a_leader_that_only_one_task_lacks_is_sent_without_a_request() -> None:
    coordinator = Coordinator()
    coordinator.hears(1, ask=["a"])
    coordinator.respond(metadata("a", epoch=5))
    coordinator.now_ms += 1000
    # What the task had was denied two seconds ago, before the coordinator asked.
    (reply,) = coordinator.hears(1, stale=[["a", 2000.0]])
    assert names([reply]) == [(1, ["a"])]
    coordinator.now_ms += 2000
    assert coordinator.view.next_request(coordinator.now_ms) is None


def test_the_fetcher_is_woken_for_what_is_to_be_asked_and_only_then() -> None:
    coordinator = Coordinator()
    coordinator.hears(1, ask=["a"])
    assert coordinator.fetches == 1
    coordinator.respond(metadata("a"))
    coordinator.now_ms += 1000
    coordinator.hears(2, ask=["a"], use=["a"])
    assert coordinator.fetches == 1
    coordinator.hears(2, stale=[["a", 0.0]])
    assert coordinator.fetches == 2


def test_what_a_task_writes_to_is_bounded_and_so_is_what_is_remembered_of_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(metadata_handler, "_MAX_TOPICS_OF_A_TASK", 500)
    monkeypatch.setattr(metadata_handler, "_MAX_SPARE", 100)
    coordinator = Coordinator()
    for part in range(50):
        used = [f"t{part}-{number}" for number in range(50)]
        coordinator.hears(1, use=used)
        asked = coordinator.view.next_request(coordinator.now_ms) or ()
        coordinator.view.on_response(
            MetadataUpdate(NODES, tuple(map(metadata, asked))), asked, coordinator.now_ms
        )
        coordinator.handler.on_response(asked)
        coordinator.now_ms += 1000
        assert len(coordinator.handler._tasks[1].topics) <= 500
        # Twice those in use, with some to spare: else it would be sorted out at every message.
        assert len(coordinator.handler._changes) <= 2 * 500 + 100 + 50
    assert used[0] in coordinator.handler._tasks[1].topics


def test_a_task_gets_pending_replies_and_a_last_one_in_time() -> None:
    coordinator = Coordinator()
    coordinator.hears(1, ask=["a"])
    coordinator.now_ms += 99
    assert not coordinator.handler.on_time(coordinator.now_ms)
    assert coordinator.handler.next_change_ms(coordinator.now_ms) == 1
    coordinator.now_ms += 1
    (reply,) = coordinator.handler.on_time(coordinator.now_ms)
    assert isinstance(reply, Reply)
    assert not reply.last
    coordinator.now_ms += GIVE_UP_MS
    (reply,) = coordinator.handler.on_time(coordinator.now_ms)
    assert isinstance(reply, Reply)
    assert reply.last
    assert reply.body["asked"]
    assert coordinator.handler.next_change_ms(coordinator.now_ms) == math.inf


def test_tasks_that_wait_for_the_same_topics_share_them() -> None:
    """Catches: 100 tasks that asked for 10,000 topics took 60 MiB until the response came."""
    coordinator = Coordinator()
    topics = [f"orders-{number}" for number in range(2_000)]
    # What the first request of a process leaves, and what the first task takes.
    coordinator.hears(0, ask=list(topics))
    tracemalloc.start()
    try:
        for peer in range(1, 100):
            assert not coordinator.hears(peer, ask=list(topics))[0].last  # type: ignore[union-attr]
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert taken < 3 * 2**20


def test_brokers_that_cannot_be_reached_end_the_wait() -> None:
    coordinator = Coordinator()
    coordinator.hears(1, ask=["a"])
    coordinator.handler.failed("nobody listens")
    (reply,) = coordinator.handler.on_time(coordinator.now_ms)
    assert isinstance(reply, Reply)
    assert reply.last
    (reply,) = coordinator.hears(1, ask=["b"])
    assert isinstance(reply, Reply)
    assert reply.last


def test_who_cannot_reach_brokers_goes_on_trying_for_those_whom_it_does_not_keep_waiting() -> None:
    """Else nothing would be left to ask for, and nothing would ever show that brokers are back."""
    coordinator = Coordinator()
    coordinator.handler.failed("nobody listens")
    (reply,) = coordinator.hears(1, ask=["a"])
    assert isinstance(reply, Reply)
    assert reply.last
    assert coordinator.view.next_request(coordinator.now_ms) == ("a",)
    coordinator.view.on_failure(coordinator.now_ms)
    coordinator.now_ms += 60_000
    assert coordinator.view.next_request(coordinator.now_ms) == ("a",)
    coordinator.view.on_failure(coordinator.now_ms)
    coordinator.handler.failed(None)
    coordinator.handler.on_time(coordinator.now_ms)
    coordinator.now_ms += 60_000
    assert coordinator.view.next_request(coordinator.now_ms) is None, "nobody waits for it"
    coordinator.hears(1, ask=["a"])
    assert names(coordinator.respond(metadata("a"))) == [(1, ["a"])]


@pytest.mark.parametrize("code", [UNKNOWN, NOT_AUTHORIZED])
def test_errors_are_sent_and_the_next_request_for_the_topic_fetches_again(code: int) -> None:
    coordinator = Coordinator()
    coordinator.hears(1, ask=["a"])
    (reply,) = coordinator.respond(a=code)
    assert reply.body["errors"] == {"a": code}
    coordinator.now_ms += 60_000
    assert coordinator.view.next_request(coordinator.now_ms) is None
    coordinator.hears(1, ask=["a"])
    assert names(coordinator.respond(metadata("a"))) == [(1, ["a"])]


def test_a_missing_topic_is_forgotten_whoever_left_while_it_waited() -> None:
    """Catches: a task that had left kept a missing topic in the metadata, which brokers were asked for on."""
    coordinator = Coordinator()
    coordinator.hears(1, ask=["x"])
    coordinator.handler.on_disconnect(1, coordinator.now_ms)
    asked = coordinator.view.next_request(coordinator.now_ms)
    assert asked is not None
    coordinator.view.on_response(MetadataUpdate(NODES, (), {"x": UNKNOWN}), asked, coordinator.now_ms)
    coordinator.handler.on_response(asked)
    (reply,) = coordinator.hears(2, ask=["x"])
    assert reply.body["errors"] == {"x": UNKNOWN}
    assert coordinator.view.topic_error("x") is None


def test_a_topic_that_brokers_may_be_creating_is_waited_for() -> None:
    coordinator = Coordinator(auto_create=True)
    coordinator.hears(1, ask=["a"])
    assert not coordinator.respond(a=UNKNOWN)
    coordinator.now_ms += 150
    (reply,) = [one for one in coordinator.respond(metadata("a")) if isinstance(one, Reply) and one.last]
    assert names([reply]) == [(1, ["a"])]


def test_a_response_that_came_while_a_clock_was_read_has_no_negative_age() -> None:
    coordinator = Coordinator()
    coordinator.hears(1, ask=["a"])
    coordinator.now_ms += 5
    coordinator.respond(metadata("a"))
    coordinator.now_ms -= 5
    (reply,) = coordinator.hears(2, ask=["a"])
    assert decode_snapshot(reply.body).topics[0].age_ms == 0
    assert decode_snapshot(reply.body).nodes_age_ms == 0


@pytest.mark.parametrize(
    "body",
    [
        {"ask": "a"},
        {"ask": [1]},
        {"ask": ["a"] * 5001},
        {"use": {}},
        {"stale": [["a", -1]]},
        {"stale": [["a", float("nan")]]},
        {"stale": [["a"]]},
        {"stale": 7},
        {"leaders": [["a", None, 0, 1]]},
        {"leaders": [["a", "00", 0, 1, 1]]},
        {"leaders": [["a", None, "0", 1, 1]]},
        {"leaders": {}},
        {"leaders": [["a", None, 0, 1, 2**40]]},
        {"leaders": [["a", None, 2**31, 1, 1]]},
    ],
)
def test_messages_that_make_no_sense_change_nothing(body: dict[str, Any]) -> None:
    coordinator = Coordinator()
    with pytest.raises(ProtocolError):
        coordinator.hears(1, **body)
    assert coordinator.view.next_request(coordinator.now_ms) is None


@pytest.mark.parametrize(
    "change",
    [
        {"topics": [["a", "00", 0, []]]},
        {"topics": [["a", None, -1, []]]},
        {"topics": [["a", None, 0, [[1]]]]},
        {"topics": [[7, None, 0, []]]},
        {"topics": [["a", None, 0, [[1, 2**40]]]]},
        {"topics": [["a", None, 0, [[1, 1]], -5]]},
        {"nodes": [[1, "h", "p", None]]},
        {"nodes_age": "old"},
        {"topics": None},
    ],
)
def test_hints_that_make_no_sense_are_refused(change: dict[str, Any]) -> None:
    (body,) = encode_snapshot(MetadataSnapshot((), NODES, 5.0, "c"))
    assert decode_snapshot(body) == MetadataSnapshot((), NODES, 5.0, "c")
    with pytest.raises(ProtocolError):
        decode_snapshot({**body, **change})


class View:
    """Takes hints and notes how long requests are held back."""

    def __init__(self) -> None:
        self.taken: list[MetadataSnapshot] = []
        self.held_until_ms = -math.inf
        self.shared = False

    def import_hints(self, snapshot: MetadataSnapshot, now_ms: float) -> int:
        self.taken.append(snapshot)
        return 1

    def hold(self, until_ms: float) -> None:
        self.held_until_ms = until_ms

    def release(self, now_ms: float) -> None:
        self.held_until_ms = now_ms

    def share_refreshes(self, shared: bool) -> None:
        self.shared = shared


class Task:
    """The exchange of a task; the test is its client."""

    def __init__(self, idle_ms: float = 300_000) -> None:
        self.now_ms = 0.0
        self.view = View()
        self.woken = 0
        self.exchange = MetadataChannel(self.view, lambda: self.now_ms, 500, idle_ms)
        self.exchange.attach(self._wake)
        self.exchange.on_connected(0)

    def _wake(self) -> None:
        self.woken += 1

    def says(self) -> Any:
        return self.exchange.next_message(self.now_ms)


def test_what_is_asked_goes_at_once_and_use_when_it_is_gathered() -> None:
    task = Task()
    assert task.says() == {"use": [], "stale": []}
    assert task.exchange.ask(["a"])
    assert task.woken == 1
    assert task.says() == {"ask": ["a"]}
    task.exchange.note_use(["a", "b"])
    assert task.says() is None
    task.now_ms = 500
    assert task.says() == {"use": ["b"], "stale": []}
    task.exchange.note_use(["a", "b"])
    task.now_ms = 1000
    assert task.says() is None
    assert task.exchange.next_message_delay_ms(task.now_ms) == 500
    task.now_ms = 6000
    assert task.says() == {"use": [], "stale": []}
    task.now_ms = 60_001
    task.exchange.note_use(["a", "b"])
    assert task.says() == {"use": ["a"], "stale": []}


def test_a_stale_leader_is_reported_sooner() -> None:
    task = Task()
    task.says()
    task.now_ms = 50
    task.exchange.report_stale("a")
    task.exchange.report_stale("b")
    assert task.woken == 1
    assert task.exchange.next_message_delay_ms(50) == 50
    task.now_ms = 100
    assert task.says() == {"use": [], "stale": [["a", 50], ["b", 50]]}


def test_a_thousand_leaders_and_more_that_move_together_are_all_told() -> None:
    task = Task()
    task.says()
    for number in range(2500):
        task.exchange.report_stale(f"t{number}")
    sent: list[str] = []
    for _ in range(3):
        task.now_ms += task.exchange.next_message_delay_ms(task.now_ms)
        sent += [name for name, _ in task.says()["stale"]]
    assert task.now_ms <= 300
    assert sent == [f"t{number}" for number in range(2500)]
    task.now_ms += 100
    assert task.says() is None


def test_the_largest_messages_are_taken_by_the_server() -> None:
    names = [f"{number:05}".ljust(249, "x") for number in range(20_000)]
    task = Task()
    task.exchange.ask(names)
    task.exchange.note_use(names)
    for name in names:
        task.exchange.report_leader(TopicPartition(name, 123_456), 2**31 - 1, 2**31 - 1, b"i" * 16)
    client, server = Session(b"s" * 32, "client"), Session(b"s" * 32, "server")
    reader = FrameReader(ServerBounds().request_bytes)
    reader.feed(server.greeting())
    proof = client.reply_to_greeting(reader.next_frame() or b"")
    client.verify_proof(server.reply_to_proof(proof[4:])[4:])
    count = 0
    while count < 8:
        if (message := task.says()) is None:
            task.now_ms += 100
            continue
        count += 1
        reader.feed(client.encode({"id": count, "kind": "metadata", "body": message}))
        assert reader.next_frame() is not None


def test_a_reply_for_many_tasks_is_encoded_once() -> None:
    """A thousand workers begin with the same two thousand topics, and wait meanwhile."""
    coordinator = Coordinator()
    for peer in range(50):
        coordinator.hears(peer, ask=["a", "b"])
    looks: list[object] = []
    snapshot = coordinator.view.snapshot
    coordinator.view.snapshot = lambda *sent: (looks.append(sent), snapshot(*sent))[1]  # type: ignore[method-assign]
    sent = coordinator.respond(metadata("a"), metadata("b"))
    assert names(sent) == [(peer, ["a", "b"]) for peer in range(50)]
    assert len(looks) == 1
    coordinator.now_ms += 1000
    coordinator.hears(7, stale=[["a", 0.0]])
    looks.clear()
    sent = coordinator.respond(metadata("a", leader=2, epoch=1))
    assert len(sent) == 50
    assert len(looks) == 1


def test_a_leader_that_a_broker_named_is_reported_with_its_epoch() -> None:
    task = Task()
    task.says()
    task.exchange.report_leader(TopicPartition("a", 3), 2, 7, b"i" * 16)
    task.exchange.report_leader(TopicPartition("a", 3), 1, 8, b"i" * 16)
    task.exchange.report_leader(TopicPartition("b", 0), 1, 1, None)
    assert task.woken == 1
    task.now_ms = 100
    leaders = [["a", (b"i" * 16).hex(), 3, 1, 8], ["b", None, 0, 1, 1]]
    assert task.says() == {"use": [], "stale": [["a", 100], ["b", 100]], "leaders": leaders}
    task.now_ms = 600
    assert task.says() is None


def test_a_leader_found_stale_while_a_clock_was_read_has_no_negative_age() -> None:
    task = Task()
    task.now_ms = 7
    task.exchange.report_stale("a")
    assert task.exchange.next_message(0) == {"use": [], "stale": [["a", 0]]}


def test_requests_are_held_as_long_as_a_response_is_on_its_way() -> None:
    task = Task()
    task.exchange.ask(["a"])
    task.says()
    task.exchange.on_reply({"pending": 1}, False, 100)
    assert task.view.held_until_ms == 100 + HINT_WAIT_MS
    (body,) = encode_snapshot(MetadataSnapshot((), NODES))
    task.exchange.on_reply({**body, "asked": True}, True, 200)
    assert task.view.held_until_ms == 200
    assert task.view.taken


def test_who_has_lost_the_coordinator_asks_nobody_until_it_is_back() -> None:
    task = Task()
    task.exchange.ask(["a"])
    task.exchange.on_lost(10)
    assert task.view.held_until_ms == 10
    assert not task.exchange.ask(["b"])
    task.exchange.on_connected(20)
    assert task.says() == {"use": [], "stale": []}
    assert task.exchange.ask(["b"])


def test_hints_that_are_awaited_leave_half_of_max_block_for_brokers() -> None:
    """However often the coordinator says that it is at it."""

    class Hopeful(HintSource):
        def ask(self, topics: Iterable[str]) -> bool:
            return True

    coordinator = Coordinator()
    view = coordinator.view
    view.hints = Hopeful()
    begun, asked_ms = coordinator.now_ms, math.inf

    def hold_again() -> None:
        nonlocal asked_ms
        view.hold(coordinator.now_ms + HINT_WAIT_MS)
        if view.next_request(coordinator.now_ms):
            asked_ms = min(asked_ms, coordinator.now_ms)
        coordinator.now_ms += 50

    with pytest.raises(MetadataTimeoutError):
        view.await_topics(["a"], 400, hold_again)
    assert asked_ms - begun == 200


@pytest.mark.parametrize("idle_ms", [5_000, 20_000, 300_000])
@pytest.mark.parametrize("pause", [0.01, 0.2, 0.34, 0.7, 0.99])
def test_a_topic_in_use_is_never_forgotten_by_the_coordinator(idle_ms: float, pause: float) -> None:
    """``pause``: from one use to the next, as a part of metadata.max.idle.ms."""
    coordinator, task = Coordinator(idle_ms=idle_ms), Task(idle_ms)
    begun = coordinator.now_ms
    task.exchange.ask(["a"])
    coordinator.hears(1, **task.says())
    coordinator.respond(metadata("a"))
    use_ms = 0.0
    messages = 0
    while task.now_ms < 5 * idle_ms:
        if task.now_ms >= use_ms:
            task.exchange.note_use(["a"])
            use_ms += pause * idle_ms
        said = task.says()
        coordinator.now_ms = begun + task.now_ms
        if said is not None:
            messages += bool(said["use"])
            coordinator.hears(1, **said)
        coordinator.view.next_request_delay_ms(coordinator.now_ms)
        assert coordinator.view.topic("a") is not None, f"forgotten at {task.now_ms} ms"
        task.now_ms += 50
    assert messages <= 5 * 15, "a task need not tell of each use"
    coordinator.now_ms += 2 * idle_ms
    coordinator.view.next_request_delay_ms(coordinator.now_ms)
    assert coordinator.view.topic("a") is None


def test_refreshing_is_left_to_the_coordinator_while_it_is_there() -> None:
    task = Task()
    assert task.view.shared
    task.exchange.on_lost(10)
    assert not task.view.shared
    task.exchange.on_connected(20)
    assert task.view.shared
