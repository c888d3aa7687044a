"""Healthy brokers that look unhealthy, and trials that must not let rows in for long; exact times."""

from __future__ import annotations

import pytest

from kafka_sink.breaker import FailureRateCircuitBreaker
from kafka_sink.breaker.breaker import Breaker
from kafka_sink.breaker.failure_rate import Health, SilenceLimits, has_response, health_of
from kafka_sink.engine.response_classifier import RULES
from kafka_sink.errors import (
    AuthenticationError,
    BrokerRefusedError,
    BrokerVersionError,
    DeliveryError,
    ProtocolError,
    RecordTooLargeError,
)
from kafka_sink.model import TopicPartition
from kafka_sink.network.broker_connection import RequestTimeoutError
from tests.support.breaker_cluster import Cluster, run_pass
from tests.support.brokers import Brokers

P0, P1, P2 = (TopicPartition("t", partition) for partition in range(3))


class Bench:
    """Broker n leads partition n - 1; a fake clock."""

    def __init__(self) -> None:
        breaker = FailureRateCircuitBreaker()
        breaker.configure({})
        self.cluster = Cluster(t=[1, 2, 3])
        self.manager, self.brokers = self.cluster.manager(), self.cluster.brokers
        self.gate = Breaker(breaker, self.manager)
        self.now = 0.0

    def send(self, partition: TopicPartition) -> None:
        self.cluster.send(self.gate, partition, 100, self.now)

    def answer(self, partition: TopicPartition, cause: Exception | None = None, rows: int = 100) -> None:
        self.cluster.answer(self.gate, partition, cause, rows, self.now)

    def batch(self, partition: TopicPartition, latency: float = 10.0) -> None:
        self.send(partition)
        self.now += latency
        self.answer(partition)

    def until_muted(self, node: int, patience: float) -> float:
        """Brokers 2 and 3 answer; the milliseconds until the node is muted, or the patience."""
        start = self.now
        while self.now < start + patience and not self.manager.is_muted(node):
            self.batch(P1)
            self.batch(P2)
            run_pass(self.gate, self.now)
        return self.now - start


def test_requests_that_a_quota_holds_back_are_no_silence() -> None:
    """Catches: a mute for a throttled broker, which sends nothing on a connection for throttle_time_ms."""
    bench = Bench()
    bench.batch(P0)
    for _ in range(3):
        bench.send(P0)
    bench.now += 10
    bench.answer(P0)
    bench.brokers.throttle(1, bench.now + 3_000.0)
    assert bench.until_muted(1, 3_300) >= 3_300
    bench.answer(P0)
    bench.answer(P0)
    assert not bench.manager.table.own_trips
    # Once the time is over, silence is silence again.
    bench.send(P0)
    assert 500 < bench.until_muted(1, 5_000) < 700


def test_others_are_watched_while_one_is_throttled() -> None:
    bench = Bench()
    for partition in (P0, P1, P2, P1):
        bench.batch(partition)
    bench.send(P1)
    bench.brokers.throttle(2, bench.now + 60_000.0)
    run_pass(bench.gate, bench.now)
    bench.send(P0)
    start = bench.now
    while not bench.manager.is_muted(1):
        assert bench.now < start + 1_000
        bench.batch(P2)
        run_pass(bench.gate, bench.now)


def test_a_broker_without_a_first_response_is_judged_by_the_others_first_ones() -> None:
    """A broker that freezes before its first response: one second where the others are quick at once."""
    bench = Bench()
    bench.batch(P1, 20.0)
    bench.send(P0)
    assert 1_000 <= bench.until_muted(1, 5_000) < 1_200


def test_where_first_responses_are_slow_a_slow_first_response_is_none() -> None:
    bench = Bench()
    bench.batch(P1, 450.0)
    bench.send(P0)
    assert bench.until_muted(1, 1_900) >= 1_900
    limits, brokers = SilenceLimits(500.0, 5.0, 15_000.0), Brokers(1, 2, 3, 4)

    def limit_ms(node: int) -> float:
        return limits.of_response(brokers[node], brokers.values())

    assert limit_ms(1) == 3_000.0, "nobody has answered yet"
    brokers[1].observe(20.0)
    assert limit_ms(2) == 1_000.0
    brokers[3].observe(400.0)
    assert limit_ms(2) == 2_000.0
    brokers[1].observe(2_900.0)
    assert limit_ms(2) == 2_000.0, "not a first response"
    brokers[4].observe(1_900.0)
    assert limit_ms(2) == 3_000.0, "as while nothing is known"


