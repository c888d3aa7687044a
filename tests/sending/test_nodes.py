"""partitioner.availability.timeout.ms, at exact times."""

from __future__ import annotations

from kafka_sink.sending.nodes import NodeAvailability


def test_a_broker_that_takes_nothing_for_longer_is_left_out_until_it_does() -> None:
    watch = NodeAvailability(100)
    watch.observe([1], [2], 0)
    watch.observe([1], [2], 100)
    assert watch.unavailable == set()
    watch.observe([1], [], 100.5)
    assert watch.unavailable == {1}
    watch.observe([], [2], 150)
    assert watch.unavailable == {1}
    watch.observe([], [1], 160)
    assert watch.unavailable == set()
    watch.observe([1], [], 170)
    assert watch.unavailable == set()


def test_a_broker_for_which_nothing_waits_any_more_gets_another_chance() -> None:
    watch = NodeAvailability(100)
    watch.observe([1], [], 0)
    watch.observe([1], [], 101)
    assert watch.unavailable == {1}
    watch.observe([], [], 5_201)
    assert watch.unavailable == {1}
    watch.observe([], [], 5_202)
    assert watch.unavailable == set()


def test_zero_switches_it_off() -> None:
    watch = NodeAvailability(0)
    watch.observe([1], [], 0)
    watch.observe([1], [], 1e9)
    assert watch.unavailable == set()
