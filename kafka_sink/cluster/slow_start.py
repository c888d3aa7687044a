"""Slow start: few batches are sent to partitions that their broker does not serve yet.

A broker announces the partitions of a new topic before it has created their logs, which takes seconds for a
thousand partitions. Until then it rejects every batch with NOT_LEADER_OR_FOLLOWER or
UNKNOWN_TOPIC_OR_PARTITION, after it has received the whole batch. New metadata does not help, because it
contains the same leader. So after such an error only one batch at a time is sent to those partitions of the
topic that have not taken a batch yet. With each batch that the broker takes, one more may be in flight, as in
TCP's slow start. Partitions that have taken a batch are not affected, and neither are other topics.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from kafka_sink.cluster.partition import ProducerBatch
from kafka_sink.kafka_errors import NOT_LEADER_OR_FOLLOWER, UNKNOWN_TOPIC_OR_PARTITION

_NOT_READY = frozenset({NOT_LEADER_OR_FOLLOWER, UNKNOWN_TOPIC_OR_PARTITION})
# Errors within this time are one burst, which counts once. While one batch is sent at a time, this is also
# the wait after an error.
_BURST_MS = 50.0
# A limit that has grown to this limits nothing.
_UNLIMITED = 256


@dataclass(slots=True)
class _SlowStart:
    """``limit`` is the number of batches that may be in flight to partitions that have taken none. A burst of
    errors lasts until ``burst_ends_ms``."""

    limit: int = 1
    burst_ends_ms: float = -math.inf

    def pause_ms(self, now_ms: float) -> float:
        """Milliseconds until a batch may be sent."""
        return max(0.0, self.burst_ends_ms - now_ms) if self.limit == 1 else 0.0


class SlowStarts:
    """The slow starts of one broker, by topic. It is False if no topic is limited."""

    __slots__ = ("_topics",)

    def __init__(self) -> None:
        self._topics: dict[str, _SlowStart] = {}

    def __bool__(self) -> bool:
        return bool(self._topics)

    def limited(
        self,
        may_send: Callable[[ProducerBatch], bool],
        in_flight: Iterable[ProducerBatch],
        now_ms: float,
    ) -> Callable[[ProducerBatch], bool]:
        """``may_send`` within the limits, for filling one request. ``in_flight`` are the broker's batches."""
        topics = self._topics.items()
        left = {topic: 0 if start.pause_ms(now_ms) else start.limit for topic, start in topics}
        for batch in in_flight:
            if batch.topic_partition.topic in left and not batch.queue.has_taken:
                left[batch.topic_partition.topic] -= 1

        def may_send_within_limits(batch: ProducerBatch) -> bool:
            topic = batch.topic_partition.topic
            if topic not in left or batch.queue.has_taken:
                return may_send(batch)
            if left[topic] <= 0 or not may_send(batch):
                return False
            left[topic] -= 1
            return True

        return may_send_within_limits

    def pause_ms(self, now_ms: float) -> float:
        """Milliseconds until a topic's pause ends; infinity if only a response can change a limit."""
        pauses = (start.pause_ms(now_ms) for start in self._topics.values())
        return min(filter(None, pauses), default=math.inf)

    def on_taken(self, batches: Iterable[ProducerBatch]) -> None:
        """Raise the limits, because the broker has taken these batches."""
        for batch in batches:
            topic = batch.topic_partition.topic
            start = self._topics.get(topic)
            if start is not None:
                start.limit += 1
                if start.limit >= _UNLIMITED:
                    del self._topics[topic]

    def on_refused(self, batch: ProducerBatch, error_code: int, now_ms: float) -> None:
        """Lower the limit if the broker's error for this batch shows that the partition is not ready."""
        if error_code not in _NOT_READY or batch.queue.has_taken:
            return
        start = self._topics.setdefault(batch.topic_partition.topic, _SlowStart())
        if now_ms >= start.burst_ends_ms:
            start.limit = max(1, start.limit // 2)
            start.burst_ends_ms = now_ms + _BURST_MS
