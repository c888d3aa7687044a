"""FailureRateCircuitBreaker at exact times: what it mutes, and healthy brokers that only look unhealthy."""

from __future__ import annotations

import math

import pytest

from kafka_sink.breaker.failure_rate import SilenceLimits
from kafka_sink.errors import (
    AuthenticationError,
    BrokerRefusedError,
    BrokerVersionError,
    ConfigurationError,
    DeliveryError,
    ProtocolError,
    RecordTooLargeError,
)
from kafka_sink.kafka_errors import ERRORS
from kafka_sink.model import TopicPartition
from kafka_sink.outcomes import Health, has_response, health_of
from tests.support.breaker_cluster import P0, P1, P2, Bench
from tests.support.brokers import Brokers, batch

REPLICAS = BrokerRefusedError("NOT_ENOUGH_REPLICAS", 19)


def test_every_response_of_the_outcome_table_is_judged() -> None:
    """Only what tells of a broker's or a partition's health may mute."""
    sick = {7, 19, 20, -1, 56, 13, 89}
    for code in ERRORS.keys() - {0}:
        refused = BrokerRefusedError("refused", code)
        assert health_of(refused) is (Health.UNHEALTHY if code in sick else Health.NEUTRAL), code
        assert has_response(refused)
    assert health_of(None) is Health.HEALTHY
    for kind in (ConnectionResetError, TimeoutError, ProtocolError, ValueError):
        lost = kind("x")
        assert health_of(lost) is Health.UNHEALTHY
        assert not has_response(lost)
    # A response that left the partition out is a DeliveryError.
    for neutral in (AuthenticationError, BrokerVersionError, DeliveryError, RecordTooLargeError):
        assert health_of(neutral("x")) is Health.NEUTRAL


# -- partitions that fail -----------------------------------------------------------------------------


def test_batches_are_counted_whatever_their_rows() -> None:
    bench = Bench(trigger_message_count="1000", trigger_failure_perc="50")
    for _ in range(4):
        assert not bench.batch(P0, rows=10_000)
        assert not bench.batch(P0, BrokerRefusedError("TOPIC_AUTHORIZATION_FAILED", 29)), "no broker's fault"
    for _ in range(3):
        assert not bench.batch(P0, REPLICAS, rows=1), "fewer than half"
    assert bench.batch(P0, REPLICAS, rows=1)
    assert list(bench.task_mutes.mutes) == [P0]
    assert bench.task_mutes.mutes[P0].reason == (
        "4 of the last 8 batches failed; last error: NOT_ENOUGH_REPLICAS"
    )


@pytest.mark.parametrize(("rows", "batches"), [("1000", 10), ("1", 3)])
def test_no_partition_is_judged_before_enough_rows_were_sent_and_three_batches_failed(
    rows: str, batches: int
) -> None:
    bench = Bench(trigger_message_count=rows)
    found = [bench.batch(P0, REPLICAS, rows=100) for _ in range(batches)]
    assert found == [False] * (batches - 1) + [True]


def test_a_slow_stream_that_always_fails_is_muted() -> None:
    """Catches: 50 rows a second that all fail and trip nothing, as no ten seconds have a thousand rows."""
    bench = Bench()
    while not bench.batch(P0, REPLICAS, rows=50):
        assert bench.now < 25_000
        bench.at(bench.now + 990)


def test_lost_connection_mutes_nothing_however_much_was_in_flight() -> None:
    """Catches: a reset with a batch of a thousand rows that mutes its partition."""
    bench = Bench()
    for _ in range(5):
        bench.send(P0, 1_000)
    bench.at(bench.now + 10)
    for _ in range(5):
        bench.answer(P0, ConnectionResetError("reset"), 1_000)
        bench.at(bench.now + 1)
    for _ in range(5):
        bench.batch(P0, rows=1_000)
    assert not bench.task_mutes.own_trips


# -- brokers that are silent --------------------------------------------------------------------------


