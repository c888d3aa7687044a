"""FailureRateCircuitBreaker on a clock of the test's own."""

from __future__ import annotations

import math

import pytest

from kafka_sink.breaker import FailureRateCircuitBreaker
from kafka_sink.breaker.failure_rate import Health, SilenceLimits, has_response, health_of
from kafka_sink.breaker.interface import ProducerStatusContext
from kafka_sink.errors import BrokerRefusedError, ConfigurationError
from kafka_sink.model import TopicPartition
from tests.support.breaker_cluster import Cluster
from tests.support.brokers import Brokers, batch_of

P0, P1, P2 = (TopicPartition("t", partition) for partition in range(3))
REPLICAS = BrokerRefusedError("NOT_ENOUGH_REPLICAS", 19)


class Bench:
    """A breaker, its manager and what is in flight; broker n leads partition n - 1."""

    def __init__(self, **configs: str) -> None:
        self.cluster = Cluster(t=[1, 2, 3])
        self.manager = self.cluster.manager()
        self.breaker = FailureRateCircuitBreaker()
        self.breaker.configure({name.replace("_", "."): text for name, text in configs.items()})
        self.breaker.set_circuit_break_manager(self.manager)
        self.brokers = self.cluster.brokers
        self.context = ProducerStatusContext(brokers=self.brokers)
        self.now = 0.0

    def at(self, now: float) -> Bench:
        self.now = self.manager.table.now_ms = self.context.now = now
        self.breaker.on_tick(self.context)
        return self

    def answer_probes(self, *nodes: int) -> None:
        """These brokers respond to requests without rows, the others do not."""
        probes = self.manager.table
        for node in probes.brokers_to_probe():
            probes.broker_probe_sent(node)
            if node in nodes:
                self.brokers[node].probed_ms = self.now
                probes.broker_probe_done(node, None)

    def pass_time(self, until: float, step: float = 20.0, *, others_respond: bool = True) -> None:
        while self.now < until:
            if others_respond:
                self.batch(P2)
            self.at(min(max(self.now, self.now + step - 10), until))

    def _about(self, partition: TopicPartition, records: int) -> None:
        context = self.context
        context.node_id = partition.partition + 1
        context.topic_partition, context.record_count = partition, records

    def send(self, partition: TopicPartition, records: int = 100) -> None:
        batch = batch_of(self.cluster.partition(partition), records)
        self.brokers.send_batches(partition.partition + 1, [batch], self.now)
        self._about(partition, records)
        self.breaker.on_send(self.context)

    def answer(self, partition: TopicPartition, error: Exception | None = None, records: int = 100) -> bool:
        broker = self.brokers[partition.partition + 1]
        broker.sent[0].request.records = records
        if has_response(error):
            broker.responded(self.now, self.breaker.prompt_ms)
        else:
            broker.failed()
        self.context.request_sent_ms = broker.request_sent_ms
        self._about(partition, records)
        home = self.cluster.partition(partition)
        if health_of(error) is Health.UNHEALTHY:
            home.count_failure(broker.request_sent_ms, self.now)
        if error is None:
            home.acknowledged(batch_of(home, 1), -1, broker.request_sent_ms, self.now)
        return self.breaker.on_complete(self.context, partition, error)

    def batch(self, partition: TopicPartition, error: Exception | None = None, records: int = 100) -> bool:
        self.send(partition, records)
        self.at(self.now + 10)
        return self.answer(partition, error, records)


def test_batches_are_counted_whatever_their_rows() -> None:
    bench = Bench(trigger_message_count="1000", trigger_failure_perc="50")
    for rows in (10_000, 10_000, 10_000, 10_000):
        assert not bench.batch(P0, records=rows)
    for _ in range(3):
        assert not bench.batch(P0, REPLICAS, records=1), "fewer than half"
    assert bench.batch(P0, REPLICAS, records=1)
    assert bench.manager.is_muted(P0)
    assert not bench.manager.is_muted(P1)
    change = bench.manager.table.take_changes()[0]
    assert change.reason == "4 of the last 8 batches failed; last error: NOT_ENOUGH_REPLICAS"


def test_nothing_is_judged_before_so_many_rows_were_sent() -> None:
    bench = Bench(trigger_message_count="1000")
    for _ in range(9):
        assert not bench.batch(P0, REPLICAS, records=100)
    assert bench.batch(P0, REPLICAS, records=100)


def test_a_slow_stream_that_always_fails_is_muted() -> None:
    """Catches: 50 rows a second that all fail and trip nothing, as no ten seconds have a thousand rows."""
    bench = Bench()
    while not bench.manager.is_muted(P0):
        assert bench.now < 25_000
        bench.batch(P0, REPLICAS, records=50)
        bench.at(bench.now + 990)


def test_one_lost_connection_mutes_nothing_however_much_was_in_flight() -> None:
    """Catches: a reset with a batch of a thousand rows that mutes its partition."""
    bench = Bench()
    for _ in range(5):
        bench.send(P0, 1_000)
    bench.at(bench.now + 10)
    for _ in range(5):
        assert not bench.answer(P0, ConnectionResetError("reset"), 1_000)
        bench.at(bench.now + 1)
    for _ in range(5):
        bench.batch(P0, records=1_000)
    assert not bench.manager.table.take_changes()


