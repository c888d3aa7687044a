"""Faults of a user's breaker class: it is switched off, and the job goes on."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kafka_sink.breaker import CircuitBreakManager, FailureRateCircuitBreaker, PartitionCircuitBreaker
from kafka_sink.breaker.breaker import Breaker
from kafka_sink.coordinator.breaker import BreakerChannel
from kafka_sink.coordinator.breaker_messages import MuteChanges
from kafka_sink.coordinator.schema import decode, encode
from kafka_sink.errors import BrokerRefusedError
from kafka_sink.model import Target, TopicPartition
from tests.support.breaker_cluster import P0, Bench, Cluster, IdleBreaker, run_pass

CALLS = ("set_circuit_break_manager", "on_send", "on_complete", "on_tick", "next_tick_ms", "close")


def own(call: str, what: Callable[[CircuitBreakManager], object]) -> PartitionCircuitBreaker:
    """A class that does so at this call."""
    made = IdleBreaker()
    goes_on: Callable[..., object] = getattr(made, call)

    def act(*arguments: object) -> object:
        found = goes_on(*arguments)
        what(made.manager)
        return found

    setattr(made, call, act)
    return made


def one_batch(breaker: PartitionCircuitBreaker) -> tuple[Breaker, BreakerChannel]:
    """A batch's way, with the coordinator's side, and the end of the producer."""
    cluster = Cluster(t=[1, 2])
    gate = Breaker(breaker, cluster.manager())
    exchange = BreakerChannel(gate.manager, lambda: None, lambda: "kafka")
    exchange.on_connected(0.0)
    gate.share(exchange)
    run_pass(gate, 0.0)
    cluster.send(gate, P0, 10, 1.0)
    gate.delay_ms(1.0)
    run_pass(gate, 2.0)
    cluster.answer(gate, P0, None, 10, 3.0)
    run_pass(gate, 4.0)
    gate.delay_ms(4.0)
    return gate, exchange


def reported(exchange: BreakerChannel) -> dict[Target, str]:
    """Mutes that go to the coordinator, with their reasons."""
    found: dict[Target, str] = {}
    while (message := exchange.next_message(5.0)) is not None:
        arrived = decode(encode(message))
        if isinstance(arrived, MuteChanges):
            found |= {one.target: one.reason for one in arrived.muted}
    return found


def raises(*_: object) -> None:
    raise ZeroDivisionError("of the user's making")


@pytest.mark.parametrize("call", CALLS)
def test_a_class_that_raises_is_switched_off_wherever_it_does(
    call: str, caplog: pytest.LogCaptureFixture
) -> None:
    gate, _ = one_batch(own(call, raises))
    gate.close()
    assert [record.message for record in caplog.records if record.exc_info] == [
        "the circuit breaker class failed and is switched off for this producer"
    ]


NO_TARGETS = ("1", None, 1.0, True, -1, ("t", 0), 1 << 63, np.float64(1))
NO_PARTITIONS = (("t", -1), ("t" * 250, 0), ("\ud800", 0), ("t", 1 << 31))


@pytest.mark.parametrize("target", [*NO_TARGETS, *(TopicPartition(*one) for one in NO_PARTITIONS)])
def test_custom_breaker_with_an_invalid_target_is_ignored(
    target: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Catches: a sender that dies of a target it cannot encode, a coordinator that hangs up for it."""
    gate, exchange = one_batch(own("on_complete", lambda manager: manager.mute(target)))
    assert not gate.manager.task_mutes.mutes
    assert not any("muted" in record.message for record in caplog.records)
    (failure,) = [record for record in caplog.records if record.exc_info]
    assert failure.exc_info is not None
    assert "a broker's id or a TopicPartition" in str(failure.exc_info[1])
    with pytest.raises(ValueError, match="a broker's id or a TopicPartition"):
        gate.manager.unmute(target)
    assert not reported(exchange)


