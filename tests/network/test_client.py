"""The client against a fake cluster on real sockets, its time moved by hand."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator

import pytest

from kafka_sink.errors import BrokerVersionError, KafkaSinkError, ProtocolError
from kafka_sink.model import Node
from kafka_sink.network import apis
from tests.support.fake_broker import API_VERSIONS, METADATA, PRODUCE, FakeCluster
from tests.support.fake_replies import (
    SWALLOWED,
    Refuse,
    Reply,
    claimed_length,
    cut_after,
    error,
    garbage,
    trailing,
    wrong_correlation_id,
)
from tests.support.network_harness import (
    Connected,
    Disconnected,
    Driver,
    Failed,
    Responded,
    batch,
    metadata_request,
    produce_request,
)


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    """One broker with topic t of two partitions."""
    with FakeCluster({"t": 2}) as running:
        yield running


@pytest.fixture
def driver(cluster: FakeCluster) -> Iterator[Driver]:
    """A client of it, connected through the bootstrap address."""
    with Driver(cluster.bootstrap_servers) as one:
        one.connect()
        yield one


@pytest.fixture
def unconfirmed(cluster: FakeCluster) -> Iterator[Driver]:
    """As ``driver``, with acks=0."""
    with Driver(cluster.bootstrap_servers, acks=0) as one:
        one.connect()
        yield one


# -- requests and responses -------------------------------------------------------------------------


def test_connecting_is_reported_and_versions_are_known(driver: Driver) -> None:
    assert [event.node_id for event in driver.of(Connected)] == [-1]
    assert driver.connection().api_version(apis.PRODUCE, (3, 13)) == 13
    assert driver.connection().api_version(apis.PRODUCE, (3, 9)) == 9
    with pytest.raises(BrokerVersionError, match="speaks Produce in versions 3 to 13, this sink in 14 to 15"):
        driver.connection().api_version(apis.PRODUCE, (14, 15))
    with pytest.raises(BrokerVersionError, match=r"broker 127.0.0.1:\d+ .* takes no PushTelemetry requests"):
        driver.connection().api_version(apis.PUSH_TELEMETRY)


def test_pipelined_requests_are_answered_with_their_latency(cluster: FakeCluster, driver: Driver) -> None:
    driver.send(metadata_request("t"), name="m")
    driver.clock.now += 7
    driver.send(produce_request(batch(3)), name="p")
    driver.clock.now += 5
    metadata, produced = driver.event(Responded, "m"), driver.event(Responded, "p")
    assert (metadata.latency_ms, produced.latency_ms) == (12.0, 5.0)
    assert metadata.response.update.nodes == (Node(0, "127.0.0.1", cluster.port(0)),)
    assert produced.response.partitions[0].error_code == 0
    assert [b.record_count for b in cluster.batches("t", 0)] == [3]
    assert driver.connection().in_flight == 0


def test_a_callback_that_raises_costs_the_others_nothing(unconfirmed: Driver) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError

    # Both have ended once they are written, which is before the next poll.
    failing = produce_request(batch(1), acks=0)
    failing.on_response = fail
    unconfirmed.client.send(unconfirmed.connection(), failing, unconfirmed.clock.now)
    unconfirmed.send(produce_request(batch(1), acks=0), name="next")
    with pytest.raises(ZeroDivisionError):
        unconfirmed.poll(20)
    assert not unconfirmed.of(Responded, "next")
    unconfirmed.event(Responded, "next")


def test_sending_to_a_broker_that_is_not_ready_changes_nothing(cluster: FakeCluster) -> None:
    with Driver(cluster.bootstrap_servers) as driver:
        with pytest.raises(ValueError, match="not ready"):
            driver.send(metadata_request("t"))
        assert driver.poll() == []


def test_a_large_request_to_a_slow_reader_never_blocks(cluster: FakeCluster) -> None:
    data = bytes(8_000_000)
    with Driver(cluster.bootstrap_servers) as driver:
        driver.connect()
        cluster.freeze(0)
        started = time.monotonic()
        for tag in range(5):
            driver.send(produce_request(data), name=tag)
        driver.poll(0.0)
        assert time.monotonic() - started < 20
        assert driver.connection().in_flight == 5
        cluster.thaw(0)
        for tag in range(5):
            assert driver.event(Responded, tag).response.partitions[0].error_code == 2
    assert len(cluster.received(PRODUCE)) == 5


# -- readiness ------------------------------------------------------------------------------------


def test_the_window_holds_produce_back_and_not_metadata(cluster: FakeCluster) -> None:
    with Driver(cluster.bootstrap_servers, max_in_flight_requests_per_connection=2) as driver:
        driver.connect()
        cluster.freeze(0)
        for tag in range(2):
            assert driver.ready()
            driver.send(produce_request(batch(1)), name=tag)
        assert not driver.ready()
        assert driver.ready_delay_ms() == math.inf
        assert driver.ready_for_any()
        assert driver.to_ask() == -1
        driver.send(metadata_request("t"), name="m")
        cluster.thaw(0)
        driver.event(Responded, "m")
        assert driver.ready()


def test_throttling_mutes_for_as_long_as_the_broker_says(cluster: FakeCluster, driver: Driver) -> None:
    cluster.script(PRODUCE, Reply(throttle_ms=900))
    driver.send(produce_request(batch(1)), name="p")
    driver.event(Responded, "p")
    assert not driver.ready()
    assert driver.ready_delay_ms() == 900
    assert driver.ready_for_any()
    driver.clock.now += 899
    assert not driver.ready()
    driver.clock.now += 1
    assert driver.ready()


def test_an_unknown_broker_is_never_ready(driver: Driver) -> None:
    assert not driver.ready(5)
    assert driver.ready_delay_ms(5) == math.inf


# -- wrong responses --------------------------------------------------------------------------------

WRONG = {
    "correlation id": wrong_correlation_id(),
    "negative length": claimed_length(-5),
    "huge length": claimed_length(2**31 - 1),
    "short length": claimed_length(20),
    "http": garbage(b"HTTP/1.1 400 Bad Request\r\n\r\n"),
    "zeros": garbage(bytes(200)),
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_wrong_response_fails_what_is_in_flight_and_the_next_connection_works(
    cluster: FakeCluster, driver: Driver, kind: str
) -> None:
    cluster.script(PRODUCE, WRONG[kind])
    for tag in ("a", "b", "c"):
        driver.send(produce_request(batch(1)), name=tag)
    for tag in ("a", "b", "c"):
        failed = driver.event(Failed, tag)
        assert isinstance(failed.cause, ProtocolError)
        assert failed.possibly_sent
        assert f"127.0.0.1:{cluster.port(0)}" in str(failed.cause)
    assert driver.of(Disconnected)[0].node_id == -1
    assert not driver.ready(), "backing off"
    assert driver.ready_delay_ms() == 50
    driver.clock.now += 50
    driver.connect()
    driver.send(produce_request(batch(1)), name="again")
    assert driver.event(Responded, "again").response.partitions[0].error_code == 0


def test_there_is_one_warning_of_trailing_bytes_over_all_connections_to_a_broker(
    cluster: FakeCluster, driver: Driver, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.script(PRODUCE, trailing(b"\1"), SWALLOWED, trailing(b"\1\2"))
    driver.send(produce_request(batch(1)), name="first")
    assert driver.event(Responded, "first").response.partitions[0].error_code == 0
    driver.send(produce_request(batch(1)), name="lost")
    driver.event(Failed, "lost")
    driver.clock.now += 50
    driver.connect()
    driver.send(produce_request(batch(1)), name="last")
    assert driver.event(Responded, "last").response.partitions[0].error_code == 0
    assert caplog.text.count("too many") == 1


@pytest.mark.parametrize("count", [0, 3, 4, 7, 8, 20])
def test_a_connection_cut_inside_of_a_response(cluster: FakeCluster, driver: Driver, count: int) -> None:
    cluster.script(PRODUCE, cut_after(count))
    driver.send(produce_request(batch(1)), name="p")
    failed = driver.event(Failed, "p")
    assert isinstance(failed.cause, OSError)
    assert failed.possibly_sent


def test_responses_before_the_cut_count(cluster: FakeCluster, driver: Driver) -> None:
    cluster.script(PRODUCE, Reply(), SWALLOWED)
    driver.send(produce_request(batch(1)), name="answered")
    driver.send(produce_request(batch(2)), name="swallowed")
    assert driver.event(Responded, "answered").response.partitions[0].base_offset == 0
    assert driver.event(Failed, "swallowed").possibly_sent
    assert [b.record_count for b in cluster.batches("t", 0)] == [1, 2], "the broker had acted"


@pytest.mark.parametrize("reply", [garbage(b"\x15\x03\x03\x00\x02\x02\x46"), Refuse(), error(41), SWALLOWED])
def test_negotiation_that_fails_backs_off(cluster: FakeCluster, reply: Reply) -> None:
    cluster.script(API_VERSIONS, reply)
    with Driver(cluster.bootstrap_servers) as driver:
        assert not driver.ready()
        lost = driver.event(Disconnected)
        assert isinstance(lost.cause, (OSError, KafkaSinkError))
        assert driver.client.connection_errors() == {Node(-1, "127.0.0.1", cluster.port(0)): lost.cause}
        assert driver.ready_delay_ms() == 50
        driver.clock.now += 50
        driver.until(lambda: driver.ready())
        assert driver.client.connection_errors() == {}


def test_a_metadata_response_with_an_error_of_its_own_fails(cluster: FakeCluster, driver: Driver) -> None:
    def with_error(frame: bytes) -> bytes:
        return frame[:-3] + (5).to_bytes(2, "big") + frame[-1:]

    cluster.script(METADATA, Reply(mangle=with_error))
    driver.send(metadata_request("t", version=13), name="m")
    assert "failed Metadata: LEADER_NOT_AVAILABLE (error 5)" in str(driver.event(Failed, "m").cause)
    assert driver.ready(), "the connection is good"


def test_rebootstrap_forgets_the_known_brokers(cluster: FakeCluster, driver: Driver) -> None:
    def with_error(frame: bytes) -> bytes:
        return frame[:-3] + (129).to_bytes(2, "big") + frame[-1:]

    driver.client.set_addresses([Node(0, "127.0.0.1", cluster.port(0))])
    driver.connect(0)
    assert driver.to_ask() == 0
    cluster.script(METADATA, Reply(mangle=with_error))
    driver.send(metadata_request("t", version=13), 0, name="m")
    driver.event(Failed, "m")
    assert driver.to_ask() == -1
