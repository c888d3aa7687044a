"""The methods of the KIP's manager, and the partitions that a mute covers."""

from __future__ import annotations

from kafka_sink.breaker.manager import CircuitBreakManager
from kafka_sink.model import TopicPartition
from tests.support.breaker_cluster import A0, A1, B0, Cluster, numbers


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
    changes = [(change.target, change.muted, change.own) for change in manager.task_mutes.take_changes()]
    assert changes == [(1, True, True), (A1, True, True), (1, False, True), (A1, False, True)]
    manager.mute(2)
    assert manager.refresh()
    manager.close()
    assert not manager.task_mutes.avoided
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
    assert manager.task_mutes.muted_count == 2


def test_partitions_that_lose_their_leader_stay_muted_with_it(
    manager: CircuitBreakManager, cluster: Cluster
) -> None:
    """Catches: keys that were spread went back to a frozen broker's partitions once nobody led them."""
    manager.mute(1, "silent")
    assert A0 in manager.refresh()
    cluster.move(A0, -1)
    cluster.move(B0, 2)
    mutes = manager.refresh()
    assert A0 in mutes
    assert B0 not in mutes, "another broker leads it now"
    assert TopicPartition("a", 3) not in mutes, "its leader was not muted"
    assert manager.is_muted(A0)
    assert manager.task_mutes.covering(A0)
    assert {name: numbers(infos) for name, infos in manager.muted_partitions_for_node(1).items()} == {
        "a": [0]
    }
    manager.task_mutes.now_ms = 10_000.0
    assert A0 in manager.refresh()
    assert numbers(manager.muted_partitions_for_topic("a")) == [0]
    assert manager.task_mutes.muted_count == 1
    cluster.move(A0, 1)
    manager.refresh()
    manager.task_mutes.on_broker_probe_sent(1)
    manager.task_mutes.on_broker_probe_done(1, None)
    assert not manager.refresh()
    cluster.move(A0, -1)
    assert not manager.refresh()


def test_if_everything_is_muted_nothing_is(manager: CircuitBreakManager) -> None:
    for node in (1, 2):
        manager.mute(node)
    assert manager.refresh()
    manager.mute(3)
    assert not manager.refresh()
    manager.unmute(2)
    assert A0 in manager.refresh()
    assert A1 not in manager.refresh()


def test_mutes_hold_before_any_metadata_is_known() -> None:
    """Catches: a task's first rows that ignore the coordinator's mutes."""
    cluster = Cluster()
    manager = cluster.manager()
    manager.task_mutes.apply_shared({1: "another task's"})
    mutes = manager.refresh()
    cluster.leaders["a"] = [1, 2]
    assert A0 in mutes
    assert A1 not in mutes


def test_available_nodes_are_computed_once_for_each_state_of_cluster_and_mutes() -> None:
    """Catches: while a broker is slow, all partitions in each pass of the sender."""
    cluster = Cluster(t=[1 + number % 3 for number in range(10_000)])
    manager = cluster.manager()
    assert [manager.available_nodes() for _ in range(100)] == [{1, 2, 3}] * 100
    assert cluster.looks == 1
    manager.mute(2)
    assert [manager.available_nodes() for _ in range(100)] == [{1, 3}] * 100
    assert cluster.looks == 2
    for number in range(0, 10_000, 3):
        cluster.move(TopicPartition("t", number), 3)
    assert manager.available_nodes() == {3}
    manager.unmute(2)
    assert manager.available_nodes() == {2, 3}
    assert cluster.looks == 4
