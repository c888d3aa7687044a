"""The coordinator's breaker: invalid reports, and what many reports cost."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from kafka_sink.coordinator.breaker import messages as breaker_messages
from kafka_sink.coordinator.breaker.handler import BreakerHandler
from kafka_sink.coordinator.breaker.messages import (
    BreakerReport,
    MuteReport,
    OutcomeCounts,
    TaskVotes,
    UnmuteReport,
    decode_update,
    encode_report,
)
from kafka_sink.coordinator.breaker.votes import MAX_ASKED, PartitionVotes
from kafka_sink.coordinator.transport.handlers import Push, ServerMessage
from kafka_sink.coordinator.transport.peer_connection import encode_message
from kafka_sink.coordinator.transport.session import MAX_FRAME_BYTES
from kafka_sink.errors import ProtocolError
from kafka_sink.model import TopicPartition

INTERVAL = 2_000.0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("responses", [[1]]),
        ("responses", [[1, -5]]),
        ("responses", [[1, float("nan")]]),
        ("rows", -1),
        ("outcomes", [["t", [0, 1, -1, False, ""]]]),
        ("outcomes", [["t" * 250, [0, 1, 1, False, ""]]]),
        ("outcomes", [["t", [0, 1]]]),
        ("outcomes", [[]]),
        ("outcomes", "x"),
        ("outcomes", [["t", *([0, 1, 1, False, ""] for _ in range(breaker_messages.MAX_OUTCOMES + 1))]]),
        ("muted", [[True, "x", 0]]),
        ("muted", [[["t"], "x", 0]]),
        ("muted", [[1, "x" * 301, 0]]),
        ("unmuted", [[1, None]]),
        ("holds", [None]),
        ("holds", {}),
        ("holds", [[]]),
        ("holds", [["t", True]]),
        ("holds", [["t", -1]]),
        ("holds", [["t", *range(breaker_messages.MAX_TARGETS + 1)]]),
    ],
)
def test_an_invalid_report_changes_nothing(name: str, value: object) -> None:
    handler = BreakerHandler(INTERVAL, PartitionVotes(1, 50), 500.0)
    body = encode_report(BreakerReport(muted=(MuteReport(1, "x"),)))
    with pytest.raises(ProtocolError):
        handler.on_message(0, 1, {**body, name: value}, 0.0)
    (reply, *_) = handler.on_message(1, 1, encode_report(BreakerReport()), 0.0)
    assert decode_update(reply.body, 10).added == {}


def test_reports_that_come_together_cost_one_walk_over_all_mutes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: a walk over hundreds of mutes for each report of a thousand tasks while votes come in,
    which kept the coordinator from sending its messages."""
    handler = BreakerHandler(INTERVAL, PartitionVotes(1, 50), 500.0, lambda: 0.5)
    partitions = [TopicPartition("t", number) for number in range(300)]
    failing = encode_report(
        BreakerReport(rows=5, outcomes=tuple(OutcomeCounts(one, 0, 5, True, "x") for one in partitions))
    )
    looks: list[float] = []
    on_time = handler.on_time
    monkeypatch.setattr(handler, "on_time", lambda now_ms: (looks.append(now_ms), on_time(now_ms))[1])
    for peer in range(200):
        handler.on_message(peer, 1, {}, 1_000.0)
    looks.clear()
    for peer in range(200):
        handler.on_message(peer, 2, failing, 2_000.0 + peer / 10)
    assert len(looks) <= 2
    assert handler.next_change_ms(2_020.0) <= 50.0
    handler.on_time(2_080.0)
    reply, *_ = handler.on_message(200, 1, {}, 2_080.0)
    assert len(decode_update(reply.body, 1_000).added) == 300


def _votes_of_thousand(failing: int, handler: BreakerHandler) -> tuple[int, bool]:
    """Of a thousand tasks so many fail. Returns how many were asked, and whether the partition is muted."""
    partition = TopicPartition("t", 0)

    def report(peer: int, now_ms: float) -> list[Push]:
        fails = peer < failing
        outcome = OutcomeCounts(partition, 0 if fails else 5, 5 if fails else 0, fails, "x" if fails else "")
        body = encode_report(BreakerReport(rows=5, outcomes=(outcome,)))
        return [one for one in handler.on_message(peer, 2, body, now_ms) if isinstance(one, Push)]

    for peer in range(1_000):
        handler.on_message(peer, 1, encode_report(BreakerReport(rows=5)), 1_000.0)
    # A few find out first.
    pushes = [push for peer in range(min(failing, 10)) for push in report(peer, 2_000.0)]
    pushes += [one for one in handler.on_time(2_060.0) if isinstance(one, Push)]
    asked = [push.task for push in pushes if decode_update(push.body, 10).asks]
    for peer in asked:
        report(peer, 2_100.0)
    handler.on_time(2_150.0)
    handler.on_time(2_600.0)
    reply, *_ = handler.on_message(5_000, 1, {}, 2_700.0)
    return len(asked), partition in decode_update(reply.body, 10).added


