"""Mutes of the task itself and of the coordinator."""

from __future__ import annotations

from kafka_sink.breaker.breaker import CircuitBreakManager
from kafka_sink.breaker.mutes import Evidence, ProbePermit, Target
from kafka_sink.errors import BrokerRefusedError
from tests.support.breaker_cluster import A0, A1
from tests.support.brokers import batch


def test_the_coordinators_mutes_and_permits(manager: CircuitBreakManager) -> None:
    muted: dict[Target, str] = {1: "another task's", A1: "another task's"}
    manager.local.apply_shared(muted, {})
    assert [(c.target, c.muted, c.own) for c in manager.local.take_changes()] == [
        (1, True, False),
        (A1, True, False),
    ]
    manager.local.now_ms = 60_000.0
    assert manager.probes.brokers_to_probe() == [], "no permit"
    assert not manager.probes.may_probe(A1), "no permit"
    manager.local.apply_shared(muted, {1: ProbePermit(500.0), A1: ProbePermit(500.0)})
    assert manager.probes.brokers_to_probe() == [1]
    assert manager.probes.may_probe(A1)
    manager.local.now_ms = 60_500.0
    assert manager.probes.brokers_to_probe() == [], "the permit is over"
    assert not manager.probes.may_probe(A1), "the permit is over"
    manager.local.apply_shared(muted, {1: ProbePermit(500.0), A1: ProbePermit(500.0)})
    manager.probes.broker_probe_sent(1)
    assert manager.probes.brokers_to_probe() == []
    manager.probes.batches_sent([batch(A1)])
    assert not manager.probes.may_probe(A1)
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
    assert manager.probes.brokers_to_probe() == []
    manager.on_coordinator_lost()
    assert manager.is_muted(1)
    assert manager.probes.brokers_to_probe() == [], "another coordinator may be there soon"
    manager.local.now_ms += manager.local.retry_interval_ms
    assert manager.probes.brokers_to_probe() == [1]


def test_a_coordinator_that_comes_and_goes_delays_probes_once(manager: CircuitBreakManager) -> None:
    """Catches: nobody ever probes, and rows for the target expire."""
    interval_ms = manager.local.retry_interval_ms
    manager.local.apply_shared({1: "another task's"}, {})
    manager.local.now_ms = 100_000.0
    for _ in range(2):
        manager.on_coordinator_lost()
        assert manager.probes.brokers_to_probe() == []
        manager.local.now_ms += interval_ms / 4
        manager.local.apply_shared({1: "another task's"}, {})
        manager.local.now_ms += interval_ms / 4
    manager.on_coordinator_lost()
    assert manager.probes.brokers_to_probe() == [1]


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
    manager.probes.batches_sent([batch(A0)])
    manager.probes.batches_done([batch(A0)], BrokerRefusedError("NOT_ENOUGH_REPLICAS", 19))
    assert [c.target for c in manager.local.mutes_to_report()] == [2]
    manager.mute(A1)
    assert manager.local.mutes_to_report()[-1].evidence == Evidence()
    manager.local.apply_shared({}, {})
    manager.local.now_ms = 4_000.0
    manager.probes.batches_sent([batch(A1)])
    manager.probes.batches_done([batch(A1)], BrokerRefusedError("NOT_ENOUGH_REPLICAS", 19))
    assert manager.probes.take_failures() == [(A1, "NOT_ENOUGH_REPLICAS")]
    assert manager.probes.take_failures() == []
