"""CircuitBreakManager: the KIP's methods, mutes that follow leaders, probes, the coordinator's word."""

from __future__ import annotations

from typing import Any

import pytest

from kafka_sink.breaker import CircuitBreakManager
from kafka_sink.breaker.values import Evidence, ProbeLease
from kafka_sink.errors import BrokerRefusedError, DeliveryError
from kafka_sink.model import TopicPartition
from tests.support.breaker_cluster import Cluster

A0, A1, A2, B0 = (
    TopicPartition("a", 0),
    TopicPartition("a", 1),
    TopicPartition("a", 2),
    TopicPartition("b", 0),
)


def numbers(infos: list[Any]) -> list[int]:
    return [info.partition for info in infos]


@pytest.fixture
def cluster() -> Cluster:
    return Cluster(a=[1, 2, 3, -1], b=[1])


@pytest.fixture
def manager(cluster: Cluster) -> CircuitBreakManager:
    return CircuitBreakManager(cluster, 2_000.0)


def test_the_methods_of_the_kip(manager: CircuitBreakManager) -> None:
    manager.mute(1)
    manager.mute(A1)
    assert numbers(manager.available_partitions_for_topic("a")) == [2]
    assert numbers(manager.muted_partitions_for_topic("a")) == [0, 1]
    assert manager.available_partitions_for_node(1) == {}
    assert {name: numbers(infos) for name, infos in manager.muted_partitions_for_node(1).items()} == {
        "a": [0],
        "b": [0],
    }
    assert manager.available_partitions_for_topic("unknown") == []
    manager.unmute(1)
    manager.unmute(A1)
    manager.unmute(A1)
    assert numbers(manager.available_partitions_for_topic("a")) == [0, 1, 2]
    changes = [(change.target, change.muted, change.own) for change in manager.take_changes()]
    assert changes == [(1, True, True), (A1, True, True), (1, False, True), (A1, False, True)]
    manager.mute(2)
    manager.close()
    assert not manager.mutes
    manager.mute(2)
    assert not manager.refresh()


def test_a_brokers_mute_follows_its_partitions(manager: CircuitBreakManager, cluster: Cluster) -> None:
    manager.mute(1)
    mutes = manager.refresh()
    assert A0 in mutes
    assert A1 not in mutes
    cluster.move(A0, 2)
    cluster.move(A1, 1)
    mutes = manager.refresh()
    assert A0 not in mutes
    assert A1 in mutes
    assert manager.metrics().muted_partitions == 2


def test_partitions_that_lose_their_leader_rest_with_it(
    manager: CircuitBreakManager, cluster: Cluster
) -> None:
    """Found by benchmarks/frozen_broker.py: the cluster takes the leadership from a frozen broker after its
    session, and keys that were spread went back to partitions that nobody leads."""
    manager.mute(1, "silent")
    assert A0 in manager.refresh()
    cluster.move(A0, -1)
    cluster.move(B0, 2)
    mutes = manager.refresh()
    assert A0 in mutes
    assert B0 not in mutes, "another broker leads it now"
    assert TopicPartition("a", 3) not in mutes, "its leader was not muted"
    assert manager.is_muted(A0)
    assert manager.mute_of(A0) is not None
    assert {name: numbers(infos) for name, infos in manager.muted_partitions_for_node(1).items()} == {
        "a": [0]
    }
    manager.now_ms = 10_000.0
    assert A0 in manager.refresh()
    assert numbers(manager.muted_partitions_for_topic("a")) == [0]
    assert manager.metrics().muted_partitions == 1
    cluster.move(A0, 1)
    manager.refresh()
    manager.probe_sent(1)
    manager.probe_done(1, None)
    assert not manager.refresh()
    cluster.move(A0, -1)
    assert not manager.refresh()


def test_all_muted_is_as_none_muted(manager: CircuitBreakManager) -> None:
    for node in (1, 2):
        manager.mute(node)
    assert manager.refresh()
    manager.mute(3)
    assert not manager.refresh()
    manager.unmute(2)
    assert A0 in manager.refresh()
    assert A1 not in manager.refresh()


def test_one_probe_then_success_unmutes(manager: CircuitBreakManager) -> None:
    manager.mute(1, "slow")
    manager.now_ms = 1_999.0
    assert manager.brokers_to_probe() == []
    manager.now_ms = 2_000.0
    assert manager.brokers_to_probe() == [1]
    assert not manager.may_probe(A0), "no row goes to a broker that may be dead"
    manager.probe_sent(1)
    assert manager.brokers_to_probe() == []
    manager.completed(A0, None)
    assert manager.is_muted(1), "not the probe: sent before"
    manager.probe_done(1, None)
    assert not manager.is_muted(1)
    assert manager.metrics().probes == 1


