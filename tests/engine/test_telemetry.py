"""Client metrics (KIP-714): when they are asked for and pushed, which and how, and what each error means."""

from __future__ import annotations

import math
import struct
from collections.abc import Set
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest

from kafka_sink.engine.telemetry import ClientTelemetry
from kafka_sink.kafka_errors import (
    INVALID_RECORD,
    TELEMETRY_TOO_LARGE,
    THROTTLING_QUOTA_EXCEEDED,
    UNKNOWN_SUBSCRIPTION_ID,
    UNSUPPORTED_VERSION,
)
from kafka_sink.network.admin_requests import Subscription
from kafka_sink.network.apis import METADATA, PRODUCE
from kafka_sink.network.broker_protocol import Request
from kafka_sink.network.wire import ErrorResponse
from tests.support.brokers import Brokers
from tests.support.telemetry import Pushed, read

OFFERED = GET, PUSH = 71, 72
NEW, ID = bytes(16), bytes(range(16))
INTERVAL = 10_000
WANTED = Subscription(0, ID, 7, INTERVAL, 1_000_000, True, ("*",))


@dataclass
class Push:
    instance_id: bytes
    subscription_id: int
    terminating: bool
    codec: int
    data: bytes

    @property
    def metrics(self) -> Pushed:
        assert self.codec == 0
        return read(self.data)


class Connection:
    """To a broker that has these APIs."""

    def __init__(self, network: Network, node_id: int, *apis: int) -> None:
        self.node_id, self._network = node_id, network
        self.protocol = SimpleNamespace(api_versions=dict.fromkeys(apis, (0, 0)))

    def accepts(self, now_ms: float) -> bool:
        return self.node_id in self._network.connected

    @property
    def in_flight(self) -> int:
        return int(self.node_id in self._network.busy)


class Network:
    """Brokers by id; those in ``offering`` have the APIs."""

    def __init__(self, *offering: int) -> None:
        self.connected = set(offering)
        self.requests: list[tuple[int, Request]] = []
        self.busy: set[int] = set()
        self.connections = {
            node: Connection(self, node, *(OFFERED if node in offering else ())) for node in (1, 2, 3)
        }
        self.on_responded: Any = None

    def connected_with(self, api_keys: Set[int], now_ms: float) -> Connection | None:
        found = [one for one in self.connections.values() if one.accepts(now_ms)]
        usable = [one for one in found if api_keys <= one.protocol.api_versions.keys()]
        return min(usable, key=lambda one: (one.in_flight, one.node_id), default=None)

    def send(self, connection: Connection, request: Request, now_ms: float) -> None:
        self.requests.append((connection.node_id, request))


class Client:
    """A client at exact times."""

    def __init__(self, *offering: int, draw: float = 0.5, **resource: str) -> None:
        self.network, self.now, self.draw = Network(*offering), 0.0, draw
        clock = lambda: 1e12 + self.now  # noqa: E731
        network: Any = self.network
        self.brokers = Brokers()
        cluster: Any = SimpleNamespace(brokers=self.brokers, broker=self.brokers.broker)
        self.telemetry = ClientTelemetry(network, cluster, 30_000, lambda: resource, clock, lambda: self.draw)
        for node in sorted(offering):
            self.telemetry.on_connected(node, self.now)

    def at(self, now_ms: float) -> Client:
        """Time goes on."""
        self.now = now_ms
        self.due = self.telemetry.refresh(now_ms)
        return self

    @property
    def last(self) -> tuple[int, bytes]:
        _, request = self.network.requests[-1]
        return request.api_key, b"".join(map(bytes, request.body))

    @property
    def push(self) -> Push:
        api, body = self.last
        assert api == PUSH
        instance, subscription, terminating, codec = struct.unpack_from(">16si?b", body)
        size, at, shift = 0, 22, 0
        while True:
            size |= (body[at] & 0x7F) << shift
            shift, at = shift + 7, at + 1
            if body[at - 1] < 0x80:
                break
        assert len(body) == at + size
        return Push(instance, subscription, terminating, codec, body[at : at + size - 1])

    def answered(self, response: Any) -> Client:
        self.request.on_response(response, self.now)
        return self

    def failed(self) -> None:
        self.request.on_failure(ConnectionResetError("cut"), True, self.now)

    @property
    def request(self) -> Request:
        """The last one."""
        return self.network.requests[-1][1]

    def responded(self, node_id: int, latency_ms: float, throttle_ms: float | None) -> None:
        """A broker has responded, to a Produce request if there is a time of throttling."""
        if self.network.on_responded is not None:
            api = METADATA if throttle_ms is None else PRODUCE
            request: Any = SimpleNamespace(api_key=api, sent_ms=self.now - latency_ms)
            response = SimpleNamespace(throttle_time_ms=throttle_ms)
            self.network.on_responded(node_id, request, response, self.now)

    def subscribed(self, **changes: Any) -> Client:
        """Has pushed once, a whole interval after it asked."""
        self.at(0).answered(replace(WANTED, **changes))
        return self.at(INTERVAL)


