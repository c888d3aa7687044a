"""One topic in the metadata cache: what is known of it, since when, and how long it waits for a request.

A response does not help a topic when it brings an error, a partition without a leader, or the very leader
that a broker has just denied to be. The topic then stays stale, with a growing backoff of its own.
"""

from __future__ import annotations

import math
import struct
import zlib
from array import array
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from kafka_sink.kafka_errors import LEADER_NOT_AVAILABLE, error_of
from kafka_sink.model import NO_LEADER, UNKNOWN_EPOCH, MetadataUpdate, Node, Partitions, TopicMetadata

# How often a topic is requested again only because a partition has no leader. An election takes seconds; a
# partition without a leader for longer is offline, and is requested again when rows wait for it.
_ELECTION_TRIES = 8


# Merges a metadata response into a topic's known metadata, by topic id and leader epoch.
#
# Pure functions of values. Brokers learn of changes one after the other and any of them may respond, so a
# later response is not necessarily newer. Two values show which one is newer. A leader epoch rises with each
# election of a partition. A topic gets a new id, and its epochs restart at 0, when it is deleted and created
# again. Both may be wrong here: an epoch came from a Produce response that named a leader which the cluster
# does not have (KIP-951), or the cluster lost its newest elections, or brokers before 2.8, which send no ids,
# have a topic that was created again. So what several responses in a row say replaces what is known.


# Number of former ids to remember. Topics are rarely recreated this often within metadata.max.idle.ms.
_MAX_FORMER_IDS = 8
# This takes about 1.5 s with the default backoffs, far longer than a broker usually lags. franz-go takes as
# many for epochs.
_RESPONSES_TO_ACCEPT = 5