def test_a_silent_broker_is_muted_after_the_threshold_and_its_responses_unmute_it() -> None:
    bench = Bench()
    for _ in range(20):
        bench.batch(P0)
    for _ in range(3):
        bench.send(P0)
    start = bench.now
    bench.pass_time(start + 500)
    assert not bench.manager.is_muted(1)
    bench.pass_time(start + 600)
    assert bench.manager.is_muted(1)
    reason = bench.manager.table.take_changes()[0].reason
    assert reason.startswith("no response to 3 request(s) for 5")
    assert reason.endswith("where 10 ms is usual")
    bench.pass_time(start + 30_000, 500)
    bench.answer(P0)
    assert bench.manager.is_muted(1), "two are still awaited"
    bench.answer(P0)
    bench.answer(P0)
    assert not bench.manager.is_muted(1)
    assert bench.brokers[1].usual_ms == pytest.approx(10, abs=150), "the freeze is not usual"


def test_slow_responses_become_usual() -> None:
    bench = Bench()
    for _ in range(100):
        bench.send(P0)
        bench.pass_time(bench.now + 450)
        bench.answer(P0)
    bench.send(P0)
    bench.pass_time(bench.now + 2_000)
    assert not bench.manager.table.take_changes()
    bench.pass_time(bench.now + 500)
    assert bench.manager.is_muted(1)


def test_slow_first_responses_are_soon_forgotten() -> None:
    limits, broker = SilenceLimits(500.0, 5.0, 15_000.0), Brokers().of(1)
    assert limits.of_response(broker, [broker]) == 3_000.0
    broker.observe(1_700.0)
    assert limits.of_response(broker, [broker]) == 3_000.0, "no more than while nothing is known"
    for sample in [20.0] * 5:
        broker.observe(sample)
    assert limits.of_response(broker, [broker]) == 500.0
    for sample in [1_000.0] * 40:
        broker.observe(min(sample, limits.of_response(broker, [broker])))
    assert limits.of_response(broker, [broker]) > 4_500.0


def test_a_silence_is_noticed_before_the_request_times_out() -> None:
    limits, brokers = SilenceLimits(500.0, 5.0, 1_000.0), Brokers(1, 2)
    for _ in range(200):
        brokers[1].observe(900.0)
    assert limits.of_response(brokers[1], brokers.values()) == 1_000.0
    assert limits.of_response(brokers[2], brokers.values()) == 1_000.0


def test_an_unreachable_broker_is_muted() -> None:
    bench = Bench()
    bench.batch(P0)
    for _ in range(40):
        bench.brokers.unreachable(1, bench.now, failing=True)
        bench.batch(P1)
        bench.at(bench.now + 10)
    assert bench.manager.is_muted(1)
    assert "could not be reached" in bench.manager.table.take_changes()[0].reason


def _muted_after_connecting_for(bench: Bench, patience: float) -> float | None:
    """Broker 2's partition is written to while broker 1 is being connected to."""
    start = bench.now
    while bench.now < start + patience:
        bench.brokers.unreachable(1, bench.now, failing=False)
        bench.batch(P1)
        bench.at(bench.now + 10)
        if bench.manager.is_muted(1):
            return bench.now - start
    return None


@pytest.mark.parametrize("known", [{}, {-1: 5.0, 2: 8.0}, {-1: 5.0, 2: 900.0}])
def test_a_slow_connection_setup_is_no_silence(known: dict[int, float]) -> None:
    """Catches: brokers that need 0.9 s for TLS and SASL and are muted after 0.55 s."""
    bench = Bench()
    for node, setup_ms in known.items():
        bench.brokers.connected(node, setup_ms, bench.now)
    assert _muted_after_connecting_for(bench, 950.0) is None


def test_a_connection_that_takes_far_longer_than_usual_is_a_silence() -> None:
    unknown, quick, slow = Bench(), Bench(), Bench()
    quick.brokers.connected(2, 8.0, quick.now)
    slow.brokers.connected(2, 8.0, slow.now)
    slow.brokers.connected(1, 900.0, slow.now)
    found = [_muted_after_connecting_for(bench, 10_000.0) for bench in (unknown, quick, slow)]
    assert found == pytest.approx([3_060, 2_060, 4_560], abs=60)
    assert "no connection to it was ready within 30" in unknown.manager.table.take_changes()[0].reason


def test_requests_that_failed_are_no_recovery() -> None:
    bench = Bench(trigger_message_count="100000")
    bench.batch(P0)
    bench.send(P0)
    bench.pass_time(bench.now + 700)
    bench.answer(P0, TimeoutError("request timed out"))
    assert bench.manager.is_muted(1)
    bench.at(bench.now + 10)
    bench.send(P0)
    bench.answer(P0)
    assert bench.manager.is_muted(1), "the manager judges probes"