def test_a_broker_owes_one_probe_at_a_time(manager: CircuitBreakManager) -> None:
    """Catches: a frozen broker that finds a request for each interval of its freeze when it is back."""
    manager.mute(1)
    for now in range(2_000, 60_000, 500):
        manager.now_ms = float(now)
        manager.refresh()
        for node in manager.brokers_to_probe():
            manager.probe_sent(node)
    assert manager.metrics().probes == 1
    manager.probe_done(1, TimeoutError("request timed out"))
    assert manager.take_failures() == [(1, "request timed out")]
    manager.refresh()
    assert manager.brokers_to_probe() == [1]
    manager.connected(1)
    assert not manager.is_muted(1), "a new connection's first answer tells as much"


def test_no_row_goes_to_a_muted_broker_however_long_it_is_muted(manager: CircuitBreakManager) -> None:
    """Catches: keyless rows that are let through to a dead broker as its probe, and fail their task after
    delivery.timeout.ms."""
    manager.mute(1)
    manager.mute(A0)
    for now in range(0, 600_000, 250):
        manager.now_ms = float(now)
        manager.note_free_rows(["a", "b"])
        mutes = manager.refresh()
        assert A0 in mutes
        assert B0 in mutes
        assert not manager.may_probe(A0)


def test_mutes_hold_before_any_metadata_is_known() -> None:
    """Catches: a task's first rows that ignore what the coordinator has told."""
    cluster = Cluster()
    manager = CircuitBreakManager(cluster, 2_000.0)
    manager.apply_shared({1: "another task's"}, {})
    mutes = manager.refresh()
    cluster.leaders["a"] = [1, 2]
    assert A0 in mutes
    assert A1 not in mutes


def test_a_failed_probe_waits_an_interval(manager: CircuitBreakManager) -> None:
    manager.mute(A0, "errors")
    manager.now_ms = 2_000.0
    manager.sent(A0)
    manager.now_ms = 2_100.0
    manager.completed(A0, BrokerRefusedError("NOT_ENOUGH_REPLICAS", 19))
    manager.refresh()
    manager.now_ms = 4_099.0
    assert not manager.may_probe(A0)
    manager.now_ms = 4_100.0
    assert manager.may_probe(A0)
    found = manager.mute_of(A0)
    assert found is not None
    assert (found.reason, found.since_ms, found.last_error) == ("errors", 0.0, "NOT_ENOUGH_REPLICAS")


def test_any_answer_tells_that_a_broker_is_back(manager: CircuitBreakManager) -> None:
    manager.mute(1)
    manager.mute(A0)
    manager.now_ms = 2_000.0
    manager.probe_sent(1)
    manager.probe_done(1, BrokerRefusedError("throttled", 89))
    assert not manager.is_muted(1)
    assert manager.is_muted(A0), "of the partition it says nothing"
    assert manager.may_probe(A0), "so the next batch may go at once"
    manager.sent(A0)
    manager.completed(A0, DeliveryError("too large"))
    assert manager.may_probe(A0)


def test_an_answer_after_the_probes_time_counts(manager: CircuitBreakManager) -> None:
    manager.mute(1)
    manager.now_ms = 2_000.0
    manager.probe_sent(1)
    manager.now_ms = 4_000.0
    manager.refresh()
    manager.probe_done(1, None)
    assert not manager.is_muted(1)


def test_the_coordinators_mutes_and_leases(manager: CircuitBreakManager) -> None:
    muted = {1: "another task's", A1: "another task's"}
    manager.apply_shared(muted, {})
    assert [(c.target, c.muted, c.own) for c in manager.take_changes()] == [
        (1, True, False),
        (A1, True, False),
    ]
    manager.now_ms = 60_000.0
    assert manager.brokers_to_probe() == [], "no lease"
    assert not manager.may_probe(A1), "no lease"
    manager.apply_shared(muted, {1: ProbeLease(500.0), A1: ProbeLease(500.0)})
    assert manager.brokers_to_probe() == [1]
    assert manager.may_probe(A1)
    manager.now_ms = 60_500.0
    assert manager.brokers_to_probe() == [], "the lease is over"
    assert not manager.may_probe(A1), "the lease is over"
    manager.apply_shared(muted, {1: ProbeLease(500.0), A1: ProbeLease(500.0)})
    manager.probe_sent(1)
    assert manager.brokers_to_probe() == []
    manager.sent(A1)
    assert not manager.may_probe(A1)
    manager.apply_shared({}, {})
    assert not manager.is_muted(1)
    changes = [(c.target, c.muted, c.own) for c in manager.take_changes()]
    assert sorted(changes, key=str) == [(1, False, False), (A1, False, False)]


