"""What breaker classes get: the KIP's methods, and what this sink adds to them."""

from __future__ import annotations

from kafka_sink.breaker.mute_control import MuteControl
from tests.support.breaker_cluster import A1, numbers


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
    changes = [(change.target, change.muted, change.own) for change in control.local.take_changes()]
    assert changes == [(1, True, True), (A1, True, True), (1, False, True), (A1, False, True)]
    control.manager.mute(2)
    control.manager.close()
    assert not control.view
    control.manager.mute(2)
    assert not control.refresh()


def test_congested_brokers_are_no_trips(control: MuteControl) -> None:
    control.manager.mute_congested(1)
    assert control.manager.congested == {1}
    assert not control.refresh()
    control.manager.unmute_congested(1)
    control.manager.unmute_congested(1)
    assert not control.manager.congested
    assert control.metrics().breaker_trips_total == 0
