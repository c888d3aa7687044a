"""Between sender and breaker class, at exact times: what is asked, logged, explained and counted."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping

import pytest

from kafka_sink.breaker import CircuitBreakManager, ProducerStatusContext
from kafka_sink.coordinator.breaker import BreakerChannel
from kafka_sink.errors import BrokerRefusedError
from kafka_sink.model import TopicPartition
from tests.support.breaker_cluster import P0, P1, P3, Bench, IdleBreaker
from tests.support.brokers import batch

REPLICAS = BrokerRefusedError("NOT_ENOUGH_REPLICAS", 19)


def frozen() -> Bench:
    """Broker 1 is, after one response in time."""
    bench = Bench()
    bench.batch(P0)
    bench.send(P0)
    bench.pass_time(700)
    assert P0 in bench.gate.avoided
    return bench


def test_a_silent_broker_is_muted_logged_once_and_unmuted_by_its_response(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, "kafka_sink"):
        bench = frozen()
        assert P3 in bench.gate.avoided
        assert P1 not in bench.gate.avoided
        bench.pass_time(500)
        assert len(caplog.records) == 1
        assert re.fullmatch(
            r"circuit breaker: muted broker host1:9092 \(id 1\) with t-0, t-3: no response to 1 request\(s\) "
            r"for 5\d\d ms \(usually 10 ms\)",
            caplog.records[0].getMessage(),
        )
        assert bench.task_mutes.muted_count == 2
        bench.answer(P0)
        bench.at(bench.now)
        assert not bench.gate.avoided
        assert [r.getMessage() for r in caplog.records[1:]] == [
            "circuit breaker: unmuted broker host1:9092 (id 1) with t-0, t-3: it responds again"
        ]
    assert (bench.task_mutes.muted_count, bench.task_mutes.own_trips, bench.task_mutes.probes) == (0, 1, 0)


class MutesWhereAllIsWell(IdleBreaker):
    """Mutes a partition with its first response."""

    def on_complete(
        self, context: ProducerStatusContext, topic_partition: TopicPartition, exception: Exception | None
    ) -> bool:
        self.manager.mute(topic_partition, "as it likes")
        return True


def test_a_mute_for_an_acknowledgement_calls_for_a_pass_at_once() -> None:
    """Catches: the sender waits on after an acknowledgement, and rows go on to the muted partition."""
    bench = Bench(MutesWhereAllIsWell())
    bench.send(P0)
    assert bench.gate.delay_ms(bench.now) > 0
    bench.answer(P0)
    assert bench.gate.delay_ms(bench.now) == 0
    assert P0 in bench.at(bench.now)
    assert bench.gate.delay_ms(bench.now) > 0


def test_a_mute_is_explained_with_broker_time_and_last_error() -> None:
    assert Bench().gate.explain(P0) is None
    bench = frozen()
    bench.answer(P0, ConnectionResetError("reset by peer"))
    bench.pass_time(1_000)
    text = bench.gate.explain(P3)
    assert text is not None
    assert re.fullmatch(
        r"the circuit breaker has muted broker host1:9092 \(id 1\) since \d\d:\d\d:\d\d UTC "
        r"\(1\.\d s\): no response to 1 request\(s\) for 5\d\d ms \(usually 10 ms\); "
        r"last error: reset by peer",
        text,
    )
    assert bench.gate.explain(P1) is None
    # A broker that the metadata lost keeps its name.
    bench.cluster.move(P0, -1)
    bench.cluster.move(P3, -1)
    bench.at(bench.now)
    assert "broker host1:9092 (id 1) since" in (bench.gate.explain(P0) or "")


class Recorder(IdleBreaker):
    """Somebody's own class."""

    broken = False

    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []

    def on_send(self, context: ProducerStatusContext) -> bool:
        self.calls.append(("send", context.now, context.record_count, dict(context.in_flight_requests)))
        return False

    def on_complete(
        self, context: ProducerStatusContext, topic_partition: TopicPartition, exception: Exception | None
    ) -> bool:
        if self.broken:
            raise ZeroDivisionError("of the user's making")
        batches = dict(context.in_flight_batches)
        self.calls.append(("complete", context.now, context.record_count, batches, exception))
        if exception is not None:
            self.manager.mute(topic_partition, "I say so")
            return True
        return False


