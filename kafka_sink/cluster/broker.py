"""All that a producer knows about one broker: its requests in flight, latency, availability and slow start.

Only the sender's thread writes it, except for the counts: the task's thread replaces them between two tasks,
while no request is in flight (``Sender.begin``). Other threads may read the counts, but two numbers may then
belong to different moments. Times are monotonic milliseconds.
"""

from __future__ import annotations

import logging
import math
from bisect import bisect_left
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace

from kafka_sink.cluster.partition import ProducerBatch
from kafka_sink.cluster.slow_start import SlowStarts
from kafka_sink.counts import LATENCY_BOUNDS_MS, LatencyWindow
from kafka_sink.model import Node
from kafka_sink.network.broker_connection import BrokerConnection
from kafka_sink.network.broker_protocol import Request
from kafka_sink.network.client import NetworkClient

_log = logging.getLogger(__name__)

# A broker's first responses are no measure of its usual latency: it may have had to create files and
# connections first.
FEW_RESPONSES = 5
# The weight of the newest latency in the mean. The mean rises slowly, within some tens of responses, so that
# a broker that becomes slow is noticed. It falls fast, so that the slow first responses are soon forgotten.
_WEIGHT_ABOVE, _WEIGHT_BELOW = 0.1, 0.5


@dataclass(slots=True, eq=False)
class SentRequest:
    """A Produce request with its batches. ``names`` maps topic ids to names, for topics that were sent by id
    (from version 13 on). ``new_rows`` is the number of rows that were in no request before."""

    request: Request
    batches: list[ProducerBatch]
    names: dict[bytes, str]
    new_rows: int = 0


@dataclass(slots=True)
class BrokerCounts:
    """Counts of one task's Produce requests to one broker. Times are in milliseconds.

    ``sent_bytes`` counts record batches each time they are sent. ``latency_buckets`` has the number of
    responses within each of LATENCY_BOUNDS_MS, not cumulative. ``throttle_ms`` is the time for which the
    broker has throttled the task, up to ``throttled_until_ms``. Periods that overlap count once.

    Only ``Broker.metrics`` sets the last three: the requests without a response, the age of the oldest one (0
    if there is none), and the time of the last response.
    """

    requests: int = 0
    failures: int = 0
    sent_bytes: int = 0
    latency_ms: float = 0.0
    throttle_ms: float = 0.0
    throttled_until_ms: float = 0.0
    latency_buckets: list[int] = field(default_factory=lambda: [0] * (len(LATENCY_BOUNDS_MS) + 1))
    in_flight: int = 0
    oldest_ms: float = 0.0
    answered_ms: float = -math.inf


