"""A mute on one task's word: contradicted, refuted, suspected and doubted by other tasks' responses."""

from __future__ import annotations

import pytest

from kafka_sink.breaker.states import Mute
from kafka_sink.coordinator.breaker.messages import MAX_NODES, MuteReport
from kafka_sink.coordinator.breaker.mute_evidence import ASK_MS, MuteEvidence, Voice
from kafka_sink.model import TopicPartition

P0 = TopicPartition("t", 0)
ONE, TWO, THREE = Voice(1), Voice(2), Voice(3)


def muted(target: int | TopicPartition = 7, since_ms: float = 10_000.0) -> Mute:
    return Mute(target, "silent", since_ms, since_ms + 2_000.0)


@pytest.mark.parametrize(("at_ms", "contradicts"), [(9_400.0, False), (9_600.0, True)])
def test_a_response_in_the_second_half_of_a_silence_contradicts_it(at_ms: float, contradicts: bool) -> None:
    evidence = MuteEvidence()
    evidence.add_response(TWO, 7, at_ms, None, 10_000.0)
    assert evidence.contradicts(ONE, 7, 1_000.0, 10_000.0, doubtful=False) is contradicts
    assert not evidence.contradicts(TWO, 7, 1_000.0, 10_000.0, doubtful=False), "its own response"
    assert evidence.contradicts(ONE, 7, 1_000.0, 10_000.0, doubtful=True)


def test_a_later_response_to_another_task_refutes_a_mute_and_raises_doubts() -> None:
    evidence = MuteEvidence()
    evidence.begin(7, ONE)
    evidence.may_be_refuted(ONE, 7, 10_000.0)
    assert not evidence.add_response(TWO, 7, 9_900.0, muted(), 10_100.0), "from before the mute"
    assert evidence.add_response(TWO, 7, 10_200.0, muted(), 10_300.0)
    assert evidence.is_doubted(ONE, 7, 10_300.0)
    assert not evidence.is_doubted(ONE, 7, 80_000.0), "a minute later"
    assert not evidence.is_doubted(TWO, 7, 10_300.0)


def test_brokers_that_do_not_exist_take_bounded_memory() -> None:
    """Catches: a task that named ever new brokers filled the coordinator's memory."""
    evidence = MuteEvidence()
    for node in range(MAX_NODES + 2):
        evidence.add_response(TWO, node, 10_000.0, None, 10_000.0)
    known = [evidence.contradicts(ONE, node, 1_000.0, 10_000.0, doubtful=False) for node in range(3)]
    assert known == [False, False, True]
    evidence.add_response(TWO, 0, 10_000.0, None, 10_000.0)
    assert evidence.contradicts(ONE, 0, 1_000.0, 10_000.0, doubtful=False), "one that responds is known again"


def test_a_task_that_gets_a_response_itself_is_not_doubted_for_its_mute() -> None:
    evidence = MuteEvidence()
    evidence.begin(7, ONE)
    evidence.may_be_refuted(ONE, 7, 10_000.0)
    assert evidence.add_response(ONE, 7, 10_200.0, muted(), 10_300.0)
    assert not evidence.is_doubted(ONE, 7, 10_300.0)


def test_a_mute_by_all_tasks_votes_is_not_refuted_by_a_response() -> None:
    evidence = MuteEvidence()
    evidence.begin(7, None)
    assert not evidence.add_response(TWO, 7, 10_200.0, muted(), 10_300.0)


def test_a_suspicion_is_due_unless_another_task_gets_a_response_in_time() -> None:
    evidence = MuteEvidence()
    evidence.suspect(ONE, 7, MuteReport(7, "x"), 10_000.0)
    evidence.suspect(ONE, 8, MuteReport(8, "y"), 10_000.0)
    evidence.add_response(ONE, 7, 10_100.0, None, 10_100.0)
    evidence.add_response(TWO, 8, 10_100.0, None, 10_100.0)
    assert evidence.next_suspicion_ms(10_100.0) == ASK_MS - 100.0
    assert evidence.take_due_suspicions(10_100.0) == {}
    assert [(node, one.reason) for node, one in evidence.take_due_suspicions(10_000.0 + ASK_MS).items()] == [
        (7, "x")
    ]
    assert evidence.next_suspicion_ms(20_000.0) == float("inf")
    assert evidence.is_doubted(ONE, 8, 10_200.0)


def test_the_task_that_muted_and_those_with_a_lease_know_when_a_mute_is_over() -> None:
    evidence = MuteEvidence()
    evidence.begin(P0, ONE)
    evidence.may_be_refuted(ONE, P0, 10_000.0)
    evidence.add_witness(TWO, P0)
    assert [evidence.is_witness(voice, P0) for voice in (ONE, TWO, THREE)] == [True, True, False]
    evidence.on_unmuted_by(TWO, P0, muted(P0), 10_500.0, 4_000.0)
    assert evidence.is_doubted(ONE, P0, 10_500.0), "its mute was over so soon"
    evidence.remove_group(2)
    assert not evidence.is_witness(TWO, P0)
    evidence.end(P0)
    assert not evidence.is_witness(ONE, P0)
