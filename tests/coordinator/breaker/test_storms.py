"""What thousands of tasks cost the coordinator when a broker freezes: no walk over all of them for each."""

from __future__ import annotations

from collections.abc import Collection

import pytest

from kafka_sink.breaker.states import ProbeLease, Target
from kafka_sink.coordinator.breaker import votes
from kafka_sink.coordinator.breaker.handler import BreakerHandler
from kafka_sink.coordinator.breaker.messages import (
    MAX_OUTCOMES,
    BreakerReport,
    MuteReport,
    OutcomeCounts,
    decode_update,
    encode_report,
)
from kafka_sink.coordinator.breaker.tasks import BreakerTasks, MutePushes, ProbeLeases
from kafka_sink.coordinator.breaker.votes import PartitionVotes
from kafka_sink.coordinator.transport.handlers import Push
from kafka_sink.coordinator.transport.peer_connection import encode_message
from kafka_sink.model import TopicPartition

TASKS = 1_000
# A walk over all tasks for each report would be a thousand looks a task.
LOOKS_A_TASK = 30
SICK = 7
HEALTHY = encode_report(BreakerReport(responses={1: 5.0}))
MUTED = encode_report(BreakerReport(responses={1: 5.0}, muted=(MuteReport(SICK, "silent", 2_000.0),)))


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list with an entry for each look at a task."""
    found: list[int] = []
    look = BreakerTasks._is_active

    def counted(self: BreakerTasks, peer: int, now_ms: float) -> bool:
        found.append(peer)
        return look(self, peer, now_ms)

    monkeypatch.setattr(BreakerTasks, "_is_active", counted)
    return found


@pytest.fixture
def handler() -> BreakerHandler:
    return BreakerHandler(2_000.0, PartitionVotes(1, 50), 500.0, lambda: 0.5)


def test_tasks_that_mute_by_their_own_evidence_cost_no_walk_over_all_tasks(
    handler: BreakerHandler, looks: list[int]
) -> None:
    """Catches: each such report looked at all tasks, also where the broker was muted already. Ten thousand
    within two seconds kept the coordinator busy for 14 s."""
    for peer in range(TASKS):
        handler.on_message(peer, 1, HEALTHY, 0.0)
    looks.clear()
    for peer in range(TASKS):
        handler.on_message(peer, 2, MUTED, 5_000.0 + peer * 0.1)
    assert [mute.target for mute in handler.muted(5_100.0)] == [str(SICK)]
    assert len(looks) < LOOKS_A_TASK * TASKS


def test_tasks_that_connect_again_during_a_mute_are_given_leases_together(
    handler: BreakerHandler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches: every first report granted leases anew, which looks at all mutes and sorts all tasks: six
    thousand tasks that connected again kept the coordinator busy for 5.8 s."""
    grants: list[float] = []
    grant = ProbeLeases.grant

    def counted(
        self: ProbeLeases, now_ms: float, unsent: Collection[Target]
    ) -> dict[int, dict[Target, ProbeLease]]:
        grants.append(now_ms)
        return grant(self, now_ms, unsent)

    monkeypatch.setattr(ProbeLeases, "grant", counted)
    handler.on_message(0, 1, MUTED, 1_000_000.0)
    for peer in range(1, TASKS):
        (reply, *_) = handler.on_message(peer, 1, HEALTHY, 1_000_100.0 + peer * 0.1)
        assert reply.body["added"], "it is told of the mute at once"
    assert len(grants) < 10, "at most one in 50 ms"


def test_a_response_that_only_the_task_itself_had_does_not_contradict_its_mute(
    handler: BreakerHandler,
) -> None:
    """The last responses to two tasks stand for those to all."""
    own = encode_report(BreakerReport(responses={SICK: 1.0}))
    others = encode_report(BreakerReport(responses={SICK: 3_000.0}))
    handler.on_message(1, 1, others, 10_000.0)
    handler.on_message(0, 1, own, 10_000.0)
    handler.on_message(0, 2, MUTED, 10_500.0)
    assert [mute.target for mute in handler.muted(10_500.0)] == [str(SICK)]


