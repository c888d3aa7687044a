"""Pushes client metrics to brokers that ask for them (KIP-714).

A client is a producer, as in Kafka. Here a Python worker has one, which outlives its tasks. Brokers without a
metrics receiver do not offer the APIs, and then nothing is recorded or sent. Nothing here fails or delays a
task: a push that fails is dropped.
"""

from __future__ import annotations

import logging
import math
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from kafka_sink import kafka_errors, varint
from kafka_sink.clock import RANDOM, Clock, wall_ms
from kafka_sink.cluster.producer_metadata import ProducerMetadata
from kafka_sink.counts import LatencyWindow
from kafka_sink.errors import ProtocolError
from kafka_sink.network.apis import GET_TELEMETRY_SUBSCRIPTIONS, PRODUCE, PUSH_TELEMETRY
from kafka_sink.network.broker_connection import BrokerConnection
from kafka_sink.network.broker_protocol import Request
from kafka_sink.network.client import NetworkClient

if TYPE_CHECKING:
    from kafka_sink.network.admin_requests import Subscription

_log = logging.getLogger(__name__)
# The push interval if a broker's response has none or an invalid one, and the shortest interval, which is
# also the shortest that Kafka's brokers allow.
_DEFAULT_INTERVAL_MS, _MIN_INTERVAL_MS = 300_000.0, 100.0
# Spark kills a worker that had no task for a minute, so the last push has to come before that.
_IDLE_MS = 50_000.0
# The APIs that a broker must offer: it may offer one without the other.
_APIS = frozenset({GET_TELEMETRY_SUBSCRIPTIONS, PUSH_TELEMETRY})
_PREFIX = "org.apache.kafka.producer."
# The wire types of protobuf, and the temporalities of OpenTelemetry.
_VARINT, _FIXED64, _LENGTH = 0, 1, 2
_DELTA, _CUMULATIVE = 1, 2


@dataclass(frozen=True, slots=True)
class Metric:
    """A gauge, or a sum that only grows. ``labels`` belong to its only data point."""

    name: str
    value: float
    labels: Mapping[str, str] = field(default_factory=dict)
    is_sum: bool = False


