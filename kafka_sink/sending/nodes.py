"""What the sender keeps of each broker: its figures, and whether it accepts requests (KIP-794)."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Iterable

from kafka_sink.counts import LATENCY_BOUNDS_MS, BrokerFigures


class _Node:
    __slots__ = (
        *("buckets", "failures", "latency_ms", "max_latency_ms", "requests"),
        *("sent_bytes", "sent_ms", "throttle_ms", "throttled_until_ms"),
    )

    def __init__(self) -> None:
        self.requests = self.failures = self.sent_bytes = 0
        self.latency_ms = self.max_latency_ms = self.throttle_ms = self.throttled_until_ms = 0.0
        self.buckets = [0] * (len(LATENCY_BOUNDS_MS) + 1)
        # When each request without a response was sent. Brokers respond in order.
        self.sent_ms: deque[float] = deque()


class NodeMetricsRecorder:
    """The sender's thread records, any thread reads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards the nodes
        self._nodes: defaultdict[int, _Node] = defaultdict(_Node)

    def sent(self, node_id: int, size: int, now_ms: float) -> None:
        with self._lock:
            node = self._nodes[node_id]
            node.requests += 1
            node.sent_bytes += size
            node.sent_ms.append(now_ms)

    def responded(self, node_id: int, now_ms: float) -> None:
        with self._lock:
            node = self._nodes[node_id]
            if node.sent_ms:
                latency_ms = max(0.0, now_ms - node.sent_ms.popleft())
                node.latency_ms += latency_ms
                node.max_latency_ms = max(node.max_latency_ms, latency_ms)
                node.buckets[bisect_left(LATENCY_BOUNDS_MS, latency_ms)] += 1

    def failed(self, node_id: int) -> None:
        with self._lock:
            node = self._nodes[node_id]
            node.failures += 1
            if node.sent_ms:
                node.sent_ms.popleft()

    def throttled(self, node_id: int, throttle_ms: float, now_ms: float) -> None:
        """The broker wants no requests for this long from now on. Time that overlaps counts once."""
        with self._lock:
            node = self._nodes[node_id]
            until_ms = now_ms + throttle_ms
            node.throttle_ms += max(0.0, until_ms - max(now_ms, node.throttled_until_ms))
            node.throttled_until_ms = max(node.throttled_until_ms, until_ms)

    def snapshot(self, now_ms: float) -> dict[int, BrokerFigures]:
        """By broker, without addresses."""
        with self._lock:
            return {
                node_id: BrokerFigures(
                    "",
                    node.requests,
                    node.failures,
                    len(node.sent_ms),
                    node.latency_ms,
                    node.max_latency_ms,
                    tuple(node.buckets),
                    node.throttle_ms,
                    max(0.0, now_ms - node.sent_ms[0]) if node.sent_ms else 0.0,
                    node.sent_bytes,
                )
                for node_id, node in self._nodes.items()
            }


# A batch that backs off after a failed attempt still waits for its broker, but is not ready for a while.
_GRACE_MS = 5_000.0


class NodeAvailability:
    """The sender calls ``observe`` at every pass. Any thread may read ``unavailable``.

    A ``timeout_ms`` of 0 switches it off. Times are monotonic milliseconds.
    """

    def __init__(self, timeout_ms: float) -> None:
        self.unavailable: frozenset[int] = frozenset()
        self._timeout_ms = timeout_ms
        # Per broker: when batches began to wait for it, and when they were last seen waiting.
        self._waits: dict[int, tuple[float, float]] = {}

    @property
    def is_watching(self) -> bool:
        """Whether batches have waited for a broker of late, so that ``observe`` may change something."""
        return bool(self._waits)

    def observe(self, waiting: Iterable[int], taking: Iterable[int], now_ms: float) -> None:
        """``waiting`` brokers have ready batches and accept no request now; ``taking`` ones accept them."""
        if self._timeout_ms <= 0:
            return
        for node in taking:
            self._waits.pop(node, None)
        for node in waiting:
            since, _ = self._waits.get(node, (now_ms, now_ms))
            self._waits[node] = (since, now_ms)
        for node, (_, last) in list(self._waits.items()):
            # No batch waits for it any more, so nothing would ever show that it is back.
            if now_ms - last > self._timeout_ms + _GRACE_MS:
                del self._waits[node]
        late = {node for node, (since, last) in self._waits.items() if last - since > self._timeout_ms}
        if late != self.unavailable:
            self.unavailable = frozenset(late)
