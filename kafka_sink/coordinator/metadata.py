"""Shared metadata (KIP-526): tasks share their metadata of topics, and one task at a time asks brokers for
all.

The coordinator has no connection to a broker. It runs the same ClusterMetadata as a task. When that is due to
send a request, the coordinator instead asks a task to fetch the topics: the one that it asked longest ago. If
this task is silent for a second or leaves, it asks another task at once. If the request failed, it asks
another task after the backoff. It pushes each response to all tasks that use the topics, even if only the age
changed.

A task's report that a leader moved is not passed on. It marks the topic as stale, until a fetch confirms it.
A fetched response is passed on as the brokers sent it. If it contradicts the known metadata, or goes far
beyond it, a second fetch by another task decides. So a task that errs misleads others until the next refresh
at most.
"""

from __future__ import annotations

import math
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from kafka_sink.clock import COORDINATOR_WAIT_MS, FETCH_SILENCE_MS, RANDOM, Clock
from kafka_sink.cluster.metadata import ClusterMetadata
from kafka_sink.cluster.refresh import NON_URGENT_SHARE
from kafka_sink.cluster.topic_state import MetadataSnapshot, TopicSnapshot
from kafka_sink.coordinator.schema import (
    Channel,
    Count,
    Int32,
    Message,
    Ms,
    Name,
    NodeId,
    Outbox,
    Service,
    ServiceScope,
    Structure,
    Text,
    Topic,
    cut,
    receives,
)
from kafka_sink.errors import ProtocolError
from kafka_sink.kafka_errors import LEADER_NOT_AVAILABLE, UNKNOWN_TOPIC_OR_PARTITION
from kafka_sink.model import (
    MAX_BROKERS,
    UNKNOWN_EPOCH,
    MetadataUpdate,
    Node,
    Partitions,
    TopicMetadata,
)
from kafka_sink.options import SinkOptions, topic_problem
from kafka_sink.printable import is_host

MAX_TOPICS = 5000
# The age for topics of which the task has no metadata.
ANY_AGE_MS = 1e12
# Approximate bytes of topics and of brokers in a message. They allow fewer than MAX_TOPICS and MAX_BROKERS,
# which fit only with the shortest names. A single topic may take more.
_PART_BYTES, _NODES_BYTES = 1_000_000, 400_000

# Numbers of four bytes each, little-endian like everywhere that PyArrow runs. JSON has them as base64.
_Int32s = Annotated[bytes, Meta(max_length=600_000)]


class NodeHint(NamedTuple):
    """A broker's address."""

    id: NodeId
    host: Text
    port: Annotated[int, Meta(ge=0, le=65_535)]
    rack: Text | None


class TopicHint(NamedTuple):
    """A topic as a broker described it ``age_ms`` ago, with the leaders and epochs of its partitions."""

    name: Topic
    age_ms: Ms
    topic_id: Annotated[bytes, Meta(min_length=16, max_length=16)] | None
    leaders: _Int32s
    epochs: _Int32s


class SnapshotPart(Structure, frozen=True):
    """A part of a MetadataSnapshot. The first part contains the brokers."""

    cluster_id: Name | None = None
    nodes: Annotated[tuple[NodeHint, ...], Meta(max_length=MAX_BROKERS)] = ()
    nodes_age_ms: Ms = 0.0
    topics: Annotated[tuple[TopicHint, ...], Meta(max_length=MAX_TOPICS)] = ()


_Names = Annotated[tuple[Topic, ...], Meta(max_length=MAX_TOPICS)]
_NO_TOPICS = SnapshotPart()


class TopicsWanted(Message, frozen=True):
    """From a task: the topics that it writes to, each with the age below which metadata is new enough for it.

    None: the task has metadata that will do. ANY_AGE_MS: it has none. Any other age: a broker contradicted
    the task's metadata that long ago. Brokers are then asked again, because one task's report is not passed
    on.
    """

    topics: Annotated[dict[Topic, Ms | None], Meta(max_length=MAX_TOPICS)]


class Fetch(Message, frozen=True):
    """To a task: ask brokers for these topics."""

    number: Count
    topics: _Names