class ClientTelemetry:
    """Records metrics and pushes them at the interval that a broker asks for.

    Only the sender's thread uses it. ``resource`` returns the attributes of all metrics. Times are
    monotonic milliseconds, unless their names contain "wall".
    """

    def __init__(
        self,
        network: NetworkClient,
        cluster: ProducerMetadata,
        request_timeout_ms: float,
        resource: Callable[[], Mapping[str, str]] = dict,
        wall_clock_ms: Clock = wall_ms,
        random: Callable[[], float] = RANDOM.random,
    ) -> None:
        # Whether a broker has offered to receive metrics.
        self.is_offered = False
        # When the last task ended; infinite while a task runs. The task's thread sets it and the sender's
        # thread reads it without a lock: a change that it misses is seen in the next pass.
        self.idle_since_ms = math.inf
        self._network = network
        self._cluster = cluster
        self._request_timeout_ms = request_timeout_ms
        self._resource = resource
        self._wall_clock_ms = wall_clock_ms
        self._random = random
        self._instance_id = bytes(16)
        self._subscription: Subscription | None = None
        self._interval_ms = _DEFAULT_INTERVAL_MS
        # The connection of the last request; None if no connection could take the next one.
        self._connection: BrokerConnection | None = None
        # When to send the next request; infinite before a broker is connected, while a request is in flight,
        # and after pushing has stopped.
        self._due_ms = math.inf
        self._is_off = self._is_resting = False
        # The number of the current client. After a long time without a task a producer becomes a new client.
        self._client = 0
        self._connections = 0
        self._created_ms = wall_clock_ms()
        self._begin_window(self._created_ms)

    def _begin_window(self, now_wall_ms: float) -> None:
        self._since_ms = now_wall_ms
        self._connections_before = self._connections
        self._queued, self._throttled = LatencyWindow(), LatencyWindow()
        for broker in self._cluster.brokers.values():
            broker.latencies = LatencyWindow()

    def on_connected(self, node_id: int, now_ms: float) -> None:
        self._connections += 1
        if self._is_off or not self._network.connections[node_id].protocol.api_versions.keys() >= _APIS:
            return
        self.is_offered = True
        self._network.on_responded = self._on_responded
        if self._connection is None and not self._is_resting:
            self._due_ms = now_ms

    def on_sent(self, queue_ms: Sequence[float]) -> None:
        """Record how long the batches of a request have waited for it."""
        for waited_ms in queue_ms if self.is_offered else ():
            self._queued.add(waited_ms)

    def _on_responded(self, node_id: int, request: Request, response: Any, now_ms: float) -> None:
        self._cluster.broker(node_id).latencies.add(now_ms - request.sent_ms)
        if request.api_key == PRODUCE:
            self._throttled.add(response.throttle_time_ms)

    def refresh(self, now_ms: float) -> float:
        """Send the request that is due. Return the milliseconds until the next one. A client that had no task
        for a long time pushes a last time, and the next task is another client."""
        if self._is_resting != (now_ms - self.idle_since_ms > _IDLE_MS):
            self._is_resting = not self._is_resting
            if self._is_resting:
                self.terminate(now_ms)
            elif self.is_offered:
                self._due_ms = now_ms
        if now_ms < self._due_ms:
            return self._due_ms - now_ms
        self._due_ms = math.inf
        # Use the last one if it is idle, otherwise the one with the least to do, so that rows and a push do
        # not wait for each other.
        connection = self._connection
        if connection is None or connection.in_flight or not connection.accepts(now_ms):
            connection = self._connection = self._network.connected_with(_APIS, now_ms)
        if connection is None:
            # The next connection ends this wait. But if all connections are throttled or renew their logins,
            # no new one follows, so the wait has an end of its own.
            self._due_ms = now_ms + self._interval_ms
        elif self._subscription is None:
            from kafka_sink.network.admin_requests import encode_get_subscription

            body = encode_get_subscription(self._instance_id)
            self._send(connection, GET_TELEMETRY_SUBSCRIPTIONS, body, now_ms)
        else:
            self._push(connection, self._subscription, now_ms)
        return self._due_ms - now_ms

    def _push(
        self, connection: BrokerConnection, wanted: Subscription, now_ms: float, *, terminating: bool = False
    ) -> None:
        from kafka_sink.network.admin_requests import encode_push

        data = self._payload(wanted)
        if len(data) > wanted.max_bytes:
            _log.debug(
                "client metrics of %d bytes are dropped: the broker accepts at most %d",
                len(data),
                wanted.max_bytes,
            )
            self._due_ms = now_ms + self._interval_ms
            return
        body = encode_push(self._instance_id, wanted.subscription_id, data, terminating=terminating)
        self._send(connection, PUSH_TELEMETRY, body, now_ms)

    def _send(self, connection: BrokerConnection, api: int, body: bytes, now_ms: float) -> None:
        on_response = partial(self._on_response, self._client, api)
        on_failure = partial(self._on_failure, self._client)
        request = Request(api, 0, [body], self._request_timeout_ms, on_response, on_failure)
        self._network.send(connection, request, now_ms)

    def _on_response(self, client: int, api: int, response: Any, now_ms: float) -> None:
        if client != self._client:
            return
        code = response.error_code
        was_asking = api == GET_TELEMETRY_SUBSCRIPTIONS
        self._due_ms = now_ms + self._interval_ms
        if code == 0 and was_asking:
            self._subscribe(response, now_ms)
        elif code == kafka_errors.UNKNOWN_SUBSCRIPTION_ID and not was_asking:
            # Ask for a subscription at once. The next push waits for its share of an interval again.
            self._subscription = None
            self._due_ms = now_ms
        elif code not in (0, kafka_errors.TELEMETRY_TOO_LARGE, kafka_errors.THROTTLING_QUOTA_EXCEEDED):
            self._stop(f"a broker responded {kafka_errors.error_of(code).label}")

    def _on_failure(self, client: int, cause: Exception, possibly_sent: bool, now_ms: float) -> None:
        """Wait for an interval of at least the default one before the next request, as Kafka's client does.

        A broker that cannot handle these requests closes the connection, and then the rows in flight on it
        have to be sent again. So such a broker must not get many of these requests.
        """
        if client != self._client:
            return
        self._due_ms = now_ms + max(self._interval_ms, _DEFAULT_INTERVAL_MS)
        if isinstance(cause, ProtocolError):
            self._stop(str(cause))

    def _stop(self, reason: str) -> None:
        _log.info("client metrics are no longer pushed: %s", reason)
        self._is_off, self.is_offered, self._due_ms = True, False, math.inf
        self._network.on_responded = None

    def _subscribe(self, given: Subscription, now_ms: float) -> None:
        if any(given.instance_id):
            self._instance_id = given.instance_id
        interval = given.push_interval_ms
        self._interval_ms = max(interval, _MIN_INTERVAL_MS) if interval > 0 else _DEFAULT_INTERVAL_MS
        self._subscription = given if given.requested else None
        # A random share of the first interval, so that clients that begin together do not push together. If
        # nothing is subscribed, the client asks again after a whole interval.
        share = 0.5 + self._random() if given.requested else 1.0
        self._due_ms = now_ms + self._interval_ms * share

    def terminate(self, now_ms: float) -> None:
        """Push a last time, as much as the socket takes at once. Nothing waits for the push."""
        wanted, last = self._subscription, self._connection
        if wanted and last and not self._is_off and last.accepts(now_ms):
            self._push(last, wanted, now_ms, terminating=True)
        self._client += 1
        self._instance_id, self._subscription, self._due_ms = bytes(16), None, math.inf

    def _payload(self, wanted: Subscription) -> bytes:
        """The subscribed metrics since the last push. They are not compressed, as they are a few kB."""
        now_ms = self._wall_clock_ms()
        prefixes = ("",) if wanted.requested == ("*",) else wanted.requested
        metrics = [metric for metric in self._metrics(wanted, now_ms) if metric.name.startswith(prefixes)]
        start_ms = self._since_ms if wanted.delta else self._created_ms
        data = metrics_data(metrics, self._resource(), start_ms, now_ms, delta=wanted.delta)
        self._begin_window(now_ms)
        return data

    def _metrics(self, wanted: Subscription, now_ms: float) -> Iterator[Metric]:
        made = self._connections - self._connections_before
        seconds = max(now_ms - self._since_ms, 1.0) / 1000
        total = made if wanted.delta else self._connections
        yield Metric(f"{_PREFIX}connection.creation.rate", made / seconds)
        yield Metric(f"{_PREFIX}connection.creation.total", total, is_sum=True)
        yield from _of_window("produce.throttle.time", self._throttled)
        yield from _of_window("record.queue.time", self._queued)
        for broker in self._cluster.brokers.values():
            yield from _of_window("node.request.latency", broker.latencies, node_id=f"node-{broker.id}")


