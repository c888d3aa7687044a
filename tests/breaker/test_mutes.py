"""The breaker's table, and books of mutes against a slow simple model."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kafka_sink.breaker.breaker import CircuitBreakManager
from kafka_sink.breaker.mutes import (
    TRANSITIONS,
    BreakerEvent,
    BreakerState,
    Evidence,
    MuteTable,
    ProbePermit,
    Target,
)
from kafka_sink.errors import BrokerRefusedError, IllegalTransitionError
from kafka_sink.model import TopicPartition
from tests.support.breaker_cluster import A0, A1
from tests.support.brokers import batch

INTERVAL = 2_000.0
TARGETS: list[Target] = [1, 2, TopicPartition("t", 0)]


def test_the_table_in_full() -> None:
    closed, opened, half = BreakerState.CLOSED, BreakerState.OPEN, BreakerState.HALF_OPEN
    wanted = {
        closed: {"trip": opened, "success": closed, "failure": closed, "reset": closed},
        opened: {"trip": opened, "probe": half, "success": closed, "failure": opened, "reset": closed},
        half: {"trip": half, "success": closed, "failure": opened, "expire": opened, "reset": closed},
    }
    assert {(s, BreakerEvent(e)): to for s, moves in wanted.items() for e, to in moves.items()} == TRANSITIONS


def is_due(book: MuteTable, target: Target, now: float) -> bool:
    mute = book.mutes.get(target)
    return mute is not None and mute.is_due(now)


def test_probes_go_once_per_interval_whatever_becomes_of_them() -> None:
    book = MuteTable(INTERVAL)
    assert book.trip(1, "slow", 100.0)
    assert not book.trip(1, "slow", 150.0)
    assert book.next_change_ms(100.0) == INTERVAL
    assert not is_due(book, 1, 2_099.0)
    assert is_due(book, 1, 2_100.0)
    assert book.next_change_ms(2_100.0) == math.inf, "what is due already must not make a loop turn"
    book.probe(1, 2_500.0)
    assert not is_due(book, 1, 4_499.0)
    book.expire_late(4_499.0)
    assert book.mutes[1].state is BreakerState.HALF_OPEN
    book.expire_late(4_500.0)
    assert is_due(book, 1, 4_500.0), "lost after an interval, so the next may go"
    book.probe(1, 4_600.0)
    book.fail(1, "NOT_ENOUGH_REPLICAS", 4_700.0)
    assert not is_due(book, 1, 6_699.0)
    assert is_due(book, 1, 6_700.0)
    assert book.mutes[1].last_error == "NOT_ENOUGH_REPLICAS"
    assert book.succeed(1), "the lost probe's response comes late and is as good"
    assert not book.succeed(1)
    assert book.probes == 2


class BookMachine(RuleBasedStateMachine):
    """The model writes down events and derives each state from all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.book = MuteTable(INTERVAL)
        self.now = 0.0
        self.story: dict[Target, list[tuple[str, float]]] = {target: [] for target in TARGETS}

    @rule(passed=st.sampled_from([0.0, 1.0, 700.0, 1_999.0, 2_000.0, 9_000.0]))
    def time_passes(self, passed: float) -> None:
        self.now += passed
        self.book.expire_late(self.now)

    @rule(of=st.sampled_from(TARGETS), event=st.sampled_from(sorted(e.value for e in BreakerEvent)))
    def happens(self, of: Target, event: str) -> None:
        kind = BreakerEvent(event)
        state, _ = self._derive(of)
        if (state, kind) not in TRANSITIONS:
            before = (repr(self.book.mutes), self.book.version, self.book.probes)
            with pytest.raises(IllegalTransitionError, match=f"{state.value} does not allow .* {event}"):
                self._do(of, kind)
            assert before == (repr(self.book.mutes), self.book.version, self.book.probes)
            return
        self._do(of, kind)
        self.story[of].append((event, self.now))

    def _do(self, target: Target, kind: BreakerEvent) -> None:
        book, now = self.book, self.now
        calls: dict[BreakerEvent, Callable[[], object]] = {
            BreakerEvent.TRIP: lambda: book.trip(target, "r", now),
            BreakerEvent.PROBE: lambda: book.probe(target, now),
            BreakerEvent.SUCCESS: lambda: book.succeed(target),
            BreakerEvent.FAILURE: lambda: book.fail(target, "", now),
            BreakerEvent.EXPIRE: lambda: book.expire(target, now),
            BreakerEvent.RESET: lambda: book.reset(target),
        }
        calls[kind]()

    def _derive(self, target: Target) -> tuple[BreakerState, float]:
        """State and the time at which it allows a probe, or loses one."""
        state, at = BreakerState.CLOSED, math.inf
        for event, when in self.story[target]:
            if state is BreakerState.HALF_OPEN and at <= when:
                state = BreakerState.OPEN
            before, state = state, TRANSITIONS[(state, BreakerEvent(event))]
            if (before, state) == (BreakerState.CLOSED, BreakerState.OPEN) or event == "probe":
                at = when + INTERVAL
            elif before is BreakerState.HALF_OPEN and state is BreakerState.OPEN:
                at = when + INTERVAL if event == "failure" else when
        if state is BreakerState.HALF_OPEN and at <= self.now:
            state = BreakerState.OPEN
        return state, at

    @invariant()
    def the_book_says_what_the_story_tells(self) -> None:
        for target in TARGETS:
            state, at = self._derive(target)
            mute = self.book.mutes.get(target)
            assert (BreakerState.CLOSED if mute is None else mute.state) is state, target
            assert is_due(self.book, target, self.now) == (state is BreakerState.OPEN and at <= self.now)