@pytest.mark.parametrize(("failing", "muted"), [(1_000, True), (800, True), (200, False), (10, False)])
def test_a_sample_votes_for_all_tasks(failing: int, muted: bool) -> None:
    """Catches: a thousand tasks that are asked about 300 partitions each, which took ten seconds to count;
    and the few that report by themselves counted as if they were a tenth of all."""
    handler = BreakerHandler(INTERVAL, PartitionVotes(1, 50), 500.0, random.Random(1).random)
    assert _votes_of_thousand(failing, handler) == (MAX_ASKED, muted)


def test_a_task_that_rests_gets_no_lease() -> None:
    """Catches: a probe that waits for a producer between two micro-batches, while the broker is back."""
    handler = BreakerHandler(INTERVAL, PartitionVotes(1, 50), 500.0, lambda: 0.5)
    for peer in (1, 2):
        handler.on_message(peer, 1, encode_report(BreakerReport(rows=5)), 0.0)
    handler.on_message(1, 2, encode_report(BreakerReport(muted=(MuteReport(7, "x", 1_500.0),))), 10.0)
    handler.on_message(2, 2, encode_report(BreakerReport(is_resting=True)), 20.0)
    handler.on_time(100.0)
    handler.on_message(1, 3, encode_report(BreakerReport(rows=1)), INTERVAL)
    leased = [
        one.task
        for now_ms in (INTERVAL + 10, INTERVAL + 200, 2 * INTERVAL + 300)
        for one in handler.on_time(now_ms)
        if isinstance(one, Push) and decode_update(one.body, 10).leases
    ]
    assert leased
    assert set(leased) == {1}


P0 = TopicPartition("t", 0)
FAILING = OutcomeCounts(P0, 0, 16, True, "x", TaskVotes(4, 4, 12))


def _relay_says(handler: BreakerHandler, relay: int, now_ms: float, **report: Any) -> Sequence[ServerMessage]:
    body = encode_report(BreakerReport(**{"rows": 100, "tasks": 4, **report}))
    return handler.on_message(relay, 1, body, now_ms)


def test_a_relay_has_the_votes_of_its_tasks() -> None:
    handler = BreakerHandler(INTERVAL, PartitionVotes(1, 50), 500.0, lambda: 0.5)
    writes = OutcomeCounts(P0, 5, 0)
    for task in range(3):
        handler.on_message(task, 1, encode_report(BreakerReport(rows=5, outcomes=(writes,))), 1_000.0)
    _relay_says(handler, 9, 1_000.0, outcomes=(FAILING,))
    handler.on_time(1_100.0)
    (mute,) = handler.muted(1_100.0)
    assert "16 batches of 4 of the 7 tasks" in mute.reason


def test_votes_of_a_frozen_relay_end_before_its_tasks_vote_by_themselves() -> None:
    """Catches: votes that count twice, because its tasks have left it and report anew."""
    votes = PartitionVotes(1, 50)
    handler = BreakerHandler(INTERVAL, votes, 500.0, lambda: 0.5)
    writes = OutcomeCounts(P0, 5, 0)
    for task in range(8):
        handler.on_message(task, 1, encode_report(BreakerReport(rows=5, outcomes=(writes,))), 1_000.0)
    _relay_says(handler, 9, 1_000.0, outcomes=(FAILING,))
    assert votes.tally(P0).tasks == 12
    for now_ms in (3_000.0, 5_000.0):
        _relay_says(handler, 9, now_ms)
        handler.on_time(now_ms + 100.0)
        assert votes.tally(P0).tasks == 12, "it is there, and has nothing new to say"
    handler.on_message(0, 2, encode_report(BreakerReport(rows=5, outcomes=(writes,))), 8_100.0)
    handler.on_time(8_200.0)
    assert votes.tally(P0) == (8, 0, 0)


def test_the_vote_of_a_relay_whose_tasks_write_elsewhere_by_now_is_forgotten() -> None:
    """Catches: votes of none, which stayed and were walked over for as long as the relay lived."""
    votes = PartitionVotes(1, 50)
    handler = BreakerHandler(INTERVAL, votes, 500.0, lambda: 0.5)
    for relay in (8, 9):
        _relay_says(handler, relay, 1_000.0, outcomes=(replace(FAILING, votes=TaskVotes(4, 1, 3)),))
    for now_ms in range(2_000, 20_000, 1_000):
        left = (OutcomeCounts(P0, 0, 0, votes=TaskVotes(0, 0, 0)),) if now_ms == 2_000 else ()
        _relay_says(handler, 9, float(now_ms), outcomes=left)
        _relay_says(handler, 8, float(now_ms))
        handler.on_time(now_ms + 100.0)
    assert votes.tally(P0).tasks == 4
    assert votes._votes[P0].keys() == {8}


