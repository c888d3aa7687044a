"""Each fault of the proxy, in front of the fake broker; and that it is invisible without one."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from io import BytesIO

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.fake_broker import FakeCluster
from tests.support.network_harness import Driver, Failed, Responded, batch, metadata_request, produce_request
from tests.support.proxy import (
    API_VERSIONS,
    METADATA,
    PRODUCE,
    REQUEST,
    RESPONSE,
    ProxyCluster,
    frames,
)


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    """Two brokers; partition 0 leads on broker 0."""
    with FakeCluster({"t": 2}, brokers=2) as running:
        yield running


@pytest.fixture
def proxies(cluster: FakeCluster) -> Iterator[ProxyCluster]:
    with ProxyCluster(cluster.bootstrap_servers) as running:
        yield running


@pytest.fixture
def driver(proxies: ProxyCluster) -> Iterator[Driver]:
    with Driver(proxies.bootstrap_servers) as one:
        one.connect()
        yield one


@given(sizes=st.lists(st.integers(0, 30), max_size=6), cuts=st.lists(st.integers(1, 25), min_size=200))
def test_messages_are_found_in_any_pieces(sizes: list[int], cuts: list[int]) -> None:
    sent = [size.to_bytes(4, "big") + bytes(size) for size in sizes]
    stream, received = BytesIO(b"".join(sent)), bytearray()
    found: list[bytes] = []
    for cut in cuts:
        received += stream.read(cut)
        found += frames(received)
    assert found == sent
    assert not received


def test_without_faults_all_passes_and_is_counted(proxies: ProxyCluster, driver: Driver) -> None:
    driver.send(metadata_request("t"), name="m")
    driver.send(produce_request(batch(3)), name="p")
    update = driver.event(Responded, "m").response.update
    assert [node.port for node in update.nodes] == [proxy.port for proxy in proxies]
    assert driver.event(Responded, "p").response.partitions[0].base_offset == 0
    assert proxies.requests == {API_VERSIONS: 1, METADATA: 1, PRODUCE: 1}
    assert proxies[1].requests == {}


def test_addresses_are_rewritten_in_every_version(proxies: ProxyCluster, driver: Driver) -> None:
    for version in range(4, 14):
        driver.send(metadata_request("t", version=version), name=version)
        update = driver.event(Responded, version).response.update
        addresses = [(node.host, node.port) for node in update.nodes]
        assert addresses == [("127.0.0.1", proxy.port) for proxy in proxies], version
        assert len(update.topics[0].partitions) == 2


def test_leaders_in_produce_responses_are_rewritten(proxies: ProxyCluster, driver: Driver) -> None:
    driver.send(produce_request(batch(1), partition=1), name="p")
    response = driver.event(Responded, "p").response
    assert response.partitions[0].current_leader == (1, 0)
    assert [node.port for node in response.node_endpoints] == [proxies[1].port]


def test_cut(proxies: ProxyCluster, driver: Driver) -> None:
    proxies[0].freeze()
    driver.send(metadata_request("t"), name="m")
    proxies[0].cut()
    driver.event(Failed, "m")
    proxies[0].thaw()
    driver.clock.now += 1_000
    driver.connect()


@pytest.mark.parametrize("count", [0, 1, 100, 5_000])
def test_a_request_cut_in_the_middle_is_not_acted_on(
    cluster: FakeCluster, proxies: ProxyCluster, driver: Driver, count: int
) -> None:
    proxies[0].cut_after(count)
    driver.send(produce_request(batch(1, value=bytes(6_000))), name="p")
    driver.event(Failed, "p")
    assert cluster.received(PRODUCE) == []
    driver.clock.now += 1_000
    driver.connect()
    driver.send(produce_request(batch(1)), name="once only")
    driver.event(Responded, "once only")


def test_bytes_count_over_requests_before_the_cut(
    cluster: FakeCluster, proxies: ProxyCluster, driver: Driver
) -> None:
    proxies[0].cut_after(10_000, REQUEST)
    for tag in range(3):
        driver.send(produce_request(batch(1, value=bytes(4_000))), name=tag)
    driver.event(Failed, 2)
    assert len(cluster.batches("t", 0)) == 2


@pytest.mark.parametrize("count", [0, 3, 10])
def test_a_response_cut_in_the_middle(
    cluster: FakeCluster, proxies: ProxyCluster, driver: Driver, count: int
) -> None:
    proxies[0].cut_after(count, RESPONSE)
    driver.send(produce_request(batch(1)), name="p")
    driver.event(Failed, "p")
    assert len(cluster.batches("t", 0)) == 1


def test_delay_and_trickle(proxies: ProxyCluster, driver: Driver) -> None:
    proxies[0].slow(delay_ms=60)
    started = time.monotonic()
    driver.send(metadata_request("t"), name="slow")
    driver.event(Responded, "slow")
    assert time.monotonic() - started > 0.11, "both directions"
    proxies[0].slow(trickle_bytes=7, trickle_ms=1)
    driver.send(produce_request(batch(1)), name="trickled")
    assert driver.event(Responded, "trickled").response.partitions[0].error_code == 0
    proxies[0].slow()
    driver.send(metadata_request("t"), name="fast")
    driver.event(Responded, "fast")


def test_refuse_and_accept(proxies: ProxyCluster, driver: Driver) -> None:
    port = proxies[0].port
    proxies[0].refuse()
    driver.send(metadata_request("t"), name="open")
    driver.event(Responded, "open")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port)).close()
    proxies[0].accept()
    socket.create_connection(("127.0.0.1", port)).close()


def test_a_broker_that_is_down_resets_the_client(cluster: FakeCluster, proxies: ProxyCluster) -> None:
    cluster.stop(0)
    with socket.create_connection(("127.0.0.1", proxies[0].port), timeout=10) as client:
        assert client.recv(1) == b""


def test_closing_leaves_no_thread(cluster: FakeCluster) -> None:
    before = {thread.ident for thread in threading.enumerate()}
    with ProxyCluster(cluster.bootstrap_servers) as proxies, Driver(proxies.bootstrap_servers) as driver:
        driver.connect()
        proxies[0].freeze()
    left = [t for t in threading.enumerate() if t.ident not in before and t.name == "fault-proxy"]
    assert left == []
