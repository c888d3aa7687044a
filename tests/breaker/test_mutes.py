"""When a target is probed, whatever becomes of its probes, and whose mute it is."""

from __future__ import annotations

import math

from kafka_sink.breaker.manager import CircuitBreakManager
from kafka_sink.breaker.mutes import Evidence
from kafka_sink.errors import BrokerRefusedError
from kafka_sink.model import Target
from tests.support.breaker_cluster import A0, A1
from tests.support.brokers import batch

REPLICAS = BrokerRefusedError("NOT_ENOUGH_REPLICAS", 19)


def test_probes_go_once_per_interval_whatever_becomes_of_them(manager: CircuitBreakManager) -> None:
    table = manager.task_mutes

    def may_probe(now_ms: float) -> bool:
        table.now_ms = now_ms
        manager.refresh()
        return table.may_probe(A0)

    assert not may_probe(100.0)
    manager.mute(A0, "slow")
    table.now_ms = 150.0
    manager.mute(A0, "slow still")
    table.now_ms = 100.0
    assert table.next_change_ms() == 2_000.0
    assert not may_probe(2_099.0)
    assert may_probe(2_100.0)
    assert table.next_change_ms() == math.inf, "what is due already must not make a loop turn"
    table.now_ms = 2_500.0
    table.on_batches_sent([batch(A0)])
    assert table.next_change_ms() == 2_000.0
    assert not may_probe(4_499.0)
    assert may_probe(4_500.0), "lost after an interval, so the next may go"
    table.now_ms = 4_600.0
    table.on_batches_sent([batch(A0)])
    table.now_ms = 4_700.0
    table.on_batches_done([batch(A0)], REPLICAS)
    assert not may_probe(6_699.0)
    assert may_probe(6_700.0)
    (mute,) = table.covering(A0)
    assert (mute.reason, mute.since_ms, mute.last_error) == ("slow", 100.0, "NOT_ENOUGH_REPLICAS")
    table.on_batches_done([batch(A0)], REPLICAS)
    assert may_probe(6_700.0), "a late failure delays nothing"
    table.on_batches_done([batch(A0)], None)
    assert not manager.is_muted(A0), "the lost probe's response comes late and is as good"
    assert table.probes == 2


def test_the_coordinators_mutes_and_permits(manager: CircuitBreakManager) -> None:
    muted: dict[Target, str] = {1: "another task's", A1: "another task's"}
    manager.task_mutes.apply_shared(muted)
    assert [(c.target, c.muted, c.own) for c in manager.task_mutes.take_changes()] == [
        (1, True, False),
        (A1, True, False),
    ]
    manager.task_mutes.now_ms = 60_000.0
    assert manager.task_mutes.brokers_to_probe() == [], "no permit"
    assert not manager.task_mutes.may_probe(A1), "no permit"
    manager.task_mutes.permit([1, A1], new_rows=False)
    assert manager.task_mutes.brokers_to_probe() == [1]
    assert manager.task_mutes.may_probe(A1)
    manager.task_mutes.now_ms += manager.task_mutes.retry_interval_ms
    assert manager.task_mutes.brokers_to_probe() == [], "the permit is over"
    assert not manager.task_mutes.may_probe(A1), "the permit is over"
    manager.task_mutes.permit([1, A1], new_rows=False)
    manager.task_mutes.on_broker_probe_sent(1)
    assert manager.task_mutes.brokers_to_probe() == []
    manager.task_mutes.on_batches_sent([batch(A1)])
    assert not manager.task_mutes.may_probe(A1)
    manager.task_mutes.apply_shared({})
    assert not manager.is_muted(1)
    changes = [(c.target, c.muted, c.own) for c in manager.task_mutes.take_changes()]
    assert sorted(changes, key=str) == [(1, False, False), (A1, False, False)]


def test_own_mutes_go_on_until_the_coordinator_knows_them(manager: CircuitBreakManager) -> None:
    manager.mute(2, "found here")
    manager.task_mutes.apply_shared({})
    assert manager.is_muted(2)
    manager.task_mutes.apply_shared({2: "found here"})
    manager.task_mutes.apply_shared({})
    assert not manager.is_muted(2)


def test_without_the_coordinator_the_own_clock_decides(manager: CircuitBreakManager) -> None:
    manager.task_mutes.apply_shared({1: "another task's"})
    manager.task_mutes.now_ms = 10_000.0
    assert manager.task_mutes.brokers_to_probe() == []
    manager.task_mutes.on_coordinator_lost()
    assert manager.is_muted(1)
    assert manager.task_mutes.brokers_to_probe() == [], "another coordinator may be there soon"
    manager.task_mutes.now_ms += manager.task_mutes.retry_interval_ms
    assert manager.task_mutes.brokers_to_probe() == [1]


def test_a_coordinator_that_comes_and_goes_delays_probes_once(manager: CircuitBreakManager) -> None:
    """Catches: nobody ever probes, and rows for the target expire."""
    interval_ms = manager.task_mutes.retry_interval_ms
    manager.task_mutes.apply_shared({1: "another task's"})
    manager.task_mutes.now_ms = 100_000.0
    for _ in range(2):
        manager.task_mutes.on_coordinator_lost()
        assert manager.task_mutes.brokers_to_probe() == []
        manager.task_mutes.now_ms += interval_ms / 4
        manager.task_mutes.apply_shared({1: "another task's"})
        manager.task_mutes.now_ms += interval_ms / 4
    manager.task_mutes.on_coordinator_lost()
    assert manager.task_mutes.brokers_to_probe() == [1]


def test_mutes_are_reported_with_their_silence(manager: CircuitBreakManager) -> None:
    manager.mute(1, "silent", Evidence(silence_ms=700.0))
    manager.task_mutes.apply_shared({2: "another's"})
    manager.task_mutes.apply_shared({2: "another's", A1: "another's"})
    manager.task_mutes.now_ms = 2_000.0
    reported = [(c.target, c.reason, c.evidence) for c in manager.task_mutes.mutes_to_report()]
    assert reported == [
        (1, "silent", Evidence(silence_ms=2_700.0)),
        (2, "another's", Evidence(silence_ms=2_000.0)),
        (A1, "another's", Evidence(counted=True)),
    ]
    manager.task_mutes.apply_shared({2: "another's"})
    manager.task_mutes.on_batches_sent([batch(A0)])
    manager.task_mutes.on_batches_done([batch(A0)], REPLICAS)
    assert [c.target for c in manager.task_mutes.mutes_to_report()] == [2]
    manager.mute(A1)
    assert manager.task_mutes.mutes_to_report()[-1].evidence == Evidence()
    manager.task_mutes.apply_shared({})
    manager.task_mutes.now_ms = 4_000.0
    manager.task_mutes.on_batches_sent([batch(A1)])
    manager.task_mutes.on_batches_done([batch(A1)], REPLICAS)
    assert manager.task_mutes.take_failures() == [A1]
    assert manager.task_mutes.take_failures() == []
