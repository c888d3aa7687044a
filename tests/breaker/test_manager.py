"""CircuitBreakManager: the KIP's methods, mutes that follow leaders, probes, the coordinator's word."""

from __future__ import annotations

from typing import Any

import pytest

from kafka_sink.breaker.mute_change import Evidence
from kafka_sink.breaker.mute_control import MuteControl
from kafka_sink.breaker.states import ProbeLease
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
def control(cluster: Cluster) -> MuteControl:
    return MuteControl(cluster, 2_000.0)


def test_the_methods_of_the_kip(control: MuteControl) -> None:
    control.manager.mute(1)
    control.manager.mute(A1)
    assert numbers(control.manager.available_partitions_for_topic("a")) == [2]
    assert numbers(control.manager.muted_partitions_for_topic("a")) == [0, 1]
    assert control.manager.available_partitions_for_node(1) == {}
    assert {name: numbers(infos) for name, infos in control.manager.muted_partitions_for_node(1).items()} == {
        "a": [0],
        "b": [0],
    }
    assert control.manager.available_partitions_for_topic("unknown") == []
    control.manager.unmute(1)
    control.manager.unmute(A1)
    control.manager.unmute(A1)
    assert numbers(control.manager.available_partitions_for_topic("a")) == [0, 1, 2]
    changes = [(change.target, change.muted, change.own) for change in control.mutes.take_changes()]
    assert changes == [(1, True, True), (A1, True, True), (1, False, True), (A1, False, True)]
    control.manager.mute(2)
    control.manager.close()
    assert not control.view
    control.manager.mute(2)
    assert not control.refresh()


def test_a_brokers_mute_follows_its_partitions(control: MuteControl, cluster: Cluster) -> None:
    control.manager.mute(1)
    mutes = control.refresh()
    assert A0 in mutes
    assert A1 not in mutes
    cluster.move(A0, 2)
    cluster.move(A1, 1)
    mutes = control.refresh()
    assert A0 not in mutes
    assert A1 in mutes
    assert control.metrics().muted_partitions == 2


def test_partitions_that_lose_their_leader_rest_with_it(control: MuteControl, cluster: Cluster) -> None:
    """Found by benchmarks/frozen_broker.py: the cluster takes the leadership from a frozen broker after its
    session, and keys that were spread went back to partitions that nobody leads."""
    control.manager.mute(1, "silent")
    assert A0 in control.refresh()
    cluster.move(A0, -1)
    cluster.move(B0, 2)
    mutes = control.refresh()
    assert A0 in mutes
    assert B0 not in mutes, "another broker leads it now"
    assert TopicPartition("a", 3) not in mutes, "its leader was not muted"
    assert control.manager.is_muted(A0)
    assert control.partitions.mute_of(A0) is not None
    assert {name: numbers(infos) for name, infos in control.manager.muted_partitions_for_node(1).items()} == {
        "a": [0]
    }
    control.now_ms = 10_000.0
    assert A0 in control.refresh()
    assert numbers(control.manager.muted_partitions_for_topic("a")) == [0]
    assert control.metrics().muted_partitions == 1
    cluster.move(A0, 1)
    control.refresh()
    control.probes.broker_probe_sent(1)
    control.probes.broker_probe_done(1, None)
    assert not control.refresh()
    cluster.move(A0, -1)
    assert not control.refresh()


def test_all_muted_is_as_none_muted(control: MuteControl) -> None:
    for node in (1, 2):
        control.manager.mute(node)
    assert control.refresh()
    control.manager.mute(3)
    assert not control.refresh()
    control.manager.unmute(2)
    assert A0 in control.refresh()
    assert A1 not in control.refresh()


def test_one_probe_then_success_unmutes(control: MuteControl) -> None:
    control.manager.mute(1, "slow")
    control.now_ms = 1_999.0
    assert control.probes.brokers_to_probe() == []
    control.now_ms = 2_000.0
    assert control.probes.brokers_to_probe() == [1]
    assert not control.probes.may_probe(A0), "no row goes to a broker that may be dead"
    control.probes.broker_probe_sent(1)
    assert control.probes.brokers_to_probe() == []
    control.probes.batch_done(A0, None)
    assert control.manager.is_muted(1), "not the probe: sent before"
    control.probes.broker_probe_done(1, None)
    assert not control.manager.is_muted(1)
    assert control.metrics().probes == 1


