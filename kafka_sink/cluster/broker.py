"""All that a producer knows of one broker: its requests in flight, latency, availability and slow start.

The sender's thread writes it, but for the counts, which the task's thread replaces between two tasks, while
nothing is in flight (``Sender.begin``). Other threads may read the counts, each number by itself. Times are
monotonic milliseconds.
"""

from __future__ import annotations

import logging
import math
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kafka_sink import kafka_errors
from kafka_sink.counts import LATENCY_BOUNDS_MS, BrokerMetrics, LatencyWindow

if TYPE_CHECKING:
    from kafka_sink.engine.batch import ProducerBatch
    from kafka_sink.model import Node
    from kafka_sink.network.broker_connection import BrokerConnection
    from kafka_sink.network.broker_protocol import Request
    from kafka_sink.network.client import NetworkClient

_log = logging.getLogger(__name__)

# The first responses of a broker say little: it may have had to create files and connections of its own.
FEW_RESPONSES = 5
# The weight of the newest response in the mean. The mean rises slowly: it takes some tens of responses to
# follow a broker that has become slow. It falls fast: the slow first responses of a broker are soon
# forgotten.
_WEIGHT_ABOVE, _WEIGHT_BELOW = 0.1, 0.5


@dataclass(slots=True, eq=False)
class SentRequest:
    """A Produce request with its batches. ``names`` maps the ids of topics that were sent by id (from v13
    on). ``new_rows`` are in a request for the first time."""

    request: Request
    batches: list[ProducerBatch]
    names: dict[bytes, str]
    new_rows: int = 0


class BrokerCounts:
    """Of one task's Produce requests to one broker."""

    __slots__ = (
        *("buckets", "failures", "latency_ms", "max_latency_ms", "requests", "sent_bytes"),
        *("throttle_ms", "throttled_until_ms"),
    )

    def __init__(self) -> None:
        self.requests = self.failures = self.sent_bytes = 0
        self.latency_ms = self.max_latency_ms = 0.0
        # Throttling up to ``throttled_until_ms``; time that overlaps counts once.
        self.throttle_ms = self.throttled_until_ms = 0.0
        self.buckets = [0] * (len(LATENCY_BOUNDS_MS) + 1)