def test_requests_that_were_late_before_the_mute_ended_do_not_mute_again() -> None:
    bench = Bench()
    bench.batch(P0)
    bench.send(P0)
    bench.send(P0)
    bench.pass_time(bench.now + 5_000)
    assert bench.manager.is_muted(1)
    bench.manager.table.apply_shared({1: "shared"})
    bench.manager.table.apply_shared({})
    assert not bench.manager.is_muted(1), "another task's batch got through"
    bench.pass_time(bench.now + 400)
    assert not bench.manager.is_muted(1)
    bench.pass_time(bench.now + 400)
    assert bench.manager.is_muted(1), "but not for this one"


def test_when_no_broker_responds_none_is_muted() -> None:
    bench = Bench()
    for partition in (P0, P1):
        bench.batch(partition)
        bench.send(partition)
    bench.pass_time(5_000, others_respond=False)
    assert not bench.manager.table.take_changes()
    bench.answer(P1)
    bench.pass_time(5_100, others_respond=False)
    assert bench.manager.is_muted(1)
    assert not bench.manager.is_muted(2)


def test_zero_switches_the_silence_off() -> None:
    bench = Bench(slow_request_min_ms="0")
    bench.send(P0)
    bench.pass_time(20_000, 500)
    assert not bench.manager.table.take_changes()
    bench.answer(P0)
    assert bench.breaker.next_tick_ms(bench.context) == math.inf


def test_the_next_tick_is_when_a_silence_may_be_found() -> None:
    bench = Bench()
    assert bench.breaker.next_tick_ms(bench.context) == math.inf
    bench.send(P0)
    bench.batch(P1)
    steps = 0
    while not bench.manager.is_muted(1):
        bench.at(bench.now + bench.breaker.next_tick_ms(bench.context))
        bench.answer_probes(2, 3)
        steps += 1
        assert steps <= 4
    assert bench.now <= 1_200, "twice 500 ms for an unknown broker, and the confirmation"


def silent_until(bench: Bench, until: float, *responding: int) -> None:
    """Time passes without rows; these brokers respond to requests without any."""
    while bench.now < until and not bench.manager.is_muted(1):
        bench.answer_probes(*responding)
        bench.at(bench.now + 10)


@pytest.mark.parametrize("connecting", [False, True])
def test_a_task_with_nothing_else_to_send_asks_the_other_brokers(connecting: bool) -> None:
    """It mutes as soon as a task that has rows for them, and nothing while none of them responds."""

    def waiting() -> Bench:
        bench = Bench()
        for partition in (P0, P1, P2):
            bench.batch(partition)
        if connecting:
            bench.brokers.connected(2, 8.0, bench.now)
            bench.brokers.unreachable(1, bench.now, failing=False)
        else:
            bench.send(P0)
        return bench

    limit = 2_000 if connecting else 500
    silent = waiting()
    silent_until(silent, silent.now + 5 * limit)
    assert not silent.manager.table.take_changes()
    silent.manager.table.broker_probe_done(2, None)
    silent.brokers[2].probed_ms = silent.now
    silent_until(silent, silent.now + 100, 2, 3)
    assert silent.manager.is_muted(1)

    prompt = waiting()
    start = prompt.now
    silent_until(prompt, start + 5 * limit, 2, 3)
    assert prompt.now - start <= limit + 100


def test_two_silent_brokers_are_noticed_where_only_the_third_has_nothing_to_do() -> None:
    """Catches: two of three brokers that freeze and are never muted, as nobody is left who has to respond."""
    bench = Bench()
    for partition in (P0, P1, P2):
        bench.batch(partition)
    bench.send(P0)
    bench.send(P1)
    silent_until(bench, bench.now + 1_000, 3)
    bench.at(bench.now + 100)
    assert bench.manager.is_muted(1)
    assert bench.manager.is_muted(2)
    assert not bench.manager.is_muted(3)


def test_full_in_flight_mutes_for_keyless_rows_alone() -> None:
    configs = {"enable_mute_inflight_full": "true"}
    with pytest.raises(ConfigurationError, match=r"enable\.mute\.inflight\.full.*=1"):
        Bench(**configs, max_in_flight_requests_per_connection="5")
    bench = Bench(**configs, max_in_flight_requests_per_connection="1")
    bench.send(P0)
    assert bench.manager.congested == {1}
    assert not bench.manager.refresh()
    assert bench.manager.table.own_trips == 0
    bench.answer(P0)
    assert not bench.manager.congested


def test_a_slow_response_for_many_batches_is_one_response() -> None:
    """Each of its batches counted as a response, so that one slow response became usual at once."""
    bench = Bench(slow_request_min_ms="100")
    for _ in range(10):
        bench.batch(P0)
    usual = bench.brokers[1].usual_ms
    assert usual is not None
    bench.brokers.send(1, [], bench.now)
    bench.at(bench.now + 90.0)
    bench.brokers[1].responded(bench.now, bench.breaker.prompt_ms)
    bench.context.request_sent_ms, bench.context.node_id = bench.brokers[1].request_sent_ms, 1
    for number in range(200):
        bench.breaker.on_complete(bench.context, TopicPartition("t", 3 * number), None)
    after = bench.brokers[1].usual_ms
    assert after is not None
    assert usual < after < usual + 0.2 * (90.0 - usual)
