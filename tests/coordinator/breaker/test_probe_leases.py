"""Who gets the lease of a muted target, and what follows when its probe fails or its task is gone."""

from __future__ import annotations

import pytest

from kafka_sink.breaker.states import BreakerState, MuteTable
from kafka_sink.coordinator.breaker.messages import BreakerReport
from kafka_sink.coordinator.breaker.tasks import BreakerTasks, ProbeLeases
from kafka_sink.model import TopicPartition

INTERVAL = 2_000.0
P0 = TopicPartition("t", 0)


class Bench:
    def __init__(self) -> None:
        self.table = MuteTable(INTERVAL)
        self.tasks = BreakerTasks(500.0)
        self.leases = ProbeLeases(self.table, self.tasks)

    def report(self, peer: int, report: BreakerReport, now_ms: float) -> None:
        self.tasks.update(peer, report, now_ms)


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_any_task_probes_a_broker_one_at_a_time_and_in_turns(bench: Bench) -> None:
    for peer in (1, 2):
        bench.report(peer, BreakerReport(), 1_000.0)
    bench.table.trip(7, "silent", 1_000.0)
    assert bench.leases.grant(1_500.0) == {}, "not before the interval is over"
    (first,) = bench.leases.grant(3_000.0)
    assert bench.leases.owners == {7: first}
    assert bench.leases.grant(3_100.0) == {}, "one probe at a time"
    bench.leases.on_failure(3 - first, 7, "late", 3_200.0)
    assert bench.leases.owners == {7: first}, "another task's failure ends no lease"
    bench.leases.on_failure(first, 7, "refused", 3_200.0)
    bench.report(1, BreakerReport(), 5_000.0)
    bench.report(2, BreakerReport(), 5_000.0)
    (second,) = bench.leases.grant(5_300.0)
    assert second == 3 - first


def test_more_targets_than_tasks_are_shared_out(bench: Bench) -> None:
    for peer in (1, 2):
        bench.report(peer, BreakerReport(), 3_000.0)
    for node in (7, 8, 9):
        bench.table.trip(node, "silent", 1_000.0)
    granted = bench.leases.grant(3_000.0)
    assert sorted(len(leases) for leases in granted.values()) == [1, 2]


def test_a_partition_needs_a_task_with_a_batch_and_after_another_interval_one_with_rows(bench: Bench) -> None:
    bench.report(1, BreakerReport(), 3_000.0)
    bench.report(2, BreakerReport(wants=(P0,)), 3_000.0)
    bench.table.trip(P0, "failing", 1_000.0)
    assert bench.leases.grant(3_000.0) == {}, "no task has a batch"
    assert bench.leases.next_trial_ms(3_000.0) == INTERVAL
    for peer in (1, 2):
        bench.report(peer, BreakerReport(), 5_000.0)
    granted = bench.leases.grant(5_000.0)
    assert granted.keys() == {2}
    assert granted[2][P0].trial
    bench.leases.on_failure(2, P0, "x", 5_100.0)
    bench.report(1, BreakerReport(holds=(P0,)), 7_100.0)
    granted = bench.leases.grant(7_100.0)
    assert not granted[1][P0].trial


def test_the_probe_of_a_task_that_is_gone_counts_as_failed(bench: Bench) -> None:
    bench.report(1, BreakerReport(), 3_000.0)
    bench.table.trip(7, "silent", 1_000.0)
    bench.leases.grant(3_000.0)
    bench.leases.remove_task(1, 3_100.0)
    assert bench.leases.owners == {}
    assert bench.table.mutes[7].state is BreakerState.OPEN
    assert bench.table.mutes[7].retry_at_ms == 3_100.0 + INTERVAL


def test_no_lease_is_left_after_a_mute(bench: Bench) -> None:
    bench.report(1, BreakerReport(), 3_000.0)
    bench.table.trip(7, "silent", 1_000.0)
    bench.leases.grant(3_000.0)
    bench.leases.end(7)
    assert bench.leases.owners == {}
