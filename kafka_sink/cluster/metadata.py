"""What is known of topics and brokers, and what to request next (KIP-526); the producer's rack (KIP-1123).

Facts and the time come in, decisions go out. Times are monotonic milliseconds. Five rules bound the requests:

- One request is in flight at a time.
- A request that fails delays the next one, whatever its topics.
- A response that does not help a topic delays that topic alone (``topic_state``).
- A topic without metadata, or with an error in its last response, is requested only while rows wait for it:
  for WAITED_FOR_MS after they were last seen.
- Topics that have metadata, but were reported as stale, are gathered for retry.backoff.ms after the last
  response.

Delays are retry.backoff.ms, doubled up to retry.backoff.max.ms, with 20 % of jitter either way.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import cache
from typing import TYPE_CHECKING

from kafka_sink.clock import COORDINATOR_WAIT_MS, RANDOM, WAITED_FOR_MS, Clock, ExponentialBackoff
from kafka_sink.cluster.broker import Broker
from kafka_sink.cluster.refresh import NON_URGENT_SHARE, DeadlineHeap, RefreshSchedule
from kafka_sink.cluster.topic_state import (
    MetadataSnapshot,
    ResponseFacts,
    TopicSnapshot,
    TopicState,
    lacks_leader,
)
from kafka_sink.errors import (
    ClusterChangedError,
    MetadataTimeoutError,
    MissingPartitionError,
    TopicRefusedError,
)
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
from kafka_sink.security.settings import SecuritySettings

if TYPE_CHECKING:
    from kafka_sink.coordinator.metadata import MetadataChannel
    from kafka_sink.network.client import NetworkClient
    from kafka_sink.options import SinkOptions

_log = logging.getLogger(__name__)
# A snapshot's age does not count the time for which it was on its way.
_ON_THE_WAY_MS = 50.0
# What to say of the errors that no task waits out (``KafkaError.final_for_topic``).
_FINAL_TOPIC_ERRORS = {
    INVALID_TOPIC_EXCEPTION: "the topic name is invalid (INVALID_TOPIC_EXCEPTION)",
    TOPIC_AUTHORIZATION_FAILED: "not authorized to access the topic (TOPIC_AUTHORIZATION_FAILED)",
}
_CHECK_MS = 100.0
_NO_PARTITIONS: Mapping[str, int] = {}


class ClusterMetadata:
    """Topics with their age and last use: of a task, whose sender refreshes them, or of the coordinator.

    Any thread. Look-ups of one topic, partition or of the brokers take no lock: their values are replaced
    whole. ``version`` rises at every change that these show, and with errors. ``network`` is the sender's,
    None in the coordinator; ``random`` is uniform on [0, 1). A call costs O(log n) for each of its topics and
    for each topic that has become due since the last call.
    """

    def __init__(
        self,
        options: SinkOptions,
        clock_ms: Clock,
        network: NetworkClient | None = None,
        *,
        random: Callable[[], float] = RANDOM.random,
        non_urgent_share: float = NON_URGENT_SHARE,
    ) -> None:
        self._clock_ms = clock_ms
        self._network = network
        # Guards all below. Methods that take it call one another; those that end in "_locked" must be called
        # with it.
        self._lock = threading.RLock()
        self._updated = threading.Condition(self._lock)
        self.version = 0
        # Until then nothing is wanted; -inf where that is not known.
        self.next_due_ms = -math.inf
        # Requests that were sent, and snapshots with news, each of which spared one.
        self.requests = self.imports = 0
        # Requests that included topics for others, see ``request_for_other_tasks``.
        self.fetches = 0
        self.cluster_id: str | None = None
        # Once rows have been sent, a response of another cluster is an error.
        self.pinned = False
        # Whoever names an address gets the rows, where any host on the internet may have a trusted
        # certificate. The coordinator sends none.
        tls = None if network is None else SecuritySettings.from_options(options).tls
        self.confirmed_nodes_only = tls is not None and tls.trust is None
        # Brings what other tasks know; None without one. It is called under the lock, so it must not wait for
        # a thread.
        self.coordinator: MetadataChannel | None = None
        # Filled by the sender's thread.
        self.brokers: dict[int, Broker] = {}
        self._max_age_ms = options.metadata_max_age_ms
        self._idle_ms = options.metadata_max_idle_ms
        backoff_ms, self._backoff_max_ms = options.retry_backoff_ms, options.retry_backoff_max_ms
        self._backoff = ExponentialBackoff(backoff_ms, self._backoff_max_ms, random)
        self._topics: dict[str, TopicState] = {}
        # Replaced whole.
        self._nodes: Mapping[int, Node] = {}
        self._nodes_ms = -math.inf
        self._schedule = RefreshSchedule(self._max_age_ms, backoff_ms, non_urgent_share)
        # When each topic becomes idle unless it is used again. A topic that was used is put back when its
        # time comes.
        self._idle = DeadlineHeap()
        # When each unsolved topic (``TopicState.is_unsolved``) is no longer needed, in the same way.
        self._needed = DeadlineHeap()
        self._in_flight: frozenset[str] | None = None
        # What others need: to be requested, and in the request in flight.
        self._for_others: dict[str, None] = {}
        self._fetching: tuple[str, ...] = ()
        self._marked_in_flight: set[str] = set()
        self._failures = 0
        # When the last response came.
        self.response_ms = -math.inf
        self._not_before_ms = -math.inf
        self._deferred_until_ms = -math.inf
        self._deferred_until_max_ms = math.inf

    # -- what is known ----------------------------------------------------------------------------

    def topic(self, name: str) -> TopicMetadata | None:
        found = self._topics.get(name)
        return None if found is None else found.metadata

    def describe_lookup_error(self, name: str) -> str | None:
        """The error in a topic's last response, None where that brought metadata."""
        found = self._topics.get(name)
        return None if found is None or not found.error else _describe(found.error)

    def leader(self, partition: TopicPartition) -> PartitionMetadata | None:
        """The partition as last observed; None for an unknown topic or partition.

        Its leader is NO_LEADER also while that broker is not in ``nodes``: nothing can be sent to it.
        """
        found = self._topics.get(partition.topic)
        metadata = None if found is None else found.metadata
        if metadata is None or not 0 <= partition.partition < len(metadata.partitions):
            return None
        info = metadata.partitions[partition.partition]
        return info if info.leader in self._nodes else info._replace(leader=NO_LEADER)

    def nodes(self) -> Mapping[int, Node]:
        """Brokers by id; each response replaces them."""
        return self._nodes

    def sizes(self) -> tuple[int, int]:
        """How many topics are kept, and how many partitions they have."""
        with self._lock:
            known = [one.metadata.partitions for one in self._topics.values() if one.metadata is not None]
            return len(self._topics), sum(map(len, known))

    def age_ms(self, now_ms: float) -> float:
        """How long ago brokers last listed themselves, to this cache or to one whose snapshot came; 0
        before."""
        return max(0.0, now_ms - self._nodes_ms) if self._nodes_ms > -math.inf else 0.0

    def names(self) -> tuple[str, ...]:
        """All topics in use, with metadata or still without."""
        with self._lock:
            return tuple(name for name, found in self._topics.items() if found.in_use)

    def snapshot(self, now_ms: float, names: Iterable[str] | None = None) -> MetadataSnapshot:
        """For ``import_snapshot`` of another cache: everything known, or only the topics of ``names``.

        A response that another thread merged after ``now_ms`` was read has age 0.
        """
        with self._lock:
            topics = tuple(
                TopicSnapshot(found.metadata, max(0.0, now_ms - found.observed_ms))
                for found in map(self._topics.get, self._topics if names is None else names)
                if found is not None and found.metadata is not None
            )
            nodes = tuple(self._nodes.values())
            return MetadataSnapshot(topics, nodes, self.age_ms(now_ms), self.cluster_id)

    def _wake_sender(self) -> None:
        """A request may be due."""
        if self._network is not None:
            self._network.wakeup()

    # -- the task's thread ------------------------------------------------------------------------

    def await_topics(
        self,
        topics: Iterable[str],
        timeout_ms: float,
        check: Callable[[], None],
        partitions: Mapping[str, int] = _NO_PARTITIONS,
        unauthorized_wait_ms: float = 0.0,
    ) -> dict[str, TopicMetadata]:
        """Wait for the metadata of all these topics; one request asks for those that are unknown.

        ``partitions``: how many partitions a topic needs for rows that name theirs. A topic known with fewer
        may have got more since, so this waits for newer metadata, as Kafka's producer does.
        ``unauthorized_wait_ms``: a topic is asked for again until brokers have said for this long that it is
        not authorized, as they say so while they load their ACLs. Raises
        MetadataTimeoutError naming the topics and the last error after ``timeout_ms`` (max.block.ms),
        TopicRefusedError for a topic that can never be written, MissingPartitionError after ``timeout_ms``
        for a partition that does not exist.
        """
        wanted = tuple(topics)
        deadline = self._clock_ms() + timeout_ms
        if self.coordinator is not None:
            self.coordinator.on_use(wanted)
        asked = False
        stale: set[str] = set()
        while True:
            with self._lock:
                now_ms = self._clock_ms()
                self.on_use(wanted, now_ms)
                found = {name: self.topic(name) for name in wanted}
                missing = [name for name, metadata in found.items() if metadata is None]
                short = [
                    name
                    for name, metadata in found.items()
                    if metadata is not None and len(metadata.partitions) < partitions.get(name, 0)
                ]
                if not missing and not short:
                    break
                self._raise_final_locked(missing, unauthorized_wait_ms, now_ms)
                left = deadline - now_ms
                if left <= 0:
                    raise self._lack_error_locked(missing, short, partitions, timeout_ms)
                if missing and not asked:
                    self._ask_others_locked(missing, timeout_ms, now_ms)
                    asked = True
                for name in short:
                    self._mark_stale_locked(name, now_ms)
                version = self.version
            self._report_stale(set(short) - stale)
            stale.update(short)
            self._wake_sender()
            check()
            with self._lock:
                if self.version == version:
                    self._updated.wait(min(left, _CHECK_MS) / 1000)
        if stale:
            # Once more: the coordinator may have the topic as it was before its partitions were added.
            self._report_stale(stale)
        return {name: metadata for name, metadata in found.items() if metadata is not None}

    def _ask_others_locked(self, topics: list[str], timeout_ms: float, now_ms: float) -> None:
        # Under the lock, so that the response cannot come before the deferral begins.
        if self.coordinator is not None and self.coordinator.ask(topics):
            # Leaves brokers time to respond in case the coordinator does not.
            self._deferred_until_max_ms = now_ms + timeout_ms / 2
            self.pause_requests(now_ms + COORDINATOR_WAIT_MS)

    def _report_stale(self, topics: Iterable[str]) -> None:
        coordinator = self.coordinator
        if coordinator is not None:
            for name in topics:
                coordinator.report_stale(name)

    def describe_lack(self, topics: Iterable[str], partitions: Mapping[str, int]) -> str:
        """What ``await_topics`` waits for with these arguments, for the log."""
        with self._lock:
            missing = [name for name in topics if self.topic(name) is None]
            if missing:
                shown, why = self._missing_texts_locked(missing)
                return f"metadata of topic {shown} ({why})"
            for name, needed in partitions.items():
                metadata = self.topic(name)
                count = 0 if metadata is None else len(metadata.partitions)
                if count < needed:
                    return f"partition {needed - 1} of topic {name}, which has {count} partitions"
        return "metadata"

    def _missing_texts_locked(self, missing: list[str]) -> tuple[str, str]:
        """The names of topics without metadata, and why there is none."""
        brokers = "" if self._network is None else self._network.describe_brokers()
        errors = filter(None, {self.describe_lookup_error(name) for name in missing})
        shown = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
        return shown, f"{', '.join(errors) or 'no response'}; brokers: {brokers}"

    def _lack_error_locked(
        self, missing: list[str], short: list[str], partitions: Mapping[str, int], timeout_ms: float
    ) -> MetadataTimeoutError | MissingPartitionError:
        if missing:
            shown, why = self._missing_texts_locked(missing)
            return MetadataTimeoutError(
                f"no metadata for topic {shown} within kafka.max.block.ms = {timeout_ms:.0f} ms ({why}). "
                "Create the topic, or check kafka.bootstrap.servers and that the brokers can be reached"
            )
        metadata = self.topic(short[0])
        count = 0 if metadata is None else len(metadata.partitions)
        return MissingPartitionError(
            f"Invalid partition: column 'partition' has {partitions[short[0]] - 1} in a row for topic "
            f"{short[0]!r}, whose partitions are 0 to {count - 1}, and no other came within "
            f"kafka.max.block.ms = {timeout_ms:.0f} ms. Add partitions to the topic, mend the column (null "
            "leaves the choice to the key), or set errors.tolerance=all to skip such rows"
        )

    def _raise_final_locked(self, topics: list[str], unauthorized_wait_ms: float, now_ms: float) -> None:
        for name in topics:
            found = self._topics[name]
            reason = _FINAL_TOPIC_ERRORS.get(found.error)
            lasts_ms = found.error_ms - found.error_since_ms
            if found.error == TOPIC_AUTHORIZATION_FAILED and lasts_ms < unauthorized_wait_ms:
                self._mark_stale_locked(name, now_ms)
            elif reason is not None:
                raise TopicRefusedError(f"topic {name!r} cannot be written: {reason}", name)

    # -- facts ------------------------------------------------------------------------------------

    def on_use(self, topics: Iterable[str], now_ms: float) -> None:
        """Rows are written to these topics: known ones stay cached, unknown ones become urgent.

        Final errors (invalid name, not authorized) count as long as metadata would: for max.age.
        """
        with self._lock:
            for name in topics:
                found = self._topics.get(name)
                if (
                    found is None
                    or found.used_ms + self._idle_ms <= now_ms
                    or (found.error and found.final and found.error_ms + self._max_age_ms <= now_ms)
                ):
                    self.forget(name)
                    self._admit_locked(name, now_ms)
                    continue
                self._use_locked(name, found, now_ms)

    def _use_locked(self, name: str, topic: TopicState, now_ms: float) -> None:
        topic.used_ms = now_ms
        if not (topic.in_use and topic.is_needed):
            topic.in_use = topic.is_needed = True
            self._reschedule_locked(name, topic)

    def forget(self, name: str) -> None:
        """Nothing waits for this topic any more; its next use requests it again."""
        with self._lock:
            found = self._topics.pop(name, None)
            if found is None:
                return
            self._schedule.drop(name)
            self._idle.drop(name)
            self._needed.drop(name)
            self.version += found.metadata is not None or found.error != 0

    def mark_stale(self, topic: str, now_ms: float) -> None:
        """A response shows that the metadata is old (NOT_LEADER_OR_FOLLOWER and the like): refresh it soon.

        The refresh waits for the backoff that follows the topic's last response: without it, the same
        response would come again at once (franz-go #1413). A leader hint with a newer epoch needs no refresh,
        so it leaves no mark. A topic with a final error is requested once more, after its backoff.
        """
        with self._lock:
            self._mark_stale_locked(topic, now_ms)
        self._report_stale((topic,))

    def _mark_stale_locked(self, topic: str, now_ms: float) -> None:
        found = self._topics.get(topic)
        if found is None or found.used_ms + self._idle_ms <= now_ms:
            self.forget(topic)
            self._admit_locked(topic, now_ms)
            return
        self._use_locked(topic, found, now_ms)
        if found.metadata is None:
            if found.final and not found.retry:
                found.retry = True
                self._reschedule_locked(topic, found)
            return
        in_flight = self._in_flight is not None and topic in self._in_flight
        if in_flight:
            self._marked_in_flight.add(topic)
        if not found.stale:
            if found.not_before_ms + self._backoff_max_ms < now_ms:
                found.unhelpful = 0  # it has been well for a while
            found.stale = True
            found.stale_ms = now_ms
            if not in_flight:
                self._reschedule_locked(topic, found)

    def leader_hint(
        self,
        partition: TopicPartition,
        leader: int,
        epoch: int,
        nodes: Iterable[Node],
        topic_id: bytes | None = None,
    ) -> bool:
        """A Produce response names the leader (KIP-951): used, and True returned, where its epoch is newer.

        ``topic_id``: the one in the request. A former topic's epochs say nothing about this one's.
        """
        with self._lock:
            found = self._topics.get(partition.topic)
            known = self.leader(partition)
            if found is None or found.metadata is None or known is None or leader < 0:
                return False
            other_topic = topic_id is not None and found.metadata.topic_id not in (None, topic_id)
            if other_topic or epoch <= known.leader_epoch:
                return False
            self._know_nodes_locked({**self._nodes, **{node.id: node for node in nodes if node.id == leader}})
            if leader not in self._nodes:
                return False
            found.name_leader(partition.partition, leader, epoch)
            self.version += 1
        if self.coordinator is not None:
            self.coordinator.report_stale(partition.topic)
        return True

    def import_topic(self, topic: TopicMetadata, age_ms: float, now_ms: float) -> bool:
        """Merge a topic that another cache of the same cluster observed ``age_ms`` ago; True if it
        changed anything here.

        It is merged like an own response of that time: higher epochs win, and another topic id wins only
        where it was observed later. What others said before gives way. A topic that is not in use is kept for
        metadata.max.idle.ms in case it will be used, but is not refreshed.
        """
        with self._lock:
            observed_ms = now_ms - max(age_ms, 0.0)
            found = self._topics.get(topic.name)
            if found is None:
                found = TopicState(now_ms, in_use=False)
            known = found.metadata
            if not topic.partitions or not found.merge_snapshot(topic, observed_ms):
                return False
            if topic.name not in self._topics:
                self._topics[topic.name] = found
                self._idle.put(topic.name, now_ms + self._idle_ms)
            changed = found.metadata != known
            is_later = observed_ms > found.stale_ms + _ON_THE_WAY_MS
            if found.stale and (changed or (is_later and found.metadata == topic)):
                # Without a change, but observed after the mark: an own response would have said the same.
                found.stale = lacks_leader(found.metadata or topic, self._nodes)
                found.unhelpful = 0 if changed else found.unhelpful + 1
                attempts = max(found.unhelpful, 1)
                found.not_before_ms = max(found.not_before_ms, observed_ms + self._backoff.delay_ms(attempts))
            self._reschedule_locked(topic.name, found)
            self.version += changed
            return changed

    def is_other_cluster(self, cluster_id: str | None) -> bool:
        """Whether this is surely not the cluster that is known: one id or the other may be unknown."""
        return None not in (cluster_id, self.cluster_id) and cluster_id != self.cluster_id

    def _start_over_locked(self) -> None:
        """Another cluster responds now: forget everything and request the topics in use again."""
        used = [(name, found.used_ms) for name, found in self._topics.items() if found.in_use]
        for name in list(self._topics):
            self.forget(name)
        for name, used_ms in used:
            self._admit_locked(name, used_ms)
        self.forget_nodes()

    def import_snapshot(self, snapshot: MetadataSnapshot, now_ms: float) -> int:
        """Merge another cache's topics by import_topic, and its brokers where they were observed later.

        Returns how many topics were news. A snapshot of another cluster is ignored: its brokers may have the
        same ids. So is, with ``confirmed_nodes_only``, one that names a broker's address that no broker has
        named.
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
                self._know_nodes_locked(nodes)
            else:
                # Leaders in the snapshot must be reachable. For brokers known to both, this cache's address
                # counts.
                self._know_nodes_locked({**nodes, **self._nodes})
            self.cluster_id = self.cluster_id or snapshot.cluster_id
            news = sum(self.import_topic(one.metadata, one.age_ms, now_ms) for one in snapshot.topics)
            self.imports += news > 0
            self._updated.notify_all()
        if news:
            self._wake_sender()
        return news

    def pause_requests(self, until_ms: float) -> None:
        """Send no request before this time, as a snapshot may come first, but wait no longer than half of the
        task's timeout."""
        self._deferred_until_ms = min(until_ms, self._deferred_until_max_ms)

    def resume_requests(self, now_ms: float) -> None:
        """No snapshot will come: ask brokers."""
        self.pause_requests(now_ms)
        self._wake_sender()

    def share_refreshes(self, shared: bool) -> None:
        """Another cache refreshes topics from now on, or does so no more."""
        with self._lock:
            # What is dropped would not be refreshed.
            self._schedule.shared = shared and not self.confirmed_nodes_only
            self.next_due_ms = -math.inf
        self._wake_sender()

    def request_for_other_tasks(self, topics: Iterable[str]) -> None:
        """Request these topics at once, or with the next request: others need them.

        They enter neither the topics in use nor the target size of a request.
        """
        with self._lock:
            self._for_others.update(dict.fromkeys(topics))
            self.next_due_ms = -math.inf
        self._wake_sender()

    def forget_nodes(self) -> None:
        """Forget the brokers (re-bootstrap): no partition has a leader until the next response."""
        with self._lock:
            self._nodes_ms = -math.inf
            self._know_nodes_locked({})

    def _know_nodes_locked(self, nodes: dict[int, Node]) -> None:
        # Leader hints and snapshots add brokers, which only the next Metadata response takes away.
        if nodes != self._nodes and len(nodes) <= MAX_BROKERS:
            self._nodes = nodes
            self.version += 1

    # -- decisions --------------------------------------------------------------------------------

    def next_request(self, now_ms: float) -> tuple[str, ...] | None:
        """The topics to request now; None when nothing is due, a request is in flight or a backoff runs.

        Urgent are topics in use without metadata, stale ones, and those older than max.age: all of them go
        into one request, however many. Topics past half their age fill it up to the target size, oldest
        first, and make a request of their own once there are that many. Every request that this returns
        must be ended by on_response or on_failure.
        """
        with self._lock:
            self._forget_idle_locked(now_ms)
            if self._in_flight is not None:
                return None
            chosen: tuple[str, ...] = ()
            if now_ms >= max(self._not_before_ms, self._deferred_until_ms):
                chosen = self._schedule.choose(self.response_ms, now_ms)
            self._fetching, self._for_others = tuple(self._for_others), {}
            if not chosen and not self._fetching:
                return None
            self._in_flight, self.next_due_ms = frozenset(chosen), -math.inf
            self.requests += bool(chosen)
            self.fetches += bool(self._fetching)
            return tuple(dict.fromkeys((*chosen, *self._fetching)))

    def is_wanting(self, now_ms: float) -> bool:
        """Whether a request is in flight, is due, or would be due without the backoff."""
        with self._lock:
            if self._in_flight is not None or self._for_others:
                return True
            return self._schedule.due_ms(self.response_ms) <= now_ms

    def next_request_delay_ms(self, now_ms: float) -> float:
        """Until next_request may have something; infinite while a request is in flight.

        Forgets idle topics first; one whose time has passed would make this return 0 for ever.
        """
        with self._lock:
            self._forget_idle_locked(now_ms)
            if self._in_flight is not None:
                return math.inf
            if self._for_others:
                return 0.0
            due = min(
                self._schedule.due_ms(self.response_ms), self._idle.earliest_ms(), self._needed.earliest_ms()
            )
            self.next_due_ms = due
            return max(0.0, due - now_ms, self._not_before_ms - now_ms, self._deferred_until_ms - now_ms)

    def _forget_idle_locked(self, now_ms: float) -> None:
        for name, _ in self._idle.pop_until(now_ms):
            idle_ms = self._topics[name].used_ms + self._idle_ms
            if idle_ms <= now_ms:
                self.forget(name)
            else:
                self._idle.put(name, idle_ms)
        for name, _ in self._needed.pop_until(now_ms):
            topic = self._topics[name]
            topic.is_needed = topic.used_ms + WAITED_FOR_MS > now_ms
            self._reschedule_locked(name, topic)

    def _admit_locked(self, name: str, now_ms: float) -> None:
        found = self._topics[name] = TopicState(now_ms)
        self._idle.put(name, now_ms + self._idle_ms)
        self._reschedule_locked(name, found)

    def _reschedule_locked(self, name: str, found: TopicState) -> None:
        self._schedule.reschedule(name, found)
        if found.is_unsolved and found.is_needed and (found.retry or not found.final):
            self._needed.put(name, found.used_ms + WAITED_FOR_MS)
        else:
            self._needed.drop(name)
        self.next_due_ms = -math.inf

    # -- responses --------------------------------------------------------------------------------

    def on_response(self, update: MetadataUpdate, requested: Collection[str], now_ms: float) -> bool:
        """Merge a response. Topics that it does not help stay urgent, each with its own backoff.

        Topics that are no longer in use by now are left out. Returns True if the response is another
        cluster's (bootstrap.servers leads elsewhere now): it replaces all that was known. If the cache is
        ``pinned``, it raises ClusterChangedError instead, and the response counts as a failure.
        """
        with self._lock:
            known, fetched = self.cluster_id, self._fetching
            switched = self.is_other_cluster(update.cluster_id)
            if switched:
                if self.pinned:
                    self.on_failure(now_ms)
                    raise ClusterChangedError(
                        f"kafka.bootstrap.servers leads to cluster {update.cluster_id} now, and rows were "
                        f"sent to cluster {self.cluster_id}: nothing more is sent. Run the write again for "
                        "the new cluster"
                    )
                self._start_over_locked()
            self._in_flight = None
            self._failures = 0
            self.response_ms = now_ms
            self._not_before_ms = -math.inf
            self.cluster_id = update.cluster_id or self.cluster_id
            if update.nodes:
                self._nodes_ms = now_ms
                self._know_nodes_locked({node.id: node for node in update.nodes})
            self._merge_locked(update, requested, now_ms)
            self._fetching = ()
            self._updated.notify_all()
        if fetched and self.coordinator is not None:
            self.coordinator.fetched(fetched, update)
        if switched:
            _log.warning("brokers of cluster %s respond, instead of %s", update.cluster_id, known)
        return switched

    def _merge_locked(self, update: MetadataUpdate, requested: Collection[str], now_ms: float) -> None:
        marked, self._marked_in_flight = self._marked_in_flight, set()
        response = ResponseFacts(now_ms, self._nodes, marked, cache(self._backoff.delay_ms))
        topics = {topic.name: topic for topic in update.topics}
        for name in dict.fromkeys((*topics, *update.errors, *requested)):
            found = self._topics.get(name)
            if found is not None:
                self.version += found.settle(topics.get(name), update.errors.get(name), response)
                self._reschedule_locked(name, found)

    def on_failure(self, now_ms: float) -> None:
        """No response came: the same topics are requested again after the backoff."""
        with self._lock:
            asked, self._in_flight = self._in_flight or (), None
            fetched, self._fetching = self._fetching, ()
            self._marked_in_flight = set()
            self._failures += 1
            self._not_before_ms = now_ms + self._backoff.delay_ms(self._failures)
            for name in asked:
                found = self._topics.get(name)
                if found is not None:
                    self._reschedule_locked(name, found)
        if fetched and self.coordinator is not None:
            self.coordinator.fetched(fetched, None)

    def broker(self, node_id: int) -> Broker:
        """What is known of a broker; made at first use, by the sender's thread."""
        found = self.brokers.get(node_id)
        if found is None:
            assert self._network is not None
            found = self.brokers[node_id] = Broker(node_id, self._network)
            found.node = self._nodes.get(node_id)
        return found

    def connect_brokers(self) -> None:
        """``NetworkClient.connections`` has changed."""
        for broker in self.brokers.values():
            broker.connection = None if self._network is None else self._network.connections.get(broker.id)


def _describe(code: int) -> str:
    return _FINAL_TOPIC_ERRORS.get(code) or error_of(code).name


class ClientRack:
    """The rack of this process. ``name`` is kafka.client.rack, "" without a rack; ``nodes`` returns the
    brokers by id."""

    def __init__(self, name: str, nodes: Callable[[], Mapping[int, Node]]) -> None:
        self.name = name
        self._nodes = nodes

    def brokers(self) -> frozenset[int]:
        if not self.name:
            return frozenset()
        return frozenset(node.id for node in self._nodes().values() if node.rack == self.name)

    def is_other(self, node_id: int) -> bool:
        node = self._nodes().get(node_id)
        return node is not None and node.rack is not None and node.rack != self.name
