"""When probes go, and what their outcomes mean."""

from __future__ import annotations

from kafka_sink.breaker.mute_control import MuteControl
from kafka_sink.breaker.states import ProbeLease
from kafka_sink.errors import BrokerRefusedError, DeliveryError
from tests.support.breaker_cluster import A0, A1, B0


def test_one_probe_then_success_unmutes(control: MuteControl) -> None:
    control.manager.mute(1, "slow")
    control.now_ms = 1_999.0
    assert control.probes.brokers_to_probe() == []
    control.now_ms = 2_000.0
    assert control.probes.brokers_to_probe() == [1]
    assert not control.probes.may_probe(A0), "no row goes to a broker that may be dead"
    control.probes.broker_probe_sent(1)
    assert control.probes.brokers_to_probe() == []
    control.probes.batches_done([(A0, 1)], None)
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
    assert not control.manager.is_muted(1), "a new connection's first response tells as much"


def test_no_row_goes_to_a_muted_broker_however_long_it_is_muted(control: MuteControl) -> None:
    """Catches: keyless rows that are let through to a dead broker as its probe, and fail their task after
    delivery.timeout.ms."""
    control.manager.mute(1)
    control.manager.mute(A0)
    for now in range(0, 600_000, 250):
        control.now_ms = float(now)
        control.probes.note_free_rows(["a", "b"])
        mutes = control.refresh()
        assert A0 in mutes
        assert B0 in mutes
        assert not control.probes.may_probe(A0)


def test_a_failed_probe_waits_an_interval(control: MuteControl) -> None:
    control.manager.mute(A0, "errors")
    control.now_ms = 2_000.0
    control.probes.batches_sent([(A0, 1)])
    control.now_ms = 2_100.0
    control.probes.batches_done([(A0, 1)], BrokerRefusedError("NOT_ENOUGH_REPLICAS", 19))
    control.refresh()
    control.now_ms = 4_099.0
    assert not control.probes.may_probe(A0)
    control.now_ms = 4_100.0
    assert control.probes.may_probe(A0)
    found = control.partitions.mute_of(A0)
    assert found is not None
    assert (found.reason, found.since_ms, found.last_error) == ("errors", 0.0, "NOT_ENOUGH_REPLICAS")


def test_any_response_unmutes_a_broker(control: MuteControl) -> None:
    control.manager.mute(1)
    control.manager.mute(A0)
    control.now_ms = 2_000.0
    control.probes.broker_probe_sent(1)
    control.probes.broker_probe_done(1, BrokerRefusedError("throttled", 89))
    assert not control.manager.is_muted(1)
    assert control.manager.is_muted(A0), "of the partition it says nothing"
    assert control.probes.may_probe(A0), "so the next batch may go at once"
    control.probes.batches_sent([(A0, 1)])
    control.probes.batches_done([(A0, 1)], DeliveryError("too large"))
    assert control.probes.may_probe(A0)


def test_a_response_after_the_probe_expired_counts(control: MuteControl) -> None:
    control.manager.mute(1)
    control.now_ms = 2_000.0
    control.probes.broker_probe_sent(1)
    control.now_ms = 4_000.0
    control.refresh()
    control.probes.broker_probe_done(1, None)
    assert not control.manager.is_muted(1)


def test_where_no_batch_waits_new_rows_are_a_partitions_probe(control: MuteControl) -> None:
    """Catches: a partition that stays muted for ever, as keyless rows avoid it and none else go there."""
    control.manager.mute(A0)
    control.now_ms = 3_999.0
    assert A0 in control.refresh()
    control.now_ms = 4_000.0
    assert A0 not in control.refresh()
    assert control.manager.is_muted(A0)
    control.probes.batches_sent([(A0, 1)])
    assert A0 in control.refresh(), "one probe, then it is muted again"
    control.probes.batches_done([(A0, 1)], None)
    assert not control.manager.is_muted(A0)


def test_while_a_batch_waits_it_is_the_probe(control: MuteControl) -> None:
    control.manager.mute(A0)
    for now in range(0, 10_000, 1_000):
        control.now_ms = float(now)
        control.probes.may_probe(A0)
        assert A0 in control.refresh()
    assert control.probes.held() == [A0]
    control.now_ms = 10_600.0
    assert A0 not in control.refresh()
    assert control.probes.held() == []


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


def test_a_task_wants_the_partitions_that_its_free_rows_avoid(control: MuteControl) -> None:
    control.manager.mute(A0)
    control.manager.mute(B0)
    control.probes.note_free_rows(["a"])
    assert control.probes.wanted() == [A0]
    control.probes.may_probe(A0)
    assert control.probes.wanted() == [], "a batch waits for it"
    control.now_ms = 2_000.0
    assert control.probes.wanted() == [], "that was long ago"