def test_brokers_that_do_not_offer_it_are_asked_nothing_and_nothing_is_recorded() -> None:
    client, ended, only_asks = Client(), Client(), Client()
    only_asks.network.connections[1] = Connection(only_asks.network, 1, GET)
    for one in (client, ended, only_asks):
        one.telemetry.on_connected(1, 0.0)
        one.telemetry.on_sent([5.0])
        one.responded(1, 5.0, 0.0)
        assert one.at(1e9).due == math.inf
        assert not one.brokers
    ended.telemetry.terminate(1e9)
    assert not ended.network.requests
    client.network.connected, client.network.connections[1] = {1}, Connection(client.network, 1, *OFFERED)
    client.telemetry.on_connected(1, 0.0)
    client.subscribed()
    assert client.push.metrics.values.keys() == {"connection.creation.rate", "connection.creation.total"}


@pytest.mark.parametrize(("draw", "first"), [(0.0, 0.5), (0.999, 1.499)])
def test_telemetry_subscribes_at_once_and_first_pushes_after_a_random_part_of_the_interval(
    draw: float, first: float
) -> None:
    client = Client(1, draw=draw).at(0)
    assert client.last == (GET, NEW + b"\0")
    assert client.due == math.inf
    client.answered(WANTED)
    assert client.at(INTERVAL * first - 1).due == pytest.approx(1)
    assert len(client.network.requests) == 1
    client.at(INTERVAL * first)
    assert (client.push.instance_id, client.push.subscription_id, client.push.terminating) == (ID, 7, False)
    client.answered(ErrorResponse(0))
    assert client.at(INTERVAL * first + 1).due == pytest.approx(INTERVAL - 1)
    assert len(client.network.requests) == 2
    client.at(INTERVAL * (first + 1))
    assert len(client.network.requests) == 3


def test_the_required_metrics_are_those_since_the_last_push() -> None:
    client = Client(1, 2, client_rack="a", transactional_id="x").at(0).answered(WANTED)
    client.telemetry.on_sent([2.0, 6.0])
    client.telemetry.on_sent([])
    client.responded(1, 10.0, 0.0)
    client.responded(1, 30.0, 5.0)
    client.responded(2, 7.0, None)
    pushed = client.at(INTERVAL).push.metrics
    assert pushed.resource == {"client_rack": "a", "transactional_id": "x"}
    assert pushed.values == {
        "connection.creation.rate": pytest.approx(0.2),
        "connection.creation.total": 2,
        "node.request.latency.avg:node-1": 20,
        "node.request.latency.max:node-1": 30,
        "node.request.latency.avg:node-2": 7,
        "node.request.latency.max:node-2": 7,
        "produce.throttle.time.avg": 2.5,
        "produce.throttle.time.max": 5,
        "record.queue.time.avg": 4,
        "record.queue.time.max": 6,
    }
    assert pushed.sums == {"connection.creation.total": True}
    assert (pushed.start_s, pushed.end_s) == (1e9, 1e9 + INTERVAL / 1000)
    client.answered(ErrorResponse(0))
    client.telemetry.on_connected(3, client.now)
    later = client.at(2 * INTERVAL).push.metrics
    assert later.values == {"connection.creation.rate": pytest.approx(0.1), "connection.creation.total": 1}
    assert later.start_s == 1e9 + INTERVAL / 1000
    # A rack may be no text.
    client = Client(1, client_rack=b"z\xff".decode(errors="surrogateescape")).subscribed()
    assert client.push.metrics.resource == {"client_rack": "z?"}
    # Sums that are not deltas count from the beginning.
    client = Client(1).subscribed(delta=False)
    assert client.push.metrics.sums == {"connection.creation.total": False}
    client.answered(ErrorResponse(0))
    client.telemetry.on_connected(2, client.now)
    later = client.at(2 * INTERVAL).push.metrics
    assert later.values["connection.creation.total"] == 2
    assert later.start_s == 1e9