def test_a_silent_broker_is_muted_after_the_threshold_and_its_responses_unmute_it() -> None:
    bench = Bench()
    for _ in range(20):
        bench.batch(P0)
    for _ in range(3):
        bench.send(P0)
    bench.pass_time(500)
    assert not bench.manager.is_muted(1)
    bench.pass_time(100)
    reason = bench.task_mutes.mutes[1].reason
    assert reason.startswith("no response to 3 request(s) for 5")
    assert reason.endswith("(usually 10 ms)")
    bench.pass_time(30_000, 500)
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
        bench.pass_time(450)
        bench.answer(P0)
    bench.send(P0)
    bench.pass_time(2_000)
    assert not bench.task_mutes.own_trips
    bench.pass_time(500)
    assert bench.manager.is_muted(1)


@pytest.mark.parametrize(
    ("every_ms", "rise_ms"),
    [(200, 60_000), (20_000, 60_000), (30_000, 60_000), (60_000, 60_000), (1_000, 10)],
)
def test_latency_that_rises_within_a_minute_mutes_nothing(every_ms: int, rise_ms: int) -> None:
    """All brokers' latency rises from 5 to 600 ms; each differs from the others by a twentieth.

    Catches: micro-batches every 20 s or more, whose few responses left the usual latency at 60 ms, so that
    the broker that responded last was muted for the milliseconds between both responses.
    """
    bench, begins = Bench(), 6 * every_ms + 1_000
    due: dict[TopicPartition, list[float]] = {P0: [], P1: [], P2: []}
    for now in range(0, begins + rise_ms + 3 * every_ms, 10):
        bench.now = float(now)
        risen = 5 + 595 * min(1.0, max(0.0, (now - begins) / rise_ms))
        for number, (partition, expected) in enumerate(due.items()):
            while expected and expected[0] <= now:
                del expected[0]
                bench.answer(partition)
            if now % every_ms == 0 and len(expected) < 5:
                bench.send(partition)
                expected.append(now + risen * (0.95 + 0.05 * number))
        bench.at(bench.now)
    assert not bench.task_mutes.own_trips


def test_setting_up_a_connection_may_take_as_many_round_trips_as_tls_and_sasl_need() -> None:
    """Catches: a reconnect after the network had become slow, judged by a setup in milliseconds."""
    limits, brokers = SilenceLimits(500.0, 5.0, 15_000.0), Brokers(1, 2)
    brokers[1].setup_ms = 12.0
    assert limits.of_connection(brokers[1], brokers.values()) == 2_000.0
    brokers[1].observe(600.0)
    assert limits.of_connection(brokers[1], brokers.values()) == 6_000.0


def test_limits_of_a_response() -> None:
    """Slow first responses are soon forgotten, and the first ones of others count where there is none."""
    limits, brokers = SilenceLimits(500.0, 5.0, 15_000.0), Brokers(1, 2, 3, 4, 5)

    def limit_ms(node: int) -> float:
        return limits.of_response(brokers[node], brokers.values(), brokers[node].expected_ms)

    assert limit_ms(1) == 3_000.0, "nobody has answered yet"
    brokers[1].observe(20.0)
    assert limit_ms(2) == 1_000.0
    brokers[3].observe(400.0)
    assert limit_ms(2) == 2_000.0
    brokers[1].observe(2_900.0)
    assert limit_ms(2) == 2_000.0, "not a first response"
    brokers[4].observe(1_900.0)
    assert limit_ms(2) == limit_ms(4) == 3_000.0, "no more than while nothing is known"
    for sample in [20.0] * 5:
        brokers[4].observe(sample)
    assert limit_ms(4) == 500.0
    for sample in [1_000.0] * 40:
        brokers[4].observe(min(sample, limit_ms(4)))
    assert limit_ms(4) > 4_500.0
    # Noticed before the request times out.
    limits = SilenceLimits(500.0, 5.0, 1_000.0)
    assert limit_ms(2) == limit_ms(4) == 1_000.0


def _muted_after_connecting_for(bench: Bench, patience: float, *, failing: bool = False) -> float | None:
    """Broker 2's partition is written to while broker 1 is being connected to."""
    start = bench.now
    while bench.now < start + patience:
        bench.brokers.unreachable(1, bench.now, failing=failing)
        bench.gate.on_unreachable([bench.brokers[1]], bench.now)
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