class TopicsFetched(Message, frozen=True):
    """From a task: the brokers' response to a Fetch, or the first part of a long one.

    ``errors``: Kafka's error codes by topic. ``failed``: there was no response.
    """

    number: Count
    part: SnapshotPart = _NO_TOPICS
    errors: Annotated[dict[Topic, Int32], Meta(max_length=MAX_TOPICS)] = msgspec.field(default_factory=dict)
    failed: bool = False


class Topics(Message, frozen=True):
    """To tasks that use the topics: their metadata.

    ``pending``: topics that the task needs are still being fetched. Without topics and without ``pending``
    there is no capacity for them.
    """

    part: SnapshotPart = _NO_TOPICS
    pending: bool = False


def parts_of(snapshot: MetadataSnapshot) -> Iterator[SnapshotPart]:
    """One or more parts, each of which fits into a message."""
    nodes: tuple[NodeHint, ...] = tuple(
        NodeHint(node.id, node.host, node.port, node.rack and cut(node.rack))
        for node in snapshot.nodes
        if is_host(node.host) and 0 <= node.port < 1 << 16
    )
    # A character takes up to six bytes. No real cluster has this many brokers; if one does, tasks ask it
    # directly.
    if sum(80 + len(node.host) + 6 * len(node.rack or "") for node in nodes) > _NODES_BYTES:
        nodes = ()
    topics: list[TopicHint] = []
    taken = 0
    for described in snapshot.topics:
        topic, partitions = described.metadata, described.metadata.partitions
        size = 200 + len(topic.name) + 11 * len(partitions)
        if topics and taken + size > _PART_BYTES:
            yield SnapshotPart(snapshot.cluster_id, nodes, snapshot.nodes_age_ms, tuple(topics))
            topics, taken, nodes = [], 0, ()
        numbers = partitions.leaders.tobytes(), partitions.epochs.tobytes()
        topics.append(TopicHint(topic.name, described.age_ms, topic.topic_id, *numbers))
        taken += size
    yield SnapshotPart(snapshot.cluster_id, nodes, snapshot.nodes_age_ms, tuple(topics))


def snapshot_of(part: SnapshotPart) -> MetadataSnapshot:
    """The snapshot in a message. Raises ProtocolError."""
    if not all(is_host(node.host) and node.id >= 0 for node in part.nodes):
        raise ProtocolError("invalid broker address or id")
    topics = []
    for name, age_ms, topic_id, leaders, epochs in part.topics:
        if len(leaders) != len(epochs) or len(leaders) % 4:
            raise ProtocolError("a topic's leaders and epochs differ in length, or are incomplete")
        # Partitions takes the bytes of both arrays without converting them.
        metadata = TopicMetadata(name, topic_id, Partitions(name, leaders, epochs))
        topics.append(TopicSnapshot(metadata, age_ms))
    nodes = tuple(Node(*node) for node in part.nodes)
    return MetadataSnapshot(tuple(topics), nodes, part.nodes_age_ms, part.cluster_id)


# How often a task reports a topic that is in use, unless metadata.max.idle.ms is short.
_REPORT_USE_MS = 60_000.0


def use_interval_ms(idle_ms: float) -> float:
    """How often a task reports a topic in use, if metadata.max.idle.ms is ``idle_ms``."""
    return min(_REPORT_USE_MS, idle_ms / 3)


def coordinator_idle_ms(idle_ms: float) -> float:
    """How long a topic may stay unreported before it is idle.

    A use just after a report is reported one interval later, or two if it waits for other topics' reports.
    """
    return idle_ms + 2 * use_interval_ms(idle_ms)


# -- the coordinator's side -------------------------------------------------------------------------------


# The coordinator refreshes a topic before tasks consider it expired, and early enough to push the response.
# Topics become non-urgent at half of metadata.max.age.ms (KIP-526). Tasks leave those to the coordinator.
_SHARE_OF_AGE = 0.9
_MAX_TOPICS_OF_A_TASK, _MAX_CONTRADICTED = 50_000, 1000
# How many tasks may be silent or leave before the fetch counts as failed.
_MAX_ASKED = 3
# How long an answer waits for each further topic, because other tasks may want the same topics: encoding
# 2,000 takes 10 ms.
_GATHER_MS = 0.05
# The number of topics encoded in one ``on_time``. A set of topics costs as much as a few topics.
_TOPICS_AT_ONCE, _COST_OF_SET = 2_500, 5
# Estimates of the bytes that a topic, a name in a set, and a broker take.
_TOPIC_BYTES, _NAME_BYTES, _NODE_BYTES = 1200, 105, 500
_MEASURE_MS = 1000.0


