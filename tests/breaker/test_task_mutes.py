"""When probes go, and what their outcomes mean."""

from __future__ import annotations

import time

from kafka_sink.breaker.manager import CircuitBreakManager
from kafka_sink.errors import BrokerRefusedError, DeliveryError
from kafka_sink.model import TopicPartition
from tests.support.breaker_cluster import A0, A1, B0, P0, P1, Bench, Cluster
from tests.support.brokers import batch


def test_broker_is_unmuted_after_one_probe_and_a_success(manager: CircuitBreakManager) -> None:
    manager.mute(1, "slow")
    manager.task_mutes.now_ms = 1_999.0
    assert manager.task_mutes.brokers_to_probe() == []
    manager.task_mutes.now_ms = 2_000.0
    assert manager.task_mutes.brokers_to_probe() == [1]
    assert not manager.task_mutes.may_probe(A0), "no row goes to a broker that may be dead"
    manager.task_mutes.on_broker_probe_sent(1)
    assert manager.task_mutes.brokers_to_probe() == []
    manager.task_mutes.on_batches_done([batch(A0)], None)
    assert manager.is_muted(1), "not the probe: sent before"
    manager.task_mutes.on_broker_probe_done(1, None)
    assert not manager.is_muted(1)
    assert manager.task_mutes.probes == 1


def test_a_broker_owes_one_probe_at_a_time(manager: CircuitBreakManager) -> None:
    """Catches: a frozen broker that finds a request for each interval of its freeze when it is back."""
    manager.mute(1)
    for now in range(2_000, 60_000, 500):
        manager.task_mutes.now_ms = float(now)
        manager.refresh()
        for node in manager.task_mutes.brokers_to_probe():
            manager.task_mutes.on_broker_probe_sent(node)
    assert manager.task_mutes.probes == 1
    for _ in range(100):
        manager.task_mutes.on_broker_probe_done(1, TimeoutError("request timed out"))
        manager.task_mutes.now_ms += 2_000.0
        manager.task_mutes.on_broker_probe_sent(1)
    manager.task_mutes.on_broker_probe_done(1, TimeoutError("request timed out"))
    assert manager.task_mutes.take_failures() == [1], "not once for each probe of its life"
    manager.task_mutes.now_ms += 2_000.0
    manager.refresh()
    assert manager.task_mutes.brokers_to_probe() == [1]
    manager.task_mutes.on_connected(1)
    assert not manager.is_muted(1), "a new connection's first response tells as much"


def test_no_row_goes_to_a_muted_broker_however_long_it_is_muted(manager: CircuitBreakManager) -> None:
    """Catches: keyless rows that are let through to a dead broker as its probe."""
    manager.mute(1)
    manager.mute(A0)
    for now in range(0, 600_000, 250):
        manager.task_mutes.now_ms = float(now)
        manager.task_mutes.on_movable_rows(["a", "b"])
        mutes = manager.refresh()
        assert A0 in mutes
        assert B0 in mutes
        assert not manager.task_mutes.may_probe(A0)


def test_any_response_unmutes_a_broker(manager: CircuitBreakManager) -> None:
    manager.mute(1)
    manager.mute(A0)
    manager.task_mutes.now_ms = 2_000.0
    manager.task_mutes.on_broker_probe_sent(1)
    manager.task_mutes.on_broker_probe_done(1, BrokerRefusedError("throttled", 89))
    assert not manager.is_muted(1)
    assert manager.is_muted(A0), "of the partition it says nothing"
    assert manager.task_mutes.may_probe(A0), "so the next batch may go at once"
    manager.task_mutes.on_batches_sent([batch(A0)])
    manager.task_mutes.on_batches_done([batch(A0)], DeliveryError("too large"))
    assert manager.task_mutes.may_probe(A0)


def test_new_rows_probe_a_partition_that_no_batch_waits_for(manager: CircuitBreakManager) -> None:
    """Catches: a partition that stays muted for ever, as keyless rows avoid it and none else go there. And
    one that got its probe only after two intervals."""
    manager.mute(A0)
    manager.task_mutes.now_ms = 1_999.0
    assert A0 in manager.refresh()
    assert not manager.refresh().probes
    manager.task_mutes.now_ms = 2_000.0
    assert A0 not in manager.refresh()
    assert list(manager.refresh().probes) == [A0]
    assert manager.is_muted(A0)
    manager.task_mutes.on_batches_sent([batch(A0)])
    assert A0 in manager.refresh(), "one probe, then it is muted again"
    manager.task_mutes.on_batches_done([batch(A0)], None)
    assert not manager.is_muted(A0)


