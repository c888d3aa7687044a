"""The metadata cache: topics, brokers, and which topics to request next (KIP-526).

It does no I/O: callers pass in responses and the time, and ask what to request. Times are monotonic
milliseconds. Five rules bound the requests:

- One request is in flight at a time.
- A request that fails delays the next one, whatever its topics.
- A response that does not help a topic delays that topic alone (``topic_state``).
- A topic without metadata, or with an error in its last response, is requested only while rows wait for it,
  that is, until WAITED_FOR_MS after a task last reported such rows.
- Topics that have metadata, but were reported as stale, are collected for retry.backoff.ms after the last
  response, so that one request serves all of them.

Delays are retry.backoff.ms, doubled up to retry.backoff.max.ms, with 20 % of jitter either way.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Protocol

from kafka_sink.clock import RANDOM, WAITED_FOR_MS, ExponentialBackoff
from kafka_sink.cluster.refresh import NON_URGENT_SHARE, DeadlineHeap, RefreshSchedule
from kafka_sink.cluster.topic_state import (
    MetadataSnapshot,
    ResponseFacts,
    TopicSnapshot,
    TopicState,
    lacks_leader,
)
from kafka_sink.errors import ClusterChangedError
from kafka_sink.kafka_errors import INVALID_TOPIC_EXCEPTION, TOPIC_AUTHORIZATION_FAILED, error_of
from kafka_sink.model import (
    MAX_BROKERS,
    NO_LEADER,
    MetadataUpdate,
    Node,
    PartitionMetadata,
    TopicMetadata,
    TopicPartition,
)
from kafka_sink.options import SinkOptions

_log = logging.getLogger(__name__)
# A snapshot may have been in transit for this long, which its age does not include.
_ON_THE_WAY_MS = 50.0
# Messages for errors that retrying cannot fix (``KafkaError.final_for_topic``).
FINAL_TOPIC_ERRORS = {
    INVALID_TOPIC_EXCEPTION: "the topic name is invalid (INVALID_TOPIC_EXCEPTION)",
    TOPIC_AUTHORIZATION_FAILED: "not authorized to access the topic (TOPIC_AUTHORIZATION_FAILED)",
}


class SharedMetadata(Protocol):
    """Shares metadata with other tasks, by way of the coordinator. No method waits."""

    def ask(self, topics: Iterable[str]) -> bool:
        """Ask for topics that are needed now. Return False if the coordinator cannot be reached. Otherwise
        they may arrive with ``ClusterMetadata.import_snapshot``."""

    def on_use(self, topics: Iterable[str]) -> None:
        """Called when the task has rows for these topics."""

    def report_stale(self, topic: str) -> None:
        """Report that a response has shown a topic's metadata to be out of date."""

    def on_fetched(self, topics: tuple[str, ...], update: MetadataUpdate | None) -> None:
        """Called with the response to a request for topics that other tasks need, or None if it failed."""


@dataclass(slots=True)
class _Request:
    """A request in flight. ``for_others`` are topics that only other tasks need. ``marked`` are topics that
    were reported as stale since it was sent."""

    topics: frozenset[str]
    for_others: tuple[str, ...]
    marked: set[str] = field(default_factory=set)


_NO_REQUEST = _Request(frozenset(), ())


