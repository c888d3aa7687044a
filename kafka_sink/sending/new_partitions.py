"""Sends little to partitions that their broker does not serve yet.

A broker announces the partitions of a new topic before it has created their logs, which takes seconds for a
thousand. Until then it rejects every batch with NOT_LEADER_OR_FOLLOWER or UNKNOWN_TOPIC_OR_PARTITION, after
it has received all of it. New metadata does not help: it names the same broker. So after such an error few
batches are sent to partitions that have not taken one yet: one at a time, and more with each that is taken,
as in TCP's slow start. Partitions that have taken a batch are not affected, nor is another topic or broker.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from kafka_sink import kafka_errors
from kafka_sink.accumulator.producer_batch import ProducerBatch
from kafka_sink.model import TopicPartition

_NOT_READY = frozenset({kafka_errors.NOT_LEADER_OR_FOLLOWER, kafka_errors.UNKNOWN_TOPIC_OR_PARTITION})
# The wait after such an error while one batch is sent at a time. It doubles up to the second of these.
_PAUSE_MS, _MAX_PAUSE_MS = 10.0, 80.0
# A limit that has grown to this limits nothing.
_UNLIMITED = 256


@dataclass(slots=True)
class _Limit:
    """Of one topic at one broker. ``batches``: how many may be in flight to partitions that took none yet.

    None is sent before ``not_before_ms``. Errors before ``counted_ms`` belong to one burst, which counts
    once.
    """

    batches: int = 1
    in_flight: set[ProducerBatch] = field(default_factory=set)
    pause_ms: float = _PAUSE_MS
    not_before_ms: float = 0.0
    counted_ms: float = 0.0


class NewPartitions:
    """Used by the sender's thread. Times are monotonic milliseconds."""

    def __init__(self) -> None:
        self._limits: dict[tuple[int, str], _Limit] = {}
        # Partitions that have taken a batch from this producer.
        self._served: set[TopicPartition] = set()

    def limited(
        self, node_id: int, now_ms: float, may_send: Callable[[ProducerBatch], bool]
    ) -> Callable[[ProducerBatch], bool]:
        """``may_send`` with the limits of this broker, for filling one request."""
        if not self._limits:
            return may_send
        chosen: dict[str, int] = {}

        def may_send_within_limits(batch: ProducerBatch) -> bool:
            topic = batch.partition.topic
            limit = self._limits.get((node_id, topic))
            if limit is None or batch.partition in self._served:
                return may_send(batch)
            count = chosen.get(topic, 0)
            if now_ms < limit.not_before_ms or len(limit.in_flight) + count >= limit.batches:
                return False
            if not may_send(batch):
                return False
            chosen[topic] = count + 1
            return True

        return may_send_within_limits

    def next_change_ms(self, now_ms: float) -> float:
        """Until a pause ends; infinite if only a response can change a limit."""
        pauses = (limit.not_before_ms - now_ms for limit in self._limits.values())
        return min((pause for pause in pauses if pause > 0), default=float("inf"))

    def sent(self, node_id: int, batches: Iterable[ProducerBatch]) -> None:
        for batch in batches if self._limits else ():
            limit = self._limits.get((node_id, batch.partition.topic))
            if limit is not None and batch.partition not in self._served:
                limit.in_flight.add(batch)

    def taken(self, node_id: int, batches: Sequence[ProducerBatch]) -> None:
        self._served.update([batch.partition for batch in batches])
        for batch in batches if self._limits else ():
            self._raise_limit((node_id, batch.partition.topic), batch)

    def _raise_limit(self, key: tuple[int, str], batch: ProducerBatch) -> None:
        limit = self._limits.get(key)
        if limit is None:
            return
        limit.in_flight.discard(batch)
        limit.batches += 1
        limit.pause_ms, limit.not_before_ms = _PAUSE_MS, 0.0
        if limit.batches >= _UNLIMITED:
            del self._limits[key]

    def failed(self, node_id: int, batch: ProducerBatch, error_code: int, now_ms: float) -> None:
        """The attempt has failed. ``error_code`` is 0 if the broker did not respond for the batch."""
        key = (node_id, batch.partition.topic)
        limit = self._limits.get(key)
        if limit is not None:
            limit.in_flight.discard(batch)
        if error_code not in _NOT_READY or batch.partition in self._served:
            return
        if limit is None:
            limit = self._limits[key] = _Limit()
        elif now_ms < limit.counted_ms:
            return
        limit.batches = max(1, limit.batches // 2)
        limit.counted_ms = now_ms + limit.pause_ms
        if limit.batches == 1:
            limit.not_before_ms = limit.counted_ms
            limit.pause_ms = min(2 * limit.pause_ms, _MAX_PAUSE_MS)
