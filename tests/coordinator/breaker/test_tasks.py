"""The coordinator's view of tasks: who is silent, who waits for a target, and the order of leases."""

from __future__ import annotations

import pytest

from kafka_sink.coordinator.breaker.messages import BreakerReport
from kafka_sink.coordinator.breaker.tasks import BreakerTasks
from kafka_sink.model import TopicPartition

P0, P1 = TopicPartition("t", 0), TopicPartition("t", 1)


@pytest.fixture
def tasks() -> BreakerTasks:
    made = BreakerTasks(500.0)
    for peer in (1, 2, 3):
        made.update(peer, BreakerReport(), 1_000.0)
    return made


def test_a_task_that_stops_reporting_is_not_active_until_its_next_report(tasks: BreakerTasks) -> None:
    tasks.update(2, BreakerReport(), 60_000.0)
    assert tasks.active(60_000.0) == [2]
    assert tasks.update(1, BreakerReport(), 60_000.0), "it was silent"
    assert not tasks.update(1, BreakerReport(), 60_100.0)
    assert tasks.active(60_100.0) == [1, 2]


def test_a_report_without_targets_keeps_those_of_the_report_before(tasks: BreakerTasks) -> None:
    tasks.update(1, BreakerReport(holds=(P0, 7)), 1_000.0)
    tasks.update(1, BreakerReport(), 1_100.0)
    assert tasks.has_holder(P0, 1_100.0)
    tasks.update(2, BreakerReport(holds=(P1,)), 1_100.0)
    assert tasks.those_that_wait_first({7, P1}, iter((0.9, 0.5, 0.1)).__next__) == [2, 1, 3]
    tasks.update(1, BreakerReport(holds=(7,)), 1_200.0)
    assert not tasks.has_holder(P0, 1_200.0)
    tasks.remove(1)
    assert not tasks.has_holder(7, 1_200.0)
    assert 1 not in tasks


def test_the_task_whose_last_lease_is_longest_ago_comes_first(tasks: BreakerTasks) -> None:
    tasks.move_to_end(1)
    tasks.move_to_end(3)
    assert tasks.in_lease_order(1_200.0) == [2, 1, 3]
    assert tasks.next_for_lease(1_200.0, other_than=2) == 1


@pytest.mark.parametrize("holders", [2, 140])
def test_the_first_holder_in_the_order_is_found_among_few_and_many(holders: int) -> None:
    tasks = BreakerTasks(500.0)
    for peer in range(200):
        tasks.update(peer, BreakerReport(wants=(P1,)), 1_000.0)
    for peer in range(holders):
        tasks.update(peer, BreakerReport(holds=(P0,)), 1_000.0)
    for peer in reversed(range(holders)):
        tasks.move_to_end(peer)
    order = dict.fromkeys(tasks.in_lease_order(1_100.0))
    assert tasks.first_holder(P0, order) == holders - 1
    assert tasks.first_wanter(P1, order) == next(iter(order))
    assert tasks.first_holder(P1, order) is None
