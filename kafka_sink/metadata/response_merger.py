"""What one Metadata answer does to the topics it speaks of: what is known of each, and how long it waits.

An answer that does not help a topic (an error, a partition without a leader, the leader that a broker has
just denied to be) leaves it stale, with a backoff of its own that grows.
"""

from __future__ import annotations

from collections.abc import Collection

from kafka_sink.backoff import ExponentialBackoff
from kafka_sink.kafka_errors import LEADER_NOT_AVAILABLE
from kafka_sink.metadata.topic_state import TopicState
from kafka_sink.model import TopicMetadata

# How often a topic is asked for again only because a partition has no leader: an election takes seconds.
# After that a partition is offline for good, and rows for it are what asks.
_ELECTION_TRIES = 8


def lacks_leader(topic: TopicMetadata, nodes: Collection[int]) -> bool:
    """An answer's brokers are those alive: a leader that is none of them is about to be replaced."""
    return any(one.leader not in nodes for one in topic.partitions)


class ResponseMerger:
    """One answer. ``nodes``: the brokers it named; ``marked``: topics told to be stale while it was under
    way. Times are monotonic milliseconds. Each method settles one topic."""

    def __init__(
        self, nodes: Collection[int], marked: Collection[str], backoff: ExponentialBackoff, now_ms: float
    ) -> None:
        self._nodes = nodes
        self._marked = marked
        self._backoff = backoff
        self._now_ms = now_ms
        # One draw of jitter for all topics that wait equally long: they stay in one request.
        self._waits: dict[int, float] = {}

    def learn(self, found: TopicState, incoming: TopicMetadata) -> bool:
        """Merges what the answer tells; returns whether that changed what is known."""
        if not incoming.partitions:
            return self.learn_error(found, LEADER_NOT_AVAILABLE)
        known = found.metadata
        accepted = found.take_answer(incoming, self._now_ms)
        changed = found.metadata != known
        if not accepted:
            self.leave_out(found)
            return changed
        electing = lacks_leader(found.metadata or incoming, self._nodes)
        # A mark that came while the request was under way may tell of something younger than the answer.
        unmended = found.stale and incoming.name in self._marked and not changed
        helped = not electing and not unmended and (changed or not found.stale)
        stale = unmended or (electing and found.unhelpful < _ELECTION_TRIES)
        self._settle(found, helped=helped, stale=stale)
        return changed

    def learn_error(self, found: TopicState, code: int) -> bool:
        """What is known of a topic survives errors, of rights too: Produce answers judge it better."""
        changed = found.error != code
        found.error, found.error_ms, found.retry = code, self._now_ms, False
        self.leave_out(found)
        return changed

    def leave_out(self, found: TopicState) -> None:
        """The answer says nothing of use about a topic that was asked for."""
        self._settle(found, helped=False, stale=True)

    def _settle(self, found: TopicState, *, helped: bool, stale: bool) -> None:
        found.stale = stale and found.metadata is not None
        found.unhelpful = 0 if helped else found.unhelpful + 1
        attempts = max(found.unhelpful, 1)
        if attempts not in self._waits:
            self._waits[attempts] = self._backoff.delay_ms(attempts)
        found.not_before_ms = self._now_ms + self._waits[attempts]
