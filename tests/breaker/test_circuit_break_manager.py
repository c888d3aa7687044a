"""CircuitBreakManager: the KIP's methods, mutes that follow leaders, probes, the coordinator's word."""

from __future__ import annotations

from typing import Any

import pytest

from kafka_sink.cluster.circuit_breaker import CircuitBreakManager
from kafka_sink.cluster.circuit_breaker.mutes import Evidence, Lease
from kafka_sink.errors import BrokerRefusedError, DeliveryError
from kafka_sink.model import TopicPartition
from tests.breaker.breaker_cluster import Cluster

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
    # No batch can wait for it, so the broker comes on trial; no row could be the probe there.
    manager.now_ms = 10_000.0
    assert A0 in manager.refresh()
    cluster.move(A0, 1)
    manager.refresh()
    assert manager.may_probe(A0)
    manager.sent(A0)
    manager.completed(A0, None)
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
    assert not manager.may_probe(A0)
    manager.now_ms = 2_000.0
    assert manager.may_probe(A0)
    assert manager.may_probe(B0)
    manager.sent(B0)
    assert not manager.may_probe(A0), "one at a time"
    manager.completed(A0, None)
    assert manager.is_muted(1), "not the probe: sent before"
    manager.completed(B0, None)
    assert not manager.is_muted(1)
    assert manager.metrics().probes == 1


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
    manager.sent(A0)
    manager.completed(A0, BrokerRefusedError("NOT_LEADER", 6))
    assert not manager.is_muted(1)
    assert manager.is_muted(A0), "of the partition it says nothing"
    assert manager.may_probe(A0), "so the next batch may go at once"
    manager.sent(A0)
    manager.completed(A0, DeliveryError("too large"))
    assert manager.may_probe(A0)


def test_an_answer_after_the_probes_time_counts(manager: CircuitBreakManager) -> None:
    manager.mute(1)
    manager.now_ms = 2_000.0
    manager.sent(A0)
    manager.now_ms = 4_000.0
    manager.refresh()
    assert manager.may_probe(B0)
    manager.completed(A0, None)
    assert not manager.is_muted(1)


def test_a_brokers_probe_may_be_of_a_partition_muted_by_itself(manager: CircuitBreakManager) -> None:
    manager.mute(1)
    manager.now_ms = 1_000.0
    manager.mute(A0)
    manager.now_ms = 2_000.0
    assert manager.may_probe(A0)
    manager.sent(A0)
    manager.completed(A0, None)
    assert not manager.refresh()


def test_the_coordinators_mutes_and_leases(manager: CircuitBreakManager) -> None:
    manager.take_shared({1: "another task's"}, {})
    assert [(c.target, c.muted, c.own) for c in manager.take_changes()] == [(1, True, False)]
    manager.now_ms = 60_000.0
    assert not manager.may_probe(A0), "no lease"
    manager.take_shared({1: "another task's"}, {1: Lease(500.0)})
    assert manager.may_probe(A0)
    manager.now_ms = 60_500.0
    assert not manager.may_probe(A0), "the lease is over"
    manager.take_shared({1: "another task's"}, {1: Lease(500.0)})
    manager.sent(A0)
    assert not manager.may_probe(B0)
    manager.take_shared({}, {})
    assert not manager.is_muted(1)
    assert [(c.target, c.muted, c.own) for c in manager.take_changes()] == [(1, False, False)]


def test_own_mutes_stay_until_the_coordinator_has_heard_of_them(manager: CircuitBreakManager) -> None:
    manager.mute(2, "found here")
    manager.take_shared({}, {})
    assert manager.is_muted(2)
    manager.take_shared({2: "found here"}, {})
    manager.take_shared({}, {})
    assert not manager.is_muted(2)


def test_without_the_coordinator_the_own_clock_rules(manager: CircuitBreakManager) -> None:
    manager.take_shared({1: "another task's"}, {})
    manager.now_ms = 10_000.0
    assert not manager.may_probe(A0)
    manager.lose_coordinator()
    assert manager.is_muted(1)
    assert manager.may_probe(A0)


def test_congested_brokers_are_no_trips(manager: CircuitBreakManager) -> None:
    manager.mute_congested(1)
    assert manager.congested == {1}
    assert not manager.refresh()
    manager.unmute_congested(1)
    manager.unmute_congested(1)
    assert not manager.congested
    assert manager.metrics().breaker_trips_total == 0


def test_where_no_batch_waits_new_rows_are_the_probe(manager: CircuitBreakManager) -> None:
    """Catches: a broker that stays muted for ever, as keyless rows avoid it and nothing else goes there."""
    manager.mute(1)
    manager.now_ms = 3_999.0
    assert A0 in manager.refresh()
    manager.now_ms = 4_000.0
    assert A0 not in manager.refresh()
    assert manager.is_muted(1)
    manager.sent(A0)
    assert A0 in manager.refresh(), "one probe, then it rests again"
    manager.completed(A0, None)
    assert not manager.is_muted(1)


def test_while_a_batch_waits_it_is_the_probe(manager: CircuitBreakManager) -> None:
    manager.mute(1)
    for now in range(0, 10_000, 1_000):
        manager.now_ms = float(now)
        manager.may_probe(B0)
        assert A0 in manager.refresh()
    assert manager.held() == [1]
    manager.now_ms = 10_600.0
    assert A0 not in manager.refresh()
    assert manager.held() == []


def test_a_leased_trial_opens_at_once_and_ends_with_its_lease(manager: CircuitBreakManager) -> None:
    manager.take_shared({1: "x", 2: "y"}, {})
    manager.now_ms = 60_000.0
    assert A0 in manager.refresh()
    manager.take_shared({1: "x", 2: "y"}, {1: Lease(500.0, trial=True), 2: Lease(500.0)})
    mutes = manager.refresh()
    assert A0 not in mutes
    assert A1 in mutes, "that lease is for a batch that waits"
    manager.now_ms = 60_500.0
    assert A0 in manager.refresh()


def test_what_the_coordinator_is_to_hear_of(manager: CircuitBreakManager) -> None:
    manager.mute(1, "silent", Evidence(silence_ms=700.0))
    manager.take_shared({2: "another's"}, {})
    manager.take_shared({2: "another's", A1: "another's"}, {})
    manager.now_ms = 2_000.0
    told = [(c.target, c.reason, c.evidence) for c in manager.standing_mutes()]
    assert told == [
        (1, "silent", Evidence(silence_ms=2_700.0)),
        (2, "another's", Evidence(silence_ms=2_000.0)),
        (A1, "another's", Evidence(counted=True)),
    ]
    manager.take_shared({2: "another's"}, {})
    manager.sent(A0)
    manager.completed(A0, BrokerRefusedError("NOT_ENOUGH_REPLICAS", 19))
    assert [c.target for c in manager.standing_mutes()] == [2]
    manager.mute(A1)
    assert manager.standing_mutes()[-1].evidence == Evidence()
    manager.take_shared({}, {})
    manager.now_ms = 4_000.0
    manager.sent(A1)
    manager.completed(A1, BrokerRefusedError("NOT_ENOUGH_REPLICAS", 19))
    assert manager.take_failures() == [(A1, "NOT_ENOUGH_REPLICAS")]
    assert manager.take_failures() == []