def test_a_response_to_another_task_contradicts_a_mute(handler: BreakerHandler) -> None:
    handler.on_message(1, 1, encode_report(BreakerReport(responses={SICK: 100.0})), 10_000.0)
    handler.on_message(0, 1, encode_report(BreakerReport(responses={SICK: 5.0})), 10_000.0)
    handler.on_message(0, 2, MUTED, 10_500.0)
    assert list(handler.muted(10_500.0)) == []


def test_votes_on_partitions_that_do_not_exist_take_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: the bound of all votes left out partitions with few, so a task could name ever new ones."""
    monkeypatch.setattr(votes, "_MAX_PARTITIONS", 5)
    found = PartitionVotes(1, 50)
    for number in range(10):
        found.vote(1, OutcomeCounts(TopicPartition("t", number), 0, 5, True, "no"), 0.0)
    assert len(found.partitions()) == 5


def test_tasks_share_the_list_of_what_is_unmuted() -> None:
    """Catches: 700 targets that end together made 31 MiB of messages for 1,000 tasks."""
    tasks = BreakerTasks(500.0)
    for peer in range(100):
        tasks.update(peer, BreakerReport(), 0.0)
    targets: list[Target] = [TopicPartition("t", number) for number in range(700)]
    pushes = MutePushes(2_000.0, lambda: 0.5)
    for target in targets:
        pushes.remove(target)
    parts = [encode_message({"kind": "breaker"}, push.body) for push in pushes.take(tasks, 1_000.0)]
    assert len(parts) == 100
    assert sum(len(own) for own, _ in parts) < 100 * 100
    assert len({id(shared) for _, shared in parts}) == 1


def test_thousands_of_partitions_that_fail_together_are_judged_in_turns_by_few(
    handler: BreakerHandler,
) -> None:
    """Catches: 100 of 1,000 tasks were asked about each of 5,000 partitions: 10 s of processor time, 380 MiB,
    and single turns of the loop of more than a second."""
    partitions = [TopicPartition(f"t{number % 50}", number // 50) for number in range(3_000)]
    votes: list[int] = []
    added: list[int] = []
    now_ms = 0.0

    def fail(peer: int, failing: list[Target]) -> list[Push]:
        sent = []
        for start in range(0, len(failing), MAX_OUTCOMES):
            part = failing[start : start + MAX_OUTCOMES]
            votes.append(len(part))
            outcomes = tuple(
                OutcomeCounts(one, 0, 5, True, "x") for one in part if isinstance(one, TopicPartition)
            )
            body = encode_report(BreakerReport(rows=5, outcomes=outcomes))
            sent += [one for one in handler.on_message(peer, 2, body, now_ms) if isinstance(one, Push)]
        return sent

    for peer in range(TASKS):
        handler.on_message(peer, 1, HEALTHY, now_ms)
    pushes = [push for peer in range(5) for push in fail(peer, list(partitions))]
    votes.clear()
    while sum(added) < TASKS * len(partitions) and now_ms < 3_000.0:
        now_ms += 50.0
        pushes += [one for one in handler.on_time(now_ms) if isinstance(one, Push)]
        updates = {id(push.body): decode_update(push.body, 10_000) for push in pushes}
        added += [len(updates[id(push.body)].added) for push in pushes]
        asked = [(push.task, list(updates[id(push.body)].asks)) for push in pushes]
        pushes = [push for task, asks in asked if asks for push in fail(task, asks)]
    assert sum(added) == TASKS * len(partitions), "all are muted, and all tasks know"
    assert max(added) <= 500
    assert sum(votes) <= 25 * len(partitions)
    # What is said of them now takes no memory, and tasks that connect share what they are told.
    fail(7, list(partitions))
    assert not handler.votes or not handler.votes.has_votes
    bodies = [handler.on_message(peer, 1, HEALTHY, now_ms)[0].body for peer in (TASKS, TASKS + 1)]
    assert bodies[0] is bodies[1]
    assert len(decode_update(bodies[0], 10_000).added) == len(partitions)
