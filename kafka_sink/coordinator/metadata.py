"""Shared metadata (KIP-526): the messages, and a task's side of it.

Tasks share their metadata of topics, so that one task at a time asks brokers for all of them. A task reports
the topics that it writes to and those that a broker contradicted, fetches topics for other tasks, and
imports what the coordinator sends: see ``metadata_service``.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from kafka_sink.clock import COORDINATOR_WAIT_MS, Clock
from kafka_sink.cluster.metadata import ClusterMetadata
from kafka_sink.cluster.topic_state import MetadataSnapshot, TopicSnapshot
from kafka_sink.coordinator.schema import (
    Channel,
    Count,
    Int32,
    Message,
    Ms,
    Name,
    ServiceScope,
    Structure,
    Text,
    Topic,
    cut,
    receives,
)
from kafka_sink.errors import ProtocolError
from kafka_sink.model import MAX_BROKERS, MetadataUpdate, Node, Partitions, TopicMetadata
from kafka_sink.options import topic_problem
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

    id: Annotated[int, Meta(ge=0, le=2**31 - 1)]
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
    the task's metadata that long ago. Brokers are then asked again.
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

    ``pending``: topics that the task needs are being fetched. Otherwise, no topics mean no capacity.
    """

    part: SnapshotPart = _NO_TOPICS
    pending: bool = False


def parts_of(snapshot: MetadataSnapshot) -> Iterator[SnapshotPart]:
    """One or more parts, each of which fits into a message."""
    nodes: tuple[NodeHint, ...] = tuple(
        NodeHint(node.id, node.host, node.port, node.rack and cut(node.rack)) for node in snapshot.nodes
    )
    # A character takes up to six bytes. If a cluster has too many brokers, tasks ask it directly.
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
    if not all(is_host(node.host) for node in part.nodes):
        raise ProtocolError("invalid broker address")
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
        """A request that included these topics for other tasks has ended. None: there was no response."""
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
    """The brokers' response about these topics, or its first part."""
    if update is None:
        return TopicsFetched(fetch.number, failed=True)
    asked = frozenset(fetch.topics)
    topics = tuple(TopicSnapshot(topic, 0.0) for topic in update.topics if topic.name in asked)
    part = next(parts_of(MetadataSnapshot(topics, update.nodes, 0.0, update.cluster_id)))
    errors = {name: code for name, code in update.errors.items() if name in asked}
    return TopicsFetched(fetch.number, part, errors)