@pytest.mark.parametrize("pause", [600.0, 5_000.0, 60_000.0])
def test_a_pause_of_the_client_while_requests_are_out_is_no_silence(pause: float) -> None:
    """A stop of the process: at its end the responses of all brokers lie in its sockets."""
    bench = Bench()
    for partition in (P0, P1, P2):
        bench.batch(partition)
        bench.send(partition)
    run_pass(bench.gate, bench.now)
    bench.now += pause
    run_pass(bench.gate, bench.now)
    bench.now += 1
    for partition in (P1, P2):
        bench.answer(partition)
    run_pass(bench.gate, bench.now)
    bench.answer(P0)
    bench.now += 60
    run_pass(bench.gate, bench.now)
    assert not bench.manager.table.own_trips


def test_each_request_counts_from_its_own_time() -> None:
    """Catches: a broker that answers all in time, and is muted for the time since it was last idle."""
    bench = Bench()
    bench.batch(P0)
    bench.send(P0)
    for _ in range(10):
        start = bench.now
        bench.until_muted(1, 100)
        bench.send(P0)
        bench.until_muted(1, 100)
        bench.answer(P0)
        assert bench.now - start < 250
    assert not bench.manager.table.own_trips


def test_what_failed_in_a_silence_mutes_nothing_that_is_back() -> None:
    bench = Bench()
    bench.batch(P0)
    bench.send(P0)
    bench.send(P0)
    bench.until_muted(1, 1_000)
    bench.answer(P0, ConnectionResetError("x"), 5_000)
    bench.answer(P0)
    assert not run_pass(bench.gate, bench.now)
    bench.send(P0)
    bench.answer(P0, BrokerRefusedError("NOT_ENOUGH_REPLICAS", 19))
    assert not run_pass(bench.gate, bench.now), "one batch of a hundred rows is too little"


def test_every_response_of_the_outcome_table_is_judged() -> None:
    """Only what tells of a broker's or a partition's health may mute."""
    sick = {7, 19, 20, -1, 56, 13, 89}
    for code in {*RULES, 29, 32, 87} - {0}:
        refused = BrokerRefusedError("refused", code)
        assert health_of(refused) is (Health.UNHEALTHY if code in sick else Health.NEUTRAL), code
        assert has_response(refused)
    assert health_of(None) is Health.HEALTHY
    for kind in (ConnectionResetError, TimeoutError, RequestTimeoutError, ProtocolError, ValueError):
        lost = kind("x")
        assert health_of(lost) is Health.UNHEALTHY
        assert not has_response(lost)
    # A response that left the partition out is a DeliveryError.
    for neutral in (AuthenticationError, BrokerVersionError, DeliveryError, RecordTooLargeError):
        assert health_of(neutral("x")) is Health.NEUTRAL


def test_a_trial_ends_when_a_batch_waits_that_cannot_be_sent() -> None:
    """Catches: rows without keys that gather for a failing partition whose broker's window is full."""
    bench = Bench()
    bench.manager.mute(P0, "failing")
    bench.now = 4_000.0
    assert P0 not in run_pass(bench.gate, bench.now), "no batch waits: new rows may come"
    bench.gate.table.note_waiting([P0])
    for _ in range(20):
        bench.now += 500
        assert P0 in run_pass(bench.gate, bench.now)
        assert bench.gate.table.may_probe(P0), "it is the probe, once the broker takes it"
    bench.send(P0)
    run_pass(bench.gate, bench.now)
    assert not bench.gate.table.may_probe(P0)


def test_there_is_no_trial_while_a_response_is_awaited() -> None:
    """Catches: rows that gather behind a batch that has no response yet."""
    bench = Bench()
    bench.batch(P0)
    bench.send(P0)
    bench.manager.mute(P0, "failing")
    for _ in range(20):
        bench.now += 500
        assert P0 in run_pass(bench.gate, bench.now)
    bench.answer(P0, RequestTimeoutError("x"))
    bench.manager.unmute(1)
    assert P0 not in run_pass(bench.gate, bench.now)


def test_waiting_for_a_healthy_partition_means_nothing() -> None:
    bench = Bench()
    bench.manager.mute(1, "silent")
    run_pass(bench.gate, bench.now)
    bench.gate.table.note_waiting([P1])
    assert bench.manager.table.held() == []