@dataclass(slots=True)
class MemoryBudget:
    """How much memory a service may use for all groups of tasks together. Tasks ask brokers for the rest."""

    limit: int = 160 * 1024 * 1024
    used: int = 0

    @property
    def is_full(self) -> bool:
        return self.used >= self.limit


@dataclass(eq=False, slots=True)
class _Users:
    """The tasks that use exactly these topics. Often many do, and one encoded message serves them all."""

    topics: frozenset[str]
    peers: dict[int, None] = field(default_factory=dict)


@dataclass(slots=True)
class _Fetch:
    """A request of the cache, the message that asks for it, and the tasks that may still answer."""

    requested: tuple[str, ...]
    message: Fetch
    asked: set[int] = field(default_factory=set)
    turns: int = 0
    silent_at_ms: float = math.inf


class MetadataService(Service):
    """Shares metadata between the tasks of one group. ``budget`` is shared by all groups."""

    scope = ServiceScope.GROUP

    def __init__(
        self,
        options: SinkOptions,
        out: Outbox,
        budget: MemoryBudget | None = None,
        random: Callable[[], float] = RANDOM.random,
    ) -> None:
        super().__init__(out)
        self._budget = MemoryBudget() if budget is None else budget
        self._cost, self._measured_ms = 0, -math.inf
        own = replace(
            options,
            metadata_max_age_ms=int(options.metadata_max_age_ms * _SHARE_OF_AGE),
            metadata_max_idle_ms=int(coordinator_idle_ms(options.metadata_max_idle_ms)),
        )
        share = NON_URGENT_SHARE / _SHARE_OF_AGE
        self.cache = ClusterMetadata(own, lambda: 0.0, random=random, non_urgent_share=share)
        # Errors that pass, because a leader is being elected or the topic is being created.
        self._transient = {LEADER_NOT_AVAILABLE}
        if options.allow_auto_create_topics:
            self._transient.add(UNKNOWN_TOPIC_OR_PARTITION)
        # The tasks. The one that was asked to fetch longest ago comes first.
        self._tasks: OrderedDict[int, None] = OrderedDict()
        # The users of sets of topics, by task and by set.
        self._users_with: dict[int, _Users] = {}
        self._users: dict[frozenset[str], _Users] = {}
        self._fetch: _Fetch | None = None
        self._number = 0
        # Whether tasks have been asked to keep waiting since the last response.
        self._is_pending_sent = False
        # Topics whose last response contradicted the known metadata. None stands for the cluster's id.
        self._contradicted: set[str | None] = set()
        # Topics that have changed, and the users that have not been sent the changes.
        self._fresh: set[str] = set()
        self._outdated: OrderedDict[_Users, None] = OrderedDict()
        # Sets of known topics with the tasks that need them, and when to send the first set.
        self._answers: OrderedDict[frozenset[str], dict[int, None]] = OrderedDict()
        self._answers_due_ms = math.inf

    # -- tasks --------------------------------------------------------------------------------------

    def on_joined(self, peer: int, now_ms: float) -> None:
        self._tasks[peer] = None

    def on_gone(self, peer: int, now_ms: float) -> None:
        self._tasks.pop(peer, None)
        self._leave(peer)
        self._give_up(peer, now_ms)

    def close(self) -> None:
        self._count(-self._cost)

    @receives(TopicsWanted)
    def on_topics_wanted(self, peer: int, message: TopicsWanted, now_ms: float) -> None:
        self._record_use(peer, message.topics, now_ms)
        wanted = {name: age_ms for name, age_ms in message.topics.items() if age_ms is not None}
        known = {topic.metadata.name: topic.age_ms for topic in self.cache.snapshot(now_ms, wanted).topics}
        fresh = frozenset(name for name, age_ms in known.items() if age_ms < wanted[name])
        for name in known.keys() - fresh:
            self.cache.mark_stale(name, now_ms)
        if fresh:
            self._answers.setdefault(fresh, {})[peer] = None
            self._answers_due_ms = min(self._answers_due_ms, now_ms + _GATHER_MS * (len(fresh) - 1))
        self._fetch_due(now_ms)

    def _record_use(self, peer: int, topics: Collection[str], now_ms: float) -> None:
        """Record the use of topics. If there is no capacity, unknown topics are left to the task."""
        # Interned, so that all tasks share one string for each name.
        names = frozenset(map(sys.intern, topics))
        unknown = frozenset(name for name in names if self.cache.topic(name) is None)
        if self._may_keep(_TOPIC_BYTES * len(unknown), now_ms):
            self._use(peer, names)
        elif unknown:
            names -= unknown
            self.out.send(peer, Topics())
        self.cache.on_use(names, now_ms)

    def _use(self, peer: int, names: frozenset[str]) -> None:
        """Record that the task uses these topics, besides those that it has reported before."""
        before = self._users_with.get(peer)
        topics = names
        if before is not None:
            if names <= before.topics:
                return
            if len(before.topics) + len(names) <= _MAX_TOPICS_OF_A_TASK:
                topics = before.topics | names
            # Otherwise the older topics are dropped. The task reports those still in use again within a
            # minute.
        is_outdated = before in self._outdated
        self._leave(peer)
        if topics not in self._users:
            self._users[topics] = _Users(topics)
            self._count(_NAME_BYTES * len(topics))
        users = self._users_with[peer] = self._users[topics]
        users.peers[peer] = None
        if is_outdated:
            self._outdated[users] = None

    def _leave(self, peer: int) -> None:
        users = self._users_with.pop(peer, None)
        if users is not None:
            del users.peers[peer]
            if not users.peers:
                del self._users[users.topics]
                self._outdated.pop(users, None)

    # -- what it may keep ---------------------------------------------------------------------------

    def _may_keep(self, more: int, now_ms: float) -> bool:
        """Whether there is capacity for this many more bytes. If so, they are counted."""
        if self._budget.is_full:
            self._measure(now_ms)
        if self._budget.is_full:
            return False
        self._count(more)
        return True

    def _count(self, more: int) -> None:
        self._cost += more
        self._budget.used += more

    def _measure(self, now_ms: float) -> None:
        """Correct the count. New entries count at once, but removed ones only at the next measurement."""
        if now_ms - self._measured_ms >= _MEASURE_MS:
            self._measured_ms = now_ms
            topics, partitions = self.cache.sizes()
            names, nodes = sum(map(len, self._users)), len(self.cache.nodes())
            cost = _TOPIC_BYTES * topics + 8 * partitions + _NODE_BYTES * nodes + _NAME_BYTES * names
            self._count(cost - self._cost)

    # -- fetches ------------------------------------------------------------------------------------

    def _fetch_due(self, now_ms: float) -> None:
        """Ask a task for the topics that are due."""
        topics = self.cache.next_request(now_ms) if self._fetch is None and self._tasks else None
        if topics is not None:
            self._number += 1
            # The cache requests again the topics that do not fit into one message.
            self._fetch = _Fetch(topics, Fetch(self._number, topics[:MAX_TOPICS]))
            self._ask_another(self._fetch, now_ms)

    def _ask_another(self, fetch: _Fetch, now_ms: float) -> None:
        peer = next((task for task in self._tasks if task not in fetch.asked), None)
        fetch.turns += 1
        fetch.silent_at_ms = now_ms + FETCH_SILENCE_MS
        if fetch.turns > _MAX_ASKED or (peer is None and not fetch.asked):
            # No task that we asked could reach a broker.
            self._fetch = None
            self.cache.on_failure(now_ms)
            self._forget_unknown(fetch.requested)
        elif peer is not None:
            self._tasks.move_to_end(peer)
            if fetch.turns > 1:
                self._send_pending()
            fetch.asked.add(peer)
            self.out.send(peer, fetch.message)

    def _send_pending(self) -> None:
        """Ask tasks to keep waiting.

        Once is enough: another task may reach brokers that one task cannot reach, but hardly a third.
        """
        if not self._is_pending_sent:
            self._is_pending_sent = True
            self.out.broadcast(list(self._tasks), Topics(pending=True))

    def _give_up(self, peer: int, now_ms: float) -> None:
        """The task has left, and will not answer."""
        fetch = self._fetch
        if fetch is not None and peer in fetch.asked:
            fetch.asked.discard(peer)
            if not fetch.asked:
                self._ask_another(fetch, now_ms)

    @receives(TopicsFetched)
    def on_topics_fetched(self, peer: int, message: TopicsFetched, now_ms: float) -> None:
        fetch = self._fetch
        if fetch is None or peer not in fetch.asked or message.number != fetch.message.number:
            return
        if message.failed:
            fetch.asked.discard(peer)
            if not fetch.asked:
                # The next task is asked after the backoff (KIP-526).
                self._fetch = None
                self.cache.on_failure(now_ms)
                self._send_pending()
            return
        self._is_pending_sent = False
        response = snapshot_of(message.part)
        self._fetch = None
        if self._doubts(None, self.cache.is_other_cluster(response.cluster_id)):
            self.cache.on_failure(now_ms)
            return
        asked = fetch.message.topics
        received = {topic.metadata.name: topic.metadata for topic in response.topics}
        known = (received[name] for name in asked if name in received)
        topics = tuple(topic for topic in known if self._believes(topic, now_ms))
        errors = {name: message.errors[name] for name in asked if name in message.errors}
        more = len(response.nodes) - len(self.cache.nodes())
        nodes = response.nodes if more <= 0 or self._may_keep(_NODE_BYTES * more, now_ms) else ()
        update = MetadataUpdate(nodes, topics, errors, response.cluster_id)
        self.cache.on_response(update, fetch.requested, now_ms)
        self._forget_unknown(name for name, code in errors.items() if code not in self._transient)
        # The response is sent to all tasks that use the topics.
        self._fresh.update(name for name in fetch.requested if self.cache.topic(name) is not None)
        self._outdated.update(dict.fromkeys(self._users.values()))
        left = set(fetch.requested) - received.keys() - errors.keys()
        if received and left:
            # The message did not have room for these topics. They are fetched next, and tasks wait for them.
            self.cache.on_use(left, now_ms)
            self.out.broadcast(list(self._tasks), Topics(pending=True))
        self._measure(now_ms)
        self._fetch_due(now_ms)

    def _forget_unknown(self, topics: Iterable[str]) -> None:
        """Forget unknown topics. If a task asks again, brokers are asked again: a topic may exist by then."""
        for name in topics:
            if self.cache.topic(name) is None:
                self.cache.forget(name)

    def _believes(self, topic: TopicMetadata, now_ms: float) -> bool:
        """Whether to use a response. Otherwise the topic stays urgent, so that another task is asked, or is
        forgotten for lack of capacity."""
        known = self.cache.topic(topic.name)
        more = len(topic.partitions) - (0 if known is None else len(known.partitions))
        if more > 0 and not self._may_keep(8 * more, now_ms):
            if known is None:
                self.cache.forget(topic.name)
            return False
        is_contradicted = known is not None and contradicts(known, topic)
        if self._doubts(topic.name, is_contradicted):
            return False
        if is_contradicted:
            # The second such response in a row replaces the known metadata.
            self.cache.forget(topic.name)
            self.cache.on_use((topic.name,), now_ms)
        return True

    def _doubts(self, key: str | None, is_contradicted: bool) -> bool:
        """Whether to doubt a response: it contradicts the known metadata, and the last one did not.

        Brokers may lag, and a task may have erred.
        """
        if not is_contradicted or key in self._contradicted:
            self._contradicted.discard(key)
            return False
        if len(self._contradicted) >= _MAX_CONTRADICTED:
            self._contradicted.clear()
        self._contradicted.add(key)
        return True

    # -- messages to tasks --------------------------------------------------------------------------

    def on_time(self, now_ms: float) -> None:
        if self._fetch is not None and now_ms >= self._fetch.silent_at_ms:
            self._ask_another(self._fetch, now_ms)
        self._fetch_due(now_ms)
        left = _TOPICS_AT_ONCE
        if now_ms >= self._answers_due_ms:
            while self._answers and left > 0:
                topics, waiting = self._answers.popitem(last=False)
                left -= self._send(waiting, topics, now_ms)
            self._answers_due_ms = now_ms if self._answers else math.inf
        while self._outdated and left > 0:
            users, _ = self._outdated.popitem(last=False)
            left -= self._send(users.peers, users.topics & self._fresh, now_ms)
        if not self._outdated:
            self._fresh.clear()

    def _send(self, peers: Iterable[int], known: frozenset[str], now_ms: float) -> int:
        """Send the topics, encoded once for all of these tasks. Returns the cost, counted in topics."""
        for part in parts_of(self.cache.snapshot(now_ms, known)) if known else ():
            self.out.broadcast(list(peers), Topics(part))
        return _COST_OF_SET + len(known)

    def next_change_ms(self, now_ms: float) -> float:
        if not self._tasks:
            return math.inf
        if self._outdated:
            return 0.0
        fetch = self._fetch
        delay_ms = fetch.silent_at_ms - now_ms if fetch else self.cache.next_request_delay_ms(now_ms)
        return max(0.0, min(delay_ms, self._answers_due_ms - now_ms))


