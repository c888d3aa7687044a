"""Tracks requests and batches in flight for the breaker's context. No I/O; the sender's thread calls it."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection

from kafka_sink.breaker.interface import ProducerStatusContext
from kafka_sink.breaker.states import Target
from kafka_sink.model import TopicPartition


class InFlightTracker:
    """Requests by broker, batches by partition. A broker responds to a connection's requests in their
    order."""

    def __init__(self) -> None:
        self._sent: dict[int, deque[float]] = {}
        self._requests: dict[int, int] = {}
        self._batches: dict[TopicPartition, int] = {}
        self._oldest: dict[int, float] = {}
        self._unreachable: dict[int, float] = {}
        self._failing: set[int] = set()
        self._setup_ms: dict[int, float] = {}
        self._probed_ms: dict[int, float] = {}
        self.context = ProducerStatusContext(
            in_flight_requests=self._requests,
            in_flight_batches=self._batches,
            oldest_request_ms=self._oldest,
            unreachable_since_ms=self._unreachable,
            failing_connections=self._failing,
            setup_ms=self._setup_ms,
            probed_ms=self._probed_ms,
        )

    def request_sent(self, node_id: int, now_ms: float) -> None:
        """A Produce request goes to a broker."""
        self._sent.setdefault(node_id, deque()).append(now_ms)
        self._requests[node_id] = self._requests.get(node_id, 0) + 1
        self._oldest.setdefault(node_id, now_ms)
        self._unreachable.pop(node_id, None)

    def request_done(self, node_id: int) -> float:
        """The oldest request to a broker has its response, or failed. Returns when it was sent, or when the
        broker's throttling ended."""
        sent = self._sent[node_id]
        at = sent.popleft()
        if sent:
            self._requests[node_id] -= 1
            self._oldest[node_id] = sent[0]
        else:
            del self._sent[node_id], self._requests[node_id], self._oldest[node_id]
        return at

    def throttled(self, node_id: int, until_ms: float) -> None:
        """The broker does not read from this connection until ``until_ms`` (KIP-219). Requests sent before
        then count from ``until_ms``."""
        sent = self._sent.get(node_id)
        if sent:
            self._sent[node_id] = deque(max(at, until_ms) for at in sent)
            self._oldest[node_id] = self._sent[node_id][0]

    def batch_sent(self, partition: TopicPartition) -> None:
        """A batch goes out in a request."""
        self._batches[partition] = self._batches.get(partition, 0) + 1

    def batch_done(self, partition: TopicPartition) -> None:
        """An attempt of a batch has ended."""
        left = self._batches.get(partition, 1) - 1
        if left:
            self._batches[partition] = left
        else:
            self._batches.pop(partition, None)

    def awaits_response(self, target: Target) -> bool:
        """Whether a broker owes a response, or one for a partition is outstanding."""
        return target in self._requests or target in self._batches

    def connected(self, node_id: int, setup_ms: float) -> None:
        """A connection is ready, ``setup_ms`` after its start."""
        self._setup_ms[node_id] = setup_ms
        self.probed(node_id)

    def probed(self, node_id: int) -> None:
        """A broker has responded to a request without rows, at the time of the context."""
        self._probed_ms[node_id] = self.context.now

    def unreachable(self, nodes: Collection[int], failing: Collection[int], now_ms: float) -> None:
        """``nodes``: brokers that batches wait for and that are not connected. ``failing``: those whose last
        connection was refused or lost."""
        self._failing.clear()
        self._failing.update(failing)
        for node in [one for one in self._unreachable if one not in nodes]:
            del self._unreachable[node]
        for node in nodes:
            self._unreachable.setdefault(node, now_ms)