def _of_window(name: str, window: LatencyWindow, **labels: str) -> Iterator[Metric]:
    if window.count:
        yield Metric(f"{_PREFIX}{name}.avg", window.total / window.count, labels)
        yield Metric(f"{_PREFIX}{name}.max", window.most, labels)


# -- OpenTelemetry's MetricsData in protobuf (opentelemetry-proto's metrics.proto, version 1) ----------------
#
# This is written by hand: the few fields that are used take fewer lines than filling a library's objects
# would, and no worker has to load protobuf.


def metrics_data(
    metrics: Iterable[Metric], resource: Mapping[str, str], start_ms: float, now_ms: float, *, delta: bool
) -> bytes:
    """Encode the metrics. Sums count from ``start_ms`` on. Both times are milliseconds since 1970."""
    times = _nanoseconds(2, start_ms), _nanoseconds(3, now_ms)
    made = b"".join(_message(2, _metric(metric, times, delta)) for metric in metrics)
    of_resource = _message(1, _labels(1, resource)) + _message(2, made)
    return _message(1, of_resource)


def _metric(metric: Metric, times: tuple[bytes, bytes], delta: bool) -> bytes:
    value = _key(4, _FIXED64) + struct.pack("<d", metric.value) + _labels(7, metric.labels)
    if not metric.is_sum:
        return _text(1, metric.name) + _message(5, _message(1, times[1] + value))
    temporality = _key(2, _VARINT) + varint.unsigned(_DELTA if delta else _CUMULATIVE)
    is_monotonic = _key(3, _VARINT) + varint.unsigned(1)
    point = _message(1, times[0] + times[1] + value)
    return _text(1, metric.name) + _message(7, point + temporality + is_monotonic)


def _labels(number: int, labels: Mapping[str, str]) -> bytes:
    pairs = (_text(1, name) + _message(2, _text(1, value)) for name, value in labels.items())
    return b"".join(_message(number, pair) for pair in pairs)


def _nanoseconds(number: int, milliseconds: float) -> bytes:
    return _key(number, _FIXED64) + struct.pack("<Q", int(milliseconds * 1e6))


def _text(number: int, text: str) -> bytes:
    # A rack read from the environment may not be valid UTF-8.
    return _message(number, text.encode(errors="replace"))


def _message(number: int, data: bytes) -> bytes:
    return _key(number, _LENGTH) + varint.unsigned(len(data)) + data


def _key(number: int, wire_type: int) -> bytes:
    return varint.unsigned(number << 3 | wire_type)