def merge(known: TopicMetadata, incoming: TopicMetadata, *, later: bool) -> TopicMetadata:
    """Merge two responses for the same topic. ``later``: ``incoming`` was observed after ``known``.

    The higher leader epoch wins, whenever it was observed. If epochs are equal or unknown, the later response
    wins. Kafka never removes partitions from a topic, so with ids the larger number of partitions is right.
    Without ids a smaller number may mean a recreated topic, so the later response is right.
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
    """Whether ``incoming`` has a lower epoch of a partition: its broker lags, or what is known is wrong."""
    return any(
        UNKNOWN_EPOCH != new < old
        for old, new in zip(known.partitions.epochs, incoming.partitions.epochs, strict=False)
    )


def _may_be_same(one: TopicMetadata, other: TopicMetadata) -> bool:
    """Whether both may be about one topic: brokers before 2.8 send no ids."""
    return None in (one.topic_id, other.topic_id) or one.topic_id == other.topic_id


@dataclass(frozen=True, slots=True)
class ResponseFacts:
    """Of a Metadata response: when it came, the brokers that it names, the topics that were reported as stale
    while the request was in flight, and how long a topic waits after so many responses in a row that did not
    help it. All that wait equally long share a draw of jitter, and so a request."""

    now_ms: float
    nodes: Collection[int]
    marked: Collection[str]
    wait_ms: Callable[[int], float]


@dataclass(slots=True)
class TopicState:
    """Times are monotonic milliseconds."""

    used_ms: float
    # False for a topic known from a snapshot only: kept in case it is used, but never requested.
    in_use: bool = True
    # Whether rows were seen to wait for it, or to be written to it, in the last WAITED_FOR_MS. It is kept up
    # to date only while ``is_unsolved``, and only for a topic that would be requested.
    is_needed: bool = True
    metadata: TopicMetadata | None = None
    observed_ms: float = -math.inf
    # What brokers have said here. The metadata differs where another cache has said more since.
    confirmed: TopicMetadata | None = None
    # Reported as out of date, or not helped by the last response: urgent although there is metadata.
    stale: bool = False
    stale_ms: float = -math.inf
    error: int = 0
    error_ms: float = -math.inf
    # When the first of the responses in a row came that had this error.
    error_since_ms: float = -math.inf
    # Rows wait for it in spite of a final error.
    retry: bool = False
    # Responses in a row that did not help, and the end of the wait after the last of them.
    unhelpful: int = 0
    not_before_ms: float = -math.inf
    # The ids that the topic's name had before the present one.
    former_ids: tuple[bytes, ...] = ()
    # Responses in a row that had a former id, or a lower epoch of some partition.
    rewinds: int = 0

    @property
    def is_unsolved(self) -> bool:
        """Whether the topic has no metadata, or the last response about it brought an error. Asking again may
        bring the same for hours, so it is requested only while tasks have rows for it."""
        return self.metadata is None or self.error != 0

    @property
    def final(self) -> bool:
        """Whether nothing is known but an error that asking again hardly mends.

        A broker that has not loaded its authorizer's rules yet sends such an error, too. So known metadata
        outlives it, and rows that wait for the topic have it requested again.
        """
        return self.metadata is None and error_of(self.error).final_for_topic

    def settle(
        self,
        incoming: TopicMetadata | None,
        code: int | None,
        response: ResponseFacts,
    ) -> bool:
        """Take what a response says of the topic: its metadata, its error code or neither; return whether
        that changed what is known. Known metadata survives every error, also of rights: Produce responses say
        more about it."""
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
        """Whether the response helped, and whether the topic is stale still."""
        electing = lacks_leader(self.metadata or incoming, response.nodes)
        # What marked the topic while the request was in flight may be younger than the response, and what is
        # known is younger than a response with lower epochs.
        is_late = incoming.name in response.marked or self.rewinds > 0
        unmended = self.stale and is_late and not changed
        helped = not electing and not unmended and (changed or not self.stale)
        return helped, unmended or (electing and self.unhelpful < _ELECTION_TRIES)

    def merge_response(self, incoming: TopicMetadata, now_ms: float) -> bool:
        """Merge a broker's response; False where it is about a former topic of this name.

        It replaces what others said, whatever their epochs and ids: who errs misleads until then only. What
        brokers have said here goes on by its epochs.

        Ids are random and never reused, so a former one comes from a lagging broker. But which of two new
        ids is older is unknown: the lagging broker's may have come last, and made the right one a former.
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
        """This id is right, whatever was known before. Brokers before 2.8 send none."""
        if topic_id is not None and known is not None:
            former = (*self.former_ids, known.topic_id)
            kept = [one for one in former if one is not None and one != topic_id]
            self.former_ids = tuple(kept[-_MAX_FORMER_IDS:])

    def name_leader(self, partition: int, leader: int, epoch: int) -> None:
        """A broker here names the leader of a partition that the metadata has."""
        known, confirmed = self.metadata, self.confirmed
        assert known is not None
        if confirmed is None:
            # No more is confirmed yet.
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
        """Merge what another cache observed; False where this cache's is later and contradicts it.

        Where it is later, it replaces what others said before: one of them may have erred.
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
    """Whether a partition has no leader among the live brokers: a new one is about to be elected."""
    return any(leader not in nodes for leader in topic.partitions.leaders)


@dataclass(frozen=True, slots=True)
class TopicSnapshot:
    """A topic as a broker described it ``age_ms`` ago, with its topic id and leader epochs."""

    metadata: TopicMetadata
    age_ms: float

    def __reduce__(self) -> tuple[object, ...]:
        """Compressed, because Spark sends it to every task: 10,000 partitions take 2 to 20 kB."""
        topic = self.metadata
        numbers = topic.partitions.leaders + topic.partitions.epochs
        leaders = zlib.compress(struct.pack(f"<{len(numbers)}i", *numbers))
        return _topic_snapshot, (topic.name, topic.topic_id, leaders, self.age_ms)


def _topic_snapshot(name: str, topic_id: bytes | None, leaders: bytes, age_ms: float) -> TopicSnapshot:
    data = zlib.decompress(leaders)
    numbers = struct.unpack(f"<{len(data) // 4}i", data)
    count = len(numbers) // 2
    partitions = Partitions(name, numbers[:count], numbers[count:])
    return TopicSnapshot(TopicMetadata(name, topic_id, partitions), age_ms)


@dataclass(frozen=True, slots=True)
class MetadataSnapshot:
    """Topics, and all brokers of the cluster as of ``nodes_age_ms`` ago.

    Ages count from the moment the snapshot was taken. Code that keeps it adds the time since (``aged``).
    """

    topics: tuple[TopicSnapshot, ...] = ()
    nodes: tuple[Node, ...] = ()
    nodes_age_ms: float = 0.0
    cluster_id: str | None = None

    def aged(self, by_ms: float) -> MetadataSnapshot:
        """The same, ``by_ms`` later."""
        topics = tuple(TopicSnapshot(one.metadata, one.age_ms + by_ms) for one in self.topics)
        return MetadataSnapshot(topics, self.nodes, self.nodes_age_ms + by_ms, self.cluster_id)


def snapshot_of(update: MetadataUpdate, topic: str) -> MetadataSnapshot | None:
    """What a Metadata response that has just come says of this topic. None where it names no leaders."""
    found = next((one for one in update.topics if one.name == topic), None)
    if found is None:
        return None
    return MetadataSnapshot((TopicSnapshot(found, 0.0),), update.nodes, 0.0, update.cluster_id)
