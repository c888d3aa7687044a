"""One topic in the metadata cache: its metadata, when it was observed, and how long to wait before the next
request.

A response does not help a topic if it contains an error, a partition without a leader, or the same leader
that has just responded that it is not the leader. The topic then stays stale, with a growing backoff of its
own.
"""

from __future__ import annotations

import math
import zlib
from array import array
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from kafka_sink.kafka_errors import LEADER_NOT_AVAILABLE, error_of
from kafka_sink.model import NO_LEADER, UNKNOWN_EPOCH, MetadataUpdate, Node, Partitions, TopicMetadata

# How often a topic is requested again only because a partition has no leader. An election takes seconds. A
# partition that has no leader for longer is offline, and is requested again when rows wait for it.
_ELECTION_TRIES = 8


# -- merging responses by topic id and leader epoch ---------------------------------------------------------
#
# Brokers learn about changes one after the other and any of them may respond, so a later response is not
# necessarily newer. Two values show which response is newer: a leader epoch increases with each election of a
# partition, and a topic that is deleted and created again gets a new id, and its epochs restart at 0. Either
# value in the cache may be wrong: an epoch may come from a Produce response with a leader that the cluster
# does not have (KIP-951), the cluster may have lost its newest elections, and brokers before 2.8 send no ids,
# so that a recreated topic cannot be recognised. So when several responses in a row contradict the cache,
# they replace it.


# The number of former ids to remember. Topics are rarely recreated this often within metadata.max.idle.ms.
_MAX_FORMER_IDS = 8
# How many responses in a row replace the cache. They take about 1.5 s with the default backoffs, far longer
# than a broker usually lags. franz-go uses the same number for epochs.
_RESPONSES_TO_ACCEPT = 5


def merge(known: TopicMetadata, incoming: TopicMetadata, *, later: bool) -> TopicMetadata:
    """Merge two responses for the same topic. ``later`` means that ``incoming`` was observed after ``known``.

    The higher leader epoch wins, whenever it was observed. If epochs are equal or unknown, the later response
    wins. Kafka never removes partitions from a topic, so with ids the larger number of partitions is right.
    Without ids a smaller number may mean a recreated topic, so the later response wins.
    """
    old, new = known.partitions, incoming.partitions
    leaders, epochs = array("i", new.leaders), array("i", new.epochs)
    common = min(len(old), len(new))
    for at, (had, got) in enumerate(zip(old.epochs, new.epochs, strict=False)):
        undecided = had == got or UNKNOWN_EPOCH in (had, got)
        if had > got if not undecided else not later:
            leaders[at], epochs[at] = old.leaders[at], had
    if len(new) == common and (incoming.topic_id is not None or not later):
        leaders += old.leaders[common:]
        epochs += old.epochs[common:]
    elif incoming.topic_id is None and not later:
        del leaders[common:], epochs[common:]
    topic_id = known.topic_id if incoming.topic_id is None else incoming.topic_id
    return TopicMetadata(known.name, topic_id, Partitions(known.name, leaders, epochs))


def has_lower_epoch(known: TopicMetadata, incoming: TopicMetadata) -> bool:
    """Whether ``incoming`` has a lower epoch of a partition: either its broker lags, or the cache is
    wrong."""
    return any(
        UNKNOWN_EPOCH != new < old
        for old, new in zip(known.partitions.epochs, incoming.partitions.epochs, strict=False)
    )


def _may_be_same(known: TopicMetadata, incoming: TopicMetadata) -> bool:
    """Whether both may describe the same topic. Brokers before 2.8 send no ids."""
    return None in (known.topic_id, incoming.topic_id) or known.topic_id == incoming.topic_id


@dataclass(frozen=True, slots=True)
class ResponseFacts:
    """The facts about a Metadata response that concern all of its topics.

    It arrived at ``now_ms`` and lists the brokers ``nodes``. The topics ``marked`` were reported as stale
    while the request was in flight. ``wait_ms`` returns how long a topic waits after a number of responses in
    a row that did not help it. Topics with the same number get the same jitter, and so share a request.
    """

    now_ms: float
    nodes: Collection[int]
    marked: Collection[str]
    wait_ms: Callable[[int], float]


