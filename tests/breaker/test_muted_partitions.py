"""Which partitions the muted targets cover."""

from __future__ import annotations

from kafka_sink.breaker.mute_control import MuteControl
from kafka_sink.model import TopicPartition
from tests.support.breaker_cluster import A0, A1, B0, Cluster, numbers


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


def test_partitions_that_lose_their_leader_stay_muted_with_it(control: MuteControl, cluster: Cluster) -> None:
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


def test_if_everything_is_muted_nothing_is(control: MuteControl) -> None:
    for node in (1, 2):
        control.manager.mute(node)
    assert control.refresh()
    control.manager.mute(3)
    assert not control.refresh()
    control.manager.unmute(2)
    assert A0 in control.refresh()
    assert A1 not in control.refresh()


def test_mutes_hold_before_any_metadata_is_known() -> None:
    """Catches: a task's first rows that ignore the coordinator's mutes."""
    cluster = Cluster()
    control = MuteControl(cluster, 2_000.0)
    control.apply_shared({1: "another task's"}, {})
    mutes = control.refresh()
    cluster.leaders["a"] = [1, 2]
    assert A0 in mutes
    assert A1 not in mutes