class Broker:
    """``node_id`` is below zero for a bootstrap address, which gets no Produce requests."""

    __slots__ = (
        *("_network", "awaits_probe", "connection", "counts", "first_ms", "silence_from_ms", "id"),
        *("is_failing", "is_silent", "is_to_be_asked", "last_response_ms", "latencies"),
        *("node", "probed_ms", "request_sent_ms", "responses", "rotation", "rows"),
        *("sent", "setup_ms", "slow_starts", "suspect_since_ms", "unreachable_since_ms", "usual_ms"),
        *("waits_since_ms", "waits_until_ms"),
    )

    def __init__(self, node_id: int, network: NetworkClient) -> None:
        self.id = node_id
        self._network = network
        # None while its address is unknown. See ``ClusterMetadata.connect_brokers``.
        self.connection: BrokerConnection | None = network.connections.get(node_id)
        # As last listed by the cluster, which omits a broker that is gone for long.
        self.node: Node | None = None
        # Produce requests without a response, oldest first. Brokers respond in order.
        self.sent: deque[SentRequest] = deque()
        # When the request was sent whose response is being handled, or when the throttling ended that delayed
        # it (KIP-219).
        self.request_sent_ms = 0.0
        # When it last responded to a Produce request.
        self.last_response_ms = -math.inf
        # Replaced when a task begins.
        self.counts = BrokerCounts()
        # Of all requests since the last push of metrics (KIP-714).
        self.latencies = LatencyWindow()
        # Where a drain begins among the partitions, so that none starves.
        self.rotation = 0
        # By topic, how little goes to partitions that have taken no batch yet.
        self.slow_starts: dict[str, SlowStart] = {}
        # Since when batches have waited for it to accept a request, and when they last did (KIP-794).
        self.waits_since_ms: float | None = None
        self.waits_until_ms = 0.0
        # Since when batches have waited for a connection, and whether the last one was refused or lost.
        self.unreachable_since_ms: float | None = None
        self.is_failing = False
        # How long its last connection took from its start to its first response.
        self.setup_ms: float | None = None
        # When it last responded to a request without rows, or to the first request of a connection.
        self.probed_ms: float | None = None
        # Rows of requests that have ended, over the producer's life; rows that are sent again count once.
        self.rows = 0
        # The mean latency and the first one; None before the first response. ``responses`` counts the first
        # few, which say little.
        self.usual_ms: float | None = None
        self.first_ms: float | None = None
        self.responses = 0
        # What the breaker has found: since when a silence is suspicious, and whether it is certain.
        self.suspect_since_ms: float | None = None
        self.is_silent = False
        # Whether a request without rows is wanted of it, and whether one is under way.
        self.is_to_be_asked = self.awaits_probe = False
        # When a mute for silence last ended: from then on at the earliest a silence counts.
        self.silence_from_ms = -math.inf

    # -- its connection -----------------------------------------------------------------------------

    def accepts(self, now_ms: float) -> bool:
        """Whether it is connected, with room in the in-flight window and no throttling (KIP-219). Starts to
        connect where it is not."""
        connection = self.connection
        if connection is None:
            return False
        if connection.accepts(now_ms):
            return True
        self._network.is_ready(connection, now_ms)
        return False

    @property
    def is_connected(self) -> bool:
        connection = self.connection
        return connection is not None and connection.is_ready

    @property
    def is_gone(self) -> bool:
        """Whether the last attempt to connect failed, or the address is unknown."""
        connection = self.connection
        return connection is None or connection.is_gone

    def delay_ms(self, now_ms: float) -> float:
        """Until ``accepts`` may change by time alone; infinite where an event must come first."""
        connection = self.connection
        return math.inf if connection is None else connection.ready_delay_ms(now_ms)

    # -- Produce requests ---------------------------------------------------------------------------

    def send(self, sent: SentRequest, now_ms: float) -> None:
        """Send a request with batches. Raises ValueError, and changes nothing, without a ready connection."""
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

    def responded(self, now_ms: float, prompt_ms: float) -> tuple[SentRequest, bool]:
        """The oldest request has its response; with acks=0, it is written to the socket. Return it, and
        whether that concerns the breaker.

        A latency beyond ``prompt_ms`` may not be usual: that is the breaker's to judge. And by a broker's
        first response, other brokers' silence is judged.
        """
        sent = self._ended()
        self.last_response_ms = now_ms
        if now_ms - self.request_sent_ms <= prompt_ms:
            self.observe(max(0.0, now_ms - self.request_sent_ms))
        latency_ms = max(0.0, now_ms - sent.request.sent_ms)
        counts = self.counts
        counts.latency_ms += latency_ms
        counts.max_latency_ms = max(counts.max_latency_ms, latency_ms)
        counts.buckets[bisect_left(LATENCY_BOUNDS_MS, latency_ms)] += 1
        since_ms = max(now_ms, counts.throttled_until_ms)
        counts.throttled_until_ms = since_ms
        if self.connection is not None:
            counts.throttled_until_ms = max(since_ms, self.connection.throttled_until_ms)
        counts.throttle_ms += counts.throttled_until_ms - since_ms
        return sent, now_ms - self.request_sent_ms > prompt_ms or self.responses == 1

    def failed(self) -> SentRequest:
        """The oldest request will get no response."""
        self.counts.failures += 1
        return self._ended()

    def _ended(self) -> SentRequest:
        self.request_sent_ms = self.oldest_request_ms or 0.0
        sent = self.sent.popleft()
        self.rows += sent.new_rows
        return sent

    def observe(self, latency_ms: float) -> None:
        """Include the latency of a response in the usual one."""
        mean = self.usual_ms
        if mean is None:
            self.usual_ms = self.first_ms = latency_ms
        else:
            weight = _WEIGHT_ABOVE if latency_ms > mean else _WEIGHT_BELOW
            self.usual_ms = mean + weight * (latency_ms - mean)
        self.responses = min(self.responses + 1, FEW_RESPONSES)

    @property
    def oldest_request_ms(self) -> float | None:
        """When bytes of the oldest request without a response were last written. A request that a throttling
        broker delays counts from the end of the throttling, which may lie ahead."""
        if not self.sent:
            return None
        written_ms, connection = self.sent[0].request.written_ms, self.connection
        return written_ms if connection is None else max(written_ms, connection.throttled_until_ms)

    def batches_in_flight(self) -> Iterator[ProducerBatch]:
        for sent in self.sent:
            yield from sent.batches

    # -- slow start: see SlowStart --------------------------------------------------------------------

    def limited(
        self, may_send: Callable[[ProducerBatch], bool], now_ms: float
    ) -> Callable[[ProducerBatch], bool]:
        """``may_send`` with this broker's limits, for filling one request."""
        starts = self.slow_starts.items()
        left = {topic: 0 if start.pause_ms(now_ms) else start.limit for topic, start in starts}
        for batch in self.batches_in_flight():
            if batch.partition.topic in left and not batch.home.has_taken:
                left[batch.partition.topic] -= 1

        def may_send_within_limits(batch: ProducerBatch) -> bool:
            topic = batch.partition.topic
            if topic not in left or batch.home.has_taken:
                return may_send(batch)
            if left[topic] <= 0 or not may_send(batch):
                return False
            left[topic] -= 1
            return True

        return may_send_within_limits

    def pause_ms(self, now_ms: float) -> float:
        """Until a pause ends; infinite if only a response can change a limit."""
        pauses = (start.pause_ms(now_ms) for start in self.slow_starts.values())
        return min(filter(None, pauses), default=math.inf)

    def took(self, batches: Iterable[ProducerBatch]) -> None:
        """The broker has these batches."""
        for batch in batches:
            topic = batch.partition.topic
            start = self.slow_starts.get(topic)
            if start is not None:
                start.limit += 1
                if start.limit >= _UNLIMITED:
                    del self.slow_starts[topic]

    def refused(self, batch: ProducerBatch, error_code: int, now_ms: float) -> None:
        """It has responded with an error for the batch."""
        if error_code not in _NOT_READY or batch.home.has_taken:
            return
        self.slow_starts.setdefault(batch.partition.topic, SlowStart()).refused(now_ms)

    # -- a task's counts ----------------------------------------------------------------------------

    def metrics(self, now_ms: float) -> BrokerMetrics:
        """Of the present task, without an address. Any thread."""
        counts = self.counts
        try:
            oldest_ms = max(0.0, now_ms - self.sent[0].request.sent_ms)
        except IndexError:  # the sender's thread may have taken it just now
            oldest_ms = 0.0
        return BrokerMetrics(
            "",
            counts.requests,
            counts.failures,
            len(self.sent),
            counts.latency_ms,
            counts.max_latency_ms,
            tuple(counts.buckets),
            counts.throttle_ms,
            oldest_ms,
            counts.sent_bytes,
            self.last_response_ms,
        )