@dataclass(slots=True)
class TopicState:
    """A topic in the cache. Times are monotonic milliseconds."""

    used_ms: float
    # False for a topic that is known only from a snapshot. It is kept in case it is used, but never
    # requested.
    in_use: bool = True
    # Whether rows waited for the topic, or were written to it, in the last WAITED_FOR_MS. It is kept up to
    # date only while the topic ``is_unsolved`` and would be requested.
    is_needed: bool = True
    metadata: TopicMetadata | None = None
    observed_ms: float = -math.inf
    # The metadata from the responses to this cache. ``metadata`` differs from it if another cache's snapshot
    # was newer.
    confirmed: TopicMetadata | None = None
    # True if the metadata was reported as out of date, or if the last response did not help. The topic is
    # then urgent although it has metadata.
    stale: bool = False
    stale_ms: float = -math.inf
    error: int = 0
    error_ms: float = -math.inf
    # When the first of the responses in a row with this error arrived.
    error_since_ms: float = -math.inf
    # Whether rows wait for the topic in spite of a final error.
    retry: bool = False
    # The number of responses in a row that did not help, and the end of the wait after the last of them.
    unhelpful: int = 0
    not_before_ms: float = -math.inf
    # The ids that topics of this name had before the current one.
    former_ids: tuple[bytes, ...] = ()
    # The number of responses in a row that had a former id, or a lower epoch of some partition.
    rewinds: int = 0

    @property
    def is_unsolved(self) -> bool:
        """Whether the topic has no metadata, or the last response about it contained an error. Further
        requests may return the same error for hours, so it is requested only while tasks have rows for
        it."""
        return self.metadata is None or self.error != 0

    @property
    def final(self) -> bool:
        """Whether the topic has no metadata but an error that another request will hardly fix.

        A broker that has not loaded its authorizer's rules yet also sends such an error. So existing metadata
        is kept in spite of it, and the topic is requested again if rows wait for it.
        """
        return self.metadata is None and error_of(self.error).final_for_topic

    def settle(self, incoming: TopicMetadata | None, code: int | None, response: ResponseFacts) -> bool:
        """Take the metadata, the error code or neither from a response, and return whether the topic has
        changed.

        Existing metadata is kept in spite of every error, even a missing authorization. Responses to Produce
        requests then show whether it is still right.
        """
        changed = helped = False
        stale = True
        if incoming is not None and not incoming.partitions:
            code = LEADER_NOT_AVAILABLE
        if code is not None:
            changed = self.error != code
            if changed:
                self.error_since_ms = response.now_ms
            self.error, self.error_ms, self.retry = code, response.now_ms, False
        elif incoming is not None:
            known = self.metadata
            accepted = self.merge_response(incoming, response.now_ms)
            changed = self.metadata != known
            if accepted:
                helped, stale = self._judge(incoming, response, changed)
        self.stale = stale and self.metadata is not None
        self.unhelpful = 0 if helped else self.unhelpful + 1
        self.not_before_ms = response.now_ms + response.wait_ms(max(self.unhelpful, 1))
        return changed

    def _judge(self, incoming: TopicMetadata, response: ResponseFacts, changed: bool) -> tuple[bool, bool]:
        """Whether the response helped, and whether the topic is still stale."""
        electing = lacks_leader(self.metadata or incoming, response.nodes)
        # The event that marked the topic while the request was in flight may be newer than the response, and
        # the cache is newer than a response with lower epochs.
        is_late = incoming.name in response.marked or self.rewinds > 0
        is_still_stale = self.stale and is_late and not changed
        helped = not electing and not is_still_stale and (changed or not self.stale)
        return helped, is_still_stale or (electing and self.unhelpful < _ELECTION_TRIES)

    def merge_response(self, incoming: TopicMetadata, now_ms: float) -> bool:
        """Merge a broker's response. Return False if it describes a former topic of this name.

        The response replaces what other tasks reported, whatever its epochs and ids, so that a task with
        wrong metadata misleads this one only until then. With earlier responses to this cache it is merged
        by its epochs.

        Ids are random and never reused, so a former id comes from a broker that lags. But it is unknown which
        of two new ids is older: the broker that lags may have responded last, so that the right id became a
        former one. Therefore several responses in a row with a former id are accepted.
        """
        known, accepted = self.confirmed, incoming
        if known is not None:
            is_same = incoming.topic_id in (None, known.topic_id)
            is_former = not is_same and incoming.topic_id in self.former_ids
            goes_back = is_former or (is_same and has_lower_epoch(known, incoming))
            self.rewinds = self.rewinds + 1 if goes_back else 0
            if self.rewinds >= _RESPONSES_TO_ACCEPT:
                self.rewinds = 0
            elif is_former:
                return False
            elif is_same:
                accepted = merge(known, incoming, later=True)
        self._take_id(known or self.metadata, incoming.topic_id)
        self.metadata = self.confirmed = accepted
        self._observed(now_ms)
        return True

    def _take_id(self, known: TopicMetadata | None, topic_id: bytes | None) -> None:
        """Make ``topic_id`` the current id, and the one in ``known`` a former id. Brokers before 2.8 send no
        ids."""
        if topic_id is not None and known is not None:
            former = (*self.former_ids, known.topic_id)
            kept = [former_id for former_id in former if former_id is not None and former_id != topic_id]
            self.former_ids = tuple(kept[-_MAX_FORMER_IDS:])

    def name_leader(self, partition: int, leader: int, epoch: int) -> None:
        """Set the leader of a partition, because a broker has responded with it. ``metadata`` must exist and
        have the partition."""
        known, confirmed = self.metadata, self.confirmed
        assert known is not None
        if confirmed is None:
            # No broker has described the topic to this cache yet, so only this leader is confirmed.
            unknown = Partitions(known.name, [NO_LEADER] * (partition + 1), [UNKNOWN_EPOCH] * (partition + 1))
            confirmed = replace(known, partitions=unknown)
        is_hinted = known is not confirmed
        self.metadata = replace(known, partitions=known.partitions.with_leader(partition, leader, epoch))
        if not is_hinted:
            self.confirmed = self.metadata
        elif partition < len(confirmed.partitions) and confirmed.topic_id == known.topic_id:
            self.confirmed = replace(
                confirmed, partitions=confirmed.partitions.with_leader(partition, leader, epoch)
            )

    def merge_snapshot(self, incoming: TopicMetadata, observed_ms: float) -> bool:
        """Merge the metadata that another cache observed. Return False if this cache's own is later and
        contradicts it.

        Later metadata replaces what other tasks reported earlier, because one of them may have been wrong.
        """
        known, confirmed = self.metadata, self.confirmed
        if self.final and observed_ms <= self.error_ms:
            return False
        merged = incoming
        if known is None:
            pass
        elif known is not confirmed and observed_ms >= self.observed_ms:
            self._take_id(known, incoming.topic_id)
            if confirmed is not None and _may_be_same(confirmed, incoming):
                merged = merge(confirmed, incoming, later=True)
        elif _may_be_same(known, incoming):
            merged = merge(known, incoming, later=observed_ms > self.observed_ms)
        else:
            if observed_ms <= self.observed_ms or incoming.topic_id in self.former_ids:
                return False
            self._take_id(known, incoming.topic_id)
        if merged != known:
            self.metadata = merged
        self._observed(max(self.observed_ms, observed_ms))
        return True

    def _observed(self, at_ms: float) -> None:
        self.observed_ms = at_ms
        self.error, self.retry = 0, False