def test_prefixes_choose() -> None:
    connections = {"connection.creation.rate", "connection.creation.total"}
    for requested, names in [
        (("",), {*connections, "record.queue.time.avg"}),
        (("org.apache.kafka.producer.connection.",), connections),
        (("org.apache.kafka.consumer.",), set()),
        (("x", "org.apache.kafka.producer.record.queue.time.avg"), {"record.queue.time.avg"}),
    ]:
        client = Client(1).at(0).answered(replace(WANTED, requested=requested))
        client.telemetry.on_sent([2.0])
        found = client.at(INTERVAL).push.metrics.values
        assert found.keys() - {"record.queue.time.max"} == names


def test_without_a_subscription_it_asks_again_after_an_interval() -> None:
    client = Client(1).subscribed(requested=())
    assert client.last == (GET, ID + b"\0")
    client.telemetry.terminate(client.now)
    assert len(client.network.requests) == 2
    # One that is unknown is asked for at once, under the same id.
    client = Client(1, draw=0.0).subscribed().answered(ErrorResponse(UNKNOWN_SUBSCRIPTION_ID))
    client.at(client.now)
    assert client.last == (GET, ID + b"\0")
    client.answered(replace(WANTED, instance_id=NEW, subscription_id=8))
    assert client.due == math.inf
    client.at(client.now + INTERVAL / 2)
    assert (client.push.instance_id, client.push.subscription_id) == (ID, 8)


def test_errors_of_one_push_drop_it() -> None:
    for error in (TELEMETRY_TOO_LARGE, THROTTLING_QUOTA_EXCEEDED):
        client = Client(1).subscribed().answered(ErrorResponse(error))
        assert client.at(client.now).due == INTERVAL
        assert client.at(client.now + INTERVAL).push.subscription_id == 7
    # So does a broker that takes less.
    client = Client(1).subscribed(max_bytes=10)
    assert (client.last[0], client.due) == (GET, INTERVAL)