def test_a_broker_owes_one_probe_at_a_time(control: MuteControl) -> None:
    """Catches: a frozen broker that finds a request for each interval of its freeze when it is back."""
    control.manager.mute(1)
    for now in range(2_000, 60_000, 500):
        control.now_ms = float(now)
        control.refresh()
        for node in control.probes.brokers_to_probe():
            control.probes.broker_probe_sent(node)
    assert control.metrics().probes == 1
    control.probes.broker_probe_done(1, TimeoutError("request timed out"))
    assert control.probes.take_failures() == [(1, "request timed out")]
    control.refresh()
    assert control.probes.brokers_to_probe() == [1]
    control.probes.connected(1)
    assert not control.manager.is_muted(1), "a new connection's first answer tells as much"


def test_no_row_goes_to_a_muted_broker_however_long_it_is_muted(control: MuteControl) -> None:
    """Catches: keyless rows that are let through to a dead broker as its probe, and fail their task after
    delivery.timeout.ms."""
    control.manager.mute(1)
    control.manager.mute(A0)
    for now in range(0, 600_000, 250):
        control.now_ms = float(now)
        control.waiting.note_free_rows(["a", "b"])
        mutes = control.refresh()
        assert A0 in mutes
        assert B0 in mutes
        assert not control.probes.may_probe(A0)


def test_mutes_hold_before_any_metadata_is_known() -> None:
    """Catches: a task's first rows that ignore what the coordinator has told."""
    cluster = Cluster()
    control = MuteControl(cluster, 2_000.0)
    control.apply_shared({1: "another task's"}, {})
    mutes = control.refresh()
    cluster.leaders["a"] = [1, 2]
    assert A0 in mutes
    assert A1 not in mutes


def test_a_failed_probe_waits_an_interval(control: MuteControl) -> None:
    control.manager.mute(A0, "errors")
    control.now_ms = 2_000.0
    control.probes.batch_sent(A0)
    control.now_ms = 2_100.0
    control.probes.batch_done(A0, BrokerRefusedError("NOT_ENOUGH_REPLICAS", 19))
    control.refresh()
    control.now_ms = 4_099.0
    assert not control.probes.may_probe(A0)
    control.now_ms = 4_100.0
    assert control.probes.may_probe(A0)
    found = control.partitions.mute_of(A0)
    assert found is not None
    assert (found.reason, found.since_ms, found.last_error) == ("errors", 0.0, "NOT_ENOUGH_REPLICAS")


def test_any_answer_tells_that_a_broker_is_back(control: MuteControl) -> None:
    control.manager.mute(1)
    control.manager.mute(A0)
    control.now_ms = 2_000.0
    control.probes.broker_probe_sent(1)
    control.probes.broker_probe_done(1, BrokerRefusedError("throttled", 89))
    assert not control.manager.is_muted(1)
    assert control.manager.is_muted(A0), "of the partition it says nothing"
    assert control.probes.may_probe(A0), "so the next batch may go at once"
    control.probes.batch_sent(A0)
    control.probes.batch_done(A0, DeliveryError("too large"))
    assert control.probes.may_probe(A0)


def test_an_answer_after_the_probes_time_counts(control: MuteControl) -> None:
    control.manager.mute(1)
    control.now_ms = 2_000.0
    control.probes.broker_probe_sent(1)
    control.now_ms = 4_000.0
    control.refresh()
    control.probes.broker_probe_done(1, None)
    assert not control.manager.is_muted(1)


