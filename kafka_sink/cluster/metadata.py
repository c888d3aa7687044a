"""What is known of topics and brokers, and what to ask next (KIP-526).

Pure: facts and the time come in, decisions go out. Times are monotonic milliseconds.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from kafka_sink.backoff import ExponentialBackoff
from kafka_sink.model import UNKNOWN_EPOCH, Node, PartitionInfo, TopicMetadata, TopicPartition

# A refresh about every ten seconds when many topics are cached, but never fewer than 20 topics each.
_REFRESH_PERIOD_S = 10
_LEAST_FETCH_SIZE = 20
_NON_URGENT_SHARE = 0.5
# No retry mends these: the name is invalid, or the principal may not see the topic.
_FINAL_ERRORS = frozenset({17, 29})


@dataclass(frozen=True, slots=True)
class MetadataUpdate:
    """One Metadata answer; ``errors`` are error codes of topics that came without metadata."""

    nodes: tuple[Node, ...]
    topics: tuple[TopicMetadata, ...]
    errors: Mapping[str, int] = field(default_factory=dict)
    cluster_id: str | None = None


@dataclass(slots=True)
class _Cached:
    metadata: TopicMetadata
    refreshed_ms: float
    used_ms: float
    # Ids this topic had before; a late answer with one of them must not resurrect the old topic.
    former_ids: frozenset[bytes] = frozenset()


class MetadataCache:
    """Topics with their age and last use. Not thread-safe: the caller brings the lock."""

    def __init__(
        self,
        *,
        max_age_ms: float,
        idle_ms: float,
        retry_backoff_ms: float,
        retry_backoff_max_ms: float,
        random: Callable[[], float],
    ) -> None:
        self.version = 0
        self._max_age_ms = max_age_ms
        self._idle_ms = idle_ms
        self._backoff_ms = retry_backoff_ms
        self._backoff = ExponentialBackoff(retry_backoff_ms, retry_backoff_max_ms, random)
        self._topics: dict[str, _Cached] = {}
        self._nodes: dict[int, Node] = {}
        self._urgent: dict[str, float] = {}  # topic -> last use; no metadata, or told to be stale
        self._errors: dict[str, int] = {}
        self._failures = 0
        self._not_before_ms = 0.0
        self._in_flight = False
        # Nothing falls due by age or idleness before this; spares a walk over all topics per look.
        self._next_due_ms = math.inf

    # -- what is known ----------------------------------------------------------------------------

    def topic(self, name: str) -> TopicMetadata | None:
        """A topic's metadata, however old."""
        cached = self._topics.get(name)
        return None if cached is None else cached.metadata

    def topic_error(self, name: str) -> int | None:
        """The last error code of a topic without metadata."""
        return self._errors.get(name)

    def leader(self, partition: TopicPartition) -> PartitionInfo | None:
        """The partition as last heard of; None for an unknown topic or partition."""
        cached = self._topics.get(partition.topic)
        if cached is None or partition.partition >= len(cached.metadata.partitions):
            return None
        return cached.metadata.partitions[partition.partition]

    def nodes(self) -> Mapping[int, Node]:
        """Brokers by id."""
        return self._nodes

    # -- facts ------------------------------------------------------------------------------------

    def note_use(self, topics: Iterable[str], now_ms: float) -> None:
        """Rows are written to these topics: known ones stay cached, unknown ones become urgent."""
        for name in topics:
            cached = self._topics.get(name)
            if cached is not None:
                cached.used_ms = now_ms
            elif self._errors.get(name) not in _FINAL_ERRORS:
                self._urgent[name] = now_ms

    def mark_stale(self, topic: str, now_ms: float) -> None:
        """An answer says that the metadata is old (NOT_LEADER_OR_FOLLOWER and its like)."""
        if topic not in self._urgent:
            self._urgent[topic] = now_ms
            # Without a newer leader at hand the same answer would come again at once (franz-go #1413).
            cached = self._topics.get(topic)
            if cached is not None:
                self._not_before_ms = max(self._not_before_ms, cached.refreshed_ms + self._backoff_ms)

    def leader_hint(self, partition: TopicPartition, leader: int, epoch: int, nodes: Iterable[Node]) -> bool:
        """A Produce answer names the leader (KIP-951); True, and taken, where its epoch is newer."""
        cached = self._topics.get(partition.topic)
        known = self.leader(partition)
        if cached is None or known is None or epoch <= known.leader_epoch:
            return False
        self._nodes = {**self._nodes, **{node.id: node for node in nodes}}
        if leader not in self._nodes:
            return False
        partitions = list(cached.metadata.partitions)
        partitions[partition.partition] = PartitionInfo(*partition, leader, epoch)
        cached.metadata = TopicMetadata(partition.topic, cached.metadata.topic_id, tuple(partitions))
        self.version += 1
        return True

    # -- decisions --------------------------------------------------------------------------------

    def next_request(self, now_ms: float) -> tuple[str, ...] | None:
        """The topics to ask for now; None when nothing is due, a request is under way or backoff runs.

        All urgent topics go into one request, however many; topics past half their age fill it up to
        the target size, and make a request of their own once there are that many.
        """
        if self._in_flight or now_ms < self._not_before_ms:
            return None
        if now_ms >= self._next_due_ms:
            self._look_over(now_ms)
        for name, used_ms in list(self._urgent.items()):
            if now_ms - used_ms > self._idle_ms and name not in self._topics:
                del self._urgent[name]
        target = self._target_size()
        urgent = list(self._urgent)
        room = target - len(urgent)
        chosen: list[str] = []
        if room > 0:
            chosen = self._non_urgent(now_ms, room)
        if not urgent and len(chosen) < target:
            return None
        self._in_flight = True
        return (*urgent, *chosen)

    def next_request_delay_ms(self, now_ms: float) -> float:
        """Until next_request may have something; infinite while a request is under way."""
        if self._in_flight:
            return math.inf
        due = now_ms if self._urgent else self._next_due_ms
        return max(0.0, due - now_ms, self._not_before_ms - now_ms)

    def _target_size(self) -> int:
        per_second = len(self._topics) / (self._max_age_ms / 1000)
        return max(int(per_second * _REFRESH_PERIOD_S), _LEAST_FETCH_SIZE)

    def _non_urgent(self, now_ms: float, most: int) -> list[str]:
        """The oldest topics that have not been refreshed for half of max.age, at most ``most``."""
        threshold = now_ms - self._max_age_ms * _NON_URGENT_SHARE
        due = [
            (cached.refreshed_ms, name)
            for name, cached in self._topics.items()
            if cached.refreshed_ms <= threshold and name not in self._urgent
        ]
        return [name for _, name in heapq.nsmallest(most, due)]

    def _look_over(self, now_ms: float) -> None:
        """Drops idle topics, makes over-aged ones urgent, and finds when to look again."""
        idle = [name for name, cached in self._topics.items() if now_ms - cached.used_ms >= self._idle_ms]
        for name in idle:
            del self._topics[name]
            self._urgent.pop(name, None)
            self._errors.pop(name, None)
            self.version += 1
        refresh_times = []
        due = now_ms + self._idle_ms
        for name, cached in self._topics.items():
            due = min(due, cached.used_ms + self._idle_ms)
            if now_ms - cached.refreshed_ms >= self._max_age_ms:
                self._urgent.setdefault(name, cached.used_ms)
            else:
                refresh_times.append(cached.refreshed_ms)
        if refresh_times:
            due = min(due, min(refresh_times) + self._max_age_ms)
            target = self._target_size()
            if len(refresh_times) >= target:
                # When the target-th oldest passes half its age, a non-urgent request is due.
                nth = heapq.nsmallest(target, refresh_times)[-1]
                due = min(due, nth + self._max_age_ms * _NON_URGENT_SHARE)
        self._next_due_ms = max(due, now_ms + 1.0)

    # -- answers ----------------------------------------------------------------------------------

    def on_response(self, update: MetadataUpdate, requested: tuple[str, ...], now_ms: float) -> None:
        """Merges an answer. Topics with an error, or partitions without a leader, stay urgent."""
        self._in_flight = False
        if update.nodes:
            self._nodes = {node.id: node for node in update.nodes}
        unresolved = False
        for topic in update.topics:
            used = self._urgent.pop(topic.name, now_ms)
            self._errors.pop(topic.name, None)
            self._merge(topic, now_ms, used)
            if any(partition.leader < 0 for partition in topic.partitions):
                self._urgent[topic.name] = used
                unresolved = True
        for name, code in update.errors.items():
            self._errors[name] = code
            if code in _FINAL_ERRORS:
                self._urgent.pop(name, None)
            else:
                self._urgent.setdefault(name, now_ms)
                unresolved = True
        self.version += 1
        self._next_due_ms = now_ms
        if unresolved:
            self._back_off(now_ms)
        else:
            self._failures = 0

    def _merge(self, topic: TopicMetadata, now_ms: float, used_ms: float) -> None:
        cached = self._topics.get(topic.name)
        if cached is None:
            self._topics[topic.name] = _Cached(topic, now_ms, used_ms)
            return
        known = cached.metadata
        cached.refreshed_ms = now_ms
        if topic.topic_id is not None and known.topic_id is not None and topic.topic_id != known.topic_id:
            if topic.topic_id in cached.former_ids:
                return
            # Recreated: its epochs start again at 0, so nothing of the old one may be kept.
            cached.former_ids |= {known.topic_id}
            cached.metadata = topic
            return
        merged = tuple(
            self._newer(known.partitions[index], partition) if index < len(known.partitions) else partition
            for index, partition in enumerate(topic.partitions)
        )
        cached.metadata = TopicMetadata(topic.name, topic.topic_id or known.topic_id, merged)

    @staticmethod
    def _newer(known: PartitionInfo, told: PartitionInfo) -> PartitionInfo:
        """The later epoch wins; without epochs, what was told last."""
        older = told.leader_epoch != UNKNOWN_EPOCH and told.leader_epoch < known.leader_epoch
        return known if older else told

    def on_failure(self, now_ms: float) -> None:
        """No answer came: the same topics are asked for again after the backoff."""
        self._in_flight = False
        self._back_off(now_ms)

    def _back_off(self, now_ms: float) -> None:
        """retry.backoff.ms, doubled at each failure in a row up to retry.backoff.max.ms, +-20 %."""
        self._failures += 1
        self._not_before_ms = max(self._not_before_ms, now_ms + self._backoff.delay_ms(self._failures))