@pytest.mark.parametrize("error", [INVALID_RECORD, UNSUPPORTED_VERSION, 42, -1])
def test_other_errors_end_it_for_good(error: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    client = Client(1).subscribed().answered(ErrorResponse(error))
    client.telemetry.on_connected(2, client.now)
    client.telemetry.on_sent([1.0])
    client.telemetry.terminate(client.now)
    assert client.at(1e9).due == math.inf
    assert len(client.network.requests) == 2
    assert "client metrics are no longer pushed" in caplog.text


def test_intervals_have_a_lower_bound() -> None:
    for given, interval in {0: 300_000, -5: 300_000, 1: 100, 2_000: 2_000}.items():
        client = Client(1).at(0).answered(replace(WANTED, push_interval_ms=given))
        assert client.at(0).due == interval
    # A question that is throttled waits for the default.
    client = Client(1).at(0).answered(replace(WANTED, error_code=THROTTLING_QUOTA_EXCEEDED))
    assert client.at(0).due == 300_000


def test_a_lost_connection_drops_the_push_and_the_next_goes_elsewhere() -> None:
    client = Client(1, 2).subscribed()
    assert client.network.requests[-1][0] == 1
    client.network.connected = {2}
    client.failed()
    client.telemetry.on_connected(2, client.now)
    assert client.at(client.now).due == 300_000
    client.at(client.now + 300_000)
    assert (client.network.requests[-1][0], client.push.subscription_id) == (2, 7)
    # A push goes where no request is in flight.
    client = Client(1, 2).subscribed().answered(ErrorResponse(0))
    client.network.busy = {1}
    client.at(2 * INTERVAL).answered(ErrorResponse(0))
    client.network.busy = set()
    client.at(3 * INTERVAL).answered(ErrorResponse(0))
    client.network.busy = {1, 2}
    client.at(4 * INTERVAL)
    assert [node for node, _ in client.network.requests] == [1, 1, 2, 2, 1]


def test_push_is_postponed_while_no_broker_is_connected() -> None:
    """Until the next connection, or the end of a login that is being renewed."""
    client = Client(1).subscribed().answered(ErrorResponse(0))
    client.network.connected = set()
    assert client.at(2 * INTERVAL).due == INTERVAL
    client.network.connected = {1}
    client.telemetry.on_connected(1, client.now)
    client.at(client.now).answered(ErrorResponse(0))
    assert len(client.network.requests) == 3
    client.network.connected = set()
    client.at(3 * INTERVAL)
    client.network.connected = {1}
    client.at(4 * INTERVAL)
    assert len(client.network.requests) == 4
    assert client.push.metrics.start_s == 1e9 + 2 * INTERVAL / 1000


def test_the_last_push_says_that_it_is_the_last_and_nothing_follows() -> None:
    client = Client(1).subscribed().answered(ErrorResponse(0))
    client.telemetry.on_sent([3.0])
    client.telemetry.terminate(client.now)
    assert client.push.terminating
    assert client.push.metrics.values["record.queue.time.max"] == 3
    client.telemetry.terminate(client.now)
    assert client.at(1e9).due == math.inf
    assert len(client.network.requests) == 3
    # Without a connection there is none.
    client = Client(1).subscribed().answered(ErrorResponse(0))
    client.network.connected = set()
    client.telemetry.terminate(client.now)
    assert len(client.network.requests) == 2


def test_a_client_that_had_no_task_for_long_ends_and_the_next_task_is_another_one() -> None:
    client = Client(1).subscribed().answered(ErrorResponse(0))
    client.telemetry.idle_since_ms = client.now
    ended = client.now + 50_001
    client.telemetry.on_sent([3.0])
    client.at(ended)
    assert client.push.terminating
    assert client.push.metrics.values["record.queue.time.max"] == 3
    last = client.request
    assert client.at(ended + 1e6).due == math.inf
    client.telemetry.on_connected(1, client.now)
    assert client.at(client.now).due == math.inf
    assert len(client.network.requests) == 3
    client.telemetry.idle_since_ms = math.inf
    client.at(client.now)
    assert client.last == (GET, NEW + b"\0")
    # Late responses do not concern the present client.
    last.on_response(ErrorResponse(0), client.now)
    last.on_failure(ConnectionResetError("cut"), True, client.now)
    assert client.at(client.now).due == math.inf
    client.answered(replace(WANTED, instance_id=ID[::-1]))
    assert client.at(client.now + INTERVAL).push.instance_id == ID[::-1]
    # A connection that is made while there is no task is asked nothing.
    client = Client(1).subscribed()
    client.network.connected = set()
    client.failed()
    client.telemetry.idle_since_ms = client.now
    client.at(client.now + 50_001)
    client.network.connected = {1}
    client.telemetry.on_connected(1, client.now)
    assert client.at(client.now).due == math.inf
    assert len(client.network.requests) == 2


def test_short_pauses_between_tasks_end_nothing() -> None:
    client = Client(1).at(0).answered(replace(WANTED, push_interval_ms=1_000_000))
    for start in (10_000, 70_000):
        client.telemetry.idle_since_ms = start
        client.at(start + 49_999)
        client.telemetry.idle_since_ms = math.inf
        client.at(start + 50_500)
    assert len(client.network.requests) == 1