def test_the_coordinators_mutes_and_leases(control: MuteControl) -> None:
    muted = {1: "another task's", A1: "another task's"}
    control.apply_shared(muted, {})
    assert [(c.target, c.muted, c.own) for c in control.mutes.take_changes()] == [
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
    control.probes.batch_sent(A1)
    assert not control.probes.may_probe(A1)
    control.apply_shared({}, {})
    assert not control.manager.is_muted(1)
    changes = [(c.target, c.muted, c.own) for c in control.mutes.take_changes()]
    assert sorted(changes, key=str) == [(1, False, False), (A1, False, False)]


def test_own_mutes_stay_until_the_coordinator_has_heard_of_them(control: MuteControl) -> None:
    control.manager.mute(2, "found here")
    control.apply_shared({}, {})
    assert control.manager.is_muted(2)
    control.apply_shared({2: "found here"}, {})
    control.apply_shared({}, {})
    assert not control.manager.is_muted(2)


def test_without_the_coordinator_the_own_clock_rules(control: MuteControl) -> None:
    control.apply_shared({1: "another task's"}, {})
    control.now_ms = 10_000.0
    assert control.probes.brokers_to_probe() == []
    control.on_coordinator_lost()
    assert control.manager.is_muted(1)
    assert control.probes.brokers_to_probe() == [1]


def test_congested_brokers_are_no_trips(control: MuteControl) -> None:
    control.manager.mute_congested(1)
    assert control.manager.congested == {1}
    assert not control.refresh()
    control.manager.unmute_congested(1)
    control.manager.unmute_congested(1)
    assert not control.manager.congested
    assert control.metrics().breaker_trips_total == 0


def test_where_no_batch_waits_new_rows_are_a_partitions_probe(control: MuteControl) -> None:
    """Catches: a partition that stays muted for ever, as keyless rows avoid it and none else go there."""
    control.manager.mute(A0)
    control.now_ms = 3_999.0
    assert A0 in control.refresh()
    control.now_ms = 4_000.0
    assert A0 not in control.refresh()
    assert control.manager.is_muted(A0)
    control.probes.batch_sent(A0)
    assert A0 in control.refresh(), "one probe, then it rests again"
    control.probes.batch_done(A0, None)
    assert not control.manager.is_muted(A0)


def test_while_a_batch_waits_it_is_the_probe(control: MuteControl) -> None:
    control.manager.mute(A0)
    for now in range(0, 10_000, 1_000):
        control.now_ms = float(now)
        control.probes.may_probe(A0)
        assert A0 in control.refresh()
    assert control.waiting.held() == [A0]
    control.now_ms = 10_600.0
    assert A0 not in control.refresh()
    assert control.waiting.held() == []


def test_a_task_wants_the_partitions_that_its_free_rows_avoid(control: MuteControl) -> None:
    control.manager.mute(A0)
    control.manager.mute(B0)
    control.waiting.note_free_rows(["a"])
    assert control.waiting.wanted() == [A0]
    control.probes.may_probe(A0)
    assert control.waiting.wanted() == [], "a batch waits for it"
    control.now_ms = 2_000.0
    assert control.waiting.wanted() == [], "that was long ago"


def test_a_leased_trial_opens_at_once_and_ends_with_its_lease(control: MuteControl) -> None:
    control.apply_shared({A0: "x", A1: "y"}, {})
    control.now_ms = 60_000.0
    assert A0 in control.refresh()
    control.apply_shared({A0: "x", A1: "y"}, {A0: ProbeLease(500.0, trial=True), A1: ProbeLease(500.0)})
    mutes = control.refresh()
    assert A0 not in mutes
    assert A1 in mutes, "that lease is for a batch that waits"
    control.now_ms = 60_500.0
    assert A0 in control.refresh()


def test_what_the_coordinator_is_to_hear_of(control: MuteControl) -> None:
    control.manager.mute(1, "silent", Evidence(silence_ms=700.0))
    control.apply_shared({2: "another's"}, {})
    control.apply_shared({2: "another's", A1: "another's"}, {})
    control.now_ms = 2_000.0
    told = [(c.target, c.reason, c.evidence) for c in control.mutes.mutes_to_report()]
    assert told == [
        (1, "silent", Evidence(silence_ms=2_700.0)),
        (2, "another's", Evidence(silence_ms=2_000.0)),
        (A1, "another's", Evidence(counted=True)),
    ]
    control.apply_shared({2: "another's"}, {})
    control.probes.batch_sent(A0)
    control.probes.batch_done(A0, BrokerRefusedError("NOT_ENOUGH_REPLICAS", 19))
    assert [c.target for c in control.mutes.mutes_to_report()] == [2]
    control.manager.mute(A1)
    assert control.mutes.mutes_to_report()[-1].evidence == Evidence()
    control.apply_shared({}, {})
    control.now_ms = 4_000.0
    control.probes.batch_sent(A1)
    control.probes.batch_done(A1, BrokerRefusedError("NOT_ENOUGH_REPLICAS", 19))
    assert control.probes.take_failures() == [(A1, "NOT_ENOUGH_REPLICAS")]
    assert control.probes.take_failures() == []
