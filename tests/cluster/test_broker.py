"""What is known of one broker: requests in flight, throttling, availability; at exact times."""

from __future__ import annotations

import math

import pytest

from kafka_sink.cluster.broker import BrokerCounts, unavailable
from kafka_sink.model import TopicPartition
from tests.support.brokers import Brokers

P0 = TopicPartition("t", 0)


def test_requests_end_in_the_order_in_which_they_were_sent() -> None:
    brokers = Brokers(1)
    broker = brokers[1]
    first, second = brokers.send(1, [P0], 5.0), brokers.send(1, [P0], 6.0)
    assert (broker.oldest_request_ms, len(list(broker.batches_in_flight()))) == (5.0, 2)
    assert broker.on_response(9.0) is first
    assert (broker.request_sent_ms, broker.oldest_request_ms) == (5.0, 6.0)
    assert broker.on_failure() is second
    assert broker.oldest_request_ms is None
    metrics = broker.metrics(20.0)
    assert (metrics.requests, metrics.failures, metrics.in_flight, metrics.sent_bytes) == (2, 1, 0, 200)
    assert (metrics.latency_ms, sum(metrics.latency_buckets)) == (4.0, 1)


def test_a_request_that_throttling_delays_counts_from_its_end() -> None:
    brokers = Brokers(1)
    brokers.send(1, [P0], 5.0)
    brokers.throttle(1, 900.0)
    assert not brokers[1].accepts(899.0)
    assert brokers[1].accepts(900.0)
    assert brokers[1].oldest_request_ms == 900.0
    brokers[1].on_response(30.0)
    assert brokers[1].request_sent_ms == 900.0
    assert brokers[1].metrics(30.0).latency_ms == 25.0


def test_throttling_outlives_its_connection_and_time_that_overlaps_counts_once() -> None:
    """Catches: the figure fell to 0 after a change of address, and in a report after the last response."""
    brokers = Brokers(1)
    for responded_ms, until_ms in [(10.0, 50.0), (20.0, 60.0), (70.0, 60.0)]:
        brokers.send(1, [P0], 5.0)
        brokers.throttle(1, until_ms)
        brokers[1].on_response(responded_ms)
    brokers[1].connection = None
    assert brokers[1].metrics(80.0).throttle_ms == 50.0
    # The next task's begin at zero.
    brokers[1].counts = BrokerCounts()
    metrics = brokers[1].metrics(80.0)
    assert (metrics.requests, metrics.latency_ms, metrics.throttle_ms) == (0, 0.0, 0.0)


def test_without_an_address_nothing_can_be_sent() -> None:
    brokers = Brokers(1)
    brokers[1].connection = None
    broker = brokers[1]
    assert (broker.accepts(0.0), broker.is_connected, broker.is_gone) == (False, False, True)
    assert broker.delay_ms(0.0) == math.inf
    with pytest.raises(ValueError, match="address of broker 1 is unknown"):
        brokers.send(1, [P0], 0.0)
    assert not broker.sent


def test_keyless_rows_avoid_a_broker_that_takes_nothing_until_it_does_or_nothing_waits_for_it() -> None:
    brokers = Brokers(1, 2)
    for waiting, accepting, now_ms, late in [
        ([1], [2], 0, set()),
        ([1], [2], 100, set()),
        ([1], [], 100.5, {1}),
        ([], [2], 150, {1}),
        ([], [1], 160, set()),
        ([1], [], 170, set()),
        ([1], [], 271, {1}),
        ([], [], 5_371, {1}),
        # Nothing would ever show that it is back.
        ([], [], 5_372, set()),
    ]:
        found = unavailable(
            brokers.values(), map(brokers.of, waiting), map(brokers.of, accepting), 100, now_ms
        )
        assert found == late, now_ms