def test_numbers_of_numpy_are_ids_and_a_reason_may_be_anything() -> None:
    def mute(manager: CircuitBreakManager) -> None:
        manager.mute(np.int64(1), ValueError("it smells"))  # type: ignore[arg-type]  # that is the point

    gate, exchange = one_batch(own("on_complete", mute))
    assert P0 in gate.avoided
    assert list(gate.manager.task_mutes.mutes) == [1]
    assert "it smells" in (gate.explain(P0) or "")
    assert reported(exchange) == {1: "it smells"}


def test_brokers_and_partitions_that_nobody_knows_rest_without_harm(caplog: pytest.LogCaptureFixture) -> None:
    def mute(manager: CircuitBreakManager) -> None:
        manager.mute(999, "who?")
        manager.mute(TopicPartition("absent", 7), "where?")

    with caplog.at_level(logging.WARNING, "kafka_sink"):
        gate, exchange = one_batch(own("on_complete", mute))
    assert [record.message for record in caplog.records] == [
        "circuit breaker: muted broker 999: who?",
        "circuit breaker: muted absent-7: where?",
    ]
    assert P0 not in gate.avoided
    assert gate.manager.task_mutes.muted_count == 0
    assert len(reported(exchange)) == 2
    for now in range(0, 60_000, 500):
        run_pass(gate, float(now))
        reported(exchange)
        run_pass(gate, float(now))
        assert gate.delay_ms(float(now)) > 0


def test_another_thread_may_mute_and_the_sender_takes_it_up() -> None:
    """Catches: a book of mutes that grows while the sender walks through it, which ends the sender."""
    gate, _ = one_batch(IdleBreaker())

    def elsewhere(call: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=call, args=arguments)
        thread.start()
        thread.join()

    elsewhere(gate.manager.mute, 1, "a monitor says so")
    assert not gate.manager.task_mutes.mutes, "not under the sender's hands"
    assert P0 in run_pass(gate, 5.0)
    assert "a monitor says so" in (gate.explain(P0) or "")
    elsewhere(gate.manager.unmute, 1)
    assert P0 in gate.avoided
    assert P0 not in run_pass(gate, 6.0)

    def many() -> None:
        for number in range(400):
            gate.manager.mute(TopicPartition("t", number))
            gate.manager.unmute(TopicPartition("t", number - 20 if number >= 20 else 0))

    thread = threading.Thread(target=many)
    thread.start()
    now = 10.0
    while thread.is_alive():
        now += 1
        run_pass(gate, now)
        gate.manager.task_mutes.waited_for()
    thread.join()
    run_pass(gate, now)
    assert len(gate.manager.task_mutes.mutes) == 20


def test_congestion_ends_with_the_class_that_reported_it() -> None:
    """Catches: keyless rows that avoid a broker for ever after the class that avoided it is off."""
    breaker = FailureRateCircuitBreaker()
    breaker.configure({"enable.mute.inflight.full": "true", "max.in.flight.requests.per.connection": "1"})
    bench = Bench(breaker)
    bench.send(P0)
    assert bench.manager.congested == {1}
    breaker.on_complete = raises  # type: ignore[assignment, method-assign]  # for the class of a user
    bench.answer(P0)
    assert not bench.manager.congested


def test_partitions_that_a_class_derived_from_the_default_mutes_are_shared() -> None:
    """Catches: mutes that the coordinator was to count itself, as it does for the default class."""

    class Derived(FailureRateCircuitBreaker):
        pass

    breaker = Derived()
    breaker.configure({"trigger.message.count": "1"})
    cluster = Cluster(t=[1, 2])
    gate = Breaker(breaker, cluster.manager())
    exchange = BreakerChannel(gate.manager, lambda: None, lambda: "kafka")
    exchange.on_connected(0.0)
    gate.share(exchange)
    for number in range(3):
        cluster.send(gate, P0, 10, 10.0 * number)
        cluster.answer(gate, P0, BrokerRefusedError("NOT_ENOUGH_REPLICAS", 19), 10, 10.0 * number + 5)
        run_pass(gate, 10.0 * number + 6)
    assert "3 of the last 3 batches failed" in reported(exchange)[P0]