def lacks_leader(topic: TopicMetadata, nodes: Collection[int]) -> bool:
    """Whether a partition has no leader among the live brokers, so that an election is to be expected."""
    return any(leader not in nodes for leader in topic.partitions.leaders)


@dataclass(frozen=True, slots=True)
class TopicSnapshot:
    """A topic as a broker described it ``age_ms`` ago, with its topic id and leader epochs."""

    metadata: TopicMetadata
    age_ms: float

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle the numbers compressed, because Spark sends them to every task: 10,000 partitions take 2 to
        20 kB."""
        topic = self.metadata
        numbers = topic.partitions.leaders + topic.partitions.epochs
        return _topic_snapshot, (topic.name, topic.topic_id, zlib.compress(numbers.tobytes()), self.age_ms)


def _topic_snapshot(name: str, topic_id: bytes | None, numbers: bytes, age_ms: float) -> TopicSnapshot:
    data = zlib.decompress(numbers)
    half = len(data) // 2
    # Partitions takes the bytes of both arrays without converting them.
    return TopicSnapshot(TopicMetadata(name, topic_id, Partitions(name, data[:half], data[half:])), age_ms)


@dataclass(frozen=True, slots=True)
class MetadataSnapshot:
    """Topics, and all brokers of the cluster as they were ``nodes_age_ms`` ago.

    Ages are relative to the moment when the snapshot was taken. Code that keeps a snapshot adds the time
    since then (``aged``).
    """

    topics: tuple[TopicSnapshot, ...] = ()
    nodes: tuple[Node, ...] = ()
    nodes_age_ms: float = 0.0
    cluster_id: str | None = None

    def aged(self, by_ms: float) -> MetadataSnapshot:
        """The same snapshot, ``by_ms`` later."""
        topics = tuple(TopicSnapshot(topic.metadata, topic.age_ms + by_ms) for topic in self.topics)
        return MetadataSnapshot(topics, self.nodes, self.nodes_age_ms + by_ms, self.cluster_id)


def snapshot_of(update: MetadataUpdate, topic: str) -> MetadataSnapshot | None:
    """A snapshot of one topic from a Metadata response that has just arrived. None if the response does not
    contain the topic."""
    metadata = next((metadata for metadata in update.topics if metadata.name == topic), None)
    if metadata is None:
        return None
    return MetadataSnapshot((TopicSnapshot(metadata, 0.0),), update.nodes, 0.0, update.cluster_id)