def test_a_connection_that_is_refused_or_takes_far_longer_than_usual_is_a_silence() -> None:
    refused, unknown, quick, slow = (Bench() for _ in range(4))
    quick.brokers.connected(2, 8.0, quick.now)
    slow.brokers.connected(2, 8.0, slow.now)
    slow.brokers.connected(1, 900.0, slow.now)
    refused.batch(P0)
    assert _muted_after_connecting_for(refused, 800.0, failing=True)
    assert "could not be reached" in refused.task_mutes.mutes[1].reason
    found = [_muted_after_connecting_for(bench, 10_000.0) for bench in (unknown, quick, slow)]
    assert found == pytest.approx([3_060, 2_060, 4_560], abs=60)
    assert "no connection to it was ready within 30" in unknown.task_mutes.mutes[1].reason


def test_a_connection_that_is_refused_after_a_long_setup_is_silence_at_once() -> None:
    """Where a setup takes 1 s, one may take 5. Catches: its refusal counted half a second later."""
    bench = Bench()
    bench.brokers.connected(2, 1_000.0, 0.0)
    assert _muted_after_connecting_for(bench, 3_000.0) is None
    found = _muted_after_connecting_for(bench, 1_000.0, failing=True)
    assert found is not None
    assert found <= 90.0


def test_requests_that_failed_are_no_recovery() -> None:
    bench = Bench(trigger_message_count="100000")
    bench.batch(P0)
    bench.send(P0)
    bench.pass_time(700)
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
    bench.pass_time(5_000)
    assert bench.manager.is_muted(1)
    bench.task_mutes.apply_shared({1: "shared"})
    bench.task_mutes.apply_shared({})
    assert not bench.manager.is_muted(1), "another task's batch succeeded"
    bench.pass_time(400)
    assert not bench.manager.is_muted(1)
    bench.pass_time(400)
    assert bench.manager.is_muted(1), "but not for this one"


def test_when_no_broker_responds_none_is_muted() -> None:
    bench = Bench()
    for partition in (P0, P1):
        bench.batch(partition)
        bench.send(partition)
    for now in range(30, 5_000, 20):
        bench.at(now)
    assert not bench.task_mutes.own_trips
    bench.answer(P1)
    for now in range(5_000, 5_100, 20):
        bench.at(now)
    assert list(bench.task_mutes.mutes) == [1]
    bench.manager.unmute(1)
    for node in (2, 3):
        bench.manager.mute(node)
    bench.pass_time(700)
    assert not bench.manager.is_muted(1), "nothing else would be left"


def test_zero_switches_the_silence_off() -> None:
    bench = Bench(slow_request_min_ms="0")
    bench.send(P0)
    bench.pass_time(20_000, 500)
    bench.answer(P0)
    bench.at(bench.now)
    assert not bench.task_mutes.own_trips
    assert bench.next_ms() == math.inf


def test_the_next_tick_is_when_a_silence_may_be_found() -> None:
    bench = Bench()
    bench.at(0.0)
    assert bench.next_ms() == math.inf
    bench.send(P0)
    bench.batch(P1)
    for _ in range(4):
        bench.at(bench.now + bench.next_ms())
        bench.answer_probes(2, 3)
        if bench.manager.is_muted(1):
            break
    assert bench.manager.is_muted(1)
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
    assert not silent.task_mutes.own_trips
    silent.gate.on_probe_done(2, None, silent.now)
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
    assert set(bench.task_mutes.mutes) == {1, 2}


def test_full_in_flight_mutes_for_keyless_rows_alone() -> None:
    with pytest.raises(ConfigurationError, match=r"enable\.mute\.inflight\.full.*=1"):
        Bench(enable_mute_inflight_full="true", max_in_flight_requests_per_connection="5")
    bench = Bench(enable_mute_inflight_full="true", max_in_flight_requests_per_connection="1")
    bench.send(P0)
    assert bench.manager.congested == {1}
    assert not bench.manager.refresh()
    assert bench.task_mutes.own_trips == 0
    bench.answer(P0)
    assert not bench.manager.congested