def note_waits(brokers: Iterable[Broker], waiting: Collection[Broker], now_ms: float) -> None:
    """``waiting`` brokers have ready batches and are not connected: none of the others is unreachable."""
    for broker in brokers:
        if broker not in waiting:
            broker.unreachable_since_ms = None
            broker.is_failing = False
    for broker in waiting:
        if broker.unreachable_since_ms is None:
            broker.unreachable_since_ms = now_ms
        broker.is_failing = broker.is_gone


# A batch that backs off after a failed attempt still waits for its broker, but is not ready for a while.
_GRACE_MS = 5_000.0


def unavailable(
    brokers: Iterable[Broker],
    waiting: Iterable[Broker],
    accepting: Iterable[Broker],
    timeout_ms: float,
    now_ms: float,
) -> frozenset[int]:
    """The ids of brokers that keyless rows are to avoid, as batches have waited for longer (KIP-794).

    ``waiting`` brokers have ready batches and accept no request now; ``accepting`` ones accept them.
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
        # No batch waits for it any more, so nothing would ever show that it is back.
        if now_ms - broker.waits_until_ms > timeout_ms + _GRACE_MS:
            broker.waits_since_ms = None
        elif broker.waits_until_ms - since_ms > timeout_ms:
            late.append(broker.id)
    return frozenset(late)


# -- slow start: little is sent to partitions that their broker does not serve yet --------------------------
#
# A broker announces the partitions of a new topic before it has created their logs, which takes seconds for a
# thousand. Until then it rejects every batch with NOT_LEADER_OR_FOLLOWER or UNKNOWN_TOPIC_OR_PARTITION, after
# it has received all of it. New metadata does not help: it names the same broker. So after such an error few
# batches are sent to partitions that have not taken one yet: one at a time, and more with each that is taken,
# as in TCP's slow start. Partitions that have taken a batch are not affected, nor is another topic or broker.


_NOT_READY = frozenset({kafka_errors.NOT_LEADER_OR_FOLLOWER, kafka_errors.UNKNOWN_TOPIC_OR_PARTITION})
# Errors within this time are one burst, which counts once. While one batch is sent at a time, it is the wait
# after an error.
_BURST_MS = 50.0
# A limit that has grown to this limits nothing.
_UNLIMITED = 256


@dataclass(slots=True)
class SlowStart:
    """Of one topic at one broker. ``limit``: how many batches may be in flight to partitions that took none.

    A burst of errors lasts until ``burst_ends_ms``.
    """

    limit: int = 1
    burst_ends_ms: float = -math.inf

    def refused(self, now_ms: float) -> None:
        if now_ms >= self.burst_ends_ms:
            self.limit = max(1, self.limit // 2)
            self.burst_ends_ms = now_ms + _BURST_MS

    def pause_ms(self, now_ms: float) -> float:
        """Until a batch may be sent."""
        return max(0.0, self.burst_ends_ms - now_ms) if self.limit == 1 else 0.0