TestBook = BookMachine.TestCase


# -- mutes of the task itself and of the coordinator --------------------------------------------------


def test_the_coordinators_mutes_and_permits(manager: CircuitBreakManager) -> None:
    muted: dict[Target, str] = {1: "another task's", A1: "another task's"}
    manager.local.apply_shared(muted, {})
    assert [(c.target, c.muted, c.own) for c in manager.local.take_changes()] == [
        (1, True, False),
        (A1, True, False),
    ]
    manager.local.now_ms = 60_000.0
    assert manager.local.brokers_to_probe() == [], "no permit"
    assert not manager.local.may_probe(A1), "no permit"
    manager.local.apply_shared(muted, {1: ProbePermit(500.0), A1: ProbePermit(500.0)})
    assert manager.local.brokers_to_probe() == [1]
    assert manager.local.may_probe(A1)
    manager.local.now_ms = 60_500.0
    assert manager.local.brokers_to_probe() == [], "the permit is over"
    assert not manager.local.may_probe(A1), "the permit is over"
    manager.local.apply_shared(muted, {1: ProbePermit(500.0), A1: ProbePermit(500.0)})
    manager.local.broker_probe_sent(1)
    assert manager.local.brokers_to_probe() == []
    manager.local.batches_sent([batch(A1)])
    assert not manager.local.may_probe(A1)
    manager.local.apply_shared({}, {})
    assert not manager.is_muted(1)
    changes = [(c.target, c.muted, c.own) for c in manager.local.take_changes()]
    assert sorted(changes, key=str) == [(1, False, False), (A1, False, False)]


def test_own_mutes_go_on_until_the_coordinator_knows_them(manager: CircuitBreakManager) -> None:
    manager.mute(2, "found here")
    manager.local.apply_shared({}, {})
    assert manager.is_muted(2)
    manager.local.apply_shared({2: "found here"}, {})
    manager.local.apply_shared({}, {})
    assert not manager.is_muted(2)


def test_without_the_coordinator_the_own_clock_decides(manager: CircuitBreakManager) -> None:
    manager.local.apply_shared({1: "another task's"}, {})
    manager.local.now_ms = 10_000.0
    assert manager.local.brokers_to_probe() == []
    manager.local.on_coordinator_lost()
    assert manager.is_muted(1)
    assert manager.local.brokers_to_probe() == [], "another coordinator may be there soon"
    manager.local.now_ms += manager.local.retry_interval_ms
    assert manager.local.brokers_to_probe() == [1]


def test_a_coordinator_that_comes_and_goes_delays_probes_once(manager: CircuitBreakManager) -> None:
    """Catches: nobody ever probes, and rows for the target expire."""
    interval_ms = manager.local.retry_interval_ms
    manager.local.apply_shared({1: "another task's"}, {})
    manager.local.now_ms = 100_000.0
    for _ in range(2):
        manager.local.on_coordinator_lost()
        assert manager.local.brokers_to_probe() == []
        manager.local.now_ms += interval_ms / 4
        manager.local.apply_shared({1: "another task's"}, {})
        manager.local.now_ms += interval_ms / 4
    manager.local.on_coordinator_lost()
    assert manager.local.brokers_to_probe() == [1]


def test_mutes_are_reported_with_their_silence(manager: CircuitBreakManager) -> None:
    manager.mute(1, "silent", Evidence(silence_ms=700.0))
    manager.local.apply_shared({2: "another's"}, {})
    manager.local.apply_shared({2: "another's", A1: "another's"}, {})
    manager.local.now_ms = 2_000.0
    reported = [(c.target, c.reason, c.evidence) for c in manager.local.mutes_to_report()]
    assert reported == [
        (1, "silent", Evidence(silence_ms=2_700.0)),
        (2, "another's", Evidence(silence_ms=2_000.0)),
        (A1, "another's", Evidence(counted=True)),
    ]
    manager.local.apply_shared({2: "another's"}, {})
    manager.local.batches_sent([batch(A0)])
    manager.local.batches_done([batch(A0)], BrokerRefusedError("NOT_ENOUGH_REPLICAS", 19))
    assert [c.target for c in manager.local.mutes_to_report()] == [2]
    manager.mute(A1)
    assert manager.local.mutes_to_report()[-1].evidence == Evidence()
    manager.local.apply_shared({}, {})
    manager.local.now_ms = 4_000.0
    manager.local.batches_sent([batch(A1)])
    manager.local.batches_done([batch(A1)], BrokerRefusedError("NOT_ENOUGH_REPLICAS", 19))
    assert manager.local.take_failures() == [(A1, "NOT_ENOUGH_REPLICAS")]
    assert manager.local.take_failures() == []
