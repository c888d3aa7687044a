"""Client metrics (KIP-714) and brokers that throttle, answer nonsense and die; the clock moves by hand."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from kafka_sink.engine.telemetry import ClientTelemetry
from tests.support.brokers import Brokers
from tests.support.fake_broker import FakeCluster
from tests.support.fake_replies import SWALLOWED, Refuse, Reply
from tests.support.network_harness import PATIENCE_S, Connected, Driver, Responded, batch, produce_request
from tests.support.telemetry_messages import GET_SUBSCRIPTIONS, PUSH, Wanted

INTERVAL = 10_000
AGAIN = 300_000
OFFERED = {GET_SUBSCRIPTIONS: (0, 0), PUSH: (0, 0)}


class Client:
    """A producer's connections and its metrics, without a sender."""

    def __init__(self, cluster: FakeCluster, driver: Driver) -> None:
        self.cluster, self.driver = cluster, driver
        known: Any = SimpleNamespace(brokers=Brokers(), broker=Brokers().broker)
        clock = lambda: self.driver.clock.now  # noqa: E731
        self.telemetry = ClientTelemetry(driver.client, known, 30_000, dict, clock, lambda: 0.5)
        connected: Callable[..., object] = driver.client.on_connected

        def on_connected(node: int, setup_ms: float, now_ms: float) -> None:
            connected(node, setup_ms, now_ms)
            self.telemetry.on_connected(node, now_ms)

        driver.client.on_connected = on_connected

    def poll(self) -> None:
        """Metrics have callbacks of their own, which ``Driver.poll`` would miss among its events."""
        self.driver.client.poll(20, self.driver.clock.now)

    def until(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline, f"never {what}"
            self.poll()

    def connect(self, node_id: int = -1) -> None:
        before = len(self.driver.of(Connected))
        self.until(lambda: self.driver.ready_for_any(node_id), "connected")
        assert len(self.driver.of(Connected)) == before + 1

    def after(self, ms: float) -> float:
        """Time goes on; returns how long nothing will be due."""
        self.driver.clock.now += ms
        return self.telemetry.refresh(self.driver.clock.now)

    def settle(self, api: int, count: int) -> None:
        """Until the broker has got so many of these, and the client the response or the end."""
        self.until(lambda: self.after(0) >= 0 and len(self.cluster.received(api)) >= count, "received")
        self.until(lambda: self.telemetry.refresh(self.driver.clock.now) < float("inf"), "answered")

    def subscribe(self) -> None:
        self.connect()
        self.after(0)
        self.settle(GET_SUBSCRIPTIONS, 1)

    @property
    def counts(self) -> tuple[int, int]:
        """Requests so far: for a subscription, and pushes."""
        return len(self.cluster.received(GET_SUBSCRIPTIONS)), len(self.cluster.received(PUSH))


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    with FakeCluster({"t": 1}, brokers=2, versions=OFFERED) as running:
        running.want_metrics(Wanted(interval_ms=INTERVAL))
        yield running


@pytest.fixture
def client(cluster: FakeCluster) -> Iterator[Client]:
    with Driver(cluster.bootstrap_servers) as driver:
        yield Client(cluster, driver)


def test_a_broker_that_throttles_gets_no_push_before_its_time(cluster: FakeCluster, client: Client) -> None:
    """Catches: a request on a connection that the broker wants silent (KIP-219)."""
    cluster.script(GET_SUBSCRIPTIONS, Reply(throttle_ms=3 * INTERVAL))
    client.subscribe()
    for _ in range(2):
        assert client.after(INTERVAL) == INTERVAL
    client.poll()
    assert client.counts == (1, 0)
    client.after(INTERVAL)
    client.settle(PUSH, 1)
    assert client.counts == (1, 1)
    network, now = client.driver.client, client.driver.clock.now
    assert network.connected_with(OFFERED.keys(), now) is not None
    assert network.connected_with({*OFFERED, 9_999}, now) is None, "no broker has that one"


@pytest.mark.parametrize("api", [GET_SUBSCRIPTIONS, PUSH])
def test_nonsense_costs_one_connection_and_no_more(cluster: FakeCluster, client: Client, api: int) -> None:
    """Catches: a connection that is closed at every interval, with the rows that are in flight on it."""
    cluster.want_metrics(Wanted(interval_ms=100))
    cluster.script(api, *[Reply(mangle=lambda frame: frame[:8] + b"\xff" * (len(frame) - 8))] * 10)
    client.connect()
    client.after(0)
    for _ in range(5):
        client.after(100)
        client.poll()
        client.poll()
        if not client.driver.ready():
            client.driver.clock.now += 1_000
            client.connect()
    assert client.counts == ((1, 0) if api == GET_SUBSCRIPTIONS else (1, 1))
    client.driver.send(produce_request(batch(1)), name="rows")
    client.until(lambda: bool(client.driver.of(Responded, "rows")), "written")


@pytest.mark.parametrize("end", [Refuse(), SWALLOWED])
def test_a_broker_that_dies_of_a_push_gets_no_other_for_long(
    cluster: FakeCluster, client: Client, end: Reply
) -> None:
    """Catches: as above, by a broker that closes the connection (Kafka's client waits for five minutes)."""
    cluster.want_metrics(Wanted(interval_ms=100))
    cluster.script(PUSH, *[end] * 5)
    client.subscribe()
    client.after(100)
    client.settle(PUSH, 1)
    assert client.after(0) == AGAIN
    client.driver.clock.now += 1_000
    client.connect()
    assert client.after(0) == AGAIN - 1_000
    assert client.counts == (1, 1)
