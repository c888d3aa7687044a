"""What the sender reports of requests and batches, and what it asks before it sends (KIP-693)."""

from __future__ import annotations

import math
from collections.abc import Collection, Container, Iterable

from kafka_sink.model import TopicPartition


class SendPolicy:
    """Hears of what the sender does, and decides which partitions get no requests for now.

    This one mutes nothing; the circuit breaker overrides it. The sender's thread calls it. Methods must not
    block or raise. Times are monotonic milliseconds.
    """

    # -- events: no call changes what happens to a batch --------------------------------------------

    def on_request(self, node_id: int, now_ms: float) -> None:
        """A Produce request goes to a broker. Calls for its batches follow."""

    def on_send(self, node_id: int, partition: TopicPartition, records: int, now_ms: float) -> None:
        """A batch of ``records`` rows goes to a broker."""

    def on_request_done(self, node_id: int, now_ms: float) -> None:
        """The oldest request to a broker has its response, or failed. Calls for its batches follow."""

    def on_complete(
        self, node_id: int, partition: TopicPartition, records: int, cause: Exception | None, now_ms: float
    ) -> None:
        """An attempt has ended. ``cause`` is None if the broker has the batch."""

    def on_unreachable(self, nodes: Collection[int], failing: Collection[int], now_ms: float) -> None:
        """``nodes``: all brokers that batches wait for and that are not connected. ``failing``: those of them
        whose last connection was refused or lost."""

    def on_connected(self, node_id: int, setup_ms: float, now_ms: float) -> None:
        """A connection is ready, ``setup_ms`` after its start: the broker has responded to its first
        request."""

    def on_throttled(self, node_id: int, now_ms: float, throttled_ms: float) -> None:
        """A broker delays its other requests for ``throttled_ms`` (throttle_time_ms of a response)."""

    def on_other_cluster(self, now_ms: float) -> None:
        """Another Kafka cluster responds at bootstrap.servers now. No row was sent to the former one."""

    def on_waiting(self, partitions: Iterable[TopicPartition]) -> None:
        """These partitions are not muted and have batches, but their brokers take no request now."""

    def on_probe(self, node_id: int, now_ms: float) -> None:
        """A request without rows goes to a broker."""

    def on_probe_done(self, node_id: int, cause: Exception | None, now_ms: float) -> None:
        """That request has its response, or failed with ``cause``."""

    # -- decisions ----------------------------------------------------------------------------------

    def muted(self, now_ms: float) -> Container[TopicPartition]:
        """Partitions that get no request now; false if there are none. Their batches wait and expire as
        usual."""
        return ()

    @property
    def muted_brokers(self) -> Collection[int]:
        """Muted brokers, as of the last call of ``muted``."""
        return ()

    def brokers_to_probe(self) -> Collection[int]:
        """Brokers that should get a request without rows now."""
        return ()

    def may_probe(self, partition: TopicPartition) -> bool:
        """Whether one batch of a muted partition may go now."""
        return False

    def next_change_ms(self, now_ms: float) -> float:
        """Milliseconds until time alone may change ``muted`` or ``may_probe``; else infinite."""
        return math.inf

    def explain(self, partition: TopicPartition) -> str | None:
        """Why a partition is muted, for messages; None if it is not. Any thread."""
        return None

    def close(self) -> None:
        """No calls follow."""