class Broker:
    """One broker. A bootstrap address has a negative ``node_id`` and gets no Produce requests."""

    def __init__(self, node_id: int, network: NetworkClient) -> None:
        self.id = node_id
        self._network = network
        # None while the broker's address is unknown. See ``ProducerMetadata.connect_brokers``.
        self.connection: BrokerConnection | None = network.connections.get(node_id)
        # The broker as last listed. The cluster drops a broker from its list some time after it has gone.
        self.node: Node | None = None
        # Produce requests without a response, oldest first. Brokers respond in order.
        self.sent: deque[SentRequest] = deque()
        # The response that is being handled belongs to a request that was sent at this time. If throttling
        # delayed the request (KIP-219), this is when the throttling ended.
        self.request_sent_ms = 0.0
        # When the broker last responded to a Produce request.
        self.last_response_ms = -math.inf
        # Replaced when a task begins.
        self.counts = BrokerCounts()
        # The latencies of all requests since the last push of metrics (KIP-714).
        self.latencies = LatencyWindow()
        # The partition at which the next drain begins. It rotates, so that no partition starves.
        self.rotation = 0
        self.slow_starts = SlowStarts()
        # Since when batches have waited for the broker to accept a request, and when they last waited
        # (KIP-794).
        self.waits_since_ms: float | None = None
        self.waits_until_ms = 0.0
        # Since when batches have waited for a connection, and whether the last connection was refused or
        # lost.
        self.unreachable_since_ms: float | None = None
        self.is_failing = False
        # How long the last connection took from its start to its first response.
        self.setup_ms: float | None = None
        # When the broker last responded to a request without rows, or to a connection's first request.
        self.probed_ms: float | None = None
        # The mean latency, the first and the latest one; None before the first response. ``responses`` counts
        # responses up to FEW_RESPONSES.
        self.usual_ms: float | None = None
        self.first_ms: float | None = None
        self.latest_ms: float | None = None
        self.responses = 0
        # Set by the breaker class: since when the broker's silence has been suspicious, and whether it is
        # certain.
        self.suspect_since_ms: float | None = None
        self.is_silent = False
        # Whether the broker should get a request without rows, and whether such a request is in flight.
        self.is_to_be_asked = self.awaits_probe = False
        # When a mute for silence last ended. Silence before that time does not count again.
        self.silence_from_ms = -math.inf

    def accepts(self, now_ms: float) -> bool:
        """Whether the broker is connected, has room in its in-flight window and does not throttle this client
        (KIP-219). Starts to connect if there is no connection."""
        connection = self.connection
        if connection is None:
            return False
        if connection.accepts(now_ms):
            return True
        self._network.is_ready(connection, now_ms)
        return False

    @property
    def is_connected(self) -> bool:
        return self.connection is not None and self.connection.is_ready

    @property
    def is_gone(self) -> bool:
        """Whether the last attempt to connect failed, or the address is unknown."""
        return self.connection is None or self.connection.is_gone

    def delay_ms(self, now_ms: float) -> float:
        """Milliseconds until ``accepts`` may change with time alone; infinity if only an event changes it."""
        return math.inf if self.connection is None else self.connection.ready_delay_ms(now_ms)

    def send(self, sent: SentRequest, now_ms: float) -> None:
        """Send a request with batches. Raises ValueError and changes nothing if no connection is ready."""
        connection = self.connection
        if connection is None:
            raise ValueError(f"the address of broker {self.id} is unknown")
        self._network.send(connection, sent.request, now_ms)
        self.sent.append(sent)
        self.unreachable_since_ms = None
        counts = self.counts
        counts.requests += 1
        size = sum([batch.buffer.size for batch in sent.batches])
        counts.sent_bytes += size
        _log.debug("broker %d: request with %d batch(es) of %d bytes", self.id, len(sent.batches), size)

    def on_response(self, now_ms: float) -> SentRequest:
        """Record the response to the oldest request or, with acks=0, that it was written to the socket.
        Return the request."""
        sent = self._ended()
        self.last_response_ms = now_ms
        latency_ms = max(0.0, now_ms - sent.request.sent_ms)
        counts = self.counts
        counts.latency_ms += latency_ms
        counts.latency_buckets[bisect_left(LATENCY_BOUNDS_MS, latency_ms)] += 1
        since_ms = max(now_ms, counts.throttled_until_ms)
        counts.throttled_until_ms = since_ms
        if self.connection is not None:
            counts.throttled_until_ms = max(since_ms, self.connection.throttled_until_ms)
        counts.throttle_ms += counts.throttled_until_ms - since_ms
        return sent

    def on_failure(self) -> SentRequest:
        """Record that the oldest request will get no response, and return it."""
        self.counts.failures += 1
        return self._ended()

    def _ended(self) -> SentRequest:
        self.request_sent_ms = self.oldest_request_ms or 0.0
        return self.sent.popleft()

    def observe(self, latency_ms: float) -> None:
        """Include the latency of a response in the usual latency."""
        mean, self.latest_ms = self.usual_ms, latency_ms
        if mean is None:
            self.usual_ms = self.first_ms = latency_ms
        else:
            weight = _WEIGHT_ABOVE if latency_ms > mean else _WEIGHT_BELOW
            self.usual_ms = mean + weight * (latency_ms - mean)
        self.responses = min(self.responses + 1, FEW_RESPONSES)

    @property
    def expected_ms(self) -> float | None:
        """How long a response is expected to take: as long as usual, or as the latest one if that was slower.
        The mean alone follows too slowly if responses are rare. None before the first response."""
        return None if self.usual_ms is None else max(self.usual_ms, self.latest_ms or 0.0)

    @property
    def oldest_request_ms(self) -> float | None:
        """When bytes of the oldest request without a response were last written. If throttling delays the
        request, this is the end of the throttling, which may be in the future."""
        if not self.sent:
            return None
        written_ms, connection = self.sent[0].request.written_ms, self.connection
        return written_ms if connection is None else max(written_ms, connection.throttled_until_ms)

    def batches_in_flight(self) -> Iterator[ProducerBatch]:
        for sent in self.sent:
            yield from sent.batches

    def metrics(self, now_ms: float) -> BrokerCounts:
        """A copy of the current task's counts. Any thread may call it."""
        try:
            oldest_ms = max(0.0, now_ms - self.sent[0].request.sent_ms)
        except IndexError:  # the sender's thread may have removed the request just now
            oldest_ms = 0.0
        return replace(
            self.counts,
            latency_buckets=[*self.counts.latency_buckets],
            in_flight=len(self.sent),
            oldest_ms=oldest_ms,
            answered_ms=self.last_response_ms,
        )


def update_unreachable(brokers: Iterable[Broker], waiting: Collection[Broker], now_ms: float) -> None:
    """Record since when brokers cannot be reached. The ``waiting`` brokers have ready batches and are not
    connected; no other broker counts as unreachable."""
    for broker in brokers:
        is_waiting = broker in waiting
        broker.is_failing = is_waiting and broker.is_gone
        if not is_waiting:
            broker.unreachable_since_ms = None
        elif broker.unreachable_since_ms is None:
            broker.unreachable_since_ms = now_ms


# A batch that backs off after a failed attempt still waits for its broker although it is not ready.
_GRACE_MS = 5_000.0


def unavailable(
    brokers: Iterable[Broker],
    waiting: Iterable[Broker],
    accepting: Iterable[Broker],
    timeout_ms: float,
    now_ms: float,
) -> frozenset[int]:
    """The ids of brokers for which batches have waited longer than ``timeout_ms``, so that keyless rows
    avoid them (KIP-794).

    The ``waiting`` brokers have ready batches and accept no request now. The ``accepting`` brokers have ready
    batches and accept them.
    """
    for broker in accepting:
        broker.waits_since_ms = None
    for broker in waiting:
        if broker.waits_since_ms is None:
            broker.waits_since_ms = now_ms
        broker.waits_until_ms = now_ms
    late = []
    for broker in brokers:
        since_ms = broker.waits_since_ms
        if since_ms is None:
            continue
        # No batch waits for the broker any longer, so no event would ever show that it is back.
        if now_ms - broker.waits_until_ms > timeout_ms + _GRACE_MS:
            broker.waits_since_ms = None
        elif broker.waits_until_ms - since_ms > timeout_ms:
            late.append(broker.id)
    return frozenset(late)
