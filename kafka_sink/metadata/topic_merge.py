"""Merges a metadata response into a topic's known metadata, by topic id and leader epoch.

Pure functions of values. Brokers learn of changes one after the other and any of them may respond, so a later
response is not necessarily newer. Two values show which one is newer. A leader epoch rises with each election
of a partition. A topic gets a new id, and its epochs restart at 0, when it is deleted and created again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

from kafka_sink.model import UNKNOWN_EPOCH, PartitionInfo, TopicMetadata

# Number of former ids to remember. Topics are rarely recreated this often within metadata.max.idle.ms.
_MAX_FORMER_IDS = 8
# See TopicIdHistory. This takes about 1.5 s with the default backoffs, far longer than a broker usually lags.
_RESPONSES_TO_ACCEPT = 5


class TopicIdentity(Enum):
    """How the topic in a response relates to the known topic of that name."""

    SAME = auto()  # the known topic: leader epochs decide for each partition
    REPLACES = auto()  # a new topic of that name: discard the known metadata
    FORMER = auto()  # the topic before it was recreated: ignore the response


@dataclass(slots=True)
class TopicIdHistory:
    """The ids that a topic's name had before the current one.

    Ids are random and never reused, so a response with a former id comes from a lagging broker and is
    rejected. It is impossible to know which of two new ids is older. A lagging broker's id may therefore have
    replaced the right id, which then counts as former; the topic could never be written again. So a former id
    is accepted again after several responses with it in a row, with growing waits and without a response that
    confirms the current id.
    """

    former: tuple[bytes, ...] = ()
    refused: int = 0

    def judge(self, known: bytes | None, incoming: bytes | None, *, goes_back: bool = False) -> TopicIdentity:
        """Classifies a response, and remembers it.

        Brokers before 2.8 send no ids (None). For these, ``goes_back`` means that the response has lower
        epochs than the known ones. A recreated topic has these, too, so such a response is treated like a
        former id.
        """
        if not goes_back and (incoming == known or incoming is None):
            self.refused = 0
            return TopicIdentity.SAME
        if goes_back or incoming in self.former:
            self.refused += 1
            if self.refused < _RESPONSES_TO_ACCEPT:
                return TopicIdentity.FORMER
        self.refused = 0
        if known is not None:
            self.former = (*(one for one in self.former if one != incoming), known)[-_MAX_FORMER_IDS:]
        return TopicIdentity.REPLACES


def merge(known: TopicMetadata, incoming: TopicMetadata, *, later: bool) -> TopicMetadata:
    """Merges two responses for the same topic. ``later``: ``incoming`` was observed after ``known``.

    The higher leader epoch wins, whenever it was observed. If epochs are equal or unknown, the later response
    wins. Kafka never removes partitions from a topic, so with ids the larger number of partitions is right.
    Without ids a smaller number may mean a recreated topic, so the later response is right.
    """
    partitions = [
        _newer(old, new, later) for old, new in zip(known.partitions, incoming.partitions, strict=False)
    ]
    common = len(partitions)
    more: Sequence[PartitionInfo] = incoming.partitions[common:]
    if (incoming.topic_id is not None or not later) and not more:
        more = known.partitions[common:]
    elif incoming.topic_id is None and not later:
        more = ()
    topic_id = known.topic_id if incoming.topic_id is None else incoming.topic_id
    return TopicMetadata(known.name, topic_id, (*partitions, *more))


def goes_back(known: TopicMetadata, incoming: TopicMetadata) -> bool:
    """Whether a topic without id has a lower epoch of some partition in ``incoming``.

    Brokers before 2.8 send no ids, so either the broker lags or the topic was recreated.
    """
    if known.topic_id is not None or incoming.topic_id is not None:
        return False
    return any(
        UNKNOWN_EPOCH != new.leader_epoch < old.leader_epoch
        for old, new in zip(known.partitions, incoming.partitions, strict=False)
    )


def _newer(known: PartitionInfo, incoming: PartitionInfo, later: bool) -> PartitionInfo:
    if (
        UNKNOWN_EPOCH in (known.leader_epoch, incoming.leader_epoch)
        or known.leader_epoch == incoming.leader_epoch
    ):
        return incoming if later else known
    return incoming if incoming.leader_epoch > known.leader_epoch else known