def test_while_a_batch_waits_it_is_the_probe(manager: CircuitBreakManager) -> None:
    manager.mute(A0)
    for now in range(0, 10_000, 1_000):
        manager.task_mutes.now_ms = float(now)
        manager.task_mutes.may_probe(A0)
        assert A0 in manager.refresh()
    assert manager.task_mutes.waited_for() == [A0]
    manager.task_mutes.now_ms = 10_600.0
    assert A0 not in manager.refresh()
    assert manager.task_mutes.waited_for() == []


def test_a_permitted_probe_opens_at_once_and_ends_with_its_permit(manager: CircuitBreakManager) -> None:
    manager.task_mutes.apply_shared({A0: "x", A1: "y"})
    manager.task_mutes.now_ms = 60_000.0
    assert A0 in manager.refresh()
    manager.task_mutes.permit([A0], new_rows=True)
    manager.task_mutes.permit([A1], new_rows=False)
    mutes = manager.refresh()
    assert A0 not in mutes
    assert A1 in mutes, "that permit is for a batch that waits"
    manager.task_mutes.now_ms += manager.task_mutes.retry_interval_ms
    assert A0 in manager.refresh()


def test_a_permit_without_rows_for_it_is_returned(manager: CircuitBreakManager) -> None:
    """Catches: the permit of a task without rows kept all other tasks from probing for an interval."""
    mutes = manager.task_mutes
    mutes.apply_shared({A0: "x", A1: "y", B0: "z"})
    mutes.may_probe(A0)
    mutes.on_movable_rows(["b"])
    mutes.permit([A0, A1], new_rows=False)
    mutes.permit([B0], new_rows=True)
    assert mutes.return_permits() == [A1]
    assert mutes.return_permits() == []
    mutes.on_batches_sent([batch(A0)])
    mutes.now_ms = 1_501.0
    assert mutes.return_permits() == [B0], "the rows came long ago"
    assert B0 in manager.refresh()
    assert mutes.mutes[A0].is_probed


def test_a_task_wants_the_partitions_that_its_free_rows_avoid(manager: CircuitBreakManager) -> None:
    manager.mute(A0)
    manager.mute(B0)
    manager.task_mutes.on_movable_rows(["a"])
    assert manager.task_mutes.acceptable() == [A0]
    manager.task_mutes.may_probe(A0)
    assert manager.task_mutes.acceptable() == [], "a batch waits for it"
    manager.task_mutes.now_ms = 2_000.0
    assert manager.task_mutes.acceptable() == [], "that was long ago"


def test_failures_before_the_end_of_a_mute_do_not_count(
    manager: CircuitBreakManager, cluster: Cluster
) -> None:
    for target in (A0, 1):
        cluster.partition(A0).outcomes.on_failure(0.0, 0.0)
        assert cluster.partition(A0).outcomes.count(0.0) == (1, 1)
        manager.mute(target)
        manager.refresh()
        manager.unmute(target)
        assert cluster.partition(A0).outcomes.count(0.0) == (0, 0)


def test_partitions_come_back_in_no_more_time_where_a_broker_of_many_is_muted() -> None:
    """Catches: all partitions of the broker were looked at for each that came back."""
    back = [TopicPartition("u", number) for number in range(5_000)]
    manager = Cluster(t=[1] * 20_000, u=[2] * 5_000).manager()
    manager.mute(1)
    manager.task_mutes.apply_shared(dict.fromkeys(back, "failed"))
    manager.refresh()
    began_s = time.thread_time()
    manager.task_mutes.apply_shared({})
    assert time.thread_time() - began_s < 1
    assert not any(map(manager.is_muted, back))


# -- trials: new rows that go to a muted partition as its probe --


def test_a_trial_ends_when_a_batch_waits_that_cannot_be_sent() -> None:
    """Catches: rows without keys that gather for a failing partition whose broker's window is full."""
    bench = Bench()
    bench.manager.mute(P0, "failing")
    assert P0 not in bench.at(4_000.0), "no batch waits: new rows may come"
    bench.task_mutes.on_waiting([P0])
    for _ in range(20):
        assert P0 in bench.at(bench.now + 500)
        assert bench.task_mutes.may_probe(P0), "it is the probe, once the broker takes it"
    bench.send(P0)
    bench.at(bench.now)
    assert not bench.task_mutes.may_probe(P0)


def test_there_is_no_trial_while_a_response_is_awaited() -> None:
    """Catches: rows that gather behind a batch that has no response yet."""
    bench = Bench()
    bench.batch(P0)
    bench.send(P0)
    bench.manager.mute(P0, "failing")
    for _ in range(20):
        assert P0 in bench.at(bench.now + 500)
    bench.answer(P0, TimeoutError("x"))
    bench.manager.unmute(1)
    assert P0 not in bench.at(bench.now)


def test_waiting_for_a_healthy_partition_means_nothing() -> None:
    bench = Bench()
    bench.manager.mute(1, "silent")
    bench.at(bench.now)
    bench.task_mutes.on_waiting([P1])
    assert bench.task_mutes.waited_for() == []