def test_no_lease_goes_out_before_the_mute_that_it_is_for() -> None:
    """Catches: a lease that a relay forgot when it learned of the mute, and a failed probe with it."""
    handler = BreakerHandler(INTERVAL, None, 500.0, lambda: 0.5)
    _relay_says(handler, 9, 1_000.0, holds=(P0,))
    _relay_says(handler, 9, 1_100.0, muted=(MuteReport(7, "x", 1_000.0, 2),))
    assert _relay_says(handler, 9, 1_110.0, muted=(MuteReport(P0, "x", 0.0, 2),))[1:] == []
    early = handler.on_time(1_120.0)  # something else is due
    late = handler.on_time(1_160.0)
    updates = [decode_update({**one.body}, 100) for one in (*early, *late)]
    kinds = ["mute" if P0 in one.added else "lease" for one in updates if P0 in one.added or P0 in one.leases]
    assert kinds == ["mute", "lease"]


def test_another_task_of_the_same_relay_is_asked_where_there_is_no_other() -> None:
    handler = BreakerHandler(INTERVAL, PartitionVotes(1, 50), 500.0, lambda: 0.5)
    _relay_says(handler, 9, 1_000.0)
    outgoing = _relay_says(handler, 9, 2_000.0, muted=(MuteReport(7, "no reason", 0.0, 2),))
    assert [decode_update(one.body, 10).asks for one in outgoing if isinstance(one, Push)] == [(7,)]
    assert not list(handler.muted(2_100.0)), "it has a second"
    _relay_says(handler, 9, 2_100.0, responses={7: 0.0}, responders={7: 3})
    handler.on_time(4_000.0)
    assert not list(handler.muted(4_000.0))


@pytest.mark.parametrize("is_old", [True, False])
def test_what_a_task_brings_along_to_a_relay_is_doubtful(is_old: bool) -> None:
    handler = BreakerHandler(INTERVAL, PartitionVotes(1, 50), 500.0, lambda: 0.5)
    handler.on_message(1, 1, encode_report(BreakerReport(rows=5)), 10_000.0)
    _relay_says(handler, 9, 10_000.0)
    handler.on_message(1, 2, encode_report(BreakerReport(responses={7: 2_000.0})), 11_000.0)
    _relay_says(handler, 9, 11_000.0, muted=(MuteReport(7, "silent", 2_000.0, 2, is_old),))
    assert bool(list(handler.muted(11_000.0))) is not is_old


def test_after_the_coordinator_stood_still_one_vote_mutes_nothing_for_all() -> None:
    """Catches: all tasks counted as silent after a stall of 5 s, and a vote as over after one of 0.4 s, and
    the first vote that was read decided for all."""
    stood_ms = 0.0
    handler = BreakerHandler(INTERVAL, PartitionVotes(1, 50), 500.0, lambda: 0.5, stood_ms=lambda _: stood_ms)
    partition = TopicPartition("t", 0)

    def say(peer: int, now_ms: float, **report: Any) -> list[int]:
        """The tasks that are asked about something after this report."""
        found = handler.on_message(peer, 1, encode_report(BreakerReport(**report)), now_ms)
        return [one.task for one in found if isinstance(one, Push) and decode_update(one.body, 10).asks]

    for peer in range(3):
        say(peer, 0.0, rows=10)
    now_ms = stood_ms = 20_000.0
    failing = OutcomeCounts(partition, 0, 9, True, "no")
    assert say(0, now_ms, outcomes=(failing,), muted=(MuteReport(7, "it seems so"),)) == [1, 2]
    now_ms += 10_000.0
    stood_ms += 10_000.0
    handler.on_time(now_ms)
    assert not list(handler.muted(now_ms)), "the answers have not been read"
    for peer in (1, 2):
        say(peer, now_ms, outcomes=(OutcomeCounts(partition, 9, 0),), responses={7: 5.0})
    handler.on_time(now_ms + 2_000.0)
    assert not list(handler.muted(now_ms))


def test_mutes_take_no_more_bytes_than_a_new_tasks_frame_has() -> None:
    """Catches: ten thousand mutes with long reasons ended the connection of every task that came."""
    handler = BreakerHandler(INTERVAL, None, 500.0, lambda: 0.5)

    def mute(first: int) -> int:
        muted = tuple(
            MuteReport(TopicPartition("t", first + number), f"{random.random()}" + "\U0001d11e" * 250)
            for number in range(500)
        )
        handler.on_message(1, 1, encode_report(BreakerReport(muted=muted)), 0.0)
        return len(list(handler.muted(0.0)))

    most = [mute(first) for first in range(0, 2_000, 500)][-1]
    assert most < 2_000
    (reply, *_) = handler.on_message(2, 1, {}, 0.0)
    start, shared = encode_message({}, reply.body)
    assert len(start + shared) < MAX_FRAME_BYTES
    over = tuple(UnmuteReport(TopicPartition("t", number), "") for number in range(500))
    handler.on_message(1, 2, encode_report(BreakerReport(unmuted=over)), 1.0)
    assert mute(5_000) == most, "there is room again"