def test_own_mutes_stay_until_the_coordinator_has_heard_of_them(manager: CircuitBreakManager) -> None:
    manager.mute(2, "found here")
    manager.apply_shared({}, {})
    assert manager.is_muted(2)
    manager.apply_shared({2: "found here"}, {})
    manager.apply_shared({}, {})
    assert not manager.is_muted(2)


def test_without_the_coordinator_the_own_clock_rules(manager: CircuitBreakManager) -> None:
    manager.apply_shared({1: "another task's"}, {})
    manager.now_ms = 10_000.0
    assert manager.brokers_to_probe() == []
    manager.on_coordinator_lost()
    assert manager.is_muted(1)
    assert manager.brokers_to_probe() == [1]


def test_congested_brokers_are_no_trips(manager: CircuitBreakManager) -> None:
    manager.mute_congested(1)
    assert manager.congested == {1}
    assert not manager.refresh()
    manager.unmute_congested(1)
    manager.unmute_congested(1)
    assert not manager.congested
    assert manager.metrics().breaker_trips_total == 0


def test_where_no_batch_waits_new_rows_are_a_partitions_probe(manager: CircuitBreakManager) -> None:
    """Catches: a partition that stays muted for ever, as keyless rows avoid it and none else go there."""
    manager.mute(A0)
    manager.now_ms = 3_999.0
    assert A0 in manager.refresh()
    manager.now_ms = 4_000.0
    assert A0 not in manager.refresh()
    assert manager.is_muted(A0)
    manager.sent(A0)
    assert A0 in manager.refresh(), "one probe, then it rests again"
    manager.completed(A0, None)
    assert not manager.is_muted(A0)


def test_while_a_batch_waits_it_is_the_probe(manager: CircuitBreakManager) -> None:
    manager.mute(A0)
    for now in range(0, 10_000, 1_000):
        manager.now_ms = float(now)
        manager.may_probe(A0)
        assert A0 in manager.refresh()
    assert manager.held() == [A0]
    manager.now_ms = 10_600.0
    assert A0 not in manager.refresh()
    assert manager.held() == []


def test_a_task_wants_the_partitions_that_its_free_rows_avoid(manager: CircuitBreakManager) -> None:
    manager.mute(A0)
    manager.mute(B0)
    manager.note_free_rows(["a"])
    assert manager.wanted() == [A0]
    manager.may_probe(A0)
    assert manager.wanted() == [], "a batch waits for it"
    manager.now_ms = 2_000.0
    assert manager.wanted() == [], "that was long ago"


def test_a_leased_trial_opens_at_once_and_ends_with_its_lease(manager: CircuitBreakManager) -> None:
    manager.apply_shared({A0: "x", A1: "y"}, {})
    manager.now_ms = 60_000.0
    assert A0 in manager.refresh()
    manager.apply_shared({A0: "x", A1: "y"}, {A0: ProbeLease(500.0, trial=True), A1: ProbeLease(500.0)})
    mutes = manager.refresh()
    assert A0 not in mutes
    assert A1 in mutes, "that lease is for a batch that waits"
    manager.now_ms = 60_500.0
    assert A0 in manager.refresh()


def test_what_the_coordinator_is_to_hear_of(manager: CircuitBreakManager) -> None:
    manager.mute(1, "silent", Evidence(silence_ms=700.0))
    manager.apply_shared({2: "another's"}, {})
    manager.apply_shared({2: "another's", A1: "another's"}, {})
    manager.now_ms = 2_000.0
    told = [(c.target, c.reason, c.evidence) for c in manager.mutes_to_report()]
    assert told == [
        (1, "silent", Evidence(silence_ms=2_700.0)),
        (2, "another's", Evidence(silence_ms=2_000.0)),
        (A1, "another's", Evidence(counted=True)),
    ]
    manager.apply_shared({2: "another's"}, {})
    manager.sent(A0)
    manager.completed(A0, BrokerRefusedError("NOT_ENOUGH_REPLICAS", 19))
    assert [c.target for c in manager.mutes_to_report()] == [2]
    manager.mute(A1)
    assert manager.mutes_to_report()[-1].evidence == Evidence()
    manager.apply_shared({}, {})
    manager.now_ms = 4_000.0
    manager.sent(A1)
    manager.completed(A1, BrokerRefusedError("NOT_ENOUGH_REPLICAS", 19))
    assert manager.take_failures() == [(A1, "NOT_ENOUGH_REPLICAS")]
    assert manager.take_failures() == []