class ClusterMetadata:
    """The metadata cache of the coordinator, or of a task (``ProducerMetadata``).

    Thread-safe. Looking up a topic, a partition or the brokers takes no lock, because values are replaced and
    never modified. ``version`` increases when one of these values changes, and with each new error.
    ``random`` returns numbers that are uniform on [0, 1). A call costs O(log n) for each of its topics and
    for each topic that has become due since the last call.
    """

    # Whether snapshots of other caches are accepted only if brokers have listed all their addresses.
    confirmed_nodes_only = False

    def __init__(
        self,
        options: SinkOptions,
        *,
        random: Callable[[], float] = RANDOM.random,
        non_urgent_share: float = NON_URGENT_SHARE,
    ) -> None:
        # Guards the attributes below, except those whose comment names the thread that sets them. The task's
        # thread, the sender's thread and the coordinator's client all change the guarded attributes, and
        # without the lock a request could be sent twice or a topic be lost from the schedule. It is an RLock
        # because methods that take it call each other. Callers of a ``*_locked`` method must hold it.
        self._lock = threading.RLock()
        self._updated = threading.Condition(self._lock)
        self.version = 0
        # No request is due before this time; -inf if it has to be computed again. The sender's thread reads
        # it without the lock, in every pass, so each change that may make a request due resets it.
        self.next_due_ms = -math.inf
        # The number of requests, and of imported snapshots that made a request unnecessary.
        self.requests = self.imports = 0
        # The number of requests that included topics for other tasks, see ``request_for_other_tasks``.
        self.fetches = 0
        self.cluster_id: str | None = None
        # The sender's thread sets it when it first sends rows. From then on a response from another cluster
        # is an error, because the rows of one write would otherwise be split between two clusters.
        self.pinned = False
        # Shares metadata with other tasks; None if there is no coordinator. Only the task's thread sets it.
        # It is called with the lock held, so it must not wait for another thread.
        self.coordinator: SharedMetadata | None = None
        self._max_age_ms = options.metadata_max_age_ms
        self._idle_ms = options.metadata_max_idle_ms
        backoff_ms, self._backoff_max_ms = options.retry_backoff_ms, options.retry_backoff_max_ms
        self._backoff = ExponentialBackoff(backoff_ms, self._backoff_max_ms, random)
        self._topics: dict[str, TopicState] = {}
        # Each change replaces the mapping, so that readers need no lock.
        self._nodes: Mapping[int, Node] = {}
        self._nodes_ms = -math.inf
        self._schedule = RefreshSchedule(self._max_age_ms, backoff_ms, non_urgent_share)
        # When each topic becomes idle unless it is used again. Using a topic does not move its entry; when
        # the entry is due, a topic that was used meanwhile is put back.
        self._idle = DeadlineHeap()
        # When each unsolved topic (``TopicState.is_unsolved``) is no longer needed, in the same way.
        self._needed = DeadlineHeap()
        # The request in flight, if there is one.
        self._request: _Request | None = None
        # Topics that other tasks need, for the next request.
        self._for_others: dict[str, None] = {}
        # Failed requests since the last response.
        self._failures = 0
        # When the last response arrived.
        self.response_ms = -math.inf
        self._not_before_ms = -math.inf
        # The coordinator's client and the task's thread set it, and no lock is needed to replace a number.
        self._paused_until_ms = -math.inf
        self._paused_until_max_ms = math.inf

    def topic(self, name: str) -> TopicMetadata | None:
        state = self._topics.get(name)
        return None if state is None else state.metadata

    def is_stale(self, name: str) -> bool:
        """Whether a response showed that the topic's metadata may be old, and no newer metadata has come."""
        state = self._topics.get(name)
        return state is not None and state.stale

    def describe_lookup_error(self, name: str) -> str | None:
        """The error in the last response about a topic; None if the response contained metadata."""
        state = self._topics.get(name)
        if state is None or not state.error:
            return None
        return FINAL_TOPIC_ERRORS.get(state.error) or error_of(state.error).name

    def leader(self, partition: TopicPartition) -> PartitionMetadata | None:
        """The partition as last observed; None for an unknown topic or partition.

        The leader is also NO_LEADER if that broker is not in ``nodes``, because nothing can be sent to it.
        """
        state = self._topics.get(partition.topic)
        metadata = None if state is None else state.metadata
        if metadata is None or not 0 <= partition.partition < len(metadata.partitions):
            return None
        info = metadata.partitions[partition.partition]
        return info if info.leader in self._nodes else info._replace(leader=NO_LEADER)

    def nodes(self) -> Mapping[int, Node]:
        """The brokers by id. Each response replaces the mapping."""
        return self._nodes

    def sizes(self) -> tuple[int, int]:
        """The number of cached topics, and the number of their partitions."""
        with self._lock:
            known = [state.metadata for state in self._topics.values() if state.metadata is not None]
            return len(self._topics), sum(len(topic.partitions) for topic in known)

    def age_ms(self, now_ms: float) -> float:
        """How long ago a broker last listed the brokers, to this cache or to one whose snapshot was imported.
        0 before the first list."""
        return max(0.0, now_ms - self._nodes_ms) if self._nodes_ms > -math.inf else 0.0

    def names(self) -> tuple[str, ...]:
        """All topics in use, including those without metadata."""
        with self._lock:
            return tuple(name for name, state in self._topics.items() if state.in_use)

    def snapshot(self, now_ms: float, names: Iterable[str] | None = None) -> MetadataSnapshot:
        """Everything in the cache, or only the topics of ``names``, for ``import_snapshot`` of another cache.

        A topic that another thread merged after ``now_ms`` was read has age 0.
        """
        with self._lock:
            topics = tuple(
                TopicSnapshot(state.metadata, max(0.0, now_ms - state.observed_ms))
                for state in map(self._topics.get, self._topics if names is None else names)
                if state is not None and state.metadata is not None
            )
            nodes = tuple(self._nodes.values())
            return MetadataSnapshot(topics, nodes, self.age_ms(now_ms), self.cluster_id)

    def _wake_sender(self) -> None:
        """Let the sender check now whether a request is due. The coordinator has no sender."""

    def _report_stale(self, topics: Iterable[str]) -> None:
        coordinator = self.coordinator
        if coordinator is not None:
            for name in topics:
                coordinator.report_stale(name)

    def on_use(self, topics: Iterable[str], now_ms: float) -> None:
        """Record that rows are written to these topics. Known topics stay cached; unknown ones become urgent.

        A final error (invalid name, not authorized) is kept for metadata.max.age.ms, like metadata.
        """
        with self._lock:
            for name in topics:
                state = self._use_locked(name, now_ms)
                if state.error and state.final and state.error_ms + self._max_age_ms <= now_ms:
                    self.forget(name)
                    self._admit_locked(name, now_ms)

    def _use_locked(self, name: str, now_ms: float) -> TopicState:
        """The topic, which is used now. If it was idle, what was known about it is forgotten."""
        state = self._topics.get(name)
        if state is None or state.used_ms + self._idle_ms <= now_ms:
            self.forget(name)
            return self._admit_locked(name, now_ms)
        state.used_ms = now_ms
        if not (state.in_use and state.is_needed):
            state.in_use = state.is_needed = True
            self._reschedule_locked(name, state)
        return state

    def forget(self, name: str) -> None:
        """Drop the topic. Its next use will request it."""
        with self._lock:
            state = self._topics.pop(name, None)
            if state is None:
                return
            self._schedule.drop(name)
            self._idle.drop(name)
            self._needed.drop(name)
            self.version += state.metadata is not None or state.error != 0

    def mark_stale(self, topic: str, now_ms: float) -> None:
        """Refresh a topic soon, because a response showed that its metadata is old (such as
        NOT_LEADER_OR_FOLLOWER).

        The refresh is not sent before the backoff that follows the topic's last response has ended. Without
        the backoff, the same response would arrive again and again (franz-go #1413). A leader hint with a
        newer epoch needs no refresh, so it does not mark the topic. A topic with a final error is requested
        once more, after its backoff.
        """
        with self._lock:
            self._mark_stale_locked(topic, now_ms)
        self._report_stale((topic,))

    def _mark_stale_locked(self, topic: str, now_ms: float) -> None:
        state = self._use_locked(topic, now_ms)
        if state.metadata is None:
            if state.final and not state.retry:
                state.retry = True
                self._reschedule_locked(topic, state)
            return
        request = self._request
        in_flight = request is not None and topic in request.topics
        if request is not None and in_flight:
            request.marked.add(topic)
        if not state.stale:
            if state.not_before_ms + self._backoff_max_ms < now_ms:
                # Its last response was long ago, so the backoff starts again.
                state.unhelpful = 0
            state.stale = True
            state.stale_ms = now_ms
            if not in_flight:
                self._reschedule_locked(topic, state)

    def on_leader_hint(
        self,
        partition: TopicPartition,
        leader: int,
        epoch: int,
        nodes: Iterable[Node],
        topic_id: bytes | None = None,
    ) -> bool:
        """Take the leader that a Produce response contains (KIP-951). Return True if its epoch is newer.

        ``topic_id`` is the id in the request. The epochs of a deleted topic of the same name cannot be
        compared with those of the current one.
        """
        with self._lock:
            state = self._topics.get(partition.topic)
            known = self.leader(partition)
            if state is None or state.metadata is None or known is None or leader < 0:
                return False
            other_topic = topic_id is not None and state.metadata.topic_id not in (None, topic_id)
            if other_topic or epoch <= known.leader_epoch:
                return False
            self._set_nodes_locked({**self._nodes, **{node.id: node for node in nodes if node.id == leader}})
            if leader not in self._nodes:
                return False
            state.name_leader(partition.partition, leader, epoch)
            self.version += 1
        self._report_stale((partition.topic,))
        return True

    def import_topic(self, topic: TopicMetadata, age_ms: float, now_ms: float) -> bool:
        """Merge a topic that another cache of the same cluster observed ``age_ms`` ago. Return True if that
        changed this cache.

        It is merged like a response that this cache received then: higher epochs win, and another topic id
        wins only if it was observed later. It replaces what other tasks reported earlier. A topic that is not
        in use is kept for metadata.max.idle.ms in case it will be used, but is not refreshed.
        """
        with self._lock:
            observed_ms = now_ms - max(age_ms, 0.0)
            state = self._topics.get(topic.name)
            if state is None:
                state = TopicState(now_ms, in_use=False)
            known = state.metadata
            if not topic.partitions or not state.merge_snapshot(topic, observed_ms):
                return False
            if topic.name not in self._topics:
                self._topics[topic.name] = state
                self._idle.put(topic.name, now_ms + self._idle_ms)
            changed = state.metadata != known
            is_later = observed_ms > state.stale_ms + _ON_THE_WAY_MS
            if state.stale and (changed or (is_later and state.metadata == topic)):
                # A topic without a change that was observed after the mark also counts: a response to this
                # cache would have contained the same.
                state.stale = lacks_leader(state.metadata or topic, self._nodes)
                state.unhelpful = 0 if changed else state.unhelpful + 1
                attempts = max(state.unhelpful, 1)
                state.not_before_ms = max(state.not_before_ms, observed_ms + self._backoff.delay_ms(attempts))
            self._reschedule_locked(topic.name, state)
            self.version += changed
            return changed

    def is_other_cluster(self, cluster_id: str | None) -> bool:
        """True only if both cluster ids are known and differ."""
        return None not in (cluster_id, self.cluster_id) and cluster_id != self.cluster_id

    def _start_over_locked(self) -> None:
        """Forget everything and request the topics in use again, because another cluster responds now."""
        used = [(name, state.used_ms) for name, state in self._topics.items() if state.in_use]
        for name in list(self._topics):
            self.forget(name)
        for name, used_ms in used:
            self._admit_locked(name, used_ms)
        self.forget_nodes()

    def import_snapshot(self, snapshot: MetadataSnapshot, now_ms: float) -> int:
        """Merge another cache's topics with import_topic, and its brokers if they were observed later.

        Returns how many topics were new or changed. A snapshot of another cluster is ignored, because its
        brokers may have the same ids. With ``confirmed_nodes_only``, a snapshot is also ignored if it
        contains a broker's address that no broker has listed.
        """
        with self._lock:
            if self.is_other_cluster(snapshot.cluster_id):
                return 0
            if self.confirmed_nodes_only and not set(snapshot.nodes) <= set(self._nodes.values()):
                return 0
            nodes = {node.id: node for node in snapshot.nodes}
            observed_ms = now_ms - max(snapshot.nodes_age_ms, 0.0)
            if nodes and observed_ms > self._nodes_ms:
                self._nodes_ms = observed_ms
                self._set_nodes_locked(nodes)
            else:
                # Add the snapshot's brokers, so that its leaders can be reached. For brokers that both caches
                # have, keep this cache's address.
                self._set_nodes_locked({**nodes, **self._nodes})
            self.cluster_id = self.cluster_id or snapshot.cluster_id
            news = sum(self.import_topic(topic.metadata, topic.age_ms, now_ms) for topic in snapshot.topics)
            self.imports += news > 0
            self._updated.notify_all()
        if news:
            self._wake_sender()
        return news

    def pause_requests(self, until_ms: float) -> None:
        """Send no request for this task's topics before this time, because a snapshot may arrive first. The
        pause ends after half of ``await_topics``'s timeout at the latest."""
        self._paused_until_ms = min(until_ms, self._paused_until_max_ms)

    def resume_requests(self, now_ms: float) -> None:
        """Ask brokers now, because no snapshot will arrive."""
        self.pause_requests(now_ms)
        self._wake_sender()

    def share_refreshes(self, shared: bool) -> None:
        """Set whether another cache refreshes the topics of this one."""
        with self._lock:
            # With ``confirmed_nodes_only`` the other cache's snapshots may be ignored, so this one must
            # refresh its topics.
            self._schedule.shared = shared and not self.confirmed_nodes_only
            self.next_due_ms = -math.inf
        self._wake_sender()

    def request_for_other_tasks(self, topics: Iterable[str]) -> None:
        """Request these topics, which other tasks need, now or together with the next request.

        They are not counted as in use or towards the target size of a request.
        """
        with self._lock:
            self._for_others.update(dict.fromkeys(topics))
            self.next_due_ms = -math.inf
        self._wake_sender()

    def forget_nodes(self) -> None:
        """Forget the brokers, to bootstrap again. No partition has a leader until the next response."""
        with self._lock:
            self._nodes_ms = -math.inf
            self._set_nodes_locked({})

    def _set_nodes_locked(self, nodes: dict[int, Node]) -> None:
        # Leader hints and snapshots only add brokers. The next Metadata response removes the brokers that are
        # gone. A list of more than MAX_BROKERS is ignored, so that no peer can exhaust the memory.
        if nodes != self._nodes and len(nodes) <= MAX_BROKERS:
            self._nodes = nodes
            self.version += 1

    def next_request(self, now_ms: float) -> tuple[str, ...] | None:
        """The topics to request now. None if no topic is due, a request is in flight, or a backoff has not
        ended.

        Topics in use are urgent if they have no metadata, are stale, or are older than metadata.max.age.ms.
        One request contains all urgent topics, however many there are. Topics past half of that age fill the
        request up to the target size, oldest first. Once there are as many of them as that size, they get a
        request of their own. The caller must end each request with on_response or on_failure.
        """
        with self._lock:
            self._forget_idle_locked(now_ms)
            if self._request is not None:
                return None
            chosen: tuple[str, ...] = ()
            if now_ms >= max(self._not_before_ms, self._paused_until_ms):
                chosen = self._schedule.choose(self.response_ms, now_ms)
            for_others, self._for_others = tuple(self._for_others), {}
            if not chosen and not for_others:
                return None
            self._request, self.next_due_ms = _Request(frozenset(chosen), for_others), -math.inf
            self.requests += bool(chosen)
            self.fetches += bool(for_others)
            return tuple(dict.fromkeys((*chosen, *for_others)))

    def has_request_due(self, now_ms: float) -> bool:
        """Whether a request is in flight, is due, or would be due if there were no backoff."""
        with self._lock:
            if self._request is not None or self._for_others:
                return True
            return self._schedule.due_ms(self.response_ms) <= now_ms

    def next_request_delay_ms(self, now_ms: float) -> float:
        """Milliseconds until next_request may return topics; infinity while a request is in flight.

        This drops idle topics first. Otherwise a topic whose idle time has passed would make the delay 0 for
        ever.
        """
        with self._lock:
            self._forget_idle_locked(now_ms)
            if self._request is not None:
                return math.inf
            if self._for_others:
                return 0.0
            due = min(
                self._schedule.due_ms(self.response_ms), self._idle.earliest_ms(), self._needed.earliest_ms()
            )
            self.next_due_ms = due
            return max(0.0, due - now_ms, self._not_before_ms - now_ms, self._paused_until_ms - now_ms)

    def _forget_idle_locked(self, now_ms: float) -> None:
        for name, _ in self._idle.pop(now_ms):
            idle_ms = self._topics[name].used_ms + self._idle_ms
            if idle_ms <= now_ms:
                self.forget(name)
            else:
                self._idle.put(name, idle_ms)
        for name, _ in self._needed.pop(now_ms):
            topic = self._topics[name]
            topic.is_needed = topic.used_ms + WAITED_FOR_MS > now_ms
            self._reschedule_locked(name, topic)

    def _admit_locked(self, name: str, now_ms: float) -> TopicState:
        state = self._topics[name] = TopicState(now_ms)
        self._idle.put(name, now_ms + self._idle_ms)
        self._reschedule_locked(name, state)
        return state

    def _reschedule_locked(self, name: str, state: TopicState) -> None:
        self._schedule.reschedule(name, state)
        if state.is_unsolved and state.is_needed and (state.retry or not state.final):
            self._needed.put(name, state.used_ms + WAITED_FOR_MS)
        else:
            self._needed.drop(name)
        self.next_due_ms = -math.inf

    def on_response(self, update: MetadataUpdate, requested: Collection[str], now_ms: float) -> bool:
        """Merge a response. Topics that it does not help stay urgent, each with its own backoff.

        Topics that are no longer in use are left out. Returns True if the response is from another cluster
        (bootstrap.servers now leads there): then it replaces everything in the cache. If the cache is
        ``pinned``, that raises ClusterChangedError instead, and the response counts as a failure.
        """
        with self._lock:
            known = self.cluster_id
            switched = self.is_other_cluster(update.cluster_id)
            if switched:
                if self.pinned:
                    self.on_failure(now_ms)
                    raise ClusterChangedError(
                        f"kafka.bootstrap.servers now leads to cluster {update.cluster_id}, but rows were "
                        f"already sent to cluster {self.cluster_id}. Sending has stopped. Run the write "
                        "again for the new cluster"
                    )
                self._start_over_locked()
            request, self._request = self._request or _NO_REQUEST, None
            self._failures = 0
            self.response_ms = now_ms
            self._not_before_ms = -math.inf
            self.cluster_id = update.cluster_id or self.cluster_id
            if update.nodes:
                self._nodes_ms = now_ms
                self._set_nodes_locked({node.id: node for node in update.nodes})
            response = ResponseFacts(now_ms, self._nodes, request.marked, cache(self._backoff.delay_ms))
            self._merge_locked(update, requested, response)
            self._updated.notify_all()
        if request.for_others and self.coordinator is not None:
            self.coordinator.on_fetched(request.for_others, update)
        if switched:
            _log.warning("kafka.bootstrap.servers now leads to cluster %s (was %s)", update.cluster_id, known)
        return switched

    def _merge_locked(
        self, update: MetadataUpdate, requested: Collection[str], response: ResponseFacts
    ) -> None:
        topics = {topic.name: topic for topic in update.topics}
        for name in dict.fromkeys((*topics, *update.errors, *requested)):
            state = self._topics.get(name)
            if state is not None:
                self.version += state.settle(topics.get(name), update.errors.get(name), response)
                self._reschedule_locked(name, state)

    def on_failure(self, now_ms: float) -> None:
        """Record that the request got no response. Its topics are requested again after the backoff."""
        with self._lock:
            request, self._request = self._request or _NO_REQUEST, None
            self._failures += 1
            self._not_before_ms = now_ms + self._backoff.delay_ms(self._failures)
            for name in request.topics:
                state = self._topics.get(name)
                if state is not None:
                    self._reschedule_locked(name, state)
        if request.for_others and self.coordinator is not None:
            self.coordinator.on_fetched(request.for_others, None)