def test_a_slow_response_for_many_batches_is_one_response() -> None:
    """Each of its batches counted as a response, so that one slow response became usual at once."""
    bench = Bench(slow_request_min_ms="100")
    for _ in range(10):
        bench.batch(P0)
    broker = bench.brokers[1]
    usual = broker.usual_ms
    assert usual is not None
    bench.brokers.send(1, [], bench.now)
    bench.at(bench.now + 190.0)
    bench.gate.on_response(broker, broker.on_response(bench.now), bench.now)
    many = [batch(TopicPartition("t", 3 * number)) for number in range(200)]
    bench.gate.on_complete(broker, many, None, bench.now)
    assert broker.usual_ms is not None
    assert usual < broker.usual_ms < usual + 0.2 * (190.0 - usual)


# -- what looks like a silence ------------------------------------------------------------------------


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
    assert not bench.task_mutes.own_trips
    # After the next response in its usual time, silence is silence again.
    bench.batch(P0)
    bench.send(P0)
    assert 500 < bench.until_muted(1, 5_000) < 700


def test_other_brokers_are_still_rated_while_one_throttles() -> None:
    bench = Bench()
    for partition in (P0, P1, P2, P1):
        bench.batch(partition)
    bench.send(P1)
    bench.brokers.throttle(2, bench.now + 60_000.0)
    bench.at(bench.now)
    bench.send(P0)
    bench.pass_time(1_000)
    assert bench.manager.is_muted(1)


def test_a_broker_without_a_first_response_is_judged_by_the_others_first_ones() -> None:
    """A broker that freezes before its first response: one second where the others are quick at once."""
    bench = Bench()
    bench.batch(P1, ms=20.0)
    bench.send(P0)
    assert 1_000 <= bench.until_muted(1, 5_000) < 1_200
    bench = Bench()
    bench.batch(P1, ms=450.0)
    bench.send(P0)
    assert bench.until_muted(1, 1_900) >= 1_900, "where they are slow, a slow one is none"


def test_the_first_response_of_another_broker_shortens_the_wait_for_a_silent_one() -> None:
    """Catches: seen after half a second without any response, a silence was judged again after three."""
    bench = Bench()
    bench.send(P0)
    for now in range(10, 1_110, 10):
        bench.now = now
        if now == 450:
            bench.send(P1)
        if now == 620:
            bench.answer(P1)
        bench.at(now)
    assert P0 in bench.gate.avoided


@pytest.mark.parametrize("pause", [600.0, 5_000.0, 60_000.0])
def test_a_pause_of_the_client_while_requests_are_out_is_no_silence(pause: float) -> None:
    """A stop of the process: at its end the responses of all brokers lie in its sockets."""
    bench = Bench()
    for partition in (P0, P1, P2):
        bench.batch(partition)
        bench.send(partition)
    bench.at(bench.now)
    bench.at(bench.now + pause)
    bench.now += 1
    for partition in (P1, P2):
        bench.answer(partition)
    bench.at(bench.now)
    bench.answer(P0)
    bench.at(bench.now + 60)
    assert not bench.task_mutes.own_trips


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
    assert not bench.task_mutes.own_trips


def test_failures_during_a_silence_do_not_mute_partitions_that_are_back() -> None:
    bench = Bench()
    bench.batch(P0)
    for _ in range(2):
        bench.batch(P0, ConnectionResetError("x"))
    bench.send(P0)
    bench.send(P0)
    bench.until_muted(1, 1_000)
    bench.answer(P0, ConnectionResetError("x"), 5_000)
    assert list(bench.task_mutes.mutes) == [1], "its third failure, but of a muted broker"
    bench.answer(P0)
    assert not bench.at(bench.now)
    bench.send(P0)
    bench.answer(P0, REPLICAS)
    assert not bench.at(bench.now), "one batch of a hundred rows is too little"
