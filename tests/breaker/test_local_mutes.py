"""Mutes of the task itself and of the coordinator."""

from __future__ import annotations

from kafka_sink.breaker.mute_control import MuteControl
from kafka_sink.breaker.states import Evidence, ProbeLease, Target
from kafka_sink.errors import BrokerRefusedError
from tests.support.breaker_cluster import A0, A1


def test_the_coordinators_mutes_and_leases(control: MuteControl) -> None:
    muted: dict[Target, str] = {1: "another task's", A1: "another task's"}
    control.apply_shared(muted, {})
    assert [(c.target, c.muted, c.own) for c in control.local.take_changes()] == [
        (1, True, False),
        (A1, True, False),
    ]
    control.now_ms = 60_000.0
    assert control.probes.brokers_to_probe() == [], "no lease"
    assert not control.probes.may_probe(A1), "no lease"
    control.apply_shared(muted, {1: ProbeLease(500.0), A1: ProbeLease(500.0)})
    assert control.probes.brokers_to_probe() == [1]
    assert control.probes.may_probe(A1)
    control.now_ms = 60_500.0
    assert control.probes.brokers_to_probe() == [], "the lease is over"
    assert not control.probes.may_probe(A1), "the lease is over"
    control.apply_shared(muted, {1: ProbeLease(500.0), A1: ProbeLease(500.0)})
    control.probes.broker_probe_sent(1)
    assert control.probes.brokers_to_probe() == []
    control.probes.batches_sent([(A1, 1)])
    assert not control.probes.may_probe(A1)
    control.apply_shared({}, {})
    assert not control.manager.is_muted(1)
    changes = [(c.target, c.muted, c.own) for c in control.local.take_changes()]
    assert sorted(changes, key=str) == [(1, False, False), (A1, False, False)]


def test_own_mutes_go_on_until_the_coordinator_knows_them(control: MuteControl) -> None:
    control.manager.mute(2, "found here")
    control.apply_shared({}, {})
    assert control.manager.is_muted(2)
    control.apply_shared({2: "found here"}, {})
    control.apply_shared({}, {})
    assert not control.manager.is_muted(2)


def test_without_the_coordinator_the_own_clock_decides(control: MuteControl) -> None:
    control.apply_shared({1: "another task's"}, {})
    control.now_ms = 10_000.0
    assert control.probes.brokers_to_probe() == []
    control.on_coordinator_lost()
    assert control.manager.is_muted(1)
    assert control.probes.brokers_to_probe() == [], "another coordinator may be there soon"
    control.now_ms += control.local.table.retry_interval_ms
    assert control.probes.brokers_to_probe() == [1]


def test_a_coordinator_that_comes_and_goes_delays_probes_once(control: MuteControl) -> None:
    """Catches: nobody ever probes, and rows for the target expire."""
    interval_ms = control.local.table.retry_interval_ms
    control.apply_shared({1: "another task's"}, {})
    control.now_ms = 100_000.0
    for _ in range(2):
        control.on_coordinator_lost()
        assert control.probes.brokers_to_probe() == []
        control.now_ms += interval_ms / 4
        control.apply_shared({1: "another task's"}, {})
        control.now_ms += interval_ms / 4
    control.on_coordinator_lost()
    assert control.probes.brokers_to_probe() == [1]


def test_mutes_are_reported_with_their_silence(control: MuteControl) -> None:
    control.manager.mute(1, "silent", Evidence(silence_ms=700.0))
    control.apply_shared({2: "another's"}, {})
    control.apply_shared({2: "another's", A1: "another's"}, {})
    control.now_ms = 2_000.0
    reported = [(c.target, c.reason, c.evidence) for c in control.local.mutes_to_report()]
    assert reported == [
        (1, "silent", Evidence(silence_ms=2_700.0)),
        (2, "another's", Evidence(silence_ms=2_000.0)),
        (A1, "another's", Evidence(counted=True)),
    ]
    control.apply_shared({2: "another's"}, {})
    control.probes.batches_sent([(A0, 1)])
    control.probes.batches_done([(A0, 1)], BrokerRefusedError("NOT_ENOUGH_REPLICAS", 19))
    assert [c.target for c in control.local.mutes_to_report()] == [2]
    control.manager.mute(A1)
    assert control.local.mutes_to_report()[-1].evidence == Evidence()
    control.apply_shared({}, {})
    control.now_ms = 4_000.0
    control.probes.batches_sent([(A1, 1)])
    control.probes.batches_done([(A1, 1)], BrokerRefusedError("NOT_ENOUGH_REPLICAS", 19))
    assert control.probes.take_failures() == [(A1, "NOT_ENOUGH_REPLICAS")]
    assert control.probes.take_failures() == []
