"""What a topic's metadata becomes when another answer tells of it: merged by (topic id, leader epoch).

Pure functions of values. Brokers learn of changes one after the other and any of them may be asked, so an
answer is not newer for having come later. Two marks tell: an epoch rises with each election of a partition,
and an id is drawn anew when a topic is deleted and created again, whereupon epochs start at 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

from kafka_sink.model import UNKNOWN_EPOCH, PartitionInfo, TopicMetadata

# A topic recreated more often than this within metadata.max.idle.ms is told apart by its latest ids.
_IDS_KEPT = 8
# See TopicIdHistory: about 1.5 s at the default backoffs, far beyond a broker's usual lag.
_ANSWERS_THAT_CONVINCE = 5


class TopicIdentity(Enum):
    """What an answer's topic id says of the answer."""

    SAME = auto()  # the topic as known: epochs decide, partition by partition
    REPLACES = auto()  # another topic of that name: nothing of the known one may be kept
    FORMER = auto()  # the topic as it was before it was recreated: not to be used


@dataclass(slots=True)
class TopicIdHistory:
    """The ids that a topic's name had before its present one.

    Ids are random and never come back, so an answer with a former id comes from a broker that lags, and is
    refused. What cannot be told: of two ids seen for the first time, which is older. Should a lagging
    broker's id have replaced the right one, the right one now counts as former; refused for ever, the topic
    could not be written. So a former id that comes in several answers in a row, with growing waits
    between them and none that confirms the present id, is taken back.
    """

    former: tuple[bytes, ...] = ()
    refused: int = 0

    def judge(self, known: bytes | None, incoming: bytes | None, *, goes_back: bool = False) -> TopicIdentity:
        """Decides on an answer, and remembers it.

        Brokers before 2.8 tell no ids (None). There ``goes_back`` says that the answer has lower epochs than
        are known, which a topic that was recreated has, too; it is believed as a former id is.
        """
        if not goes_back and (incoming == known or incoming is None):
            self.refused = 0
            return TopicIdentity.SAME
        if goes_back or incoming in self.former:
            self.refused += 1
            if self.refused < _ANSWERS_THAT_CONVINCE:
                return TopicIdentity.FORMER
        self.refused = 0
        if known is not None:
            self.former = (*(one for one in self.former if one != incoming), known)[-_IDS_KEPT:]
        return TopicIdentity.REPLACES


def merge(known: TopicMetadata, incoming: TopicMetadata, *, later: bool) -> TopicMetadata:
    """The same topic from two answers; ``later``: ``incoming`` was observed after ``known``.

    A higher leader epoch wins whatever the time; between equal or unknown ones the later answer does. Kafka
    never takes partitions away from a topic, so with ids the larger number of partitions stands; without
    ids a smaller one may also mean a recreated topic, and the later answer is believed.
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
    """Whether ``incoming`` has a lower epoch of some partition, of a topic that has no id.

    Brokers before 2.8 tell none, so this is a broker that lags or a topic that was recreated.
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
