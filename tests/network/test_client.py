"""The client against a fake cluster on real sockets, its time moved by hand: requests, brokers, wake-ups."""

from __future__ import annotations

import dataclasses
import math
import queue
import socket
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from kafka_sink.errors import BrokerVersionError, KafkaSinkError, ProtocolError
from kafka_sink.model import Node
from kafka_sink.network import apis
from kafka_sink.network.transport import resolve_host
from tests.support.fake_broker import API_VERSIONS, METADATA, PRODUCE, FakeCluster
from tests.support.fake_replies import (
    SWALLOWED,
    Refuse,
    Reply,
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
from tests.support.ports import refusing_port, silent_port
from tests.support.surroundings import Modules
from tests.support.waiting import until


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


# -- requests and responses -------------------------------------------------------------------------


def test_connecting_is_reported_and_versions_are_known(driver: Driver) -> None:
    assert [event.node_id for event in driver.of(Connected)] == [-1]
    assert driver.connection().api_version(apis.PRODUCE, (3, 13)) == 13
    assert driver.connection().api_version(apis.PRODUCE, (3, 9)) == 9
    with pytest.raises(BrokerVersionError, match="speaks Produce in versions 3 to 13, this sink in 14 to 15"):
        driver.connection().api_version(apis.PRODUCE, (14, 15))
    with pytest.raises(
        BrokerVersionError, match=r"broker 127.0.0.1:\d+ .* does not support PushTelemetry requests"
    ):
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


def test_a_callback_that_raises_costs_the_others_nothing(cluster: FakeCluster) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError

    with Driver(cluster.bootstrap_servers, acks=0) as driver:
        driver.connect()
        # Both have ended once they are written, which is before the next poll.
        failing = produce_request(batch(1), acks=0)
        failing.on_response = fail
        driver.client.send(driver.connection(), failing, driver.clock.now)
        driver.send(produce_request(batch(1), acks=0), name="next")
        with pytest.raises(ZeroDivisionError):
            driver.poll(20)
        assert not driver.of(Responded, "next")
        driver.event(Responded, "next")


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


def test_the_window_holds_produce_back_and_not_metadata(cluster: FakeCluster) -> None:
    with Driver(cluster.bootstrap_servers, max_in_flight_requests_per_connection=2) as driver:
        with pytest.raises(ValueError, match="not ready"):
            driver.send(metadata_request("t"))
        assert driver.poll() == []
        assert not driver.ready(5), "there is no such broker"
        assert driver.ready_delay_ms(5) == math.inf
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
        # Throttling mutes for as long as the broker says.
        cluster.script(PRODUCE, Reply(throttle_ms=900))
        driver.send(produce_request(batch(1)), name="p")
        driver.event(Responded, "p")
        assert driver.ready_delay_ms() == 900
        for wait, is_ready in ((0, False), (899, False), (1, True)):
            driver.clock.now += wait
            assert driver.ready() is is_ready
            assert driver.ready_for_any()


# -- wrong responses --------------------------------------------------------------------------------

# The connection's own tests have each way to be wrong.
WRONG = (wrong_correlation_id(), garbage(b"HTTP/1.1 400 Bad Request\r\n\r\n"))


def test_a_wrong_response_fails_what_is_in_flight_and_the_next_connection_works(
    cluster: FakeCluster, driver: Driver
) -> None:
    for wrong in WRONG:
        driver.events.clear()
        cluster.script(PRODUCE, wrong)
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
    for name, kind in (("first", Responded), ("lost", Failed), ("last", Responded)):
        driver.connect()
        driver.send(produce_request(batch(1)), name=name)
        ended = driver.event(kind, name)
        assert kind is Failed or ended.response.partitions[0].error_code == 0
        driver.clock.now += 50
    assert caplog.text.count("too many") == 1


def test_a_connection_cut_inside_of_a_response(cluster: FakeCluster, driver: Driver) -> None:
    for count in (0, 3, 4, 7, 8, 20):
        cluster.script(PRODUCE, cut_after(count))
        driver.send(produce_request(batch(1)), name=count)
        failed = driver.event(Failed, count)
        assert isinstance(failed.cause, OSError)
        assert failed.possibly_sent
        driver.clock.now += 1_200
        driver.connect()


def test_negotiation_that_fails_backs_off(cluster: FakeCluster) -> None:
    for reply in (garbage(b"\x15\x03\x03\x00\x02\x02\x46"), Refuse(), error(41), SWALLOWED):
        cluster.script(API_VERSIONS, reply)
        with Driver(cluster.bootstrap_servers) as driver:
            assert not driver.ready()
            lost = driver.event(Disconnected)
            assert isinstance(lost.cause, (OSError, KafkaSinkError))
            assert driver.client.connection_errors() == {Node(-1, "127.0.0.1", cluster.port(0)): lost.cause}
            assert driver.ready_delay_ms() == 50
            driver.clock.now += 50
            driver.until(lambda driver=driver: driver.ready())
            assert driver.client.connection_errors() == {}


def test_a_metadata_response_with_an_error_of_its_own_fails(cluster: FakeCluster, driver: Driver) -> None:
    def refused(code: int) -> str:
        cluster.script(
            METADATA, Reply(mangle=lambda frame: frame[:-3] + code.to_bytes(2, "big") + frame[-1:])
        )
        driver.send(metadata_request("t", version=13), 0, name=code)
        return str(driver.event(Failed, code).cause)

    driver.client.set_addresses([Node(0, "127.0.0.1", cluster.port(0))])
    driver.connect(0)
    assert "failed Metadata: LEADER_NOT_AVAILABLE (error 5)" in refused(5)
    assert driver.ready(0), "the connection is good"
    assert driver.to_ask() == 0
    refused(129)
    assert driver.to_ask() == -1, "REBOOTSTRAP_REQUIRED forgets the known brokers"


def test_poll_ends_at_the_next_deadline(cluster: FakeCluster) -> None:
    started = time.monotonic()
    with Driver(cluster.bootstrap_servers, clock=lambda: time.monotonic() * 1000) as driver:
        driver.clock.now = time.monotonic() * 1000
        driver.connect()
        cluster.freeze(0)
        driver.clock.now, driver.events = time.monotonic() * 1000, []
        driver.send(dataclasses.replace(produce_request(batch(1)), timeout_ms=200))
        driver.send(produce_request(batch(1)))
        first, second, third = driver.poll(60_000)
        for failed in (first, second):
            assert isinstance(failed, Failed)
            assert isinstance(failed.cause, TimeoutError)
            assert failed.possibly_sent
        assert isinstance(third, Disconnected)
        assert time.monotonic() - started < 20
        cluster.thaw(0)


def test_an_idle_connection_is_closed_without_a_fuss(driver: Driver) -> None:
    driver.clock.now += 540_000
    driver.poll()
    assert driver.of(Disconnected) == []
    assert driver.client.connection_errors() == {}
    driver.connect()
    assert len(driver.of(Connected)) == 2


def test_dead_bootstrap_addresses_are_skipped(cluster: FakeCluster) -> None:
    with refusing_port() as port, Driver(f"127.0.0.1:{port},{cluster.bootstrap_servers}") as driver:

        def ready() -> bool:
            node = driver.to_ask()
            driver.clock.now += 10
            return node is not None and driver.ready_for_any(node)

        driver.until(ready)
        assert [type(event) for event in driver.events] in ([Connected], [Disconnected, Connected])


def test_an_attempt_that_hangs_does_not_hold_the_others_up() -> None:
    """A firewall that drops packets: another broker is tried after a second, not after the setup timeout."""
    with FakeCluster(brokers=2) as cluster, Driver(cluster.bootstrap_servers) as driver:
        cluster.freeze(0)
        driver.ready_for_any()
        driver.clock.now += 999
        assert driver.to_ask() == -1
        driver.clock.now += 1
        assert driver.to_ask() == -2
        cluster.thaw(0)


def test_metadata_goes_to_the_least_loaded_and_not_to_the_silent_throttling_or_muted() -> None:
    """Catches: a second that every third new producer loses on a broker that the job knows to be dead."""
    with FakeCluster({"t": 1}, brokers=2) as cluster, Driver(cluster.bootstrap_servers) as driver:
        driver.client.set_addresses(Node(i, "127.0.0.1", cluster.port(i)) for i in range(2))
        for avoided in ({0}, {1}, {0, 1}, set[int]()):
            driver.client.avoided = frozenset(avoided)
            assert driver.to_ask() in ({0, 1} - avoided or {0, 1})
        for node in range(2):
            driver.connect(node)
        cluster.script(PRODUCE, Reply(throttle_ms=900))
        driver.send(produce_request(batch(1)), 0, name="p")
        driver.event(Responded, "p")
        assert driver.to_ask() == 1, "0 throttles"
        driver.clock.now += 900
        for node in range(2):
            cluster.freeze(node)
        driver.send(metadata_request("t"), 0)
        assert driver.to_ask() == 1
        driver.clock.now += 2000
        for _ in range(3):
            driver.send(metadata_request("t"), 1)
        assert driver.to_ask() == 1, "0 has been silent for two seconds"
        for node in range(2):
            cluster.thaw(node)


def test_a_new_start_asks_no_broker_that_was_known(cluster: FakeCluster, driver: Driver) -> None:
    driver.client.set_addresses([Node(0, "127.0.0.1", cluster.port(0))])
    assert driver.to_ask() == 0
    driver.client.rebootstrap()
    driver.clock.now += 1000
    assert driver.to_ask() == -1


def test_a_broker_that_is_gone_is_kept_until_its_requests_are_done_and_one_that_moved_is_not(
    cluster: FakeCluster, driver: Driver
) -> None:
    here = Node(0, "127.0.0.1", cluster.port(0))
    driver.client.set_addresses([here])
    driver.connect(0)
    cluster.freeze(0)
    driver.send(metadata_request("t"), 0, name="m")
    driver.client.set_addresses([])
    assert driver.connection(0).in_flight == 1
    cluster.thaw(0)
    driver.event(Responded, "m")
    driver.client.set_addresses([])
    assert not driver.ready_for_any(0)
    driver.connect()  # bootstrap addresses stay
    driver.client.set_addresses([here])
    driver.connect(0)
    cluster.freeze(0)
    driver.send(metadata_request("t"), 0, name="lost")
    with FakeCluster() as other:
        driver.client.set_addresses([Node(0, "127.0.0.1", other.port(0))])
        assert "moved to" in str(driver.event(Failed, "lost").cause)
        driver.connect(0)
        assert len(other.received(API_VERSIONS)) == 1
    cluster.thaw(0)


def test_the_connection_to_a_bootstrap_address_becomes_that_of_the_broker_there(
    cluster: FakeCluster, driver: Driver
) -> None:
    """Catches: each client connected and logged in twice, one round trip or more after the other."""
    driver.connect()
    driver.client.set_addresses([Node(0, "127.0.0.1", cluster.port(0))])
    driver.until(lambda: [event.node_id for event in driver.of(Connected)] == [-1, 0])
    assert driver.connection(0).is_ready
    assert len(cluster.received(API_VERSIONS)) == 1


def test_addresses_of_a_name_are_all_tried(cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    places: list[Any] = []
    monkeypatch.setattr("kafka_sink.network.transport.resolve_host", lambda host, port, flags: list(places))
    many = Driver("many.example:9092")
    with refusing_port() as refused, many as driver:
        places += [(socket.AF_INET, ("127.0.0.1", port)) for port in (refused, cluster.port(0))]
        driver.connect()
        assert [type(event) for event in driver.events] == [Disconnected, Connected]
        assert driver.clock.now == 1_000_000.0, "no backoff between addresses"


def test_an_address_that_drops_packets_is_passed_by(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    with silent_port() as silent:
        places = [(socket.AF_INET, ("127.0.0.1", port)) for port in (silent, cluster.port(0))]
        monkeypatch.setattr("kafka_sink.network.transport.resolve_host", lambda *_: list(places))
        with Driver("many.example:9092") as driver:
            assert not driver.ready_for_any()
            driver.until(lambda: driver.client.bootstrap[0].attempts)
            driver.clock.now += 250
            driver.connect()
            assert [type(event) for event in driver.events] == [Connected]
            assert driver.clock.now == 1_000_250.0
            assert driver.client.bootstrap[0].attempts == {}


def test_a_name_that_hangs_holds_nobody_up(cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()

    def slow(host: str, port: int, flags: int) -> object:
        if host == "slow.example":
            if flags:
                raise OSError("a name")
            release.wait(60)
            raise OSError("late")
        return resolve_host(host, port, flags)

    monkeypatch.setattr("kafka_sink.network.transport.resolve_host", slow)
    with Driver(f"slow.example:9092,{cluster.bootstrap_servers}") as driver:
        started = time.monotonic()
        assert not driver.ready_for_any()
        driver.connect(-2)
        assert time.monotonic() - started < 40
        for _ in range(3):
            driver.clock.now += 40_000
            driver.poll()
            driver.ready_for_any()
        mine = [t for t in threading.enumerate() if t.name == "kafka-chunked-dns-slow.example"]
        assert len(mine) == 1, "one thread, however often it is tried"
        release.set()
        driver.clock.now += 2_000
        driver.ready_for_any()
        driver.until(lambda: any("late" in str(e.cause) for e in driver.of(Disconnected)))
    mine[0].join(60)
    assert not mine[0].is_alive()


# -- waking up and closing ------------------------------------------------------------------------


def test_a_wakeup_ends_the_poll_under_way_or_the_next_and_a_thousand_are_one(driver: Driver) -> None:
    started = time.monotonic()
    driver.client.wakeup()
    driver.client.poll(60_000, driver.clock.now)
    timer = threading.Timer(0.05, driver.client.wakeup)
    timer.start()
    driver.client.poll(60_000, driver.clock.now)
    timer.join()
    for _ in range(1000):
        driver.client.wakeup()
    driver.client.poll(60_000, driver.clock.now)
    assert time.monotonic() - started < 40
    started = time.monotonic()
    driver.client.poll(50, driver.clock.now)
    assert time.monotonic() - started >= 0.045, "nothing is left to wake the second poll"


def test_wakeups_from_many_threads_are_never_lost(driver: Driver) -> None:
    """Each thread adds, wakes and waits until that is seen; a lost wake-up would take a minute."""
    added: queue.SimpleQueue[threading.Event] = queue.SimpleQueue()

    def work() -> None:
        for _ in range(200):
            seen = threading.Event()
            added.put(seen)
            driver.client.wakeup()
            assert seen.wait(50)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    started = time.monotonic()
    for _ in range(800):
        while added.empty():
            driver.client.poll(60_000, driver.clock.now)
        added.get().set()
    assert time.monotonic() - started < 40
    for thread in threads:
        thread.join()


def test_close_ends_quickly_whatever_is_under_way(cluster: FakeCluster) -> None:
    driver = Driver(cluster.bootstrap_servers)
    driver.connect()
    cluster.freeze(0)
    driver.send(produce_request(bytes(50_000_000)))
    started = time.monotonic()
    driver.client.close()
    driver.client.close()
    driver.client.wakeup()
    assert time.monotonic() - started < 20, "a frozen broker reads nothing, ever"
    cluster.thaw(0)


def test_close_goes_on_behind_a_connection_whose_close_was_interrupted(driver: Driver) -> None:
    """Catches: Ctrl-C in mid-close printed "ValueError: Invalid file descriptor: -1"."""
    (transport,) = driver.connection().transports
    transport.close()
    driver.client.close()
    assert driver.client.connections == {}


def test_opening_and_closing_leaves_no_socket_and_no_thread(cluster: FakeCluster) -> None:
    def next_descriptor() -> int:
        with socket.socket() as probe:
            return probe.fileno()

    before = math.inf
    for number in range(20):
        with Driver(cluster.bootstrap_servers) as driver:
            driver.connect()
            driver.send(metadata_request("t"), name="m")
            driver.event(Responded, "m")
        if not number:
            before = next_descriptor()
    # The broker's threads may still be closing their sides of the connections.
    until(lambda: next_descriptor() <= before, "all sockets are closed")


def test_a_login_that_another_thread_has_prepared_is_used_at_once(modules: Modules) -> None:
    """Catches: a client that looks for it only when the connection's time is up."""
    begun, go_on = threading.Event(), threading.Event()

    def no_token() -> str:
        begun.set()
        go_on.wait(60)
        raise OSError("no token")

    modules(tokens=SimpleNamespace(get=no_token))
    login: dict[str, Any] = {"sasl_mechanism": "OAUTHBEARER", "sasl_oauthbearer_token_provider": "tokens.get"}
    with Driver("127.0.0.1:1", security_protocol="SASL_PLAINTEXT", **login) as driver:
        driver.ready()
        driver.until(begun.is_set)
        assert driver.of(Disconnected) == []
        go_on.set()
        assert "raised OSError" in str(driver.event(Disconnected).cause)