def contradicts(known: TopicMetadata, response: TopicMetadata) -> bool:
    """Whether epochs, ids or partitions make it unlikely that the response is newer than the known metadata.

    Added partitions, and several elections since, are unlikely too, and a second response confirms them.
    """
    if None not in (known.topic_id, response.topic_id) and known.topic_id != response.topic_id:
        return True
    if len(response.partitions) != len(known.partitions):
        return True
    pairs = zip(known.partitions.epochs, response.partitions.epochs, strict=False)
    return any(UNKNOWN_EPOCH not in (old, new) and not old <= new <= old + 1 for old, new in pairs)


# -- a task's side ----------------------------------------------------------------------------------------


class MetadataChannel(Channel):
    """Asks the coordinator for metadata, reports stale topics to it, and fetches topics for other tasks.

    It accepts requests before the first connection, and a task's first topics wait up to
    ``COORDINATOR_WAIT_MS`` for it. After ``on_lost`` it accepts none until there is a connection again.
    """

    scope = ServiceScope.GROUP

    def __init__(self, cache: ClusterMetadata, clock_ms: Clock, idle_ms: float) -> None:
        super().__init__()
        self._cache = cache
        self._clock_ms = clock_ms
        self._use_interval_ms = use_interval_ms(idle_ms)
        # Guards all attributes below. The task's, the sender's and the client's thread change them, and
        # without it a use reported while a message is made would be lost.
        self._lock = threading.Lock()
        self._reachable = True
        # Topics used since the last report to the coordinator. A number is the time at which a broker
        # contradicted the metadata, and -inf means that there is no metadata.
        self._to_report: dict[str, float | None] = {}
        # When topics were last reported to the coordinator, and when to report more.
        self._reported_ms = -math.inf
        self._due_ms = math.inf
        # The topics that the task waits for.
        self._needed: set[str] = set()
        # A request on behalf of other tasks, and the brokers' response to it, which goes to the coordinator.
        self._fetch: Fetch | None = None
        self._fetched: TopicsFetched | None = None

    @property
    def is_waiting(self) -> bool:  # type: ignore[override]
        return bool(self._needed)

    # -- for ClusterMetadata: the task's and the sender's thread, which never wait --------------------

    def ask(self, topics: Iterable[str]) -> bool:
        """Ask for topics that are needed now. Returns False if the coordinator is not reachable.

        Otherwise they arrive by ``import_snapshot``, or not at all. After a while the task asks brokers.
        """
        names = tuple(filter(_may_exist, topics))
        with self._lock:
            if not self._reachable or not names:
                return False
            self._to_report.update(dict.fromkeys(names, -math.inf))
            self._due_ms = -math.inf
            # A task waits for one set of topics at a time.
            self._needed = set(names)
        self.wake()
        return True

    def on_use(self, topics: Iterable[str]) -> None:
        """Rows are written to these topics."""
        topics = tuple(filter(_may_exist, topics))
        if not topics:
            return
        with self._lock:
            for name in topics:
                self._to_report.setdefault(name, None)
            due_ms = self._reported_ms + self._use_interval_ms
            is_sooner = due_ms < self._due_ms
            self._due_ms = min(self._due_ms, due_ms)
        if is_sooner:
            self.wake()

    def report_stale(self, topic: str) -> None:
        """A response showed that a topic's metadata is stale."""
        if not _may_exist(topic):
            return
        with self._lock:
            # The number of entries is bounded by the number of topics that the task writes to.
            if self._to_report.get(topic) is None:
                self._to_report[topic] = self._clock_ms()
            self._due_ms = -math.inf
        self.wake()

    def on_fetched(self, topics: tuple[str, ...], update: MetadataUpdate | None) -> None:
        """Brokers responded to a request that included these topics for other tasks. None: there was no
        response."""
        with self._lock:
            fetch = self._fetch
            if fetch is None or not set(topics).issuperset(fetch.topics):
                return
            self._fetch, self._fetched = None, _response(fetch, update)
        self.wake()

    # -- Channel: the client's thread -------------------------------------------------------------

    def next_message(self, now_ms: float) -> Message | None:
        with self._lock:
            if self._fetched is not None:
                fetched, self._fetched = self._fetched, None
                return fetched
            if now_ms < self._due_ms:
                return None
            # A message holds no more than this.
            taken = dict(islice(self._to_report.items(), MAX_TOPICS))
            for name in taken:
                del self._to_report[name]
            self._reported_ms, self._due_ms = now_ms, now_ms if self._to_report else math.inf
        # The sender may have read the clock after ``now_ms``.
        return TopicsWanted(
            {
                name: None if since_ms is None else min(max(0.0, now_ms - since_ms), ANY_AGE_MS)
                for name, since_ms in taken.items()
            }
        )

    def next_message_delay_ms(self, now_ms: float) -> float:
        with self._lock:
            return 0.0 if self._fetched is not None else max(0.0, self._due_ms - now_ms)

    @receives(Topics)
    def on_topics(self, message: Topics, now_ms: float) -> None:
        snapshot = snapshot_of(message.part)
        if snapshot.topics or snapshot.nodes:
            self._cache.import_snapshot(snapshot, now_ms)
        with self._lock:
            was_waiting = bool(self._needed)
            self._needed.difference_update(topic.metadata.name for topic in snapshot.topics)
            if not snapshot.topics and not message.pending:
                self._needed.clear()
            is_waiting = bool(self._needed)
        if is_waiting and message.pending:
            self._cache.pause_requests(now_ms + COORDINATOR_WAIT_MS)
        elif was_waiting and not is_waiting:
            self._cache.resume_requests(now_ms)

    @receives(Fetch)
    def on_fetch(self, message: Fetch, now_ms: float) -> None:
        with self._lock:
            before = self._fetch
            if before is not None and not set(message.topics).issubset(before.topics):
                # Brokers have not answered the request before. The coordinator will ask another task.
                return
            self._fetch = message
        if before is None:
            self._cache.request_for_other_tasks(message.topics)

    def on_connected(self, now_ms: float) -> None:
        with self._lock:
            self._reachable = True
            self._reported_ms = -math.inf
            self._due_ms = -math.inf if self._to_report else math.inf
        self._cache.share_refreshes(True)

    def on_lost(self, now_ms: float) -> None:
        with self._lock:
            self._reachable = False
            self._to_report = dict.fromkeys(self._to_report)
            self._needed.clear()
            self._fetch = self._fetched = None
        self._cache.share_refreshes(False)
        self._cache.resume_requests(now_ms)


def _may_exist(topic: str) -> bool:
    """Whether a message accepts this topic's name. Brokers reject other names."""
    return topic_problem(topic) is None


def _response(fetch: Fetch, update: MetadataUpdate | None) -> TopicsFetched:
    """The brokers' response about these topics. The coordinator asks again for topics that a part leaves
    out."""
    if update is None:
        return TopicsFetched(fetch.number, failed=True)
    asked = frozenset(fetch.topics)
    topics = tuple(TopicSnapshot(topic, 0.0) for topic in update.topics if topic.name in asked)
    part = next(parts_of(MetadataSnapshot(topics, update.nodes, 0.0, update.cluster_id)))
    errors = {name: code for name, code in update.errors.items() if name in asked}
    return TopicsFetched(fetch.number, part, errors)