def test_a_users_class_is_called_per_batch_with_its_rows() -> None:
    breaker = Recorder()
    bench = Bench(breaker)
    bench.now = 5.0
    bench.send(P0, 7_000)
    bench.send(P3, 3)
    bench.now = 6.0
    bench.answer(P0, REPLICAS, 7_000)
    bench.answer(P3, None, 3)
    assert breaker.calls == [
        ("send", 5.0, 7_000, {1: 1}),
        ("send", 5.0, 3, {1: 2}),
        ("complete", 6.0, 7_000, {P3: 1}, REPLICAS),
        ("complete", 6.0, 3, {}, None),
    ]
    assert P0 in bench.at(6.0)
    assert "I say so" in (bench.gate.explain(P0) or "")


def test_context_mappings_are_computed_once_for_all_batches_of_a_request() -> None:
    """Catches: it was counted anew for each of 2,000 batches, over all in flight: 3.5 s for one response."""

    read: list[Mapping[TopicPartition, int]] = []

    class Reads(Recorder):
        def on_complete(self, context: ProducerStatusContext, *_: object) -> bool:
            read.append(context.in_flight_batches)
            return False

    bench = Bench(Reads())
    bench.send(P0)
    bench.send(P3)
    lefts: list[dict[TopicPartition, int]] = [{P3: 1}, {}]
    for left in lefts:
        read.clear()
        bench.brokers[1].on_response(bench.now)
        bench.gate.on_complete(bench.brokers[1], [batch(P0), batch(P1)], None, bench.now)
        assert read == [left, left]
        assert read[0] is read[1]


def test_a_class_that_raises_is_switched_off_and_its_mutes_end_by_probes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    breaker = Recorder()
    bench = Bench(breaker)
    bench.send(P0)
    bench.answer(P0, REPLICAS)
    breaker.broken = True
    bench.send(P1)
    bench.answer(P1)
    bench.send(P1)
    bench.answer(P1)
    assert [r.message for r in caplog.records if r.exc_info] == [
        "the circuit breaker class failed and is switched off for this producer"
    ]
    assert P0 not in bench.at(2_001.0), "its probe may go"
    assert bench.task_mutes.may_probe(P0)
    bench.send(P0)
    bench.answer(P0)
    assert not bench.at(bench.now)


class Shared(BreakerChannel):
    """A coordinator's side that says nothing."""

    is_current = True  # type: ignore[assignment]

    def __init__(self, manager: CircuitBreakManager) -> None:
        super().__init__(manager, lambda: None, lambda: None)

    def exchange(self) -> None:
        pass


def test_a_task_does_not_wait_for_mutes_that_are_known() -> None:
    """Catches: a second of waiting at the begin of each task, until the sender happens to pass by."""
    bench = Bench(Recorder())
    shared = Shared(bench.manager)
    bench.gate.share(shared)
    bench.gate.begin()
    bench.at(0.0)

    def check() -> None:
        pytest.fail("waits")

    bench.gate.begin()
    bench.gate.await_mutes(10_000.0, check)
    shared.is_current = False
    bench.gate.begin()
    asked = []
    bench.gate.await_mutes(120.0, lambda: asked.append(True))
    assert len(asked) == 3, "a bounded time"
    bench.gate.await_mutes(10_000.0, check)
    bench.gate.begin()
    bench.gate.share(None)
    bench.gate.await_mutes(10_000.0, check)


def test_topics_without_a_leader_are_refreshed_when_a_broker_is_probed() -> None:
    """Catches: partitions of a broker that is back that get no rows until their metadata is old."""
    bench = frozen()
    stale = bench.cluster.stale
    bench.cluster.move(P0, -1)
    bench.cluster.leaders["other"] = [2]
    bench.pass_time(2_100)
    assert bench.task_mutes.brokers_to_probe() == [1]
    bench.gate.on_probe(1, bench.now)
    bench.gate.on_probe_done(1, ConnectionError("the cluster no longer lists this broker"), bench.now)
    assert stale == ["t"]
    assert bench.task_mutes.brokers_to_probe() == [], "once an interval"
    bench.pass_time(2_100)
    bench.gate.on_probe(1, bench.now)
    bench.gate.on_probe_done(1, None, bench.now)
    assert stale == ["t", "t"]


def test_a_task_that_leaves_the_coordinator_goes_on_by_its_own_clock() -> None:
    bench = Bench(Recorder())
    bench.gate.share(Shared(bench.manager))
    bench.task_mutes.apply_shared({1: "another task says so"})
    bench.at(bench.now)
    bench.gate.share(None)
    bench.at(bench.now)
    assert not bench.task_mutes.mutes[1].is_shared
    assert P3 in bench.gate.avoided
    bench.gate.close()
    assert not bench.gate.avoided
