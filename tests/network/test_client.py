"""The client against a fake cluster on real sockets, its time moved by hand."""

from __future__ import annotations

import dataclasses
import math
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from kafka_sink.errors import BrokerVersionError, KafkaSinkError, ProtocolError
from kafka_sink.model import Node
from kafka_sink.network import requests, resolver
from kafka_sink.network.broker_link import RequestTimeoutError
from kafka_sink.network.client import NodeConnected, NodeDisconnected, RequestFailed, ResponseReceived
from tests.faults.fake_broker import API_VERSIONS, METADATA, PRODUCE, FakeCluster
from tests.faults.fake_replies import (
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
from tests.network.network_harness import Driver, batch, metadata_request, produce_request


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


# -- requests and answers -------------------------------------------------------------------------


def test_connecting_is_told_and_versions_are_known(driver: Driver) -> None:
    assert driver.of(NodeConnected) == [NodeConnected(-1)]
    assert driver.client.api_version(-1, requests.PRODUCE, (3, 13)) == 13
    assert driver.client.api_version(-1, requests.PRODUCE, (3, 9)) == 9
    with pytest.raises(BrokerVersionError, match="speaks Produce in versions 3 to 13, this sink in 14 to 15"):
        driver.client.api_version(-1, requests.PRODUCE, (14, 15))
    with pytest.raises(BrokerVersionError, match="speaks 99 in versions 0 to -1"):
        driver.client.api_version(-1, 99, (0, 1))


def test_pipelined_requests_are_answered_with_their_latency(cluster: FakeCluster, driver: Driver) -> None:
    driver.send(metadata_request("t", tag="m"))
    driver.clock.now += 7
    driver.send(produce_request(batch(3), tag="p"))
    driver.clock.now += 5
    metadata, produced = driver.event(ResponseReceived, "m"), driver.event(ResponseReceived, "p")
    assert (metadata.latency_ms, produced.latency_ms) == (12.0, 5.0)
    assert metadata.response.update.nodes == (Node(0, "127.0.0.1", cluster.port(0)),)
    assert produced.response.partitions[0].error_code == 0
    assert [b.record_count for b in cluster.batches("t", 0)] == [3]
    assert driver.client.in_flight(-1) == 0


def test_a_request_without_an_answer_is_done_when_written(cluster: FakeCluster, driver: Driver) -> None:
    driver.send(produce_request(batch(2), acks=0, tag="fire"))
    driver.send(metadata_request("t", tag="after"))
    assert driver.event(ResponseReceived, "fire").response is None
    driver.event(ResponseReceived, "after")
    assert [b.record_count for b in cluster.batches("t", 0)] == [2]


def test_sending_to_a_broker_that_is_not_ready_changes_nothing(cluster: FakeCluster) -> None:
    with Driver(cluster.bootstrap_servers) as driver:
        with pytest.raises(ValueError, match="not ready"):
            driver.send(metadata_request("t"))
        with pytest.raises(ValueError, match="no broker 7"):
            driver.send(metadata_request("t"), 7)
        assert driver.poll() == []


def test_a_large_request_to_a_slow_reader_never_blocks(cluster: FakeCluster) -> None:
    data = bytes(8_000_000)
    with Driver(cluster.bootstrap_servers) as driver:
        driver.connect()
        cluster.freeze(0)
        started = time.monotonic()
        for tag in range(5):
            driver.send(produce_request(data, tag=tag))
        driver.poll(0.0)
        assert time.monotonic() - started < 2
        assert driver.client.in_flight(-1) == 5
        cluster.thaw(0)
        for tag in range(5):
            assert driver.event(ResponseReceived, tag).response.partitions[0].error_code == 2
    assert len(cluster.received(PRODUCE)) == 5


# -- readiness ------------------------------------------------------------------------------------


def test_the_window_holds_produce_back_and_not_metadata(cluster: FakeCluster) -> None:
    with Driver(cluster.bootstrap_servers, max_in_flight=2) as driver:
        driver.connect()
        cluster.freeze(0)
        for tag in range(2):
            assert driver.client.ready(-1, driver.clock.now)
            driver.send(produce_request(batch(1), tag=tag))
        assert not driver.client.ready(-1, driver.clock.now)
        assert driver.client.ready_delay_ms(-1, driver.clock.now) == math.inf
        assert driver.client.ready_for_any(-1, driver.clock.now)
        assert driver.client.least_loaded_node(driver.clock.now) == -1
        driver.send(metadata_request("t", tag="m"))
        cluster.thaw(0)
        driver.event(ResponseReceived, "m")
        assert driver.client.ready(-1, driver.clock.now)


def test_throttling_mutes_for_as_long_as_the_broker_says(cluster: FakeCluster, driver: Driver) -> None:
    cluster.script(PRODUCE, Reply(throttle_ms=900))
    driver.send(produce_request(batch(1), tag="p"))
    driver.event(ResponseReceived, "p")
    assert not driver.client.ready(-1, driver.clock.now)
    assert driver.client.ready_delay_ms(-1, driver.clock.now) == 900
    assert driver.client.ready_for_any(-1, driver.clock.now)
    driver.clock.now += 899
    assert not driver.client.ready(-1, driver.clock.now)
    driver.clock.now += 1
    assert driver.client.ready(-1, driver.clock.now)


def test_an_unknown_broker_is_never_ready(driver: Driver) -> None:
    assert not driver.client.ready(5, driver.clock.now)
    assert driver.client.ready_delay_ms(5, driver.clock.now) == math.inf
    assert driver.client.in_flight(5) == 0


# -- wrong answers --------------------------------------------------------------------------------

WRONG = {
    "correlation id": wrong_correlation_id(),
    "negative length": claimed_length(-5),
    "huge length": claimed_length(2**31 - 1),
    "short length": claimed_length(20),
    "trailing bytes": trailing(b"\1\2\3"),
    "http": garbage(b"HTTP/1.1 400 Bad Request\r\n\r\n"),
    "zeros": garbage(bytes(200)),
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_wrong_answer_fails_what_is_in_flight_and_the_next_connection_works(
    cluster: FakeCluster, driver: Driver, kind: str
) -> None:
    cluster.script(PRODUCE, WRONG[kind])
    for tag in ("a", "b", "c"):
        driver.send(produce_request(batch(1), tag=tag))
    for tag in ("a", "b", "c"):
        failed = driver.event(RequestFailed, tag)
        assert isinstance(failed.cause, ProtocolError)
        assert failed.possibly_sent
        assert f"127.0.0.1:{cluster.port(0)}" in str(failed.cause)
    assert driver.of(NodeDisconnected)[0].node_id == -1
    assert not driver.client.ready(-1, driver.clock.now), "backing off"
    assert driver.client.ready_delay_ms(-1, driver.clock.now) == 50
    driver.clock.now += 50
    driver.connect()
    driver.send(produce_request(batch(1), tag="again"))
    assert driver.event(ResponseReceived, "again").response.partitions[0].error_code == 0


@pytest.mark.parametrize("count", [0, 3, 4, 7, 8, 20])
def test_a_connection_cut_inside_of_an_answer(cluster: FakeCluster, driver: Driver, count: int) -> None:
    cluster.script(PRODUCE, cut_after(count))
    driver.send(produce_request(batch(1), tag="p"))
    failed = driver.event(RequestFailed, "p")
    assert isinstance(failed.cause, OSError)
    assert failed.possibly_sent


def test_answers_before_the_cut_count(cluster: FakeCluster, driver: Driver) -> None:
    cluster.script(PRODUCE, Reply(), SWALLOWED)
    driver.send(produce_request(batch(1), tag="answered"))
    driver.send(produce_request(batch(2), tag="swallowed"))
    assert driver.event(ResponseReceived, "answered").response.partitions[0].base_offset == 0
    assert driver.event(RequestFailed, "swallowed").possibly_sent
    assert [b.record_count for b in cluster.batches("t", 0)] == [1, 2], "the broker had acted"


@pytest.mark.parametrize("reply", [garbage(b"\x15\x03\x03\x00\x02\x02\x46"), Refuse(), error(41), SWALLOWED])
def test_negotiation_that_fails_backs_off(cluster: FakeCluster, reply: Reply) -> None:
    cluster.script(API_VERSIONS, reply)
    with Driver(cluster.bootstrap_servers) as driver:
        assert not driver.client.ready(-1, driver.clock.now)
        lost = driver.event(NodeDisconnected)
        assert isinstance(lost.cause, (OSError, KafkaSinkError))
        assert driver.client.connection_errors() == {Node(-1, "127.0.0.1", cluster.port(0)): lost.cause}
        assert driver.client.ready_delay_ms(-1, driver.clock.now) == 50
        driver.clock.now += 50
        driver.until(lambda: driver.client.ready(-1, driver.clock.now))
        assert driver.client.connection_errors() == {}


def test_an_old_broker_is_asked_in_version_0() -> None:
    versions = {API_VERSIONS: (0, 2), PRODUCE: (3, 7)}
    with FakeCluster({"t": 1}, versions=versions) as old, Driver(old.bootstrap_servers) as driver:
        driver.connect()
        assert driver.client.api_version(-1, PRODUCE, (3, 13)) == 7
        driver.send(produce_request(batch(1), version=7, tag="p"))
        assert driver.event(ResponseReceived, "p").response.partitions[0].error_code == 0


def test_a_controller_is_refused_by_name() -> None:
    with FakeCluster(versions={PRODUCE: (0, -1)}) as other, Driver(other.bootstrap_servers) as driver:
        other._state.versions.pop(PRODUCE)  # type: ignore[attr-defined]  # a dict here
        driver.client.ready(-1, driver.clock.now)
        assert "is it a controller" in str(driver.event(NodeDisconnected).cause)


def test_a_metadata_answer_with_an_error_of_its_own_fails(cluster: FakeCluster, driver: Driver) -> None:
    def with_error(frame: bytes) -> bytes:
        return frame[:-3] + (5).to_bytes(2, "big") + frame[-1:]

    cluster.script(METADATA, Reply(mangle=with_error))
    driver.send(metadata_request("t", version=13, tag="m"))
    assert "answered Metadata with error 5" in str(driver.event(RequestFailed, "m").cause)
    assert driver.client.ready(-1, driver.clock.now), "the connection is good"


def test_rebootstrap_forgets_the_known_brokers(cluster: FakeCluster, driver: Driver) -> None:
    def with_error(frame: bytes) -> bytes:
        return frame[:-3] + (129).to_bytes(2, "big") + frame[-1:]

    driver.client.set_nodes([Node(0, "127.0.0.1", cluster.port(0))])
    driver.connect(0)
    assert driver.client.least_loaded_node(driver.clock.now) == 0
    cluster.script(METADATA, Reply(mangle=with_error))
    driver.send(metadata_request("t", version=13, tag="m"), 0)
    driver.event(RequestFailed, "m")
    assert driver.client.least_loaded_node(driver.clock.now) == -1


# -- time -----------------------------------------------------------------------------------------


def test_a_silent_broker_fails_its_requests_after_their_timeout(cluster: FakeCluster, driver: Driver) -> None:
    cluster.freeze(0)
    driver.send(produce_request(batch(1), tag="old"))
    driver.clock.now += 10_000
    driver.send(produce_request(batch(1), tag="new"))
    driver.clock.now += 19_999
    assert driver.poll() == []
    driver.clock.now += 1
    for tag in ("old", "new"):
        failed = driver.event(RequestFailed, tag)
        assert isinstance(failed.cause, RequestTimeoutError)
        assert failed.possibly_sent
    cluster.thaw(0)


def test_what_had_not_left_is_told_apart(cluster: FakeCluster) -> None:
    with Driver(cluster.bootstrap_servers, send_buffer_bytes=8192) as driver:
        driver.connect()
        cluster.freeze(0)
        driver.send(produce_request(bytes(50_000_000), tag="begun"))
        driver.send(produce_request(batch(1), tag="unsent"))
        driver.clock.now += 30_000
        assert driver.event(RequestFailed, "begun").possibly_sent
        assert not driver.event(RequestFailed, "unsent").possibly_sent
        cluster.thaw(0)


def test_poll_ends_at_the_next_deadline(cluster: FakeCluster) -> None:
    clock_started = time.monotonic()
    with Driver(cluster.bootstrap_servers, clock=lambda: time.monotonic() * 1000) as driver:
        driver.clock.now = time.monotonic() * 1000
        driver.connect()
        cluster.freeze(0)
        now_ms = time.monotonic() * 1000
        driver.client.send(-1, dataclasses.replace(produce_request(batch(1)), timeout_ms=200), now_ms)
        events = driver.client.poll(60_000, now_ms)
        assert [type(event) for event in events] == [RequestFailed, NodeDisconnected]
        assert time.monotonic() - clock_started < 20
        cluster.thaw(0)


def test_a_broker_that_accepts_and_says_nothing_is_given_up(cluster: FakeCluster) -> None:
    cluster.freeze(0)
    with Driver(cluster.bootstrap_servers) as driver:
        driver.client.ready(-1, driver.clock.now)
        driver.until(lambda: cluster._nodes[0].connections)
        driver.poll(20)
        assert driver.of(NodeDisconnected) == []
        driver.clock.now += 10_000
        assert "connection.setup.timeout.ms" in str(driver.event(NodeDisconnected).cause)
        cluster.thaw(0)


def test_an_idle_connection_is_closed_without_a_fuss(driver: Driver) -> None:
    driver.clock.now += 540_000
    driver.poll()
    assert driver.of(NodeDisconnected) == []
    assert driver.client.connection_errors() == {}
    driver.connect()
    assert len(driver.of(NodeConnected)) == 2


def test_reconnects_wait_longer_each_time(cluster: FakeCluster) -> None:
    cluster.stop(0)
    with Driver(cluster.bootstrap_servers) as driver:
        for attempt, wait in enumerate((50, 100, 200, 400, 800, 1000, 1000), 1):
            driver.client.ready(-1, driver.clock.now)
            driver.until(lambda n=attempt: len(driver.of(NodeDisconnected)) == n)  # type: ignore[misc]
            assert driver.client.connect_delay_ms(driver.clock.now) == wait
            assert driver.client.least_loaded_node(driver.clock.now) is None
            driver.clock.now += wait
        cluster.start(0)
        driver.connect()


# -- nodes ----------------------------------------------------------------------------------------


def test_dead_bootstrap_addresses_are_skipped(cluster: FakeCluster) -> None:
    with socket.create_server(("127.0.0.1", 0)) as dead:
        port = dead.getsockname()[1]
    with Driver(f"127.0.0.1:{port},{cluster.bootstrap_servers}") as driver:

        def ready() -> bool:
            node = driver.client.least_loaded_node(driver.clock.now)
            driver.clock.now += 10
            return node is not None and driver.client.ready_for_any(node, driver.clock.now)

        driver.until(ready)
        assert [type(event) for event in driver.events] in (
            [NodeConnected],
            [NodeDisconnected, NodeConnected],
        )


def test_an_attempt_that_hangs_does_not_hold_the_others_up() -> None:
    """A firewall that drops packets: another broker is tried after a second, not after the setup timeout."""
    with FakeCluster(brokers=2) as cluster, Driver(cluster.bootstrap_servers) as driver:
        cluster.freeze(0)
        driver.client.ready_for_any(-1, driver.clock.now)
        assert driver.client.least_loaded_node(driver.clock.now + 999) == -1
        assert driver.client.least_loaded_node(driver.clock.now + 1000) == -2
        cluster.thaw(0)


def test_metadata_goes_to_the_least_loaded_and_not_to_the_silent() -> None:
    with FakeCluster({"t": 1}, brokers=2) as cluster, Driver(cluster.bootstrap_servers) as driver:
        driver.client.set_nodes(Node(i, "127.0.0.1", cluster.port(i)) for i in range(2))
        driver.connect(0)
        driver.connect(1)
        cluster.freeze(0)
        cluster.freeze(1)
        driver.send(metadata_request("t"), 0)
        assert driver.client.least_loaded_node(driver.clock.now) == 1
        driver.clock.now += 2000
        for _ in range(3):
            driver.send(metadata_request("t"), 1)
        assert driver.client.least_loaded_node(driver.clock.now) == 1, "0 has been silent for two seconds"
        cluster.thaw(0)
        cluster.thaw(1)


def test_a_broker_that_moved_is_connected_to_anew(cluster: FakeCluster, driver: Driver) -> None:
    driver.client.set_nodes([Node(0, "127.0.0.1", cluster.port(0))])
    driver.connect(0)
    cluster.freeze(0)
    driver.send(metadata_request("t", tag="m"), 0)
    with FakeCluster() as other:
        driver.client.set_nodes([Node(0, "127.0.0.1", other.port(0))])
        assert "moved to" in str(driver.event(RequestFailed, "m").cause)
        driver.connect(0)
        assert len(other.received(API_VERSIONS)) == 1
    cluster.thaw(0)


def test_a_broker_that_is_gone_is_kept_until_its_requests_are_done(
    cluster: FakeCluster, driver: Driver
) -> None:
    here = Node(0, "127.0.0.1", cluster.port(0))
    driver.client.set_nodes([here])
    driver.connect(0)
    cluster.freeze(0)
    driver.send(metadata_request("t", tag="m"), 0)
    driver.client.set_nodes([])
    assert driver.client.in_flight(0) == 1
    cluster.thaw(0)
    driver.event(ResponseReceived, "m")
    driver.client.set_nodes([])
    assert not driver.client.ready_for_any(0, driver.clock.now)
    assert driver.client.ready_for_any(-1, driver.clock.now), "bootstrap addresses stay"


def test_all_addresses_of_a_name_are_tried(cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as dead:
        refused = dead.getsockname()
    places = [(socket.AF_INET, refused), (socket.AF_INET, ("127.0.0.1", cluster.port(0)))]
    monkeypatch.setattr(resolver, "_resolve", lambda host, port, flags: list(places))
    with Driver("many.example:9092") as driver:
        driver.connect()
        assert [type(event) for event in driver.events] == [NodeDisconnected, NodeConnected]
        assert driver.clock.now == 1_000_000.0, "no backoff between addresses"


def test_a_name_that_hangs_holds_nobody_up(cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    direct = resolver._resolve

    def slow(host: str, port: int, flags: int) -> object:
        if host == "slow.example":
            if flags:
                raise OSError("a name")
            release.wait(20)
            raise OSError("late")
        return direct(host, port, flags)

    monkeypatch.setattr(resolver, "_resolve", slow)
    before = threading.active_count()
    with Driver(f"slow.example:9092,{cluster.bootstrap_servers}") as driver:
        started = time.monotonic()
        assert not driver.client.ready_for_any(-1, driver.clock.now)
        driver.connect(-2)
        assert time.monotonic() - started < 10
        for _ in range(3):
            driver.clock.now += 40_000
            driver.poll()
            driver.client.ready_for_any(-1, driver.clock.now)
        mine = [t for t in threading.enumerate() if t.name == "kafka-chunked-dns-slow.example"]
        assert len(mine) == 1, "one thread, however often it is tried"
        release.set()
        driver.clock.now += 2_000
        driver.client.ready_for_any(-1, driver.clock.now)
        driver.until(lambda: any("late" in str(e.cause) for e in driver.of(NodeDisconnected)))
    mine[0].join(10)
    assert threading.active_count() <= before + 2  # the fake broker's own


# -- waking up and closing ------------------------------------------------------------------------


def test_a_wakeup_before_the_poll_is_not_lost(driver: Driver) -> None:
    driver.client.wakeup()
    started = time.monotonic()
    driver.client.poll(30_000, driver.clock.now)
    assert time.monotonic() - started < 10


def test_a_wakeup_ends_the_poll_under_way(driver: Driver) -> None:
    timer = threading.Timer(0.05, driver.client.wakeup)
    timer.start()
    started = time.monotonic()
    driver.client.poll(30_000, driver.clock.now)
    assert time.monotonic() - started < 10
    timer.join()


def test_a_thousand_wakeups_are_one(driver: Driver) -> None:
    for _ in range(1000):
        driver.client.wakeup()
    driver.client.poll(30_000, driver.clock.now)
    started = time.monotonic()
    driver.client.poll(50, driver.clock.now)
    assert time.monotonic() - started >= 0.045, "nothing is left to wake the second poll"


def test_wakeups_from_many_threads_are_never_lost(driver: Driver) -> None:
    """Each thread adds and then wakes; the poller looks after each poll. A lost one would wait 30 s."""
    added: list[int] = []
    threads = [
        threading.Thread(target=lambda i=i: [(added.append(i), driver.client.wakeup()) for _ in range(200)])  # type: ignore[misc]
        for i in range(4)
    ]
    for thread in threads:
        thread.start()
    seen = 0
    started = time.monotonic()
    while seen < 800:
        seen = len(added)
        if seen < 800:
            driver.client.poll(30_000, driver.clock.now)
    assert time.monotonic() - started < 15
    for thread in threads:
        thread.join()


def test_close_ends_quickly_whatever_is_under_way(cluster: FakeCluster) -> None:
    driver = Driver(cluster.bootstrap_servers, send_buffer_bytes=8192)
    driver.connect()
    cluster.freeze(0)
    driver.send(produce_request(bytes(10_000_000)))
    started = time.monotonic()
    driver.client.close()
    driver.client.close()
    driver.client.wakeup()
    assert time.monotonic() - started < 1
    cluster.thaw(0)


def test_opening_and_closing_leaves_no_socket_and_no_thread(cluster: FakeCluster) -> None:
    def round_trip() -> None:
        with Driver(cluster.bootstrap_servers) as driver:
            driver.connect()
            driver.send(metadata_request("t", tag="m"))
            driver.event(ResponseReceived, "m")

    round_trip()
    with socket.socket() as probe:
        before = probe.fileno()
    for _ in range(20):
        round_trip()
    # The broker's side of the last connection may still be closing.
    with socket.socket() as probe:
        assert probe.fileno() <= before + 2
